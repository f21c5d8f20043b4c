"""Impressions are negatives of a task of their own, and part of no history."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch

from npu_gr.core.errors import DataError
from npu_gr.history_store.interactions import Impressions, Interactions
from npu_gr.train.data import InteractionLog, build_log
from npu_gr.train.metrics import difference_of_auc
from npu_gr.train.rank.fit import fit
from npu_gr.train.rank.inputs import pages_of
from npu_gr.train.rank.options import NEXT, SHOWN, Task, TrainOptions, choose_tasks, make_labels
from npu_gr.train.rank.shown import MAX_SHOWN, ShownFigures, _draws, shown_logits
from npu_gr.train.rank.train import train_rank

START = 1_700_000_000
TINY = TrainOptions(
    epochs=12,
    batch_tokens=512,
    dim=16,
    qk_dim=8,
    v_dim=8,
    head_dim=16,
    num_layers=1,
    refit=False,
    test_users=20,
    validation_users=20,
)


class Page(NamedTuple):
    """What a user was shown at one time, from top to bottom."""

    user: int
    second: int
    items: list[int]
    clicked: list[bool]


def logged(pages: list[Page], *, has_positions: bool = True) -> Interactions:
    rows = [
        (page.user, item, START + page.second, place, clicked)
        for page in sorted(pages, key=lambda page: page.second)
        for place, (item, clicked) in enumerate(zip(page.items, page.clicked, strict=True))
    ]
    events = np.array([row[:4] for row in rows if row[4]], np.int64)
    others = np.array([row[:4] for row in rows if not row[4]], np.int64)
    places = np.int16(1) if has_positions else np.int16(0)

    def positions(of: npt.NDArray[np.int64]) -> npt.NDArray[np.int16]:
        return ((of[:, 3] + 1) * places - 1).astype(np.int16)

    return Interactions(
        events[:, 0].astype(np.int32),
        events[:, 1],
        np.zeros(len(events)),
        events[:, 2],
        [f"u{n}" for n in range(max(page.user for page in pages) + 1)],
        ("click",),
        (),
        Impressions(
            others[:, 0].astype(np.int32),
            others[:, 1],
            others[:, 2],
            positions(others),
            positions(events) if has_positions else None,
        ),
    )


def trained(log: InteractionLog, *tasks: Task) -> ShownFigures:
    model = fit(log, [], tasks, TINY, [], "test", lambda _: None).model
    following = next((at for at, task in enumerate(tasks) if task.is_next_item), None)
    task = next((at for at, task in enumerate(tasks) if task.shown), following)
    assert task is not None
    return ShownFigures(log, model, tasks[task].name, task, following)


def test_impressions_come_just_before_the_next_event_of_the_user() -> None:
    pages = [
        Page(0, 10, [1, 2], [True, False]),
        Page(0, 15, [3, 1], [False, False]),
        Page(0, 20, [1, 2, 9], [False, True, False]),  # 9 has no event, so no row
        Page(1, 12, [3, 2], [True, False]),
        Page(1, 30, [1], [False]),  # after the last event
    ]
    log = build_log(logged([*pages, Page(1, 13, [2], [True])]), [], "user-time")
    assert log.shown is not None
    assert log.items[: log.starts[1]].tolist() == [0, 1]
    found = list(
        zip(
            log.shown.events.tolist(),
            log.item_ids[log.shown.items].tolist(),
            log.shown.positions.tolist(),
            strict=True,
        )
    )
    assert sorted(found) == sorted(
        [(0, 2, 1), (1, 3, 0), (1, 1, 1), (1, 1, 0), (2, 2, 1), (3, 1, 0)]
    )
    assert log.shown.of_events.tolist() == [0, 1, 0, 0]
    # those of held-out events are not trained on, and a part of the log has its own
    inner = log.shown.of_kept(np.array([False, True, True, False]))
    assert sorted(inner.events.tolist()) == [0, 0, 0, 1]
    assert sorted(log.item_ids[inner.items].tolist()) == [1, 1, 2, 3]


def test_clicks_of_one_page_do_not_give_each_other_away() -> None:
    """Pages that are clicked by chance, some of them twice: nothing can tell what is clicked."""
    random = np.random.default_rng(0)
    pages = []
    for user in range(60):
        for page in range(12):
            clicked = (random.random(5) < 0.5).tolist()
            items = random.choice(8, 5, replace=False).tolist()
            pages.append(Page(user, page * 7200 + user, items, clicked))
    log = build_log(logged(pages, has_positions=False), [], "user-time")
    begins = pages_of(log)
    for event in range(len(begins)):
        same = (log.users == log.users[event]) & (log.times == log.times[event])
        assert begins[event] == np.flatnonzero(same)[0]
    options = msgspec.structs.replace(TINY, epochs=30, learning_rate=0.01, shown_ratio=1.0)
    model = fit(log, [], (SHOWN,), options, [], "test", lambda _: None).model
    assert abs(ShownFigures(log, model, "click", 0, None).auc - 0.5) < 0.06


def test_a_draw_repeats_nothing_and_has_all_of_a_few() -> None:
    counts = torch.tensor([[0, 3, MAX_SHOWN, 50]])
    for _ in range(20):
        drawn = _draws(counts)[0]
        assert drawn[1, :3].tolist() == [0, 1, 2]
        assert sorted(set(drawn[2].tolist())) == list(range(MAX_SHOWN))
        assert len(set(drawn[3].tolist())) == MAX_SHOWN
        assert int(drawn[3].max()) < 50


def synthetic(seed: int, num_users: int, num_items: int) -> list[Page]:
    """Clicks by an item's appeal and its place; what is shown often has little appeal."""
    random = np.random.default_rng(seed)
    appeal = np.linspace(-2.0, 2.0, num_items)
    often = np.exp(-1.5 * np.arange(num_items) * 4 / num_items)
    pages = []
    for user in range(num_users):
        for page in range(10):
            shown = random.choice(num_items, 5, replace=False, p=often / often.sum())
            chance = 1 / (1 + np.exp(0.3 - appeal[shown] + 0.8 * np.arange(5)))
            clicked = (random.random(5) < chance).tolist()
            pages.append(Page(user, page * 3600 + user, shown.tolist(), clicked))
    return pages


