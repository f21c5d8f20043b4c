"""Each bench runs once in a tiny form: it checks before it times, and has all its lines."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import yaml

from benchmarks import (
    cascade,
    cold,
    delta,
    device,
    emulator,
    emulator_costs,
    features,
    fleet,
    fleet_log,
    fleet_ranks,
    generate,
    kernels,
    kernels_device,
    kernels_hstu,
    kernels_topk,
    long,
    long_int8,
    long_user,
    match,
    match_train,
    metrics,
    prepare,
    protocols,
    rank,
    rules,
    servers,
    shared_encoder,
    store,
    tables,
    wire,
)
from benchmarks.frame import Line
from benchmarks.servers import FIRST_ID, Traffic
from npu_gr.backend.calls import BiasTables, HstuCall
from npu_gr.backend.choose import choose
from npu_gr.backend.cpu.library import supported
from npu_gr.backend.reference import ReferenceBackend
from npu_gr.core.errors import ConfigError, DataError
from npu_gr.core.settings import to_table
from npu_gr.model.config import HSTUConfig
from npu_gr.model.delta import read_delta
from npu_gr.model.delta_log import DeltaLog
from npu_gr.model.weights import read_weights
from npu_gr.train.rank.options import TrainOptions
from tests.engine.kv_cache.invariants import check_dram
from tests.models import tiny_order
from tests.ops.ascend_emulator import Emulator
from tests.server.test_recommend_over_http import section
from tests.serving import make_config, write_checkpoint
from tests.train.synthetic import planted

CONFIG = Path(__file__).parents[2] / "configs" / "cpu.yaml"
ranker = rank.config
needs_kernels = pytest.mark.skipif(not supported(), reason="no kernels")
needs_emulator = pytest.mark.skipif(
    shutil.which("g++") is None, reason="no g++ here: the CPU emulator cannot be built"
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ranker of two narrow layers."""
    for module in (rank, features, metrics, long, long_int8):
        monkeypatch.setattr(module, "config", lambda *_, **__: ranker(num_layers=2, dim=32))


def checked(lines: list[Line]) -> list[Line]:
    for line in lines:
        assert line.ours > 0
        assert line.ratio == pytest.approx(line.baseline_value / line.ours)
        assert line.target is None or line.ok is not None
    return lines


def test_a_stream_of_deltas_leads_from_checkpoint_to_checkpoint(tmp_path: Path) -> None:
    shape = ranker(num_layers=1, dim=16)
    stream = delta.Stream(tmp_path, shape, changed=20, seed=0)
    for _ in range(2):
        rows = stream.popular()
        assert len(np.unique(rows)) == 20
        stream.next(rows)
    log = DeltaLog(tmp_path / "made")
    way = log.way(read_weights(stream.checkpoint).version)
    assert way[-1].manifest.result == read_weights(stream.newest).version
    made = [read_delta(link.path) for link in way]
    assert [(one.num_rows, [*one.changes]) for one in made] == [(20, ["item.weight"])] * 2
    bodies = stream.bodies(Traffic(history_tokens=50, num_users=2), 0)
    first = np.array(bodies[0]["history"]["items"]) - FIRST_ID
    assert np.median(first) < shape.num_items / 8  # popular ones


def test_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "WARM_BATCH", 500)
    found = [
        *tables.lines(rows=3000, hot_bytes=60_000, requests=4, folder=None, no_server=True, seed=0)
    ]
    checked(found)
    cases = [line.case for line in found]
    assert cases[:2] == ["open", "memory"]
    assert [case.rpartition(": ")[2] for case in cases[2:5]] == [
        "median",
        "P99",
        "distinct rows from disk a rank",
    ]
    assert found[1].ok
    assert all(line.ours > 0 for line in found)


def test_flops_by_hand() -> None:
    """One layer of width 8, 1 head of 4: candidates cost 5 projections and one pair a key."""
    shape = HSTUConfig(
        num_items=1,
        actions=("a",),
        tasks=("t",),
        dim=8,
        num_layers=1,
        num_heads=1,
        qk_dim=4,
        v_dim=4,
    )
    row, pair = 2 * 8 * 16 + 2 * 4 * 8, 2 * 8
    assert rank.flops(shape, 10, 3, cached=True) == 3 * row + 3 * 11 * pair
    assert rank.flops(shape, 10, 3, cached=False) == 3 * row + 3 * 11 * pair + 10 * 2 * 8 * 8


