"""The plan against real instances: the hits that it predicts, at sizes of both tiers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from npu_gr.cli.main import main
from npu_gr.core.history import Events
from npu_gr.core.request import Fetched, Outcome
from npu_gr.core.settings import to_table
from npu_gr.engine.cost import CostModel
from npu_gr.engine.kv_cache.pages import KVLayout
from npu_gr.relay.config import Calibration, calibration_path
from npu_gr.replay.files import write
from npu_gr.replay.log import LoggedHistory, QueryRecord
from npu_gr.simulate.config import Lognormal, UsersConfig
from npu_gr.simulate.config import write as write_settings
from npu_gr.simulate.memory import Rules, TierSizes, Visit, replayed, visits_of
from npu_gr.simulate.users import TrafficRequest, signals_and_ranks, visits
from tests.serving import columns, make_config, serving, write_checkpoint

USERS = UsersConfig(
    num_users=60, zipf=0.6, history_tokens=Lognormal(median=200, sigma=0.6), growth_tokens=20
)
MOST, STEP = 512, 128
COST = CostModel(1e-3, 1e-5, 0.0, 1e-6, 0.0)
LAYOUT = KVLayout(num_layers=1, num_heads=1, qk_dim=1, v_dim=1, page_tokens=64)
PAGE = LAYOUT.page_bytes
RULES = Rules(LAYOUT, 10.0, float("inf"), 1, COST, 1e9)
HIT, RELOADED, MISS = Outcome.HBM_HIT.value, Outcome.DRAM_HIT.value, Outcome.MISS_FULL.value


def traffic(*, signals: bool) -> list[TrafficRequest]:
    found = signals_and_ranks(visits(USERS, 100.0, 2.6, 3), 8)
    return [request for request in found if signals or request.kind == "rank"]


def body(request: TrafficRequest) -> dict[str, object]:
    random = np.random.default_rng(int(request.user[1:]))  # a longer history continues a shorter
    rows = random.integers(0, 300, 4096)[: request.num_tokens]
    history = Events.make(rows, rows % 3, 1_600_000_000 + np.arange(len(rows)))
    return {"user_id": request.user, "history": columns(history)}


@pytest.mark.parametrize(("signals", "sizes"), [(False, (20, 90)), (True, (20,))])
async def test_real_instances_find_what_is_predicted(
    tmp_path: Path, signals: bool, sizes: tuple[int, ...]
) -> None:
    """TierSizes of both tiers; the shares of each source differ by .02 at most."""
    found = traffic(signals=signals)
    write_checkpoint(tmp_path / "checkpoint", max_history_tokens=MOST)
    shares = []
    page_bytes = 64 * 3 * 2 * (8 + 16) * 4
    for pages in sizes:
        kv_cache = {"hbm_bytes": pages * page_bytes, "dram_bytes": 2 * pages * page_bytes}
        real = Counter[str]()
        async with serving(
            tmp_path,
            watched=False,
            kv_cache=kv_cache,
            service={"cut_step_tokens": STEP, "selfcheck_ratio": 0.0},
            history_store={"kind": "none"},
        ) as (client, service):
            ranking = service.versions.ranker()
            relay = ranking.relay
            assert relay.tiers.pool.arena.layout.page_bytes == page_bytes
            source = {"already_resident": HIT, "extend": HIT, "reload": RELOADED}
            signalled: dict[str, str] = {}
            for request in found:
                about = body(request)
                if request.kind == "signal":
                    async with client.post("/v1/signal", json=about) as answer:
                        verdict = (await answer.json())["verdict"]
                    signalled.setdefault(request.user, source.get(verdict, MISS))
                else:
                    asked = {**about, "candidates": [1000, 1001], "timestamp": 1_700_000_000}
                    async with client.post("/v1/rank", json=asked) as answer:
                        outcome = (await answer.json())["outcome"]
                    real[signalled.pop(request.user, outcome)] += 1
                await relay.settled()
            rules = Rules(
                relay.tiers.pool.arena.layout,
                relay.t_life_s,
                600.0,
                4,
                ranking.engine.cost,
                ranking.engine.copy_bytes_per_s,
            )
        tiers = TierSizes(kv_cache["hbm_bytes"], kv_cache["dram_bytes"])
        predicted = replayed(visits_of(found, MOST, STEP), tiers, rules, 0.0).sources
        total = real.total()
        assert predicted.total() == total > 150
        for name in (HIT, RELOADED, MISS):
            assert abs(predicted[name] - real[name]) / total < 0.02, (pages, predicted, real)
        shares.append(real[MISS] / total)
    assert shares[-1] < shares[0] - 0.1 or len(sizes) == 1  # the sizes matter


def visit(at: float, user: str, num_tokens: int = 64, *, signal: bool = False) -> Visit:
    return Visit(at, signal, user, 0, num_tokens, 8)


def test_reuse_is_by_bytes_between_two_visits() -> None:
    """Users in turn: each comes back after all others, so memory for one less finds nothing."""
    turns = [visit(float(n), f"u{n % 10}") for n in range(100)]
    for pages, ratio in ((10, 0.9), (9, 0.0)):
        assert replayed(turns, TierSizes(pages * PAGE), RULES, 0.0).ratio == pytest.approx(ratio)
    for dram, ratio in ((10, 0.9), (9, 0.0)):
        found = replayed(turns, TierSizes(PAGE, dram * PAGE), RULES, 0.0)
        assert found.sources[RELOADED] == pytest.approx(100 * ratio)


def test_a_copy_expires_and_a_pool_has_it_for_a_signal() -> None:
    rules = RULES._replace(ttl_s=10.0)
    again = [visit(0.0, "a"), visit(1.0, "b"), visit(9.0, "a")]
    late = [visit(0.0, "a"), visit(1.0, "b"), visit(11.0, "a")]
    assert replayed(again, TierSizes(PAGE, 4 * PAGE), rules, 2.0).sources == {RELOADED: 1}
    assert replayed(late, TierSizes(PAGE, 4 * PAGE), rules, 2.0).sources == {MISS: 1}
    asked = [*again[:2], visit(2.0, "c"), visit(8.9, "a", signal=True), again[2]]
    small = TierSizes(2 * PAGE, PAGE, 4 * PAGE)
    assert replayed(asked, small, rules, 8.0).sources == {Fetched.HIT.value: 1}
    assert replayed(asked, small._replace(pool_bytes=0), rules, 8.0).sources == {MISS: 1}


def test_what_waits_for_its_rank_is_not_evicted() -> None:
    waiting = [visit(0.0, "a", signal=True), visit(0.1, "b"), visit(1.0, "a")]
    found = replayed(waiting, TierSizes(PAGE), RULES, 0.5)
    assert (found.sources, found.num_prefills) == ({MISS: 1}, 0)
    assert found.device_s == pytest.approx(COST.pass_s(0, 64, 8))  # it reads what the signal made
    assert replayed(waiting, TierSizes(PAGE), RULES, 0.0).num_prefills == 1


@pytest.fixture
def configured(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "checkpoint", max_history_tokens=MOST)
    path = tmp_path / "serve.yaml"
    config = make_config(tmp_path, history_store={"kind": "none"}, kv_cache={"page_tokens": 32})
    path.write_text(yaml.safe_dump(to_table(config), sort_keys=False))
    measured = Calibration(
        version="v",
        device="cpu",
        cost=COST,
        copy_bytes_per_s=1e9,
        kv_token_bytes=3 * 2 * (8 + 16) * 4,
        kv_p99_tokens=MOST,
        t_life_s=0.2,
        q_m_per_s=100.0,
    )
    write_settings(measured, calibration_path(path))
    return path


def invoke(*words: str) -> str:
    done = CliRunner().invoke(main, ["plan", *words])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_log_and_a_model_of_its_users_are_planned(configured: Path, tmp_path: Path) -> None:
    records = [
        QueryRecord(
            ts=one.due_at,
            kind="rank",
            user_id=one.user,
            candidates=[1] * 8,
            history=LoggedHistory.of(Events.make(*[[0] * one.num_tokens] * 3)),
        )
        for one in traffic(signals=False)
    ]
    log = tmp_path / "log.jsonl"
    write(log, records)
    words = ["--config", str(configured), "--log", str(log)]
    assert "kv_cache:" in invoke(*words)
    found = json.loads(invoke(*words, "--json"))
    assert found["has_signals"]
    assert found["rate_per_s"] == pytest.approx(100, rel=0.15)
    ratios = [ratio["ratio"] for ratio in found["curve"]]
    assert ratios == sorted(ratios)
    assert found["kv_cache"]["hbm_bytes"] == found["hbm_bytes"] > 0
    assert sum(found["sources"].values()) == pytest.approx(1)
    assert 1 - found["sources"].get(MISS, 0) >= 0.9 * found["most_ratio"]
    # ten times the rate of the same users takes ten times the devices
    faster = json.loads(invoke(*words, "--json", "--qps", str(100 * found["rate_per_s"])))
    assert faster["instances"] >= 50 * found["instances"]
    # a tenth of the users in the log: the fleet takes ten times as much
    sampled = json.loads(invoke(*words, "--json", "--sample-ratio", "0.1"))
    mib = 1 << 20  # to which sizes are rounded up
    for one, other in zip(found["curve"], sampled["curve"], strict=True):
        assert other["num_bytes"] + mib >= 10 * (one["num_bytes"] - mib)
    write_settings(USERS, tmp_path / "users.yaml")
    words = ["--config", str(configured), "--users", str(tmp_path / "users.yaml")]
    of_model = json.loads(invoke(*words, "--qps", "100", "--duration-s", "2.6", "--json"))
    assert of_model["most_ratio"] == pytest.approx(found["most_ratio"], abs=0.05)


def test_what_is_missing_is_said(configured: Path) -> None:
    words = ["plan", "--config", str(configured)]
    done = CliRunner().invoke(main, words)
    assert "give --log, or --users with --qps" in done.output
    other = CliRunner().invoke(main, [*words, "--set", "kv_cache.dtype=int8"])
    assert "calibration: a token takes 576 bytes there, here" in other.output
    calibration_path(configured).unlink()
    assert "run npu-gr calibrate" in CliRunner().invoke(main, words).output
