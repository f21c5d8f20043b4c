"""Every kind of the table is whole: one real instance serves all, and every list of kinds has it.

The rooms test their own parts for every kind, too; this file holds the whole of it in one place,
over HTTP.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from npu_gr.core.kinds import ERASE, KINDS, Kind
from npu_gr.metrics.dashboards import dashboards
from npu_gr.metrics.registry import Metrics
from npu_gr.metrics.registry.requests import HTTP_STAGE
from npu_gr.metrics.rules import rules
from npu_gr.replay.files import QueryLog
from npu_gr.replay.log import QueryRecord
from npu_gr.replay.requests import encode
from npu_gr.route.config import DiscoveryConfig, InstanceConfig, RouterConfig
from npu_gr.route.haproxy import RenderInputs, render, routed
from npu_gr.service.config import SLOConfig
from tests.server.test_match_over_http import section as match_section
from tests.server.test_recommend_over_http import HISTORY
from tests.server.test_recommend_over_http import section as cascade_section
from tests.serving import FIRST_ID, serving
from tests.vector_search.vectors import KNOWN

ROOT = Path(__file__).parent.parent
CANDIDATES = list(range(FIRST_ID, FIRST_ID + 20))
BODIES: dict[str, dict[str, Any] | None] = {  # by kind; None = it has no body
    "signal": {"user_id": "u", "history": HISTORY},
    "rank": {"user_id": "u", "history": HISTORY, "candidates": CANDIDATES, "top_k": 3},
    "generate": {"user_id": "u", "history": HISTORY, "num_items": 5},
    "match": {"user_id": KNOWN, "num_items": 5},
    "recommend": {"user_id": "u", "history": HISTORY, "num_items": 5},
    "events": {"user_id": "u", "events": HISTORY},
    "ingest": {"users": [{"user_id": "u", "events": HISTORY}, {"user_id": "v", "events": HISTORY}]},
    "erase": None,
}
# no default edge, never missed
OBJECTIVES_S = {f"{name}_s": 7.25 + place for place, name in enumerate(KINDS)}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: str(kind.name))


@dataclass
class Facts:
    """What an instance said after it was asked for every kind once."""

    answers: dict[str, tuple[int, Any]]  # by kind: status and body
    lines: dict[str, dict[str, Any]]  # by kind: of the access log
    samples: dict[str, float]
    documented: dict[str, Any]  # OpenAPI paths
    status: dict[str, Any]
    recorded: dict[str, QueryRecord]  # by kind


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return asyncio.run(gather_facts(tmp_path_factory.mktemp("kinds")))


async def gather_facts(folder: Path) -> Facts:
    handler = _Lines()
    logger = logging.getLogger("npu_gr.request")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    sections = cascade_section(folder) | {"match": match_section(folder), "slo": OBJECTIVES_S}
    record = {
        "folder": str(folder / "traffic"),
        "enabled": True,
        "suffix": ".jsonl",
        "users": "clear",
    }
    answers: dict[str, tuple[int, Any]] = {}
    lines: dict[str, dict[str, Any]] = {}
    async with serving(folder, watched=False, record=record, **sections) as (client, _):
        for name, kind in KINDS.items():
            path = kind.path.replace("{user_id}", "somebody")
            async with client.request(kind.method, path, json=BODIES[name]) as response:
                answers[name] = (
                    response.status,
                    await response.json(content_type=None) if kind.status != 204 else None,
                )
            lines[name] = handler.lines[-1]
        text = await (await client.get("/metrics")).text()
        documented = (await (await client.get("/openapi.json")).json())["paths"]
        status = await (await client.get("/debug/status")).json()
    logger.removeHandler(handler)
    samples = {
        _series(s.name, s.labels): s.value
        for f in text_string_to_metric_families(text)
        for s in f.samples
    }
    files = sorted((folder / "traffic").glob("traffic-*.jsonl"))
    recorded = {record.kind: record for file in files for record in QueryLog(file)}
    return Facts(answers, lines, samples, documented, status, recorded)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(record.getMessage()))


def _series(name: str, labels: dict[str, str]) -> str:
    return name + json.dumps(labels, sort_keys=True)


def status_of(kind: Kind[Any, Any]) -> int:
    return 202 if kind is ERASE else kind.status  # recordings hold bytes for a while


def value(facts: Facts, name: str, **labels: str) -> float | None:
    return facts.samples.get(_series(f"npu_gr_{name}", labels))


def test_the_table_is_what_is_asked_here() -> None:
    assert BODIES.keys() == KINDS.keys()


@every_kind
def test_route_and_openapi(kind: Kind[Any, Any], facts: Facts) -> None:
    status, answer = facts.answers[kind.name]
    assert status == status_of(kind), answer
    operation = facts.documented[kind.path][kind.method.lower()]
    assert str(kind.status) in operation["responses"]
    assert operation["summary"] == kind.summary


@every_kind
def test_admissions_histograms_stages_and_objective(kind: Kind[Any, Any], facts: Facts) -> None:
    edge = str(OBJECTIVES_S[f"{kind.name}_s"])
    assert value(facts, "admissions_total", kind=kind.name, verdict="admitted") == 1
    assert value(facts, "slo_threshold_seconds", kind=kind.name) == float(edge)
    assert value(facts, "slo_requests_total", kind=kind.name, result="good") == 1
    assert value(facts, "request_duration_seconds_bucket", kind=kind.name, le=edge) == 1
    label = [{}] if kind.label is None else [{kind.label: each} for each in kind.labels]
    counts = [value(facts, f"{kind.name}_duration_seconds_bucket", le=edge, **one) for one in label]
    assert None not in counts
    assert sum(filter(None, counts)) >= 1  # a cascade counts its own signal, generate and rank, too
    for stage in (*kind.stages, HTTP_STAGE):
        assert (
            value(facts, "stage_duration_seconds_count", kind=kind.name, stage=stage) or 0
        ) >= 1, stage


@every_kind
def test_log_fields_and_status_row(kind: Kind[Any, Any], facts: Facts) -> None:
    line = facts.lines[kind.name]
    assert (line["status"], line["method"]) == (status_of(kind), kind.method)
    assert line["stages_s"].keys() == set(kind.stages)
    # of a cascade the degraded stages are named, if any
    if kind.label is not None and kind.label != "degraded":
        assert line[kind.label] in kind.labels
    (row,) = (row for row in facts.status["goodput"] if row["kind"] == kind.name)
    assert row["good"] == 1
    assert row["threshold_s"] == OBJECTIVES_S[f"{kind.name}_s"]


@every_kind
def test_recording_and_replay(kind: Kind[Any, Any], facts: Facts) -> None:
    assert (kind.name in facts.recorded) == kind.is_recorded
    if kind.is_recorded:
        body = json.loads(encode(facts.recorded[kind.name]))
        asked = BODIES[kind.name]
        assert asked is not None
        assert asked.keys() <= body.keys()
        assert body["user_id"] == asked["user_id"]


@every_kind
def test_router_entry(kind: Kind[Any, Any]) -> None:
    assert kind in routed(kind.routing)
    config = RouterConfig(
        discovery=DiscoveryConfig(instances=[InstanceConfig(name="gr", host="h", port=1)])
    )
    text = render(config, RenderInputs(instances=[], addresses={}, keys=[]))
    allowed = re.findall(rf"^  acl on_{kind.method} (path|path_reg) (.*)$", text, re.MULTILINE)
    path = kind.path.replace("{user_id}", "u")
    assert any(
        path == given if how == "path" else re.search(given, path)
        for how, line in allowed
        for given in line.split()
    )


@every_kind
def test_rules_alerts_runbooks_and_panels(kind: Kind[Any, Any]) -> None:
    objectives = SLOConfig().objectives()
    flat = [rule for group in rules(objectives)["groups"] for rule in group["rules"]]
    selector = f'kind="{kind.name}"'
    assert any(selector in rule["expr"] for rule in flat if "record" in rule)
    alerts = [rule for rule in flat if rule.get("alert", "").startswith(f"NpuGr{kind.title}")]
    assert {rule["annotations"]["runbook_url"] for rule in alerts} >= {
        f"docs/runbooks/{kind.name}-latency.md",
        f"docs/runbooks/{kind.name}-availability.md",
    }
    for rule in alerts:
        assert (ROOT / rule["annotations"]["runbook_url"]).exists()
    assert selector in json.dumps(dashboards(objectives)).replace('\\"', '"')


def test_the_registry_has_no_kind_that_the_table_lacks() -> None:
    metrics = Metrics(CollectorRegistry(), SLOConfig().objectives())
    assert metrics.requests.objectives.keys() == KINDS.keys()


def test_a_new_kind_costs_one_entry_one_job_one_codec() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.pretended"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {
        "status": 201,
        "echo": "HELLO",
        "admitted": 1.0,
        "in_time": 1.0,
        "stage": 1.0,
        "line": {"loudness": 5, "route": "/v1/shout"},
        "documented": "Say a word louder.",
        "row": 0.5,
        "recorded": {"kind": "shout", "word": "hello"},
        "router": "FOLLOW",
        "alerts": ["NpuGrShoutAvailabilityFastBurn", "NpuGrShoutLatencyFastBurn"],
        "has_panel": True,
    }
