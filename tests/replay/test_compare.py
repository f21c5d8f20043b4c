"""A comparison finds what differs and nothing else: slower runs, drifted scores, another order."""

from __future__ import annotations

import gzip
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from npu_gr.cli.main import main
from npu_gr.core.errors import DataError
from npu_gr.replay.answers import AnswerLine
from npu_gr.replay.compare import BLOCKS, compare
from npu_gr.replay.log import TaskScores, digest, raw

SLO_S = 0.05


def run(
    folder: Path,
    *,
    slower: float = 1.0,
    shift: float = 0.0,
    num: int = 4000,
    seed: int = 0,
    values: bool = True,
) -> Path:
    """Answers whose latencies are noise of the run's own times what is hard in the log."""
    log, own = np.random.default_rng(7), np.random.default_rng(seed)
    hard, scores = log.lognormal(2, 0.8, num), log.standard_normal((num, 20)).astype(np.float32)
    latencies_ms = hard * slower * own.lognormal(0, 0.1, num)
    scores = scores + np.float32(shift) * own.standard_normal((num, 20)).astype(np.float32)
    folder.mkdir()
    lines = [
        AnswerLine(
            number=i,
            kind="rank",
            due_at=i * 0.01,
            latency_ms=float(latencies_ms[i]),
            error="504" if i % 50 == 0 else "",
            model_version="m",
            digest=digest({"click": scores[i]}),
            scores={"click": raw(scores[i])} if values else {},
        )
        for i in own.permutation(num).tolist()
    ]
    data = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    (folder / "answers.jsonl.gz").write_bytes(gzip.compress(data, 1))
    return folder


def test_a_run_against_itself_differs_in_nothing(tmp_path: Path) -> None:
    a = run(tmp_path / "a")
    found = compare(a, a, SLO_S)
    assert found.is_paired
    assert all((row.ratio, row.low, row.high) == (1.0, 1.0, 1.0) for row in found.ratios)
    assert (found.drift.num_compared, found.drift.num_same_digest) == (3920, 3920)
    assert (found.drift.max_drift, found.drift.same_first_ratio, found.drift.top_overlap) == (
        0.0,
        1.0,
        1.0,
    )


def test_a_slowdown_is_found_with_an_interval_that_does_not_reach_one(tmp_path: Path) -> None:
    found = compare(run(tmp_path / "a"), run(tmp_path / "b", slower=1.1, seed=1), SLO_S)
    for row in found.ratios[:4]:
        assert row.low < 1.1 < row.high or row.ratio == pytest.approx(1.1, rel=0.04)
        assert row.low <= row.ratio <= row.high
    assert all(row.low > 1.0 for row in found.ratios[:2])
    good = found.ratios[4]
    assert good.a > good.b
    exact = np.percentile(_latencies(tmp_path / "a"), 99, method="inverted_cdf")
    assert found.ratios[2].a == pytest.approx(exact, rel=0.006)


def test_pairing_makes_intervals_narrower_than_two_logs_of_their_own(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a"), run(tmp_path / "b", seed=1)
    other = run(tmp_path / "c", seed=1, num=3999)
    paired, apart = compare(a, b, SLO_S), compare(a, other, SLO_S)
    assert (paired.is_paired, apart.is_paired) == (True, False)
    for one, two in zip(paired.ratios[:4], apart.ratios[:4], strict=True):
        assert one.high - one.low < two.high - two.low


def test_intervals_hold_the_truth_about_as_often_as_they_say(tmp_path: Path) -> None:
    held = 0
    for seed in range(20):
        b = run(tmp_path / f"b{seed}", seed=100 + seed, slower=1.05, num=5 * BLOCKS)
        found = compare(run(tmp_path / f"a{seed}", seed=seed, num=5 * BLOCKS), b, SLO_S)
        held += found.ratios[3].low <= 1.05 <= found.ratios[3].high
    assert 15 <= held <= 20  # of the mean; 95 % of 20 is 19


def test_drift_is_in_standard_deviations_of_the_request(tmp_path: Path) -> None:
    found = compare(run(tmp_path / "a"), run(tmp_path / "b", shift=1e-3, seed=3), SLO_S).drift
    assert found.num_same_digest == 0
    assert found.num_with_values == 3920
    assert 1e-3 < found.p50_drift < 5e-3
    assert found.p50_drift < found.p99_drift <= found.max_drift == found.worst[0][1]
    assert found.top_overlap > 0.99
    digests = compare(tmp_path / "a", run(tmp_path / "d", values=False), SLO_S).drift
    assert (digests.num_same_digest, digests.num_with_values) == (3920, 0)


def test_the_command_fails_where_it_was_asked_to(tmp_path: Path) -> None:
    a, b = (
        run(tmp_path / "a", num=300),
        run(tmp_path / "b", shift=1e-2, slower=2.0, num=300, seed=1),
    )

    def code(*words: str) -> int:
        return CliRunner().invoke(main, ["replay", "compare", str(a), *words]).exit_code

    assert code(str(b)) == 0
    assert code(str(b), "--max-drift", "0.5", "--max-p99-ratio", "3", "--json") == 0
    assert code(str(b), "--max-drift", "0.001") == 1
    assert code(str(b), "--max-p99-ratio", "1.2") == 1
    assert code(str(a), "--max-drift", "0", "--max-p99-ratio", "1") == 0


def test_digests_tell_answers_apart() -> None:
    base = digest({"a": [1.0, None], "b": [2.0]})
    assert base == digest(
        {"b": np.array([2.0], np.float32), "a": np.array([1.0, np.nan], np.float32)}
    )
    others: list[TaskScores] = [
        {"a": [1.0], "b": [2.0]},
        {"a": [1.0, 0.0], "b": [2.0]},
        {"a": [1.0, None], "c": [2.0]},
    ]
    assert base not in [digest(scores) for scores in others]
    assert digest({"": [1.0]}, [5]) != digest({"": [1.0]}, [6])


def test_no_answers_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(DataError, match=r": no answers$"):
        compare(tmp_path, tmp_path, SLO_S)
    (tmp_path / "answers.jsonl.gz").write_bytes(gzip.compress(b'{"number": "x"}\n'))
    with pytest.raises(DataError, match="line 1"):
        compare(tmp_path, tmp_path, SLO_S)


def _latencies(folder: Path) -> list[float]:
    lines = gzip.decompress((folder / "answers.jsonl.gz").read_bytes()).splitlines()
    rows = [msgspec.json.decode(line, type=AnswerLine) for line in lines]
    return [row.latency_ms for row in rows if not row.error]
