"""A calibration is stored next to the configuration, and used only for its device and version."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from npu_gr.cli.main import main
from npu_gr.core.errors import ConfigError, DataError
from npu_gr.core.history import Events
from npu_gr.core.settings import to_table
from npu_gr.handlers.prefix_histories import UserHistory
from npu_gr.relay.config import Calibration, calibration_path
from npu_gr.replay.log import LoggedAnswer, LoggedHistory, QueryRecord
from npu_gr.service.config import load
from npu_gr.tools.calibrate import LogTraffic, calibrate, traffic
from tests.models import events
from tests.serving import make_config, serving, write_checkpoint


def history(num: int) -> LoggedHistory:
    return LoggedHistory.of(events(num, num))


def rank(ts: float, user: str, **fields: object) -> QueryRecord:
    return QueryRecord(ts=ts, kind="rank", user_id=user, candidates=[1], **fields)  # type: ignore[arg-type]


def test_a_log_says_how_long_histories_are_and_how_long_a_prefix_waits() -> None:
    records = []
    for n in range(100):
        records.append(
            QueryRecord(ts=n * 10.0, kind="signal", user_id=f"u{n}", history=history(n + 1))
        )
        answer = LoggedAnswer(latency_ms=50.0)
        records.append(rank(n * 10.0 + 0.01 * n, f"u{n}", history=history(n + 1), answer=answer))
    found = traffic(records)
    assert found.kv_p99_tokens == 100
    assert found.t_life_s == pytest.approx(float(np.quantile(0.01 * np.arange(100) + 0.05, 0.99)))
    delayed = traffic([rank(float(n), "u", delay_ms=80.0) for n in range(30)])
    assert delayed.kv_p99_tokens is None
    assert delayed.t_life_s == pytest.approx(0.08)
    assert traffic([rank(float(n), "u", history=history(7)) for n in range(30)]) == LogTraffic(
        7, None
    )
    with pytest.raises(DataError, match="the log has 3 ranks, the least is 20"):
        traffic(records[:6])


async def test_it_is_measured_with_the_instances_own_parts(tmp_path: Path) -> None:
    version = write_checkpoint(tmp_path / "checkpoint")
    config = make_config(tmp_path)
    short, long = [await calibrate(config, LogTraffic(n, 0.2), 0.2) for n in (10, 500)]
    assert (short.version, short.kv_p99_tokens, short.t_life_s) == (version, 10, 0.2)
    assert short.q_m_per_s > 1.5 * long.q_m_per_s
    assert long.cost.full_s(500, 8) > 0
    assert (
        await calibrate(config, LogTraffic(10**6, None), 0.01)
    ).kv_p99_tokens == 2048  # no longer than the model takes
    small = msgspec.structs.replace(
        config,
        kv_cache=msgspec.structs.replace(config.kv_cache, hbm_bytes=short.kv_token_bytes * 320),
    )
    with pytest.raises(
        ConfigError, match=r"kv_cache\.hbm_bytes: 1 prefixes of 500 tokens do not fit"
    ):
        await calibrate(small, LogTraffic(500, None), 0.1)


async def test_an_instance_goes_on_from_it_where_it_fits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    found = await calibrate(make_config(tmp_path), LogTraffic(10, 0.2), 0.05)
    found = msgspec.structs.replace(found, q_m_per_s=5.0)
    calibration = msgspec.to_builtins(found)
    async with serving(tmp_path, calibration=calibration) as (_, service):
        relay = service.versions.ranker().relay
        assert relay.measured.q_inst_per_s == pytest.approx(0.8 * 5.0)
        assert relay.measured.t_life_p99_s.value == 0.2
        tokens = service.versions.ranker().tokenize(
            UserHistory.of(Events.make([1001] * 10, [0] * 10, range(10)), 0, 10)
        )
        assert relay.measured.kv_p99_bytes.value == relay.tiers[0].arena.layout.bytes(len(tokens))
    async with serving(tmp_path, calibration=calibration, trigger={"q_m_per_s": 20.0}) as (
        _,
        service,
    ):
        measured = service.versions.ranker().relay.measured
        assert measured.q_inst_per_s == pytest.approx(0.8 * 20.0)  # what is configured wins
    with caplog.at_level(logging.WARNING):
        async with serving(tmp_path, calibration={**calibration, "version": "another"}) as (
            _,
            service,
        ):
            relay = service.versions.ranker().relay
            assert relay.measured.t_life_p99_s.value == relay.t_life_s  # the guess
    assert "the calibration of another on cpu" in caplog.text


def test_the_command_writes_the_file_that_a_start_reads(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(to_table(make_config(tmp_path)), sort_keys=False))
    assert load(path).calibration is None
    done = CliRunner().invoke(main, ["calibrate", "--config", str(path), "--seconds", "0.1"])
    assert done.exit_code == 0, done.output
    assert calibration_path(path) == tmp_path / "serve.calibration.yaml"
    assert f"written to {calibration_path(path)}" in done.output
    found = load(path).calibration
    assert found == msgspec.convert(yaml.safe_load(calibration_path(path).read_text()), Calibration)
    calibration_path(path).write_text("q_m: 5\n")
    with pytest.raises(ConfigError, match=r"serve\.calibration\.yaml: unknown key q_m"):
        load(path)
