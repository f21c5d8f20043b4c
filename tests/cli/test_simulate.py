"""npu-gr simulate, as a user runs it."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from npu_gr.cli.main import main
from npu_gr.core.errors import ConfigError, DataError
from npu_gr.core.history import Events
from npu_gr.core.settings import load
from npu_gr.engine.cost import CostModel
from npu_gr.relay.config import Calibration
from npu_gr.replay.files import write
from npu_gr.replay.log import LoggedHistory, QueryRecord
from npu_gr.simulate.config import DeviceProfile, SimulateConfig, UsersConfig, calibrated
from npu_gr.simulate.config import write as write_settings
from npu_gr.simulate.fit import MeasuredRank, fit_device

EXAMPLE = Path(__file__).parent.parent.parent / "configs" / "simulate.yaml"
SHORT = [
    "--set",
    "duration_s=4.0",
    "--set",
    "warmup_s=1.0",
    "--set",
    "qps=200.0",
    "--set",
    "instances=2",
]


def invoke(*words: str) -> str:
    done = CliRunner().invoke(main, ["simulate", *words])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_example_is_played_and_leaves_its_report(tmp_path: Path) -> None:
    table = invoke("--config", str(EXAMPLE), *SHORT, "--out", str(tmp_path / "out"))
    assert "within SLO" in table
    assert "not a measurement" in table
    found = json.loads((tmp_path / "out" / "simulation.json").read_text())
    (one,) = found["runs"]
    assert one["ranks"] == sum(one["outcomes"].values())
    assert 0.5 < one["hit_ratio"]["any"] <= 1.0


def test_a_calibration_takes_the_place_of_the_configs_device(tmp_path: Path) -> None:
    path = tmp_path / "c.calibration.yaml"
    measured = Calibration(
        version="v",
        device="cpu",
        cost=CostModel(0.03, 0.0, 0.0, 0.0, 0.0),
        copy_bytes_per_s=1e9,
        kv_token_bytes=512,
        kv_p99_tokens=900,
        t_life_s=2.5,
        q_m_per_s=7.5,
    )
    write_settings(measured, path)
    config = load(EXAMPLE, SimulateConfig)
    after = calibrated(config, path)
    assert isinstance(config.device, DeviceProfile)
    assert isinstance(after.device, DeviceProfile)
    assert (after.calibration, after.device.cost) == (measured, measured.cost)
    assert (after.device.copy_bytes_per_s, after.device.kv_token_bytes) == (1e9, 512)
    assert after.device.rank_host_s == config.device.rank_host_s
    quick, slow = (
        json.loads(invoke("--config", str(EXAMPLE), *SHORT, "--json", *words))["runs"][0][
            "latency_ms"
        ]["P50"]
        for words in ([], ["--calibration", str(path)])
    )
    assert slow > 30 > quick
    path.write_text("q_m_per_s: 7.5\n")
    with pytest.raises(ConfigError, match="version"):
        calibrated(config, path)


def test_the_capacity_is_searched(tmp_path: Path) -> None:
    words = [
        "--config",
        str(EXAMPLE),
        *SHORT,
        "--set",
        "sampled_instances=1",
        "--set",
        "qps=400.0",
        "--capacity",
    ]
    invoke(*words, "--out", str(tmp_path))
    found = json.loads((tmp_path / "simulation.json").read_text())
    needed = found["capacity"]["instances"]
    by_number = {run["instances"]: run["attainment_ratio"] for run in found["runs"]}
    assert by_number[needed] >= 0.99
    assert needed >= found["capacity"]["device_time_needs"]


def test_a_log_is_fitted_and_simulated(tmp_path: Path) -> None:
    source = np.random.default_rng(0)
    records = []
    for number in range(400):
        user = int(source.integers(40))
        history = Events.make(*[[0] * (100 + user)] * 3)
        records.append(
            QueryRecord(
                ts=number / 50,
                kind="rank",
                user_id=str(user),
                candidates=[1] * 30,
                history=LoggedHistory.of(history),
            )
        )
    log = tmp_path / "log.jsonl.gz"
    write(log, records)
    invoke("fit-users", str(log), "--num-users", "1000", "--out", str(tmp_path / "users.yaml"))
    users = load(tmp_path / "users.yaml", UsersConfig)
    assert (users.num_users, users.candidates, users.growth_tokens) == (1000, 30, 0)
    assert users.return_ratio == pytest.approx(0.9, abs=0.02)  # 360 of 400
    words = [*SHORT, "--set", "qps=50.0", "--json"]
    of_log = json.loads(invoke("--config", str(EXAMPLE), *words, "--log", str(log)))
    of_users = json.loads(
        invoke("--config", str(EXAMPLE), *words, "--set", f"users={tmp_path / 'users.yaml'}")
    )
    for found in (of_log, of_users):
        assert found["runs"][0]["hit_ratio"]["any"] > 0.9


def test_without_users_and_log_it_says_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "bare.yaml"
    path.write_text("device: {a0_s: 0.001, a1_s: 1.0e-6, kv_token_bytes: 64}\n")
    done = CliRunner().invoke(main, ["simulate", "--config", str(path)])
    assert done.exit_code == 2
    assert "users: is required" in done.output


def test_the_example_names_every_key_of_its_own() -> None:
    assert load(EXAMPLE, SimulateConfig).instances == 16
    own = {"scheduler", "relay", "brownout"}.symmetric_difference(SimulateConfig.__struct_fields__)
    keys = {*own, *DeviceProfile.__struct_fields__, *UsersConfig.__struct_fields__}
    assert [key for key in sorted(keys) if f"{key}:" not in EXAMPLE.read_text()] == []


def _measured(cost: CostModel, noise: float) -> list[MeasuredRank]:
    source = np.random.default_rng(0)
    ranks = []
    for _ in range(400):
        n, c = int(source.integers(100, 4000)), int(source.integers(10, 400))
        cached = int(source.integers(0, 2)) * int(n * 0.9)
        device_s = cost.pass_s(n - cached, cached, c) * float(
            np.exp(noise * source.standard_normal())
        )
        ranks.append(
            MeasuredRank(
                new_tokens=n - cached,
                cached_tokens=cached,
                num_candidates=c,
                device_s=device_s,
                waited_s=0.004,
                total_s=device_s + 0.004 + 0.0015,
                outcome="hbm_hit" if cached else "miss_full",
            )
        )
    return ranks


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_device_is_found_again_in_its_answers(noise: float) -> None:
    cost = CostModel(0.002, 3e-6, 1e-9, 5e-6, 2e-9)
    about = {"kv_token_bytes": 512, "copy_bytes_per_s": 1e9, "max_history_tokens": 4096}
    found: DeviceProfile = fit_device(_measured(cost, noise), [0.001, 0.002, 0.003], **about)  # type: ignore[arg-type]
    for shape in ((2000, 0, 100), (200, 1800, 100), (512, 512, 0)):
        assert found.cost.pass_s(*shape) == pytest.approx(cost.pass_s(*shape), rel=0.08)
    assert found.rank_host_s == pytest.approx([0.0015] * 200, rel=1e-3)
    assert found.signal_host_s == 0.002
    assert len(found.late) == 8
    for late in found.late:
        assert float(np.std(late.ratios)) == pytest.approx(noise, rel=0.4, abs=1e-6)
    with pytest.raises(DataError, match="at least 50"):
        fit_device(_measured(cost, noise)[:49], [], **about)  # type: ignore[arg-type]
