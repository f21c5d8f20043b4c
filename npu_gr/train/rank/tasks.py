"""The ranker's tasks: what each of its logits predicts, and which ones suit a log if nobody says.

    next item     no threshold and no actions: the event's item against items drawn from the catalogue
    a threshold   `at_least`: the event's value reaches it, as a rating does
    actions       the event's action is one of these, e.g. a purchase

A checkpoint names its tasks; a request asks for them by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from npu_gr.core.errors import ConfigError, DataError
from npu_gr.core.words import quoted
from npu_gr.train.data import Bools, InteractionLog

MAX_ACTIONS = 100  # distinct values of a log; more are measurements, such as dwell times
MAX_EVENT_TASKS = 8  # that are chosen for a log of event types
STARS = 5.0  # largest value of a scale on which `LIKE` is a liking
_MOST_SHOWN = 10


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task of the ranker: one logit."""

    name: str
    at_least: float | None = None  # smallest action value of a positive
    actions: Annotated[tuple[str, ...], Meta(max_length=MAX_ACTIONS)] = ()  # an event with one of them is a positive

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
            f"{len(log.action_values)} distinct values of actions, the limit is {MAX_ACTIONS}: these are measurements, "
            "not actions; `npu-gr prepare` makes buckets of them"
        )


def choose_tasks(log: InteractionLog) -> ChosenTasks:
    """Choose tasks by what the log's actions are: event types, one single action, stars, or another scale."""
    counts = np.bincount(log.actions[log.trained], minlength=len(log.action_values))
    used = np.flatnonzero(counts)
    if len(used) == 1:
        name = log.names_of_actions[used[0]]
        return ChosenTasks((CLICK,), f"every event is {quoted(name)}: the next item is all that can be learnt")
    if log.action_names:
        often = used[np.argsort(-counts[used], kind="stable")]
        chosen = [log.action_names[action] for action in often[1 : 1 + MAX_EVENT_TASKS]]
        left = f", {len(often) - 1 - len(chosen)} rarer ones have none" if len(often) - 1 > len(chosen) else ""
        return ChosenTasks(
            (CLICK, *(Task(name=_task_name(name), actions=(name,)) for name in chosen)),
            f"the next item, and one for each event type but the most frequent, {quoted(log.action_names[often[0]])}"
            + left,
        )
    values = log.values[log.trained]
    if values.min() < 4.0 <= values.max() <= STARS:
        return ChosenTasks((CLICK, LIKE), "the next item, and a rating of at least 4")
    median, second = float(np.quantile(values, 0.5, method="lower")), float(log.action_values[used[1]])
    at_least, what = (median, "median") if median >= second else (second, "lowest but one")
    return ChosenTasks(
        (CLICK, Task(name=LIKE.name, at_least=at_least)),
        f"the next item, and a value of at least {at_least:g}, which is the {what} of {values.min():g} .. "
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

    Ordered values get the auxiliary labels of ordinal regression: above the lowest, above the second lowest, and so on.
    Event types have no order, so each is a label of its own.

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
    auxiliary = log.actions[:, None] == every if log.action_names else log.actions[:, None] > every[:-1]
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
    """Say what each action of a log is worth to a binary task: its value; of event types, 1 for a positive.

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
    there = [f"{name} ({count})" for name, count in zip(log.names_of_actions, counts, strict=True) if count]
    rule = f"at_least {task.at_least}" if task.at_least is not None else f"actions {_shown(task.actions)}"
    return (
        f"task {task.name}: {rule} gives every trained event the same label, {'yes' if label else 'no'}; the trained "
        f"events are {_shown(there)}. Leave `tasks` out and they are chosen by the log, or say them, e.g. "
        "--set 'tasks=[{name: click},{name: buy, actions: [purchase]}]' or {name: like, at_least: 4}"
    )


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return ", ".join(names[:_MOST_SHOWN]) + more
