"""The options of `npu-gr train rank`, its presets, and its tasks: what each logit predicts, and which suit a log.

    next item     no threshold and no actions: the event's item against items drawn from the catalogue
    a threshold   `at_least`: the event's value reaches it, as a rating does
    actions       the event's action is one of these, e.g. a purchase

A checkpoint names its tasks; a request asks for them by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from npu_gr.core.errors import ConfigError, DataError
from npu_gr.core.feature_schema.schema import Feature
from npu_gr.core.settings import Count
from npu_gr.core.text_format import quoted
from npu_gr.train.data import Bools, InteractionLog, Split
from npu_gr.train.options import DropoutRatio, Share, Weight
from npu_gr.train.steps import StepOptions

MAX_ACTIONS = 100  # distinct values of a log; more are measurements, such as dwell times
MAX_EVENT_TASKS = 8  # that are chosen for a log of event types
STARS = 5.0  # largest value of a scale on which `LIKE` is a liking
_MOST_SHOWN = 10


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task of the ranker: one logit."""

    name: str
    at_least: float | None = None  # smallest action value of a positive
    actions: Annotated[
        tuple[str, ...], Meta(max_length=MAX_ACTIONS)
    ] = ()  # an event with one of them is a positive

    def __post_init__(self) -> None:
        if self.at_least is not None and self.actions:
            raise ValueError(f"task {self.name}: has at_least or actions, not both")

    @property
    def is_next_item(self) -> bool:
        """Whether it predicts the item that comes next, not what the user does with it."""
        return self.at_least is None and not self.actions


CLICK = Task(name="click")
LIKE = Task(name="like", at_least=4.0)


class ChosenTasks(NamedTuple):
    """Tasks, and why these."""

    tasks: tuple[Task, ...]
    reason: str


def check_actions(log: InteractionLog) -> None:
    """Check that the log's values are actions.

    Raises:
        DataError: there are too many: they are measurements.
    """
    if len(log.action_values) > MAX_ACTIONS:
        raise DataError(
            f"{len(log.action_values)} distinct values of actions, the limit is {MAX_ACTIONS}: "
            "these are measurements, "
            "not actions; `npu-gr prepare` makes buckets of them"
        )


def choose_tasks(log: InteractionLog) -> ChosenTasks:
    """Choose tasks by what the log's actions are: event types, one single action, stars, or another scale."""
    counts = np.bincount(log.actions[log.trained], minlength=len(log.action_values))
    used = np.flatnonzero(counts)
    if len(used) == 1:
        name = log.names_of_actions[used[0]]
        return ChosenTasks(
            (CLICK,), f"every event is {quoted(name)}: the next item is all that can be learnt"
        )
    if log.action_names:
        often = used[np.argsort(-counts[used], kind="stable")]
        chosen = [log.action_names[action] for action in often[1 : 1 + MAX_EVENT_TASKS]]
        left = (
            (f", {len(often) - 1 - len(chosen)} rarer ones have none")
            if len(often) - 1 > len(chosen)
            else ""
        )
        return ChosenTasks(
            (CLICK, *(Task(name=_task_name(name), actions=(name,)) for name in chosen)),
            "the next item, and one for each event type but the most frequent, "
            f"{quoted(log.action_names[often[0]])}" + left,
        )
    values = log.values[log.trained]
    if values.min() < 4.0 <= values.max() <= STARS:
        return ChosenTasks((CLICK, LIKE), "the next item, and a rating of at least 4")
    median, second = (
        float(np.quantile(values, 0.5, method="lower")),
        float(log.action_values[used[1]]),
    )
    at_least, what = (median, "median") if median >= second else (second, "lowest but one")
    return ChosenTasks(
        (CLICK, Task(name=LIKE.name, at_least=at_least)),
        f"the next item, and a value of at least {at_least:g}, which is the {what} of "
        f"{values.min():g} .. "
        f"{values.max():g}",
    )


class Labels(NamedTuple):
    """Labels of the binary tasks and of the auxiliary head. n = events of the log."""

    served: Tensor  # float32 [n, binary tasks] 1 = positive
    served_tasks: list[int]  # index of each of those tasks among all
    auxiliary: Tensor  # float32 [n, a] 1 = the action is above the lowest, the second lowest, ...; or is this one
    click_task: int | None  # index of the task that predicts the next item


