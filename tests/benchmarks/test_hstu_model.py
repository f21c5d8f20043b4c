"""bench emulator's second part: the kernels run, and the model follows from what they did."""

from __future__ import annotations

import shutil
from itertools import islice

import pytest

from benchmarks import generate_model, hstu_model, hstu_sizes
from npu_gr.backend.npu import hstu_slots
from tests.ops.ascend_emulator import Emulator

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="no g++ here: the CPU emulator cannot be built"
)


def test_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hstu_model, "CHUNK_TOKENS", 64)
    found = list(hstu_model.lines(seed=0, history=128, suffix=5, candidates=33))
    assert [line.case for line in found] == [
        f"{name}, 8 layers, {column}"
        for name in ("rank 33 of 133 tokens", "prefill 128 in chunks of 64")
        for column in ("autofuse", "calibrated")
    ]
    for line in found:
        assert line.unit == "ms (model)"
        assert line.ok == (line.ours <= line.baseline_value)
        assert 0 < line.ours < line.baseline_value, "small passes are cheap"
    rank, prefill = found[0], found[2]
    assert "0.4 to 0.8 ms" in rank.baseline, "10 launches of 8 layers, at 5 and at 10 us"
    assert "0.7 to 1.5 ms" in prefill.baseline, "two chunks, whose last layer is four launches"


def test_chains_overlap_and_are_no_faster_than_their_slowest_unit() -> None:
    """One chain is the layer as it is; two take at least the vector cores' time of both."""
    emulator = Emulator()
    whole = hstu_model.counted(emulator, 2048, 0, 512, seed=0)
    half = hstu_model.counted(emulator, 2048, 0, 512, seed=0, heads=2)
    for column in hstu_model.COLUMNS:
        assert hstu_model.chained_us(whole, whole, 1, column) == pytest.approx(whole.us(column))
        two = hstu_model.chained_us(whole, half, 2, column)
        assert 2 * hstu_model.kernel_us(half.scores, column) < two < whole.us(column)
    found = list(hstu_model.chains(0, lengths=(300,), candidates=64))
    assert [line.case.split()[6] for line in found] == ["2", "2", "4", "4"]


def test_what_moves_is_what_must() -> None:
    """Of a rank: scores in and out once, keys and values out of pages and into the workspace."""
    layer = hstu_model.counted(Emulator(), 600, 0, 40, seed=0, cores=4)
    scores, rows = (
        {k: sum(core[k] for core in cores) for k in cores[0]}
        for cores in (layer.scores, layer.rows)
    )
    alive = 640 // 256 * 256 + 256  # of the last block of keys the queries see some
    assert scores["mte3_bytes"] == 4 * 40 * layer.key_slots * 2
    scores_in = scores["mte2_bytes"] - 4 * 40 * alive * 2
    assert 0 <= scores_in < 100_000, "times, tables and windows are little in comparison"
    cells = layer.key_slots * 4 * 64 * 2 * 2
    assert rows["mte3_bytes"] == cells + 2 * 40 * 4 * 64 * 2, "k and v with their zeros, q and u"


def test_a_rank_meets_its_target() -> None:
    """By both columns; `python -m benchmarks emulator` prints the prefill's too."""
    for line in islice(hstu_model.lines(seed=0), 2):
        assert line.ok, line


@pytest.mark.parametrize(("cached", "new", "candidates"), [(2048, 0, 512), (2048, 512, 0)])
def test_cores_have_equal_shares(cached: int, new: int, candidates: int) -> None:
    """No core of hstu_scores takes much longer than the mean, by vector work or by bytes."""
    cores = hstu_model.counted(Emulator(), cached, new, candidates, seed=0, cores=8).scores
    for what in ("exp_elements", "mte2_bytes", "mte3_bytes"):
        share = [core[what] for core in cores]
        assert max(share) < 1.25 * sum(share) / len(share), what
    for column in hstu_model.COLUMNS:
        took = [hstu_model.core_us(core, column, 8) for core in cores]
        assert max(took) < 1.2 * sum(took) / len(took)
    if candidates:
        loaded = sum(core["mte2_long_bytes"] for core in cores)
        assert loaded > 0.9 * sum(core["mte2_bytes"] for core in cores), (
            "candidates come in long loads"
        )


def test_sizes_have_roofs_and_a_trace_finds_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests take less than twice the time of one; nothing is faster than its roof."""
    for name, value in {
        "LENGTHS": (300,), "REQUESTS": (1, 2), "CANDIDATES": 33, "PASSES": 50,
        "CHUNK_TOKENS": 150,
    }.items():  # fmt: skip
        monkeypatch.setattr(hstu_sizes, name, value)
    monkeypatch.setattr(hstu_slots, "GRAPH_ROWS", (64, 1024))
    monkeypatch.setattr(hstu_slots, "LEAST_GRAPH_KEYS", 512)
    found = list(hstu_sizes.lines(0))
    one, _, two, *_ = found
    assert one.case == "rank 33 of 300 tokens, 1 at once, autofuse"
    assert one.ours < two.ours < 2 * one.ours
    timed = [line for line in found if line.unit == "ms (model)"]
    assert len(timed) == 2 * (2 + 1)
    assert all(0 < line.ratio < 1 for line in timed)
    traces = found[len(timed) :]
    assert [line.ours for line in traces] == [100.0] * len(hstu_sizes.TRACES)


def test_a_generate_is_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BEAMS": (8, 16), "CODES": 256, "PROMPT": 64}.items():
        monkeypatch.setattr(generate_model, name, value)
    prefill, narrow, _, wide, whole = generate_model.lines(0)
    assert all(0 < line.ratio < 1 for line in (prefill, narrow, wide, whole))
    assert narrow.ours < wide.ours
    assert whole.ours > prefill.ours + 2 * wide.ours
