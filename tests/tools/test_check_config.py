"""`npu-gr check-config` opens all files of a configuration, and reports what start rejects."""

from __future__ import annotations

import importlib.util
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from npu_gr.core import settings
from npu_gr.core.errors import ConfigError
from npu_gr.core.memory import HostMemory
from npu_gr.model.weights import load, save
from npu_gr.relay.config import calibration_path
from npu_gr.route.config import RouterConfig
from npu_gr.service.config import Config
from npu_gr.service.memory import check_sizes
from npu_gr.tools.check_config import Opened, OpenedState, examine, is_well, read, shown
from tests.certificates import Authority
from tests.decoders import SIZES, hf_model
from tests.keys import entry, write_keys
from tests.ports import free_port
from tests.serving import make_config, write_checkpoint

ROUTER = {
    "discovery": {"instances": [{"name": "a", "host": "h", "port": 1}]},
    "port": free_port(),
    "admin_port": free_port(),
}


def examined(folder: Path, **sections: object) -> dict[str, Opened]:
    config = make_config(folder, **sections)
    return {one.key: one for one in examine(config)}


def examined_router(**table: object) -> dict[str, Opened]:
    return {one.key: one for one in examine(settings.from_table(ROUTER | table, RouterConfig))}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def test_what_a_start_takes_is_well(tmp_path: Path, checkpoint: Path, authority: Authority) -> None:
    pair = authority.issue("localhost")
    (tmp_path / "popular").write_text("5\n6\n")
    (tmp_path / "user-key").write_bytes(b"k" * 32)
    found = examined(
        tmp_path,
        server={
            "api_keys_file": write_keys(tmp_path / "keys", entry()),
            "log_user_key_file": str(tmp_path / "user-key"),
            "tls": {"certificate": str(pair.certificate), "key": str(pair.key)},
        },
        record={
            "folder": str(tmp_path / "new" / "traffic"),
            "hash_key_file": str(tmp_path / "user-key"),
        },
    )
    assert is_well(list(found.values())), found
    assert "version" in found["checkpoint"].words
    assert "1 keys" in found["server.api_keys_file"].words
    assert not (tmp_path / "new").exists()  # nothing is made
    assert not (tmp_path / "history.db").exists()


@pytest.mark.parametrize(
    ("sections", "key", "words"),
    [
        (
            {"checkpoint": "/nowhere"},
            "checkpoint",
            "No such file or directory: /nowhere/config.json",
        ),
        (
            {"history_store": {"path": "/proc/none/h.db"}},
            "history_store.path",
            "/proc cannot be written: No such",
        ),
        (
            {"history_store": {"path": "/etc/passwd"}},
            "history_store.path",
            "/etc/passwd is no SQLite file",
        ),
        ({"server": {"api_keys_file": "/nowhere"}}, "server.api_keys_file", "No such file"),
        ({"server": {"log_user_key_file": "/nowhere"}}, "server.log_user_key_file", "No such file"),
        (
            {"server": {"tls": {"certificate": "/nowhere", "key": "/no"}}},
            "server.tls",
            "No such file",
        ),
        (
            {"server": {"host": "no.such.host.invalid", "allow_unauthenticated": True}},
            "server.port",
            "no.such.host",
        ),
        ({"record": {"folder": "/etc/passwd/x"}}, "record.folder", "/etc/passwd is no folder"),
        (
            {"record": {"folder": "r", "hash_key_file": "/nowhere"}},
            "record.hash_key_file",
            "No such file",
        ),
        ({"match": {"vectors": "/nowhere"}}, "match.vectors", "/nowhere"),
    ],
)
def test_what_a_start_rejects_is_reported(
    tmp_path: Path, sections: dict[str, Any], key: str, words: str
) -> None:
    found = examined(tmp_path, **sections)
    assert found[key].state is OpenedState.BROKEN
    assert words in found[key].words