def make_labels(log: InteractionLog, tasks: Sequence[Task]) -> Labels:
    """Label every event of the log for every task.

    Ordered values get the auxiliary labels of ordinal regression: above the lowest, above the
    second lowest, and so on. Event types have no order, so each is a label of its own.

    Raises:
        DataError: all trained events have the same label.
        ConfigError: a task names an action that the log lacks.
    """
    served = []
    served_tasks = []
    for index, task in enumerate(tasks):
        if task.is_next_item:
            continue
        label = positives(log, task)
        if label[log.trained].all() or not label[log.trained].any():
            raise DataError(_one_class(log, task, bool(label[log.trained].all())))
        served.append(label)
        served_tasks.append(index)
    every = np.arange(len(log.action_values))
    auxiliary = (
        log.actions[:, None] == every if log.action_names else log.actions[:, None] > every[:-1]
    )
    click = next((index for index, task in enumerate(tasks) if task.is_next_item), None)
    return Labels(
        torch.from_numpy(np.array(served, np.float32).reshape(-1, len(log.items)).T.copy()),
        served_tasks,
        torch.from_numpy(auxiliary.astype(np.float32)),
        click,
    )


def positives(log: InteractionLog, task: Task) -> Bools:
    """Whether each event is a positive of a binary task, bool [n].

    Raises:
        ConfigError: the task names an action that the log lacks.
    """
    if task.at_least is not None:
        reached: Bools = log.values >= task.at_least
        return reached
    names = log.names_of_actions
    for action in task.actions:
        if action not in names:
            near = difflib.get_close_matches(action, names, n=1)
            raise ConfigError(
                f"task {task.name}: the log has no action {quoted(action)}"
                + (f"; did you mean {quoted(near[0])}?" if near else f"; it has {_shown(names)}")
            )
    found: Bools = np.array([name in task.actions for name in names])[log.actions]
    return found


def liking_values(log: InteractionLog, task: Task) -> tuple[float, ...]:
    """Say what each action of a log is worth to a binary task: its value.

    Of event types, 1 for a positive.

    Raises:
        ConfigError: the task names an action that the log lacks.
    """
    if not task.actions:
        return log.action_values
    worth = np.zeros(len(log.action_values))
    worth[np.unique(log.actions[positives(log, task)])] = 1.0
    return tuple(worth.tolist())


def _task_name(action: str) -> str:
    """Name the task of an event type; the next item's task has its name already."""
    return action if action != CLICK.name else f"{action} event"


def _one_class(log: InteractionLog, task: Task, label: bool) -> str:
    """Say which events there are, and which tasks would do."""
    counts = np.bincount(log.actions[log.trained], minlength=len(log.action_values)).tolist()
    there = [
        f"{name} ({count})"
        for name, count in zip(log.names_of_actions, counts, strict=True)
        if count
    ]
    rule = (
        f"at_least {task.at_least}"
        if task.at_least is not None
        else (f"actions {_shown(task.actions)}")
    )
    return (
        f"task {task.name}: {rule} gives every trained event the same label, "
        f"{'yes' if label else 'no'}; the trained "
        f"events are {_shown(there)}. Leave `tasks` out and they are chosen by the log, or say "
        "them, e.g. "
        "--set 'tasks=[{name: click},{name: buy, actions: [purchase]}]' or {name: like, "
        "at_least: 4}"
    )


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return ", ".join(names[:_MOST_SHOWN]) + more


