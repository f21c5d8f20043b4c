"""The options of `npu-gr train rank`, its presets, and its tasks.

A task is a logit of the ranker. A positive of a task is

    next item     (none of the following) the item of the next event
    shown         (`shown`) an event; the negatives are impressions: items that were shown alone
    threshold     (`at_least`) an event whose value, e.g. a rating, is at least this
    actions       (`actions`) an event with one of these actions, e.g. a purchase

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

from npu_gr.core.arrays import I64
from npu_gr.core.errors import ConfigError, DataError
from npu_gr.core.feature_schema.schema import Feature
from npu_gr.core.settings import Count
from npu_gr.core.text_format import quoted
from npu_gr.train.data import Bools, InteractionLog, Split, count_trained
from npu_gr.train.options import DropoutRatio, Share, Weight
from npu_gr.train.steps import StepOptions

MAX_ACTIONS = 100  # most distinct values of a log; more are measurements, such as dwell times
MAX_EVENT_TASKS = 8  # most tasks that are chosen for a log of event types
STARS = 5.0  # largest value of a rating scale on which `LIKE` applies
_MOST_SHOWN = 10


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task of the ranker; see the module."""

    name: str
    at_least: float | None = None  # smallest action value of a positive
    actions: Annotated[tuple[str, ...], Meta(max_length=MAX_ACTIONS)] = ()  # those of positives
    shown: bool = False  # whether the negatives are impressions

    def __post_init__(self) -> None:
        if (self.at_least is not None) + bool(self.actions) + self.shown > 1:
            raise ValueError(f"task {self.name}: has one of at_least, actions and shown")

    @property
    def is_next_item(self) -> bool:
        """Whether the task predicts the next item, not what the user does with an item."""
        return self.at_least is None and not self.actions and not self.shown

    @property
    def is_liking(self) -> bool:
        """Whether the task predicts what the user does with an item."""
        return not self.is_next_item and not self.shown


NEXT = Task(name="next")
SHOWN = Task(name="click", shown=True)
MIN_IMPRESSIONS = 100  # fewer trained impressions make no task
LIKE = Task(name="like", at_least=4.0)


class ChosenTasks(NamedTuple):
    """Tasks, and why they were chosen."""

    tasks: tuple[Task, ...]
    reason: str


def check_actions(log: InteractionLog) -> None:
    """Check that the log's values are actions, not measurements.

    Raises:
        DataError: there are more than `MAX_ACTIONS` distinct values.
    """
    if len(log.action_values) > MAX_ACTIONS:
        raise DataError(
            f"{len(log.action_values)} distinct values of actions, the limit is {MAX_ACTIONS}: "
            "these are measurements, not actions. `npu-gr prepare` groups measurements into buckets"
        )


def choose_tasks(log: InteractionLog) -> ChosenTasks:
    """Choose tasks by the log's actions, and one for its impressions if it has some."""
    chosen = _by_actions(log)
    if log.shown is None or int(log.trained[log.shown.events].sum()) < MIN_IMPRESSIONS:
        return chosen
    taken = {task.name for task in chosen.tasks}
    name = next(name for name in (SHOWN.name, "click_if_shown") if name not in taken)
    return ChosenTasks(
        (*chosen.tasks, Task(name=name, shown=True)),
        f"{chosen.reason}, and {quoted(name)}: a behaviour with an item that is shown",
    )