@pytest.mark.parametrize(
    ("sections", "key", "words"),
    [
        (
            {"kv_cache": {"hbm_bytes": 8 << 30}},
            "kv_cache.hbm_bytes",
            "8.0 GiB, but this process can have 4.0 GiB (the limit of its control group)",
        ),
        ({"kv_cache": {"dram_bytes": 5 << 30}}, "kv_cache.dram_bytes", "5.0 GiB, but"),
        ({"service": {"known_prefix_bytes": 9 << 30}}, "service.known_prefix_bytes", "9.0 GiB"),
        ({"server": {"max_receiving_bytes": 9 << 30}}, "server.max_receiving_bytes", "9.0 GiB"),
        (
            {"kv_cache": {"hbm_bytes": 3 << 30, "dram_bytes": 2 << 30}},
            "kv_cache.hbm_bytes",
            "with kv_cache.dram_bytes, checkpoint 5.0 GiB, but this process can have 4.0 GiB",
        ),
        ({"threads": 4096}, "threads", "4096, but this process can use "),
    ],
)
def test_sizes_that_the_machine_does_not_have_are_reported(
    tmp_path: Path,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    sections: dict[str, Any],
    key: str,
    words: str,
) -> None:
    group = HostMemory(4 << 30, "the limit of its control group")
    monkeypatch.setattr("npu_gr.service.memory.total_memory", lambda: group)
    found = examined(tmp_path, **sections)
    assert found[key].state is OpenedState.BROKEN
    assert words in found[key].words
    config = make_config(tmp_path, **sections)
    assert is_well(examine(config, is_here=False))
    if key != "threads":
        with pytest.raises(ConfigError, match=rf"^{key}: "):
            check_sizes(config)


def test_memory_of_a_device_is_not_that_of_the_machine(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "npu_gr.service.memory.total_memory", lambda: HostMemory(4 << 30, "the machine")
    )
    assert is_well(
        list(examined(tmp_path, backend="cuda", kv_cache={"hbm_bytes": 8 << 30}).values())
    )


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_reported(
    tmp_path: Path, checkpoint: Path, number: float
) -> None:
    found = load(checkpoint)
    with torch.no_grad():
        next(found.model.parameters())[0, 0] = number
    save(found, checkpoint)
    words = examined(tmp_path)["checkpoint"].words
    assert "1 of " in words
    assert "not finite, the first is" in words
    generator = hf_model(model_type="qwen3")
    with torch.no_grad():
        next(generator.parameters())[0, 0] = number
    generator.save_pretrained(tmp_path / "sid")
    (tmp_path / "c.jsonl").write_text('{"item_id": 1, "sid": [0, 1]}\n')
    found_words = examined(tmp_path, **generating(tmp_path))["generate.checkpoint"].words
    assert "NaN or infinity" in found_words


def test_weights_that_are_not_the_manifests_are_reported(tmp_path: Path, checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\1")
    assert "is not the one that config.json names" in examined(tmp_path)["checkpoint"].words


def generating(folder: Path, **changes: object) -> dict[str, Any]:
    section = {
        "checkpoint": str(folder / "sid"),
        "catalogue": str(folder / "c.jsonl"),
        "codes": [4, 4],
    }
    return {"generate": section | changes}


def test_a_generator_its_catalogue_and_its_codes(tmp_path: Path, checkpoint: Path) -> None:
    hf_model(model_type="qwen3").save_pretrained(tmp_path / "sid")
    vocab_size = SIZES["vocab_size"]
    (tmp_path / "c.jsonl").write_text(
        '{"item_id": 1, "sid": [0, 1]}\n{"item_id": 2, "sid": [3, 3]}\n'
    )
    found = examined(tmp_path, **generating(tmp_path))
    assert found["generate.checkpoint"].state is OpenedState.OK, found
    assert found["generate.catalogue"].words.endswith("2 items")
    assert found["generate.change_log"].words.endswith("c.jsonl.changes: no changes yet")
    room = re.search(r"room for (\d+) beams, max_beams is 512", found["generate.checkpoint"].words)
    assert room, found
    most = int(room[1])
    found = examined(tmp_path, **generating(tmp_path, max_beams=most))
    assert found["generate.checkpoint"].state is OpenedState.OK, found
    found = examined(tmp_path, **generating(tmp_path, max_beams=most + 1))
    assert found["generate.checkpoint"].state is OpenedState.BROKEN
    assert f"generate.beam_bytes 1073741824 has room for {most}" in (
        found["generate.checkpoint"].words
    )
    found = examined(tmp_path, **generating(tmp_path, codes=[4, 2]))
    assert found["generate.catalogue"].state is OpenedState.BROKEN
    found = examined(tmp_path, **generating(tmp_path, codes=[4, vocab_size]))
    assert f"the last token is {vocab_size + 3}" in found["generate.checkpoint"].words
    (tmp_path / "sid" / "model.safetensors").unlink()
    assert (
        examined(tmp_path, **generating(tmp_path))["generate.checkpoint"].state
        is OpenedState.BROKEN
    )


def test_a_hook_and_popular_items(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rules.py").write_text(
        "def apply(items, context): return items\ndef one(items): return items\n"
    )
    (tmp_path / "popular").write_text("5\n6\n")
    monkeypatch.syspath_prepend(tmp_path)

    def hooked(hook: str, popular: str) -> dict[str, Opened]:
        recommend = {"hook": hook, "popular": str(tmp_path / popular)}
        return examined(tmp_path, **generating(tmp_path), recommend=recommend)

    found = hooked("my_rules:apply", "popular")
    assert (found["recommend.hook"].state, found["recommend.popular"].state) == (
        OpenedState.OK,
        OpenedState.OK,
    )
    assert found["recommend.popular"].words.endswith("2 items")
    found = hooked("my_rules:one", "none")
    assert (found["recommend.hook"].state, found["recommend.popular"].state) == (
        OpenedState.BROKEN,
        OpenedState.BROKEN,
    )
    assert "No module" in hooked("my_rulez:apply", "popular")["recommend.hook"].words


def test_a_port_in_use_is_a_note(tmp_path: Path, checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = examined(tmp_path, server={"port": taken.getsockname()[1]})
    assert found["server.port"].state is OpenedState.NOTE
    assert is_well(list(found.values()))


def test_redis_is_not_called_and_its_password_not_shown(tmp_path: Path, checkpoint: Path) -> None:
    found = examined(
        tmp_path, history_store={"kind": "redis", "url": "redis://:s3cret@10.255.255.1:6379/0"}
    )
    assert found["history_store.url"].state is OpenedState.NOTE
    assert "s3cret" not in str(found)


@pytest.mark.parametrize(
    ("sections", "module", "key", "extra"),
    [
        (
            {"server": {"otlp_endpoint": "http://127.0.0.1:1/v1/traces"}},
            "opentelemetry.sdk",
            "server.otlp_endpoint",
            "otel",
        ),
        ({"server": {"grpc_port": 9000}}, "grpc", "server.grpc_port", "grpc"),
        (ROUTER | {"picker": {}}, "grpc", "picker", "picker"),
    ],
)
def test_an_extra_that_is_not_installed_is_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sections: dict[str, Any],
    module: str,
    key: str,
    extra: str,
) -> None:
    real = importlib.util.find_spec

    def found() -> dict[str, Opened]:
        return (
            examined_router(**sections)
            if "discovery" in sections
            else examined(tmp_path, **sections)
        )

    assert key not in found()
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == module else real(name)
    )
    assert found()[key].remedy == f"pip install 'npu_gr[{extra}]'"