def test_impressions_tell_what_is_clicked_from_what_is_shown_often() -> None:
    log = build_log(logged(synthetic(0, 150, 30)), [], "user-time")
    with_shown, without = trained(log, NEXT, SHOWN), trained(log, NEXT)
    found = difference_of_auc(
        with_shown.logits[:, 0], without.logits[:, 0], with_shown.labels, with_shown.users
    )
    assert found is not None
    assert found.low > 0.03, (with_shown.auc, without.auc, found)
    # the report says so if counts of each item tell as much as the model
    tested = with_shown.labels
    with_shown.logits[:, 0] = tested
    assert "minus that of the items' own click rates: +0." in with_shown.text()
    assert "WARNING" not in with_shown.text()
    with_shown.logits[:, 0] = np.random.default_rng(0).random(len(tested))
    assert "WARNING: do not order pages by click: how often" in with_shown.text()


def test_the_position_explains_what_the_item_does_not() -> None:
    # two equal kinds of items, of which one mostly stands on top
    random = np.random.default_rng(0)
    pages = []
    for user in range(150):
        for page in range(8):
            top, below = random.choice(10, 2, replace=False), random.choice(10, 2, replace=False)
            clicked = (random.random(4) < [0.6, 0.6, 0.15, 0.15]).tolist()
            items = [*top.tolist(), *(below + 10).tolist()]
            if random.random() < 0.3:  # sometimes the page is upside down
                items = items[::-1]
            pages.append(Page(user, page * 3600 + user, items, clicked))
    quicker = msgspec.structs.replace(TINY, epochs=30, learning_rate=0.01, shown_ratio=0.5)
    gaps = []
    for has_positions in (True, False):
        log = build_log(logged(pages, has_positions=has_positions), [], "user-time")
        model = fit(log, [], (SHOWN,), quicker, [], "test", lambda _: None).model
        events = np.repeat(np.flatnonzero(~log.trained)[:40], 20)
        every = np.tile(np.arange(20), 40)
        logits = shown_logits(log, model, events, every, [0])[:, 0]
        gaps.append(logits[every < 10].mean() - logits[every >= 10].mean())
    assert abs(gaps[0]) < 0.5 * gaps[1], gaps


def test_a_log_with_impressions_gets_the_task() -> None:
    pages = synthetic(1, 40, 20)
    _, evaluation = train_rank(logged(pages), [], TINY)
    assert "AUC click" in evaluation.text()
    assert 0 < evaluation.as_dict()["auc_click"] < 1
    log = build_log(logged(pages), [], "user-time")
    assert [task.name for task in choose_tasks(log).tasks] == ["next", "click"]
    few = build_log(logged(pages[:30]), [], "user-time")
    assert [task.name for task in choose_tasks(few).tasks] == ["next"]


def test_a_task_of_shown_items_needs_impressions() -> None:
    with pytest.raises(ValueError, match="one of at_least, actions and shown"):
        Task(name="click", shown=True, at_least=4.0)
    with pytest.raises(ValueError, match="at most one may have `shown`"):
        TrainOptions(tasks=(SHOWN, Task(name="more", shown=True)))
    plain = logged(synthetic(1, 10, 20))
    log = build_log(plain[:], [], "user-time")  # a part of a log has none
    with pytest.raises(DataError, match="no impressions"):
        make_labels(log, (NEXT, SHOWN))