def test_rank(monkeypatch: pytest.MonkeyPatch, small: None) -> None:
    monkeypatch.setattr(rank, "LENGTHS", (64,))
    monkeypatch.setattr(rank, "CANDIDATES", (5,))
    (line,) = checked(list(rank.lines("cpu", "float32", 0, 0.0)))
    assert line.of_floor == pytest.approx(line.ratio / line.floor)  # type: ignore[operator]
    monkeypatch.setattr(rank, "TOLERANCE", {torch.float32: -1.0})
    with pytest.raises(AssertionError, match="drift"):
        list(rank.lines("cpu", "float32", 0, 0.0))


@needs_kernels
def test_long(monkeypatch: pytest.MonkeyPatch, small: None) -> None:
    window: Any = (100, 10, 1000, ("window",), None, 0, 0.0)
    found = checked(list(long.lines("cpu", "float32", (130, 300), *window)))
    assert [line.case.partition(",")[0] for line in found] == [
        *("cached rank", "cold rank", "append of one event", "prefill", "bytes a user"),
        "bytes a user",
    ]
    full: Any = (100, 10, 1000, ("full",), None, 0, 0.0)
    found = checked(list(long.lines("cpu", "float32", (130, 20_000), *full)))
    assert [line.case.partition(",")[0] for line in found] == ["cached rank", "prefill"]
    again = long_user.Prepared.rank
    monkeypatch.setattr(
        long_user.Prepared, "rank", lambda self, cached=True: again(self, cached) + bytes(cached)
    )
    with pytest.raises(AssertionError, match="130 events: another score"):
        list(long.lines("cpu", "float32", (130,), *window))


@needs_kernels
def test_int8_against_bfloat16(monkeypatch: pytest.MonkeyPatch, small: None) -> None:
    """A ranker of one epoch; scores that moved would be seen."""
    for name, value in {"AT": 130, "SHORT": 70}.items():
        monkeypatch.setattr(long_int8, name, value)
    found = list(long_int8.lines(choose("cpu"), 0.0, 0))
    assert found[0].ratio == found[1].ratio > 1.5
    isas = [isa for isa in supported() if isa != "generic"]
    assert [line.case for line in found[2:]] == [
        f"int8: cached rank at {num}, {isa}" for isa in isas for num in (130, 70)
    ]
    options = TrainOptions(refit=False, test_users=1, epochs=1, dim=16, num_layers=1, patience=0)
    served = long_int8.Served(choose("cpu"), planted(40, 60), options)

    def quality() -> dict[str, Line]:
        return {line.case.rpartition(",")[0]: line for line in long_int8.quality(served)}

    best = quality()["int8: best 10 by like, 40 users"]
    assert 0.8 < best.ours <= 1
    assert quality()["int8: AUC of like"].ok
    real = long_int8.Served.scored

    def worse(self: long_int8.Served, dtype: torch.dtype, pages: torch.dtype) -> Any:
        scored = real(self, dtype, pages)
        return scored if pages != torch.int8 else scored._replace(liking=-scored.liking)

    monkeypatch.setattr(long_int8.Served, "scored", worse)
    assert quality()["int8: AUC of like"].ok is False


def test_features(monkeypatch: pytest.MonkeyPatch, small: None) -> None:
    monkeypatch.setattr(features, "TOKENS", 32)
    monkeypatch.setattr(features, "CANDIDATES", 20)
    read, *groups = features.lines("cpu", 0, 0.0)
    assert read.case == "read 20 x 40 cross features, raw msgpack"
    assert [line.case.split()[-1] for line in groups] == ["user", "event", "request", "40", "all"]
    assert [line.ok is None for line in groups] == [True, True, True, False, True]


def test_metrics(monkeypatch: pytest.MonkeyPatch, small: None) -> None:
    monkeypatch.setattr(metrics, "SHAPES", ((1, 16, 4),))
    counts, timed = checked(list(metrics.lines(0, 0.0)))
    assert (counts.target, timed.ok) == (100, None)
    monkeypatch.setattr("npu_gr.metrics.registry.requests.RequestMetrics.done", lambda *_: None)
    with pytest.raises(AssertionError):  # a wrong count is not timed
        next(iter(metrics.lines(0, 0.0)))


def test_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "LENGTHS", (8, 64))
    found = checked(list(wire.lines(0, 0.0)))
    forms = ("JSON raw", "msgpack raw", "infer raw", "infer gRPC", "client")
    assert [line.case for line in found] == [
        f"L={length} M=500 {form}" for length in (8, 64) for form in forms
    ]
    made = wire.bodies

    def wrong(num_tokens: int, seed: int) -> Any:
        return made(num_tokens, seed) | {"msgpack raw": made(num_tokens, seed + 1)["msgpack raw"]}

    monkeypatch.setattr(wire, "bodies", wrong)
    with pytest.raises(AssertionError, match="msgpack raw"):
        list(wire.lines(0, 0.0))


