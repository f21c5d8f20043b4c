"""Trainings of one log share their baselines: one fits them, and the others read the same ranks."""

from __future__ import annotations

from pathlib import Path
from threading import Barrier, Thread

import numpy as np
import pytest

from npu_gr.train import shared_baselines as module
from npu_gr.train.baselines import fit_baselines, fit_linear, graph_of, sample_users
from npu_gr.train.data import InteractionLog, build_log, events_of
from npu_gr.train.next_item import baseline_figures, rank_next_items
from npu_gr.train.shared_baselines import RankedBaselines, SharedBaselines, rank_baselines
from tests.train.synthetic import planted


@pytest.fixture(scope="module")
def log() -> InteractionLog:
    return build_log(planted(num_users=60, num_events=7), [], "leave-one-out")


def assert_same(found: RankedBaselines, want: RankedBaselines, log: InteractionLog) -> None:
    assert found.skipped == want.skipped
    assert [*found.ranks] == [*want.ranks]
    for name, ranks in want.ranks.items():
        for part, other in zip(found.ranks[name], ranks, strict=True):
            np.testing.assert_array_equal(part, other)
    assert found.item_knn is not None
    assert want.item_knn is not None
    assert found.item_knn.tuned.settings == want.item_knn.tuned.settings
    one, two = (each.item_knn.refitted(log) for each in (found, want) if each.item_knn)
    np.testing.assert_array_equal(one.next_items(log, 3), two.next_items(log, 3))


def test_two_at_once_fit_once_and_read_what_each_would_have_found(
    log: InteractionLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = log.next_items()
    want = rank_baselines(log, "leave-one-out", 0, targets)
    figures = [
        baseline_figures(log, targets, each) for each in fit_baselines(log, "leave-one-out", 0)
    ]
    assert list(want.figures()) == figures
    fits: list[int] = []

    def counted(*args: object) -> RankedBaselines:
        fits.append(len(fits))
        return rank_baselines(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "rank_baselines", counted)
    share, both = SharedBaselines(tmp_path), Barrier(2)
    results: list[RankedBaselines] = []

    def training() -> None:
        both.wait()
        results.append(share(log, "leave-one-out", 0, targets))

    threads = [Thread(target=training) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fits == [0]
    for found in results:
        assert_same(found, want, log)
    share(log, "leave-one-out", 0, targets[1:])  # other users: nothing to share
    share(log, "leave-one-out", 1, targets)  # another seed
    assert fits == [0, 1, 2]


def test_without_linear_baselines_the_words_are_kept(
    log: InteractionLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("npu_gr.train.baselines.MAX_EDGES", 10)
    share = SharedBaselines(tmp_path)
    for _ in range(2):
        found = share(log, "leave-one-out", 0, log.next_items())
        assert found.item_knn is None
        assert "the limit is 10" in found.skipped[0]
        assert len(found.ranks) == 4


def test_beyond_the_limit_linear_baselines_are_of_a_sample_with_the_tested_users(
    log: InteractionLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = log.next_items()[::7]
    tested = {user for user, _ in targets}
    monkeypatch.setattr("npu_gr.train.baselines.MAX_EDGES", 120)
    share = SharedBaselines(tmp_path)
    first, again = (share(log, "leave-one-out", 0, targets) for _ in range(2))
    assert first.skipped == again.skipped
    assert list(first.ranks)[4:] == ["ItemKNN", "EASE", "PureSVD"]
    assert first.item_knn is None  # the blend needs the weights of all users
    users = sample_users(log, np.array(sorted(tested)), 0)
    assert tested < set(users.tolist())
    assert 60 < len(graph_of(events_of(log, users)).users) <= 120
    assert f"{len(users)} of 60 users" in first.skipped[0]
    part = events_of(log, users)
    own = [target for target in part.next_items() if users[target.user] in tested]
    for linear in fit_linear(part, "leave-one-out", 0):
        want = rank_next_items(part, own, (linear.next_items(part, user) for user, _ in own))
        np.testing.assert_array_equal(first.ranks[linear.name].unseen, want.unseen)
