"""What features are worth: the lines of the ablation, their intervals, and ZOZOTOWN's log as its package has it."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks import quality_features, quality_zozotown
from benchmarks.quality_features import NONE, Compared, Group, auc_difference, compared, lines_of, movielens_lines
from benchmarks.quality_zozotown import CAMPAIGNS, ITEM, POLICIES, USER, read_impressions, zozotown_lines
from npu_gr.core.errors import DataError
from npu_gr.train.metrics import auc
from npu_gr.train.next_item import NextItemRanks
from npu_gr.train.paired import difference_of_auc
from npu_gr.train.rank.evaluate import RankingFigures
from npu_gr.train.rank.options import TrainOptions
from tests.train.rank.test_features import GENRES
from tests.train.synthetic import planted

TINY = TrainOptions(
    split="user-time", refit=False, dim=8, qk_dim=4, v_dim=4, head_dim=8, num_layers=1, epochs=1, window_tokens=16
)


def figures(seed: int, likes: np.ndarray, gap: float) -> RankingFigures:
    random = np.random.default_rng(seed)
    liking = random.normal(size=len(likes)) + gap * likes
    overall, unseen = random.integers(0, 30, (2, 9)).astype(float)
    ranks = NextItemRanks(overall, unseen, np.zeros(9, np.bool_))
    return RankingFigures(
        model="x",
        auc=auc(liking, likes),
        hr_at_10=0.0,
        ndcg_at_10=0.0,
        hr_at_10_unseen=0.0,
        ndcg_at_10_unseen=0.0,
        ranks=ranks,
        liking=liking,
    )


def group_of(gap: float, seeds: tuple[int, ...]) -> Compared:
    random = np.random.default_rng(0)
    likes, users = random.random(400) < 0.5, np.sort(random.integers(0, 40, 400))
    return Compared(figures=[figures(seed, likes, gap) for seed in seeds], likes=likes, users=users)


def test_the_difference_of_one_training_is_the_paired_one_and_several_add_their_noise() -> None:
    ours, theirs = group_of(1.0, (1,)), group_of(0.2, (2,))
    own, other = ours.figures[0].liking, theirs.figures[0].liking
    assert own is not None
    want = difference_of_auc(own, other, ours.likes, ours.users)
    assert want is not None
    found = auc_difference(ours, theirs)
    assert found[:3] == pytest.approx(want[:3])
    same = auc_difference(group_of(1.0, (1, 1)), group_of(0.2, (2, 2)))
    assert same[:3] == pytest.approx(want[:3])
    noisy = auc_difference(group_of(1.0, (1, 3, 5)), group_of(0.2, (2, 4, 6)))
    gaps = group_of(1.0, (1, 3, 5)).aucs - group_of(0.2, (2, 4, 6)).aucs
    assert noisy.mean == pytest.approx(gaps.mean())
    assert noisy.high - noisy.low > 2 * 1.96 * gaps.std(ddof=1) / np.sqrt(3)


def test_lines_say_whether_a_group_is_worse() -> None:
    better, worse = group_of(1.0, (1, 2)), group_of(0.0, (3, 4))
    for ours, theirs, is_ok in ((better, worse, True), (worse, better, False)):
        auc_line, *others = lines_of("case", ours, "without", theirs)
        assert auc_line.ok is is_ok
        assert auc_line.ours == pytest.approx(ours.aucs.mean())
        assert [line.unit for line in others] == ["HR@10", "NDCG@10"] * 2


def test_a_group_is_trained_on_what_it_names_alone() -> None:
    log = planted(8, 15)
    found = compared(log, GENRES, Group(name="x", with_items=True, computed=("events_by:genre",)), TINY, (0,))
    plain = compared(log, GENRES, Group(name="y"), TINY, (0,))
    assert found.figures[0].auc != plain.figures[0].auc
    assert len(found.likes) == 8 * 3


def test_every_group_is_less_one_before_it() -> None:
    groups = (NONE, *quality_features.GROUPS)
    names = [group.name for group in groups]
    assert [group.less in names[:place] for place, group in enumerate(groups)] == [False] + [True] * (len(groups) - 1)


@pytest.mark.parametrize(
    ("gaps", "chosen"), [((0.0, 0.9, 0.3), "b + c"), ((0.9, 0.0, 0.0), "a"), ((0.0, 0.0, 0.0), "")]
)
def test_groups_are_chosen_on_the_validation_and_judged_once_on_the_test(
    monkeypatch: pytest.MonkeyPatch, gaps: tuple[float, ...], chosen: str
) -> None:
    groups = [Group(name=name, computed=(name,)) for name in "abc"]
    asked: list[tuple[str, bool, tuple[int, ...]]] = []

    def trained(
        events: object,
        items: object,
        group: Group,
        rank: TrainOptions,
        seeds: tuple[int, ...],
        on_validation: bool = False,
    ) -> Compared:
        asked.append((group.name, on_validation, seeds))
        gap = sum(gap for one, gap in zip(groups, gaps, strict=True) if one.name in group.computed)
        return group_of(gap, seeds)

    monkeypatch.setattr(quality_features, "GROUPS", groups)
    monkeypatch.setattr(quality_features, "movielens", lambda: (None, None))
    monkeypatch.setattr(quality_features, "compared", trained)
    monkeypatch.setattr(quality_features, "factorised", lambda events, seeds: group_of(0.0, seeds))
    lines = list(movielens_lines(TINY, (5, 6)))
    validated = [(name, True, (5,)) for name in (NONE.name, "a", "b", "c")]
    assert asked == validated + ([(NONE.name, False, (5, 6)), (chosen, False, (5, 6))] if chosen else [])
    assert [line.baseline for line in lines if "validation" not in line.case] == (
        [NONE.name] * 5 + ["matrix factorisation"] * 2 if chosen else []
    )


def test_the_validation_is_of_the_trained_part_alone() -> None:
    log = planted(8, 15)
    found = compared(log, GENRES, NONE, TINY, (0,), on_validation=True)
    last = np.concatenate([np.flatnonzero(log.users == user)[-3:] for user in range(8)])  # the test's
    values = log.values.copy()
    values[last] = 6 - values[last]
    other = compared(dataclasses.replace(log, values=values), GENRES, NONE, TINY, (0,), on_validation=True)
    assert np.array_equal(found.figures[0].liking, other.figures[0].liking)  # type: ignore[arg-type]
    assert len(found.likes) < 8 * 3 + 8


def write_log(root: Path) -> None:
    """A log like the package's: what is clicked is what its affinity says."""
    random = np.random.default_rng(0)
    for policy in POLICIES:
        for campaign in CAMPAIGNS:
            folder = root / policy / campaign
            folder.mkdir(parents=True)
            with (folder / "item_context.csv").open("w", newline="") as file:
                rows = [[at, at, at / 3, *(f"{name}{at % 2}" for name in ITEM[1:])] for at in range(4)]
                csv.writer(file).writerows([["", "item_id", *ITEM], *rows])
            head = ["", "timestamp", "item_id", "position", "click", "propensity_score", *USER]
            affinities = [f"user-item_affinity_{at}" for at in range(4)]
            with (folder / f"{campaign}.csv").open("w", newline="") as file:
                csv.writer(file).writerow([*head, *affinities])
                for row in range(60):
                    item, near = int(random.integers(4)), random.integers(0, 3, 4)
                    time = f"2019-11-24 {row // 3:02d}:{row % 3 * 20:02d}:17.004101+00:00"
                    click = int(near[item] == 2)
                    user = [f"u{int(random.integers(3))}" for _ in USER]
                    csv.writer(file).writerow([row, time, item, 1 + row % 3, click, 0.1, *user, *near])