def _by_actions(log: InteractionLog) -> ChosenTasks:
    """Choose tasks by the actions: a single action, event types, stars, or another scale."""
    counts = np.bincount(log.actions[log.trained], minlength=len(log.action_values))
    used = np.flatnonzero(counts)
    if len(used) == 1:
        name = log.names_of_actions[used[0]]
        return ChosenTasks(
            (NEXT,), f"every event is {quoted(name)}, so the ranker only predicts the next item"
        )
    if log.action_names:
        often = used[np.argsort(-counts[used], kind="stable")]
        chosen = [log.action_names[action] for action in often[1 : 1 + MAX_EVENT_TASKS]]
        left = (
            f"; {len(often) - 1 - len(chosen)} rarer event types have no task"
            if len(often) - 1 > len(chosen)
            else ""
        )
        return ChosenTasks(
            (NEXT, *(Task(name=_task_name(name), actions=(name,)) for name in chosen)),
            "the next item, and a task for each event type except the most frequent, "
            f"{quoted(log.action_names[often[0]])}" + left,
        )
    values = log.values[log.trained]
    if values.min() < 4.0 <= values.max() <= STARS:
        return ChosenTasks((NEXT, LIKE), "the next item, and a rating of at least 4")
    median, second = (
        float(np.quantile(values, 0.5, method="lower")),
        float(log.action_values[used[1]]),
    )
    at_least, what = (median, "median") if median >= second else (second, "second lowest value")
    return ChosenTasks(
        (NEXT, Task(name=LIKE.name, at_least=at_least)),
        f"the next item, and a value of at least {at_least:g}, the {what} of {values.min():g} .. "
        f"{values.max():g}",
    )


class Labels(NamedTuple):
    """Labels of an action, for the binary tasks and the auxiliary head. n = actions."""

    served: Tensor  # float32 [n, binary tasks] 1 = an event with this action is a positive
    served_tasks: list[int]  # index of each binary task among all tasks
    # float32 [n, a] ordered values: 1 = the value is above the lowest, above the second lowest, ...
    # event types: 1 = the event has this type
    auxiliary: Tensor
    next_task: int | None  # index of the task that predicts the next item
    shown_task: int | None = None  # index of the task whose negatives are impressions


def make_labels(log: InteractionLog, tasks: Sequence[Task]) -> Labels:
    """Label the actions of a log for every binary task, and for the auxiliary head.

    The auxiliary labels of ordered values are those of ordinal regression: above the lowest value,
    above the second lowest, and so on. Event types have no order, so each type is a label.

    Raises:
        DataError: all trained events have the same label for some task.
        ConfigError: a task names an action that the log lacks.
    """
    served = []
    served_tasks = []
    counts = count_trained(log, log.actions, len(log.action_values))
    for index, task in enumerate(tasks):
        if not task.is_liking:
            continue
        label = positive_actions(log, task)
        if not counts[label].any() or not counts[~label].any():
            raise DataError(_one_class(log, task, counts, bool(counts[label].any())))
        served.append(label)
        served_tasks.append(index)
    every = np.arange(len(log.action_values))
    auxiliary = every[:, None] == every if log.action_names else every[:, None] > every[:-1]
    following = next((index for index, task in enumerate(tasks) if task.is_next_item), None)
    shown = next((index for index, task in enumerate(tasks) if task.shown), None)
    if shown is not None and (log.shown is None or not log.trained[log.shown.events].any()):
        raise DataError(
            f"task {tasks[shown].name}: the log has no impressions to train on; npu-gr prepare "
            "--positive CONDITION keeps the rows that are no behaviour as impressions"
        )
    return Labels(
        torch.from_numpy(np.array(served, np.float32).reshape(-1, len(every)).T.copy()),
        served_tasks,
        torch.from_numpy(auxiliary.astype(np.float32)),
        following,
        shown,
    )


def positives(log: InteractionLog, task: Task) -> Bools:
    """Whether each event is a positive of a binary task, bool [n].

    Raises:
        ConfigError: the task names an action that the log lacks.
    """
    found: Bools = positive_actions(log, task)[log.actions]
    return found


def positive_actions(log: InteractionLog, task: Task) -> Bools:
    """Whether an event with each action is a positive of a binary task, bool [actions].

    Raises:
        ConfigError: the task names an action that the log lacks.
    """
    if task.at_least is not None:
        reached: Bools = np.array(log.action_values) >= task.at_least
        return reached
    names = log.names_of_actions
    for action in task.actions:
        if action not in names:
            near = difflib.get_close_matches(action, names, n=1)
            raise ConfigError(
                f"task {task.name}: the log has no action {quoted(action)}"
                + (f"; did you mean {quoted(near[0])}?" if near else f"; it has {_shown(names)}")
            )
    return np.array([name in task.actions for name in names])