def test_a_router(tmp_path: Path, authority: Authority) -> None:
    assert is_well(list(examined_router().values()))
    (tmp_path / "instances.yaml").write_text("instances: [{name: a, host: h, port: 1}]")
    found = examined_router(discovery={"file": str(tmp_path / "instances.yaml")})
    assert found["discovery.file"].words.endswith("1 instances")
    (tmp_path / "instances.yaml").write_text("instances: [{name: a, host: h}]")
    found = examined_router(
        discovery={"file": str(tmp_path / "instances.yaml")},
        api_keys_file="/nowhere",
        instances_tls={"ca": "/nowhere"},
        tls={"certificate": "/nowhere", "key": "/nowhere"},
    )
    keys = ("discovery.file", "api_keys_file", "tls", "instances_tls")
    assert [found[key].state for key in keys] == [OpenedState.BROKEN] * 4
    assert "port is missing" in found["discovery.file"].words


def test_where_each_value_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.yaml"
    (tmp_path / "url").write_text("redis://:s3cret@h:6379/0")
    path.write_text(
        f"checkpoint: x\nhistory_store: {{url: {{file: {tmp_path}/url}}}}\n"
        "kv_cache: {dram_bytes: 1GiB}\n"
    )
    monkeypatch.setenv("NPU_GR_SERVER__PORT", "9000")
    overrides = ["admission.tenant_weights={shop: 2}", "threads=3"]
    config = read(path, overrides)
    assert isinstance(config, Config)
    text = shown(config, path, overrides)
    for line in (
        f"checkpoint: x  # {path}",
        "threads: 3  # --set",
        "  port: 9000  # NPU_GR_SERVER__PORT",
        f"  dram_bytes: 1073741824  # {path}",
        "    shop: 2.0  # --set",
        f"  url: redis://***@h:6379/0  # {path}",
        "  admin_port: 8081",
    ):
        assert line in text.splitlines()
    assert "s3cret" not in text
    assert yaml.safe_load(text) == settings.to_table(config)
    calibration = (
        "{version: v, device: d, cost: {a0: 1, a1: 1, a2: 1, b0: 1, b1: 1}, copy_bytes_per_s: 1, "
    )
    calibration_path(path).write_text(
        f"{calibration}kv_token_bytes: 2, kv_p99_tokens: 3, t_life_s: 4, q_m_per_s: 5}}"
    )
    assert f"  version: v  # {calibration_path(path)}" in shown(read(path), path).splitlines()
    path.write_text("checkpoint: x\ncalibration:\n")
    assert f"  version: v  # {calibration_path(path)}" in shown(read(path), path).splitlines()
