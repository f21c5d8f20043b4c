"""A configuration is right or it is rejected, with the field, the limit and a hint."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.inspect import FloatType, IntType

from npu_gr.core.errors import ConfigError
from npu_gr.core.setting_types import options, settings_of, unit_of
from npu_gr.core.settings import to_table
from npu_gr.route.config import RouterConfig
from npu_gr.route.config import load as load_router
from npu_gr.service.config import Config, load
from npu_gr.simulate.config import SimulateConfig

SHIPPED = Path(__file__).parents[2] / "configs"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return path


OTHERS = {SHIPPED / "router.yaml", SHIPPED / "simulate.yaml"}  # of other commands


@pytest.mark.parametrize("path", sorted(set(SHIPPED.glob("*.yaml")) - OTHERS), ids=lambda p: p.name)
def test_what_ships_loads(path: Path) -> None:
    assert load(path).checkpoint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("checkpoint: x\nsrever: {}", "unknown key srever; did you mean server?"),
        (
            "checkpoint: x\nkv_cache: {hbm_byte: 1}",
            r"unknown key kv_cache\.hbm_byte; did you mean hbm_bytes?",
        ),
        (
            "checkpoint: x\nkv_cache: {hbm_bytes: 1GX}",
            r"kv_cache\.hbm_bytes: expected auto \| a whole number of bytes \(1GiB, .*'1GX'",
        ),
        (
            "checkpoint: x\nserver: {port: 70000}",
            r"server\.port: the number 70000 is out of range: .*<= 65535",
        ),
        (
            "checkpoint: x\nrelay: {t_life_s: 0}",
            r"relay\.t_life_s: the number 0 is out of range: .* > 0",
        ),
        ("checkpoint: x\nbackend: gpu", "backend: 'gpu' must be one of cpu, cuda, npu, reference"),
        (
            "checkpoint: x\nkv_cache: {page_tokens: 100}",
            "page_tokens: the number 100 must be one of 32, 64, 128, 256",
        ),
        ("checkpoint: x\nkv_cache: [1]", "kv_cache: expected a section .*got a list"),
        (
            "checkpoint: x\nserver: {trusted_proxies: 10.0.0.1}",
            r"trusted_proxies: expected a list, \[a text, \.\.\.\]",
        ),
        (
            "checkpoint: 12",
            "checkpoint: expected a text or null, got the number 12; write it in quotes",
        ),
        (
            "checkpoint: x\nhistory_store: {kind: redi}",
            "'redi' must be one of embedded, none, redis; did you mean redis?",
        ),
        (
            "checkpoint: x\nadmission: {tenant_weights: {1: 2}}",
            "tenant_weights: every key must be a text",
        ),
        (
            "checkpoint: x\nadmission: {tenant_weights: {a: -1}}",
            r"tenant_weights\[\.\.\.\]: expected a number, > 0",
        ),
        ("checkpoint: x\ngenerate: {}", "generate: checkpoint is missing"),
        (
            "checkpoint: x\nserver: {tls: {certificate: a, key: b, min_version: 1.3}}",
            "1.3; write it in quotes",
        ),
        ("checkpoint: x\ncheckpoint: y", "line 2: key 'checkpoint' is given twice"),
        ("backend: cpu", "set `checkpoint` .a ranker. or the section `generate`"),
        (
            "checkpoint: x\nserver: {host: 0.0.0.0}",
            "server: host: 0.0.0.0 is not a loopback address: set api_keys_file",
        ),
        (
            "checkpoint: x\nservice: {unknown_items: drop}",
            "unknown_items: 'drop' must be one of ignore, reject",
        ),
        ("[1, 2]", "got list"),
        ("a: [", "invalid YAML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        load(tmp_path / "none.yaml")


def test_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, "checkpoint: x\nkv_cache: {hbm_bytes: 5}")
    config = load(path, ["kv_cache.hbm_bytes=7", "server.port=1", "relay.enabled=false"])
    assert (config.kv_cache.hbm_bytes, config.server.port, config.relay.enabled) == (7, 1, False)
    for override in ("kv_cache.hbm=1", "kv_cache", "checkpoint.x=1"):
        with pytest.raises(ConfigError):
            load(path, [override])


@pytest.mark.parametrize("cls", [Config, RouterConfig, SimulateConfig])
def test_what_is_named_after_a_unit_takes_it(cls: type[msgspec.Struct]) -> None:
    endings = {"_bytes": "bytes", "_s": "seconds"}
    for path, setting in settings_of(cls).items():
        kinds = {type(kind) for kind in options(setting.field.type)}
        if kinds & {IntType, FloatType} and not path.endswith("_per_s"):
            named = next((unit for end, unit in endings.items() if path.endswith(end)), None)
            unit = unit_of(setting.field.type)
            assert (unit.noun if unit else None) == named, path


def test_the_environment_is_between_file_and_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_GR_KV__HBM_BYTES", "1GiB")
    monkeypatch.setenv("NPU_GR_SERVER__PORT", "9000")
    path = write(tmp_path, "checkpoint: x\nkv_cache: {hbm_bytes: 5}")
    config = load(path, ["server.port=9001"])
    assert (config.kv_cache.hbm_bytes, config.server.port) == (2**30, 9001)
    assert to_table(config)["kv_cache"]["hbm_bytes"] == 2**30  # plain, where it is shown
    monkeypatch.setenv("NPU_GR_SERVER__PROT", "1")
    with pytest.raises(ConfigError, match="did you mean NPU_GR_SERVER__PORT"):
        load(path)


def test_the_routers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_GR_HEALTH__INTERVAL_S", "250ms")
    monkeypatch.setenv("NPU_GR_PORT", "1234")
    config = load_router(SHIPPED / "router.yaml")
    assert (config.health.interval_s, config.port) == (0.25, 1234)


def test_a_public_address_needs_keys_or_a_word(tmp_path: Path) -> None:
    for extra in ("api_keys_file: k", "allow_unauthenticated: true"):
        text = f"checkpoint: x\nserver: {{host: 0.0.0.0, {extra}}}"
        assert load(write(tmp_path, text)).server.host == "0.0.0.0"