def liking_values(log: InteractionLog, task: Task) -> tuple[float, ...]:
    """Return the worth of each action for a binary task.

    This is the action's value, or, for a task of event types, 1 for a positive and 0 for others.

    Raises:
        ConfigError: the task names an action that the log lacks.
    """
    if not task.actions:
        return log.action_values
    worth = np.zeros(len(log.action_values))
    worth[np.unique(log.actions[positives(log, task)])] = 1.0
    return tuple(worth.tolist())


def _task_name(action: str) -> str:
    """Name the task of an event type; the name of the next-item task is taken."""
    return action if action != NEXT.name else f"{action} event"


def _one_class(log: InteractionLog, task: Task, counts: I64, label: bool) -> str:
    """Write the error text of a task with one class: its rule, the actions, and what to do."""
    there = [
        f"{name} ({count})"
        for name, count in zip(log.names_of_actions, counts.tolist(), strict=True)
        if count
    ]
    rule = (
        f"at_least {task.at_least}"
        if task.at_least is not None
        else f"actions {_shown(task.actions)}"
    )
    return (
        f"task {task.name}: {rule} gives every trained event the same label, "
        f"{'yes' if label else 'no'}; the trained events are {_shown(there)}. Leave `tasks` out "
        "to have them chosen by the log, or choose others, e.g. --set 'tasks=[{name: next},"
        "{name: buy, actions: [purchase]}]' or {name: like, at_least: 4}"
    )


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return ", ".join(names[:_MOST_SHOWN]) + more


