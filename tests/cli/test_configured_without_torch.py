"""What reads a configuration but no model works without torch, which only `serve` brings."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from npu_gr.tools.config_docs import KINDS
from tests.client.scripted import answer, scripted
from tests.serving import write_checkpoint
from tests.sources import ROOT

CHILD = """
import json, os, sys, tempfile
sys.modules["torch"] = None  # importing it is ModuleNotFoundError
from npu_gr.cli.main import main
done = []
for words in json.load(sys.stdin):
    with tempfile.TemporaryFile() as output:
        if (process := os.fork()) == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            main(words, prog_name="npu-gr")  # exits
        _, status = os.waitpid(process, 0)
        output.seek(0)
        done.append((os.waitstatus_to_exitcode(status), output.read().decode()))
print(json.dumps(done))
"""


class Done(NamedTuple):
    """How a command ended."""

    code: int
    output: str


def run(folder: Path, *commands: list[str]) -> list[Done]:
    """Run commands, each in a fork of one process in which there is no torch."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        cwd=folder,
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=300,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return [Done(*one) for one in json.loads(done.stdout)]


def test_configurations(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "ranker")
    sections = "server: {port: 0, admin_port: 0}\nhistory_store: {path: history.db}\n"
    (tmp_path / "good.yaml").write_text(f"checkpoint: ranker\n{sections}")
    (tmp_path / "popular.txt").write_text("SKU-1\n42\n")
    generate = "generate: {checkpoint: decoder, catalogue: items.jsonl, codes: [8, 8]}\n"
    (tmp_path / "cascade.yaml").write_text(
        f"checkpoint: ranker\n{sections}{generate}recommend: {{popular: popular.txt}}\n"
    )
    (tmp_path / "bad.yaml").write_text("checkpoint: ranker\nbackend: gpu\n")
    (tmp_path / "router.yaml").write_text(
        "discovery: {instances: [{name: a, host: 127.0.0.1, port: 1}]}\n"
    )
    schemas = [["config", kind, "--schema"] for kind in KINDS]
    good, cascade, bad, router, security, dashboards, serve, *written = run(
        tmp_path,
        ["check-config", "--config", "good.yaml"],
        ["check-config", "--config", "cascade.yaml"],
        ["check-config", "--config", "bad.yaml"],
        ["check-config", "--config", "router.yaml"],
        ["doctor", "--security", "--config", "good.yaml"],
        ["dashboards", "--out", "made", "--config", "good.yaml"],
        ["serve", "--config", "good.yaml"],
        *schemas,
    )
    assert good.code == 0
    assert "not read, because torch is not installed" in good.output
    assert "history.db will be created" in good.output
    assert cascade.code == 1, "there is no catalogue"
    assert "popular.txt: 2 items" in cascade.output
    assert bad.code == 2
    assert "backend" in bad.output
    assert router.code == 0, router.output
    assert security.code == 0
    assert "all users of this machine" in security.output
    assert dashboards.code == 0
    assert json.loads((tmp_path / "made" / "slo.json").read_text())
    assert serve == (2, "npu-gr: serve needs torch: pip install 'npu_gr[serve]'\n")
    for kind, one in zip(KINDS, written, strict=True):
        assert one == (0, (ROOT / KINDS[kind][2]).read_text())


async def test_events_go_through_a_service(tmp_path: Path) -> None:
    lines = [{"user_id": "u", "item_id": 7, "rating": 1, "timestamp": 1_700_000_000}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    models: dict[str, Any] = {"models": [{"actions": ["1"]}]}
    users = [{"num_events": 1, "num_added": 1}]
    written = {"request_id": "r", "num_added": 1, "num_failed": 0, "users": users}
    async with scripted(answer(models), answer(written), answer(models)) as service:
        to = ["--url", service.url]
        load, consume = await asyncio.to_thread(
            run,
            tmp_path,
            ["load", "log.jsonl", *to],
            ["kafka-ingest", "--brokers", "127.0.0.1:1", "--topic", "t", *to],
        )
    assert load.code == 0, load.output
    assert "1 users: 1 events added" in load.output
    assert consume.code == 2
    assert "npu-gr: kafka: 127.0.0.1:1: KafkaConnectionError" in consume.output
    assert [one.path for one in service.asked] == ["/v1/models", "/v1/events/bulk", "/v1/models"]