def test_protocols() -> None:
    found = checked(list(protocols.lines(0, CONFIG, 0.0)))
    ways = ("/v1, JSON", "infer over HTTP, raw", "infer over gRPC, raw")
    assert [line.case.partition("M=100 ")[2].rpartition(":")[0] for line in found[::2]] == list(
        ways
    )


def test_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(match, "NEAR_SEARCHES", 210)
    found = list(match.lines(2000, 0, 0.0, match.PARTS))
    exact = checked([line for line in found if line.case.startswith("I=2000")])
    assert len(exact) == len(match.BATCHES)
    near = [line for line in found if line.case.startswith("ivf I=2000")]
    assert [line.unit for line in near] == ["of the best", "ms", "ms"]
    assert near[0].ok
    assert all("torch mm + topk, numpy" in line.baseline for line in exact)
    monkeypatch.setattr(
        match, "torch_top_k", lambda queries, items, k: torch.mm(-queries, items.T).topk(k)
    )
    with pytest.raises(AssertionError, match="torch mm"):
        list(match.lines(2000, 0, 0.0, ["exact"]))


def test_the_baselines_sort_what_they_find() -> None:
    queries, items = np.eye(3, 4, dtype=np.float32), np.diag([1.0, 2, 3, 4]).astype(np.float32)
    scores, rows = match.numpy_top_k(queries, items, 2)
    assert scores[2].tolist() == [3, 0]
    assert rows[1, 0] == 1
    values, _ = match.torch_top_k(torch.from_numpy(queries), torch.from_numpy(items), 2)
    assert np.array_equal(values.numpy(), scores)


def test_match_train() -> None:
    minutes, memory = match_train.lines(4000, 2, 0)
    assert (minutes.unit, memory.unit) == ("CPU min", "GB")
    assert all(f"{stage} 0." in minutes.case for stage in ("source", "target", "inter"))
    assert memory.ours > 0.05


def test_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FEW": 10, "MANY": 100, "TURNS": 50}.items():
        monkeypatch.setattr(store, name, value)
    [line] = checked(list(store.lines(0)))
    assert "100 entries" in line.case
    tier = store.FullTier(10, 0)
    tier.turns()
    check_dram(tier.store)
    assert len(tier.store) == 10


@pytest.fixture
def few_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = msgspec.structs.replace(
        generate.decoder_config(),
        vocab_size=32,
        dim=16,
        num_layers=2,
        head_dim=8,
        mlp_dim=32,
        max_tokens=64,
    )
    t5 = msgspec.structs.replace(
        generate.t5_config(),
        vocab_size=32,
        dim=16,
        head_dim=4,
        mlp_dim=32,
        num_encoder_layers=2,
        num_decoder_layers=2,
    )
    for name, value in {
        "NUM_CODES": 32, "PROMPT_TOKENS": 20, "NUM_ITEMS": 400, "WIDTHS": (3, 8),
        "decoder_config": lambda: decoder, "t5_config": lambda: t5,
    }.items():  # fmt: skip
        monkeypatch.setattr(generate, name, value)


def test_generate(few_codes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = checked(list(generate.lines("cpu", 0, 0.0, "decoder")))
    assert [line.case.rpartition(" vs ")[2] for line in found] == ["shared prefix", "no cache"] * 2
    right = generate.SharedPrefix.search
    monkeypatch.setattr(generate.SharedPrefix, "search", lambda *given: right(*given) - 0.01)
    with pytest.raises(AssertionError, match="width=3: sdpa differs"):
        list(generate.lines("cpu", 0, 0.0, "decoder"))


def test_generate_by_a_t5(few_codes: None) -> None:
    found = checked(list(generate.lines("cpu", 0, 0.0, "t5")))
    assert [line.baseline for line in found] == ["no cache"] * 2


@needs_kernels
def test_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WIDTHS": (16,), "COLD_BYTES": 1, "CATALOGUES": (1000, 3000)}.items():
        monkeypatch.setattr(kernels_topk, name, value)
    monkeypatch.setattr("benchmarks.roofs._READ_FLOATS", 1 << 12)
    found = list(kernels.lines(supported()[0], 0, 0.0, ("roofs", "topk", "pass")))
    assert sum(line.case.startswith("roof:") for line in found) >= 2
    assert sum("items=3000" in line.case for line in found) == 2
    passes = [line for line in found if line.case.startswith("pass:")]
    for whole, locked in zip(passes[::2], passes[1::2], strict=True):
        # what holds the lock is a part of the pass
        assert 0 < locked.ours < whole.ours == locked.baseline_value


@needs_kernels
def test_kernels_of_a_ranker(monkeypatch: pytest.MonkeyPatch, small: None) -> None:
    monkeypatch.setattr(kernels_hstu, "LENGTHS", (70,))
    monkeypatch.setattr(kernels_hstu, "CANDIDATES", (5,))
    found = checked(list(kernels.lines("", 0, 0.0, ("hstu",))))
    assert len(found) == 2 * (3 + 1)  # dtypes x (pack_kv, prefill, rank, request)
    assert all(line.of_floor for line in found)


def test_the_naive_path_is_the_reference_without_bias() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 5, 2, 8).unbind(0)
    past = torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    bias, times = BiasTables(torch.zeros(2, 2), torch.zeros(2, 64)), torch.arange(9)
    call = HstuCall(q, k, v, [past], times, bias, 0.3, query_time=9)
    naive = kernels_hstu.NaiveCachedBackend().hstu_targets(call)
    torch.testing.assert_close(naive, ReferenceBackend().hstu_targets(call))


