"""Tasks suit the log: event types, one action, stars, another scale.

What does not suit is rejected with the remedy.
"""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest

from npu_gr.core.errors import ConfigError, DataError
from npu_gr.core.settings import override
from npu_gr.history_store.interactions import Interactions
from npu_gr.train.data import build_log
from npu_gr.train.rank.options import LIKE, NEXT, Task, choose_tasks, make_labels
from npu_gr.train.rank.train import train_rank
from tests.train.rank.test_train import TINY
from tests.train.synthetic import planted


def valued(*values: float, names: tuple[str, ...] = ()) -> Interactions:
    """The planted log with these values in turn, in every user's history."""
    log = planted()
    place = np.empty(len(log), np.int64)
    for user in range(60):
        own = log.users == user
        place[own] = np.arange(own.sum())
    return dataclasses.replace(
        log, values=np.array(values)[place % len(values)], action_names=names
    )


EVENTS = valued(1, 1, 0, 1, 3, 0, 1, names=("cart", "view", "never", "purchase"))


def test_stars_keep_their_liking() -> None:
    chosen = choose_tasks(build_log(planted(), [], "user-time"))
    assert chosen.tasks == (NEXT, LIKE)


def test_one_action_is_the_next_item_alone() -> None:
    chosen = choose_tasks(build_log(valued(1.0), [], "user-time"))
    assert chosen.tasks == (NEXT,)
    assert "every event is '1'" in chosen.reason
    named = choose_tasks(build_log(valued(1.0, names=("cart", "view")), [], "user-time"))
    assert named.tasks == (NEXT,)
    assert "'view'" in named.reason


def test_another_scale_takes_its_median_and_says_so() -> None:
    chosen = choose_tasks(build_log(valued(1, 8, 9, 7, 10, 2, 8, 9, 5, 8), [], "user-time"))
    assert chosen.tasks == (NEXT, Task(name="like", at_least=8.0))
    assert "at least 8, the median of 1 .. 10" in chosen.reason
    codes = choose_tasks(build_log(valued(1, 1, 1, 2), [], "user-time"))
    assert codes.tasks[1].at_least == 2.0  # the median would give every event the same label


def test_each_event_type_but_the_most_frequent_is_a_task() -> None:
    log = build_log(EVENTS, [], "user-time")
    chosen = choose_tasks(log)
    assert chosen.tasks == (
        NEXT,
        Task(name="cart", actions=("cart",)),
        Task(name="purchase", actions=("purchase",)),
    )
    assert "'view'" in chosen.reason
    labels = make_labels(log, chosen.tasks)
    assert labels.served_tasks == [1, 2]
    assert np.array_equal(labels.served[:, 1].numpy()[log.actions] > 0, log.actions == 3)
    # no order among them
    assert np.array_equal(
        labels.auxiliary.numpy()[log.actions] > 0, log.actions[:, None] == np.arange(4)
    )


def test_an_event_type_called_next_does_not_take_the_next_items_name() -> None:
    log = build_log(valued(1, 1, 0, names=("next", "view")), [], "user-time")
    assert [task.name for task in choose_tasks(log).tasks] == ["next", "next event"]
    log = build_log(valued(1, 1, 0, names=("click", "view")), [], "user-time")
    assert [task.name for task in choose_tasks(log).tasks] == ["next", "click"]


def test_a_ranker_of_event_types_knows_all_of_the_data_sets_and_is_evaluated() -> None:
    checkpoint, found = train_rank(EVENTS, [], msgspec.structs.replace(TINY, split="user-time"))
    # in the data set's order
    assert checkpoint.action_names == ("cart", "view", "never", "purchase")
    assert checkpoint.action_values == (0.0, 1.0, 2.0, 3.0)
    assert checkpoint.model.config.actions == checkpoint.action_names
    assert checkpoint.model.config.tasks == ("next", "cart", "purchase")
    assert found.auc_task == "cart"
    assert "cart" in str(found.table().columns[1].header)
    assert 0 <= next(row for row in found.baselines if row.model == "user + item means").auc <= 1


def test_tasks_can_be_set() -> None:
    tasks = (NEXT, Task(name="buy", actions=("purchase", "cart")))
    checkpoint, found = train_rank(EVENTS, [], msgspec.structs.replace(TINY, tasks=tasks))
    assert checkpoint.model.config.tasks == ("next", "buy")
    assert found.tasks == "set by the option `tasks`"
    stars = (Task(name="five", actions=("5",)),)
    assert train_rank(planted(), [], msgspec.structs.replace(TINY, tasks=stars))[1].ranker.auc > 0


def test_what_does_not_suit_is_rejected_with_the_remedy() -> None:
    log = build_log(EVENTS, [], "user-time")
    with pytest.raises(
        ConfigError,
        match=r"task buy: the log has no action 'purchas'; did you "
        r"mean 'purchase'\?",
    ):
        make_labels(log, [Task(name="buy", actions=("purchas",))])
    with pytest.raises(ConfigError, match=r"no action 'x'; it has cart, view, never, purchase"):
        make_labels(log, [Task(name="buy", actions=("x",))])
    with pytest.raises(
        DataError,
        match=r"buy: actions never gives every trained event the same "
        r"label, no; .*--set",
    ):
        make_labels(log, [Task(name="buy", actions=("never",))])
    with pytest.raises(ValueError, match="has one of at_least, actions and shown"):
        Task(name="buy", at_least=1.0, actions=("a",))
    dwell = dataclasses.replace(planted(), values=np.arange(1800) / 7)
    with pytest.raises(
        DataError,
        match=r"1800 distinct values of actions, the limit is 100: "
        r".*npu-gr prepare",
    ):
        train_rank(dwell, [], msgspec.structs.replace(TINY, tasks=(NEXT,)))


def test_tasks_of_the_command_line_are_read_and_a_misspelled_key_is_named() -> None:
    options = override(TINY, ["tasks=[{name: next}, {name: buy, actions: [purchase]}]"])
    assert options.tasks == (NEXT, Task(name="buy", actions=("purchase",)))
    with pytest.raises(ConfigError, match=r"tasks\[0\]\.at_leas; did you mean at_least\?"):
        override(TINY, ["tasks=[{name: like, at_leas: 4}]"])
    with pytest.raises(ConfigError, match="task buy: has one of at_least, actions and shown"):
        override(TINY, ["tasks=[{name: buy, at_least: 1, actions: [a]}]"])