class TrainOptions(StepOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides the result but the log and the number of threads."""

    name: Annotated[str, Meta(description="of the model, as answers and metrics show it")] = "hstu"
    split: Annotated[
        Split,
        Meta(
            description="what the evaluation keeps: the newest fifth of each user or of the log, "
            "or each last event"
        ),
    ] = "user-time"
    evaluate_on: Annotated[
        Literal["test", "validation"],
        Meta(
            description="validation: split the training part again, and train and evaluate on that"
        ),
    ] = "test"
    test_users: Annotated[Count, Meta(description="most users of HR and NDCG, drawn at random")] = (
        1000
    )
    validation_users: Annotated[
        Count,
        Meta(
            description="most users whose last trained event stops the training and fits the "
            "order, drawn at random"
        ),
    ] = 2000
    tasks: Annotated[
        tuple[Task, ...] | None,
        Meta(
            description="one logit each, e.g. [{name: click}, {name: buy, actions: [purchase]}]; "
            "null: by the log"
        ),
    ] = None

    features: Annotated[
        tuple[Feature, ...] | None,
        Meta(
            description="columns of the dataset to read, each with its kind; null: all, as their "
            "values look"
        ),
    ] = None
    computed: Annotated[
        tuple[str, ...],
        Meta(
            description="what is computed besides, e.g. [events, rate_by:genre, recency, "
            "mf_score, hour]"
        ),
    ] = ()

    budget_s: Annotated[
        float,
        Meta(
            ge=0.0,
            description="seconds of a search for better settings on the "
            "validation; 0 = these settings",
        ),
    ] = 0.0

    dim: Annotated[Count, Meta(description="width of a token")] = 64
    num_layers: Annotated[Count, Meta(description="attention layers")] = 2
    num_heads: Annotated[Count, Meta(description="attention heads")] = 2
    qk_dim: Annotated[Count, Meta(description="width of a query and a key, per head")] = 32
    v_dim: Annotated[Count, Meta(description="width of a value, per head")] = 32
    head_dim: Annotated[Count, Meta(description="hidden width before the task logits")] = 64
    activation: Annotated[
        Literal["uvqk", "u"], Meta(description="SiLU on all four projections, or on U alone")
    ] = "uvqk"
    residual: Annotated[
        Literal["add", "concat"], Meta(description="how the attention's output joins a token")
    ] = "add"
    norm: Annotated[
        Literal["layer", "group"],
        Meta(description="of the attention's output: over all heads, or each by itself"),
    ] = "layer"
    relative_bias: Annotated[
        Literal["position_time", "none"],
        Meta(
            description="what attention adds for the distance and the time between two tokens; "
            "none: nothing"
        ),
    ] = "position_time"
    scaling_seqlen: Annotated[
        Count, Meta(description="the constant attention scale is 1 / this")
    ] = 64
    max_history_tokens: Annotated[Count, Meta(description="longest history that is served")] = 1024

    patience: Annotated[
        int,
        Meta(
            ge=0,
            description="epochs without a better likelihood on validation that end it; 0 = never",
        ),
    ] = 3
    window_tokens: Annotated[
        Count, Meta(description="longest run of events trained on at once")
    ] = 120
    batch_tokens: Annotated[Count, Meta(description="events of one step, padding included")] = 1024
    item_weight_decay: Annotated[
        Weight, Meta(description="of item embeddings, which overfit first")
    ] = 0.5
    dropout: Annotated[
        DropoutRatio, Meta(description="share of embeddings and updates that are dropped")
    ] = 0.3
    row_dropout: Annotated[
        DropoutRatio,
        Meta(
            description="share of the items that a step knows by features and codes alone, as it "
            "will know new ones"
        ),
    ] = 0.1
    vector_dropout: Annotated[
        DropoutRatio, Meta(description="share of the user's vector that is dropped")
    ] = 0.15
    item_init_norm: Annotated[
        Weight,
        Meta(
            description="of the item embeddings at the start, which say what stands near "
            "what; 0 = random"
        ),
    ] = 0.3

    max_softmax_items: Annotated[
        Count,
        Meta(description="largest catalogue of which every item is in the softmax of the next one"),
    ] = 4000
    num_negatives: Annotated[
        Count, Meta(description="items drawn for each step in the place of a larger catalogue")
    ] = 1024
    task_weight: Annotated[
        Weight, Meta(description="of the binary tasks in the loss; the next item has 1")
    ] = 1.0
    ordinal_weight: Annotated[
        Weight, Meta(description="of the auxiliary head beside the binary tasks")
    ] = 0.5
    click_weight: Annotated[Weight, Meta(description="of the next item's logit in the loss")] = 0.3
    click_ratio: Annotated[
        Share, Meta(description="share of the events that get items drawn for that logit")
    ] = 0.05
    num_retrieved: Annotated[
        Count,
        Meta(
            description="retrieved items of the lists that the order is fitted on, and "
            "that it is evaluated on"
        ),
    ] = 200
    num_neighbours: Annotated[
        int,
        Meta(
            ge=0,
            description="items of these lists that the users of the history's items have, "
            "beside the others",
        ),
    ] = 100

    def __post_init__(self) -> None:
        if self.tasks is None:
            return
        if not self.tasks or len({task.name for task in self.tasks}) != len(self.tasks):
            raise ValueError("tasks: needs at least one, each name once")
        if sum(task.is_next_item for task in self.tasks) > 1:
            raise ValueError("tasks: at most one may have neither at_least nor actions")


DEMO = TrainOptions()
QUICK = TrainOptions(epochs=5)
"""Two CPU minutes for 100,000 events, the refit included."""
PRESETS = {"demo": DEMO, "quick": QUICK}