def test_kernels_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "COPY_BYTES": 1 << 12, "WIDTHS": (3,), "CODES": 20, "LENGTHS": (9,), "CANDIDATES": 4,
        "PROMPT": 9, "BEAMS": 3,
    }.items():  # fmt: skip
        monkeypatch.setattr(kernels_device, name, value)
    found = checked(list(kernels_device.lines("cpu", 0, 0.0)))
    assert [line.case.split()[0] for line in found] == [
        "beam_topk",
        "hstu_causal",
        "hstu_targets",
        "beam_attention",
    ]
    monkeypatch.setattr(kernels_device, "TOLERANCE", -1.0)
    with pytest.raises(AssertionError, match="beam_topk"):
        list(kernels_device.lines("cpu", 0, 0.0))


def test_plain_torch_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dense model has the kernels' scores; a compiler takes a minute, so none runs here."""
    compiled: list[object] = []

    def compile_(dense: cold.Forward) -> cold.Forward:
        compiled.append(dense)
        return dense

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(
        device, "TRAFFIC", servers.Traffic(history_tokens=20, num_candidates=5, num_users=2)
    )
    found = checked(list(device.lines("cpu", "compiled", 0, 0.0)))
    assert [line.baseline for line in found] == ["plain torch, eager", "plain torch, torch.compile"]
    assert len(compiled) == 1
    monkeypatch.setattr(device, "TOLERANCE", -1.0)
    with pytest.raises(AssertionError, match="plain torch, eager differs"):
        list(device.lines("cpu", "compiled", 0, 0.0))


def test_without_kernels_it_says_so() -> None:
    with pytest.raises(ConfigError, match="bench kernels"):
        list(kernels.lines("mmx", 0, 0.0))


@needs_emulator
def test_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LENGTHS": (1024,), "KS": (32,), "KEPT": (1.0, 0.05)}.items():
        monkeypatch.setattr(emulator, name, value)
    for part in ("hstu_model", "hstu_sizes", "generate_model"):
        monkeypatch.setattr(f"benchmarks.{part}.lines", lambda seed: iter(()))
    monkeypatch.setattr("benchmarks.hstu_model.chains", lambda seed: iter(()))
    found = checked(list(emulator.lines(0)))
    assert [(line.case, line.baseline, line.unit) for line in found] == [
        (f"n=1024 k=32 kept={kept}", name, "us (model)")
        for kept in ("100%", "5%")
        for name in ("full sort", "top-k, no filter")
    ]
    real = Emulator.masked_topk
    monkeypatch.setattr(
        Emulator,
        "masked_topk",
        lambda self, logits, *rest, **more: real(self, -logits, *rest, **more),
    )
    with pytest.raises(AssertionError, match="masked_topk is wrong"):
        next(emulator.lines(0))


def test_the_model_gives_the_published_time() -> None:
    """Of pto-isa's sample: 3.24 us for a row of 1024 on one core of an A3.

    The model is of that size, no better.
    """
    assert emulator_costs.modelled_us(emulator.full_sort(1024, 1000)) == pytest.approx(
        3.24, rel=0.25
    )


def test_cascade() -> None:
    found = checked(list(cascade.lines("cpu", (64,), 2, 3, 0)))
    assert [line.baseline for line in found] == ["no relay"] * 4
    assert [line.target is None for line in found] == [False] * 3 + [True]


