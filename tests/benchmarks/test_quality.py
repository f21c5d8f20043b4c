"""`bench quality`: every data set, way and figure has its line.

The strongest baseline is named, floors compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import quality, quality_cold
from benchmarks.frame import Line, bench
from benchmarks.quality import QUICK, codes_lines, knob_lines, match_lines, next_lines
from benchmarks.quality_knob import Knob, planted_pair
from benchmarks.quality_match import INGREDIENTS, JOINT_SVD, POPULARITY, SCCDR, SERVED
from npu_gr.core.errors import DataError
from npu_gr.train.generate.train import GenerateOptions
from npu_gr.train.match.domains import Domains
from npu_gr.train.match.joined import BASELINES
from npu_gr.train.next_item import NextItemRanks
from npu_gr.train.rank.options import TrainOptions
from npu_gr.train.sasrec import SASRecOptions
from tests.train.match.synthetic import quick, write
from tests.train.synthetic import planted

TINY = replace(
    QUICK,
    seeds=(0, 1),
    match=quick(source_steps=4, target_steps=4, inter_steps=4, evaluate_every=4),
    generate=GenerateOptions(
        code_count=(6, 6),
        dim=16,
        num_layers=1,
        mlp_dim=16,
        head_dim=8,
        epochs=1,
        beam_width=30,
        refit=False,
    ),
    rank=msgspec.structs.replace(QUICK.rank, epochs=1, dim=16, num_layers=1),
    sasrec=SASRecOptions(dim=16, num_layers=1, epochs=1),
)


def folder_of_domains(folder: Path) -> Path:
    for path, name in zip(write(folder), ("one", "two"), strict=True):
        (folder / "pairs" / name).mkdir(parents=True)
        path.rename(folder / "pairs" / name / "train.txt")
    return folder / "pairs"


def test_both_directions_of_a_pair_have_every_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "MATCH_FLOORS", {("one", "two"): (1e-9, 2.0, 1e-9)})
    lines = list(match_lines(folder_of_domains(tmp_path), TINY, quality._pair_lines))
    cases = [line.case for line in lines]
    for pair in ("one -> two", "two -> one"):
        for kind in ("", ", near-duplicates too"):
            for figure in ("HIT@10", "HIT@50"):
                assert f"match {pair}{kind}: served, {figure}" in cases
        assert f"match {pair}: SCCDR alone, HIT@50" in cases
    floors = {line.case: line for line in lines if line.baseline == "the floor"}
    assert [line.ok for line in floors.values()] == [True, False, True]
    assert all("one -> two" in case for case in floors)
    for line in lines:
        if line.low is not None and line.high is not None:
            assert line.low <= line.ours - line.baseline_value + 1e-9
            assert line.ok is (line.high >= 0)


def test_ingredients_and_newcomers_have_their_lines(tmp_path: Path) -> None:
    def of_pair(pair: tuple[str, str], domains: Domains, effort: quality.Effort) -> Iterator[Line]:
        if pair == ("one", "two"):
            yield from quality._ingredient_lines(pair, domains, effort)

    effort = replace(TINY, seeds=(0,))
    lines = list(match_lines(folder_of_domains(tmp_path), effort, of_pair))
    arms = [*INGREDIENTS, SERVED]
    assert [(line.case.partition(": ")[2], line.baseline) for line in lines[: len(arms)]] == [
        (f"{ours}, HIT@50", less)
        for less, ours in zip([POPULARITY, *INGREDIENTS], arms, strict=True)
    ]
    newcomers = {
        (line.case.partition("cold-start, ")[2], line.baseline): line for line in lines[len(arms) :]
    }
    assert len(newcomers) == 5
    # The taste is the source's: the SVD of both domains knows it, popularity does not.
    served = newcomers["served, HIT@50", POPULARITY]
    assert served.low is not None
    assert served.low > 0
    assert newcomers["served, HIT@50", JOINT_SVD].ours == served.ours


def test_a_planted_pair_has_what_its_knobs_say() -> None:
    def share(domains: Domains) -> float:
        """How much the sources of two users who share target items have in common."""
        source, target = (
            np.bincount(of.users * 60 + of.items, minlength=300 * 60).reshape(300, 60) * 1.0
            for of in (domains.source, domains.target)
        )
        alike = [np.corrcoef(of)[np.triu_indices(300, 1)] for of in (source, target)]
        return float(np.corrcoef(*alike)[0, 1])

    low, high = (
        planted_pair(Knob(overlap, 12, 0.0), 0, num_users=300, num_items=60)
        for overlap in (0.0, 1.0)
    )
    assert abs(share(low)) < 0.02
    assert share(high) > 0.2
    assert len(high.target.users) == 300 * 11
    held = high.test.users * 60 + high.test.items
    assert not np.isin(held, high.target.users * 60 + high.target.items).any()
    even, steep = (
        planted_pair(Knob(0.5, 12, popularity), 0, 300, 60).target.degrees()[1]
        for popularity in (0.0, 1.0)
    )
    assert steep.max() > 2 * even.max()


def test_a_pair_of_knobs_has_a_line_against_the_simple_and_one_for_each_ingredient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def small(knob: Knob, seed: int) -> Domains:
        return planted_pair(knob, seed, num_users=120, num_items=60)

    monkeypatch.setattr(quality, "planted_pair", small)
    lines = list(knob_lines([Knob(0.5, 12, 0.0)], replace(TINY, seeds=(0,))))
    assert [line.case.rpartition(": ")[2] for line in lines] == [
        f"{ours}, HIT@50" for ours in (SCCDR, *list(INGREDIENTS)[1:])
    ]
    assert lines[0].baseline in BASELINES


def test_folders_without_common_users_are_rejected(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.txt").write_text(f"{name}\t1\n{name}\t2\n")
    with pytest.raises(DataError, match="no two folders with a train"):
        list(match_lines(tmp_path, TINY, quality._pair_lines))


def test_every_trainer_of_the_next_item_has_its_lines() -> None:
    """Most of the next items of this log are repeats."""
    lines = list(next_lines(planted(num_users=30, num_events=12), "planted", TINY))
    ways = ("train retrieve", "train generate", "train rank")
    assert [line.case for line in lines] == [
        f"next planted: {way}, all items, {figure}"
        for way in ways
        for figure in ("HR@10", "NDCG@10")
    ]
    names = {line.baseline for line in lines}
    assert names <= {
        "popularity",
        "Markov counts",
        "decayed transitions",
        "ItemKNN",
        "EASE",
        "PureSVD",
        "SASRec",
    }
    assert all(0 <= line.ours <= 1 for line in lines)


def test_given_and_own_codes_have_their_lines(tmp_path: Path) -> None:
    log = planted(num_users=30, num_events=12)
    codes = {
        str(item): [place % 5, place // 5]
        for place, item in enumerate(np.unique(log.items).tolist())
    }
    (tmp_path / "codes.json").write_text(json.dumps(codes))
    lines = list(
        codes_lines(
            log,
            tmp_path / "codes.json",
            "planted",
            replace(TINY, given_codes=TINY.generate, own_codes=TINY.generate),
        )
    )
    kinds = ("given IDs", "own IDs")
    assert [line.case for line in lines] == [  # no published figures for this log
        f"codes planted: train generate, {kind}, all items, {figure}"
        for kind in kinds
        for figure in ("HR@10", "NDCG@10")
    ]
    assert lines[0].ours != lines[2].ours


def test_the_strongest_baseline_is_the_one_of_the_best_mean() -> None:
    random = np.random.default_rng(0)
    ours = [np.where(random.random(1000) < 0.5, 0.0, 99.0) for _ in range(2)]
    weak = [np.full(1000, 99.0)] * 2
    strong = [np.where(np.arange(1000) < 300, 0.0, 99.0)] * 2
    line = quality._line("case", "HIT@10", ours, {"weak": weak, "strong": strong})
    assert (line.baseline, line.baseline_value) == ("strong", 0.3)
    assert line.ok is True
    assert line.low is not None
    assert line.low > 0.1
    assert quality._line("case", "HIT@10", weak, {"strong": strong}).ok is False


def test_a_part_without_its_data_is_rejected() -> None:
    out = CliRunner().invoke(bench, ["quality", "--only", "match"])
    assert out.exit_code == 1
    assert "needs --pairs for match" in out.output


def test_row_dropout_is_compared_with_none_on_the_next_items_of_all_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[float, int]] = []

    def trained(
        events: object, features: object, options: TrainOptions
    ) -> tuple[None, SimpleNamespace]:
        asked.append((options.row_dropout, options.seed))
        ranks = np.where(np.arange(40) < (30 if options.row_dropout else 10), 0.0, 99.0)
        return None, SimpleNamespace(
            ranker=SimpleNamespace(ranks=NextItemRanks(ranks + 99, ranks, ranks > 0))
        )

    monkeypatch.setattr(quality_cold, "train_rank", trained)
    options = msgspec.structs.replace(TINY.rank, row_dropout=0.5)
    lines = list(quality_cold.warm_lines(planted(), [], "x", options, (3, 4)))
    assert asked == [(0.5, 3), (0.5, 4), (0.0, 3), (0.0, 4)]
    assert [line.case for line in lines] == [
        f"cold x: {of} warm, without row dropout" for of in ("HR@10", "NDCG@10")
    ]
    assert [(line.ours, line.baseline_value, line.ok) for line in lines] == [(0.75, 0.25, True)] * 2
    assert all(line.low is not None and line.low > 0.2 for line in lines)