def test_zozotowns_log_is_read_with_all_that_it_says(tmp_path: Path) -> None:
    write_log(tmp_path)
    found = read_impressions(tmp_path)
    assert len(found.events) == 6 * 60
    assert set(found.events.action_names) == {"click", "impression"}
    assert [(column.name, column.of) for column in found.events.columns] == [
        *((name, "user") for name in USER),
        ("position", "request"),
        ("affinity", "cross"),
    ]
    assert [item.name for item in found.items] == list(ITEM)
    clicked = np.array(found.events.action_names)[found.events.values.astype(int)] == "click"
    assert np.array_equal(clicked, found.affinity[found.events.users] == 2)
    assert found.names.shape == (360, 11)


def test_the_ranker_stands_beside_both_baselines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn: pip install 'npu_gr[baselines]'")
    write_log(tmp_path)
    for name, value in (
        ("EPOCHS", (12,)),
        ("RATES", (1e-2,)),
        ("PENALTIES", (1.0,)),
        ("LEAVES", (4,)),
        ("TREES", (20,)),
    ):
        monkeypatch.setattr(quality_zozotown, name, value)
    monkeypatch.setattr(
        quality_zozotown,
        "RANKER",
        msgspec.structs.replace(quality_zozotown.RANKER, dim=16, dropout=0.0, batch_tokens=64),
    )
    found = list(zozotown_lines(0, read_impressions(tmp_path)))
    assert [line.baseline for line in found] == ["logistic regression", "boosted trees"]
    assert min(found[0].ours, *(line.baseline_value for line in found)) > 0.9


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"npu_gr\[baselines\]"):
        next(zozotown_lines(0))
    monkeypatch.setattr("importlib.metadata.files", lambda name: [])
    with pytest.raises(DataError, match=r"use obp==0\.4\.1"):
        read_impressions()