def test_shared_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_encoder, "HALVINGS", 1)
    monkeypatch.setattr(shared_encoder, "LEAST_GOAL_S", 0.5)
    write_checkpoint(tmp_path / "checkpoint", tiny_order(), retrieval=True)

    def written(**sections: object) -> Path:
        (tmp_path / "serve.yaml").write_text(
            yaml.safe_dump(to_table(make_config(tmp_path, **sections)))
        )
        return tmp_path / "serve.yaml"

    path = written(**section(tmp_path))
    found = list(shared_encoder.lines(path, ("recommend.max_candidates=50",), (40,), 0.05, 5, 0))
    assert [line.baseline for line in found] == ["a rank of as many", "two models", "two models"]
    assert all("L=40 M=50" in line.case and line.ours > 0 for line in found)
    assert found[0].target == pytest.approx(1 / 1.5)
    with pytest.raises(ConfigError, match="needs recommend"):
        list(shared_encoder.lines(written(), (), (40,), 0.05, 5, 0))


def test_rules(tmp_path: Path) -> None:
    recommend = section(tmp_path) | {"history_store": {"kind": "none"}}
    ruled: dict[str, Any] = {"explore": {"temperature": 1.0}}
    path = tmp_path / "serve.yaml"
    for given in (None, ruled):
        recommend["recommend"]["rules"] = given
        path.write_text(yaml.safe_dump(to_table(make_config(tmp_path, **recommend))))
        if given is None:
            with pytest.raises(ConfigError, match="needs rules to measure"):
                list(rules.lines(path, (), 2, 3, 0))
    write_checkpoint(tmp_path / "checkpoint")
    [line] = list(rules.lines(path, (), 2, 3, 0))
    assert (line.baseline, line.unit) == ("without rules", "ms")
    assert line.low is not None
    assert line.high is not None
    assert line.ok == (line.ours - line.baseline_value <= rules.TARGET_MS)
    assert line.low <= line.ours - line.baseline_value <= line.high


def test_a_fleet_is_placed_prepared_and_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "SIZES", (3, 20))
    monkeypatch.setattr(fleet_ranks, "ROUNDS", 1)
    for name in ("train generate", "train match"):
        monkeypatch.delitem(fleet_ranks.TRAININGS, name)
    monkeypatch.delitem(fleet_log.TRAININGS, "train rank")
    found = list(
        fleet.lines(
            num_users=2000,
            num_rows=2000,
            num_parts=2,
            num_events=2000,
            num_steps=1,
            seconds=0.2,
            parts=fleet.PARTS,
            seed=0,
        )
    )
    assert len(found) == 15
    # the difference between two small logs may be below 0
    assert all(line.ours > 0 for line in found if line.unit != "bytes an event")
    joins = [line for line in found if "joins" in line.case]
    assert all(0.5 < line.ratio < 2 for line in joins)
    monkeypatch.setattr(fleet, "merge", lambda parts, out: shutil.copytree(parts[0], out))
    with pytest.raises(DataError, match="the merged parts are not the one run"):
        list(fleet.lines(9, 500, 2, 9, 1, 0.1, ("prepare",), 0))


def test_prepare_finds_what_sql_finds_before_it_prints_a_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = Path(__file__).parents[2]
    found = list(
        prepare.lines(num_rows=2000, num_runs=1, before=root, parts=("gz", "parquet"), seed=0)
    )
    assert [(line.unit, line.baseline) for line in found[:7]] == [
        *(
            (unit, arm)
            for unit in ("rows/s", "rows/CPU s")
            for arm in ("DuckDB, 14 lines of SQL", "before")
        ),
        *(("MB at its peak", arm) for arm in ("the limit", "DuckDB, 14 lines of SQL", "before")),
    ]
    assert len(found) == 14
    for line in found:
        better = line.ours / line.baseline_value
        assert line.ratio == pytest.approx(better if line.unit.startswith("rows") else 1 / better)
        assert line.target is None or line.ok is not None
    monkeypatch.setattr(
        prepare, "SQL", prepare.SQL.replace("SELECT count(*)", "SELECT 1 + count(*)")
    )
    with pytest.raises(DataError, match="not the same events, users and items"):
        list(prepare.lines(num_rows=100, num_runs=1, before=None, parts=("csv",), seed=0))
    monkeypatch.setattr(prepare, "SQL", "raise ValueError('no such thing')")
    with pytest.raises(DataError, match=r"log\.csv: ValueError: no such thing"):
        list(prepare.lines(num_rows=100, num_runs=1, before=None, parts=("csv",), seed=0))
