"""What is on disk is what the generator makes.

Panels are whole, expressions parse and name real metrics.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any

import aiohttp
import promql_parser
import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry

from npu_gr.cli.main import main
from npu_gr.metrics.dashboards import dashboards, files
from npu_gr.metrics.registry import Metrics
from npu_gr.metrics.rules import rules
from npu_gr.service.config import SLOConfig
from tests.serving import until

ROOT = Path(__file__).parents[2]
OBJECTIVES = SLOConfig().objectives()
BOARDS = dashboards(OBJECTIVES)
PANELS = [
    (name, panel)
    for name, board in BOARDS.items()
    for panel in board["panels"]
    if panel["type"] != "row"
]
IDS = [f"{name}: {panel['title']}" for name, panel in PANELS]
ROUTER = "haproxy_"  # panels of the router: HAProxy has the metrics
SUFFIXES = r"(_bucket|_sum|_count|_total|_info)?$"


def expressions(panel: dict[str, Any]) -> list[str]:
    return [target["expr"] for target in panel["targets"]]


def plain(expr: str, window: str = "1m") -> str:
    """As Grafana would send it with every variable at All."""
    return (
        expr.replace("$__rate_interval", window)
        .replace('"$job"', '".+"')
        .replace('"$instance"', '".+"')
    )


def named(expr: str) -> set[str]:
    return set(
        re.findall(
            r"\b((?:npu_gr_|process_|haproxy_|slo:)[a-z0-9_:]+|up)\b(?=[{\[ "
            r")]|$)",
            expr,
        )
    )


def known() -> set[str]:
    registry = CollectorRegistry()
    metrics = Metrics(registry, OBJECTIVES)
    families = [*registry.collect(), *metrics.process.collector.collect()]
    recorded = {
        rule["record"]
        for group in rules(OBJECTIVES)["groups"]
        for rule in group["rules"]
        if "record" in rule
    }
    return {re.sub(SUFFIXES, "", family.name) for family in families} | recorded | {"up"}


HAPROXY = """
defaults
  mode http
  timeout connect 1s
  timeout client 5s
  timeout server 5s
frontend npu_gr
  bind unix@{folder}/callers
  http-request use-service prometheus-exporter if {{ path /metrics }}
  default_backend users
backend users
  server gr-0 127.0.0.1:1 check
"""


@pytest.mark.prometheus
async def test_haproxy_has_what_panels_and_rules_say_of_it(tmp_path: Path) -> None:
    binary = shutil.which("haproxy")
    if binary is None:
        pytest.skip("needs haproxy")
    (tmp_path / "haproxy.cfg").write_text(HAPROXY.format(folder=tmp_path))
    proxy = await asyncio.create_subprocess_exec(binary, "-f", str(tmp_path / "haproxy.cfg"))
    try:
        await until((tmp_path / "callers").exists)
        connector = aiohttp.UnixConnector(str(tmp_path / "callers"))
        async with (
            aiohttp.ClientSession(connector=connector) as http,
            http.get("http://haproxy/metrics") as answer,
        ):
            text = await answer.text()
    finally:
        proxy.terminate()
        await proxy.wait()
    exprs = [expr for _, panel in PANELS for expr in expressions(panel)]
    exprs += [rule["expr"] for group in rules(OBJECTIVES)["groups"] for rule in group["rules"]]
    wanted = {name for expr in exprs for name in named(expr) if name.startswith(ROUTER)}
    assert wanted
    assert wanted <= set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))


def test_the_files_are_those_that_the_generator_makes(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["dashboards", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    for name, text in files(OBJECTIVES).items():
        assert (tmp_path / name).read_text() == text
        assert (ROOT / "dashboards" / name).read_text() == text, (
            f"run `npu-gr dashboards`: {name} is another"
        )


def test_objectives_of_a_configuration_are_in_its_rules(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("checkpoint: none\nslo: {rank_s: 0.0123, latency_ratio: 0.95}\n")
    out = [
        "dashboards",
        "--out",
        str(tmp_path / "out"),
        "--config",
        str(config),
        "--runbooks",
        "https://x.example/r",
    ]
    assert CliRunner().invoke(main, out).exit_code == 0
    text = (tmp_path / "out" / "rules.yml").read_text()
    assert "vector(0.95)" in text
    assert "https://x.example/r/rank-latency.md" in text
    assert "12.3 ms" in (tmp_path / "out" / "slo.json").read_text()


@pytest.mark.parametrize("name", BOARDS)
def test_panels_are_placed_without_overlap(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    panels = BOARDS[name]["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not taken & cells, panel["title"]
        taken |= cells


def test_boards_are_apart() -> None:
    assert len({board["uid"] for board in BOARDS.values()}) == len(BOARDS)
    for board in BOARDS.values():
        titles = [(panel["title"], panel["gridPos"]["y"] > 0) for panel in board["panels"]]
        assert len(titles) == len(board["panels"])
        assert {variable["name"] for variable in board["templating"]["list"]} == {
            "datasource",
            "job",
            "instance",
        }
        json.dumps(board, allow_nan=False)


@pytest.mark.parametrize("panel", [panel for _, panel in PANELS], ids=IDS)
def test_a_panel_is_whole(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"]["uid"] == "${datasource}"
    assert [target["refId"] for target in panel["targets"]] == [
        chr(65 + i) for i in range(len(panel["targets"]))
    ]
    for expr in expressions(panel):
        promql_parser.parse(plain(expr))
        if "rate(" in expr:
            assert "[$__rate_interval]" in expr
        if ROUTER in expr:
            continue
        for name in named(expr):
            assert re.sub(SUFFIXES, "", name) in known(), f"no metric {name}"
        if "npu_gr_" in expr.replace('sloth_service="npu_gr"', ""):
            assert 'job=~"$job", instance=~"$instance"' in expr


@pytest.mark.parametrize(
    "rule",
    [rule for group in rules(OBJECTIVES)["groups"] for rule in group["rules"]],
    ids=lambda rule: str(next(iter(rule.values()))),
)
def test_a_rule_names_real_metrics(rule: dict[str, Any]) -> None:
    names = named(rule["expr"])
    assert names or rule["expr"].startswith("vector(")
    for name in names:
        assert name.startswith(ROUTER) or re.sub(SUFFIXES, "", name) in known(), f"no metric {name}"