class TrainOptions(StepOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides the result, except the log and the number of threads."""

    name: Annotated[str, Meta(description="name of the model in answers and metrics")] = "hstu"
    split: Annotated[
        Split,
        Meta(
            description="events held out for the evaluation: the newest fifth of each user's or "
            "of the log's events, or each user's last event"
        ),
    ] = "user-time"
    evaluate_on: Annotated[
        Literal["test", "validation"],
        Meta(
            description="validation: split the training part again, and train and evaluate on "
            "its parts"
        ),
    ] = "test"
    test_users: Annotated[Count, Meta(description="most users of HR and NDCG, drawn at random")] = (
        1000
    )
    validation_users: Annotated[
        Count,
        Meta(
            description="most users of the validation (early stopping and score blend), drawn at "
            "random"
        ),
    ] = 2000
    memory_events: Annotated[
        Count,
        Meta(
            description="largest log in memory (.55 kB an event); of a larger dataset the events "
            "are read from files, and tasks, validation, score blend, baselines and evaluation are "
            "of a sample of its users with about so many events"
        ),
    ] = 10_000_000
    tasks: Annotated[
        tuple[Task, ...] | None,
        Meta(
            description="one logit each, e.g. [{name: next}, {name: buy, actions: [purchase]}]; "
            "null: chosen by the log"
        ),
    ] = None

    features: Annotated[
        tuple[Feature, ...] | None,
        Meta(
            description="columns of the dataset to read, each with its kind; null: all, with "
            "kinds chosen by their values"
        ),
    ] = None
    computed: Annotated[
        tuple[str, ...],
        Meta(
            description="computed features, e.g. [events, rate_by:genre, recency, mf_score, hour]"
        ),
    ] = ()

    choose_mf_score: Annotated[
        bool,
        Meta(
            description="where users rate or choose among actions, train two short rankers "
            "first, and read the computed feature mf_score if the validation is better with it"
        ),
    ] = False

    sasrec: Annotated[
        bool,
        Meta(description="also train SASRec as a baseline, which takes as long as the ranker"),
    ] = False

    budget_s: Annotated[
        float,
        Meta(
            ge=0.0,
            description="seconds to search for better settings on the validation; 0 = no search",
        ),
    ] = 0.0

    dim: Annotated[Count, Meta(description="width of a token")] = 64
    num_layers: Annotated[Count, Meta(description="attention layers")] = 2
    num_heads: Annotated[Count, Meta(description="attention heads")] = 2
    qk_dim: Annotated[Count, Meta(description="width of a query and a key, per head")] = 32
    v_dim: Annotated[Count, Meta(description="width of a value, per head")] = 32
    head_dim: Annotated[Count, Meta(description="hidden width before the task logits")] = 64
    activation: Annotated[
        Literal["uvqk", "u"], Meta(description="projections with a SiLU: all four, or U alone")
    ] = "uvqk"
    residual: Annotated[
        Literal["add", "concat"], Meta(description="how the attention's output joins a token")
    ] = "add"
    norm: Annotated[
        Literal["layer", "group"],
        Meta(description="normalisation of the attention's output: over all heads, or per head"),
    ] = "layer"
    relative_bias: Annotated[
        Literal["position_time", "none"],
        Meta(description="attention bias by the distance and the time between two tokens, or none"),
    ] = "position_time"
    attention_window_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="a token reads this many of the newest ones, so that a user's prefix takes "
            "the same memory at any length; 0 = the whole history",
        ),
    ] = 0
    attention_first_tokens: Annotated[
        int, Meta(ge=0, description="and, with a window, this many of the oldest tokens")
    ] = 0
    scaling_seqlen: Annotated[
        Count, Meta(description="attention weights are scaled by 1 / this")
    ] = 64
    max_history_tokens: Annotated[Count, Meta(description="longest history that is served")] = 1024

    patience: Annotated[
        int,
        Meta(
            ge=0,
            description="epochs without a better validation that end the training, by the "
            "likelihood, or by the mean reciprocal rank if the catalogue is larger than "
            "max_softmax_items; 0 = never",
        ),
    ] = 3
    window_tokens: Annotated[
        Count, Meta(description="longest run of events trained on at once")
    ] = 120
    batch_tokens: Annotated[Count, Meta(description="events of one step, padding included")] = 1024
    item_weight_decay: Annotated[
        Weight, Meta(description="weight decay of the item embeddings, which overfit first")
    ] = 0.5
    dropout: Annotated[
        DropoutRatio, Meta(description="share of embeddings and updates that are dropped")
    ] = 0.3
    row_dropout: Annotated[
        DropoutRatio,
        Meta(
            description="share of the items whose own embedding a step hides, so that the model "
            "learns to score new items by features and codes"
        ),
    ] = 0.1
    vector_dropout: Annotated[
        DropoutRatio, Meta(description="share of the user's vector that is dropped")
    ] = 0.15
    item_init_norm: Annotated[
        Weight,
        Meta(
            description="length of the initial item embeddings, made from item co-occurrence; "
            "0 = random start"
        ),
    ] = 0.3

    max_softmax_items: Annotated[
        Count,
        Meta(description="largest catalogue with a full softmax over the next item"),
    ] = 4000
    num_negatives: Annotated[
        Count, Meta(description="items of the sampled softmax of a larger catalogue, per step")
    ] = 1024
    task_weight: Annotated[
        Weight, Meta(description="weight of the binary tasks in the loss; the next item's is 1")
    ] = 1.0
    ordinal_weight: Annotated[
        Weight, Meta(description="weight of the auxiliary head relative to the binary tasks")
    ] = 0.5
    click_weight: Annotated[
        Weight, Meta(description="weight of the next item's logit in the loss")
    ] = 0.3
    click_ratio: Annotated[
        Share, Meta(description="share of the events on which that logit is trained")
    ] = 0.05
    shown_ratio: Annotated[
        Share, Meta(description="share of the events whose impressions are trained on in a step")
    ] = 0.2
    num_retrieved: Annotated[
        Count,
        Meta(
            description="retrieved items of the lists on which the score blend is fitted and "
            "evaluated"
        ),
    ] = 200
    num_neighbours: Annotated[
        int,
        Meta(
            ge=0,
            description="neighbours of the history's items (items of the same users) that are "
            "added to these lists",
        ),
    ] = 100

    def __post_init__(self) -> None:
        if self.tasks is None:
            return
        if not self.tasks or len({task.name for task in self.tasks}) != len(self.tasks):
            raise ValueError("tasks: needs at least one task, and each name only once")
        if sum(task.shown for task in self.tasks) > 1:
            raise ValueError("tasks: at most one may have `shown`")
        if sum(task.is_next_item for task in self.tasks) > 1:
            raise ValueError(
                "tasks: at most one may have none of at_least, actions and shown, because that "
                "task predicts the next item"
            )


DEMO = TrainOptions()
QUICK = TrainOptions(epochs=5)
"""Two CPU minutes for 100,000 events, the refit included."""
PRESETS = {"demo": DEMO, "quick": QUICK}
