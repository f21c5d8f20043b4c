"""Every kind of request has an objective, rules, alerts, runbooks and panels."""

from __future__ import annotations

import re
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from npu_gr.core.kinds import KINDS, Kind
from npu_gr.metrics.registry import Metrics
from npu_gr.metrics.slo import Promise
from tests.metrics.test_dashboards import (
    BOARDS,
    OBJECTIVES,
    PANELS,
    ROOT,
    expressions,
    known,
    named,
)
from tests.metrics.test_rules import ALERTS, RULES

RUNBOOKS = ROOT / "docs" / "runbooks"
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: str(kind.name))
each_promise = pytest.mark.parametrize("promise", Promise)


@every_kind
def test_a_kind_has_one_objective_of_its_own(kind: Kind[Any, Any]) -> None:
    (objective,) = (one for one in OBJECTIVES if one.kind == kind.name)
    assert objective.threshold_s == kind.objective_s


@every_kind
@each_promise
def test_a_kind_has_its_recordings(kind: Kind[Any, Any], promise: Promise) -> None:
    slo = f"{kind.name}-{promise.value}"
    recorded = [
        rule
        for group in RULES["groups"]
        for rule in group["rules"]
        if "record" in rule and rule["labels"]["sloth_slo"] == slo
    ]
    names = {rule["record"] for rule in recorded}
    assert {
        "slo:sli_error:ratio_rate5m",
        "slo:sli_error:ratio_rate3d",
        "slo:objective:ratio",
    } <= names
    asked = [rule["expr"] for rule in recorded if rule["record"] == "slo:sli_error:ratio_rate5m"]
    assert all(f'npu_gr_slo_requests_total{{kind="{kind.name}"' in expr for expr in asked)


@every_kind
@each_promise
def test_a_kind_has_its_alerts_and_they_lead_to_its_runbook(
    kind: Kind[Any, Any], promise: Promise
) -> None:
    alert = f"NpuGr{kind.title}{promise.value.title()}"
    fast, slow = ALERTS[f"{alert}FastBurn"], ALERTS[f"{alert}SlowBurn"]
    assert fast["labels"]["severity"] == ("page" if kind.pages_on_fast_burn else "ticket")
    assert slow["labels"]["severity"] == "ticket"
    for rule in (fast, slow):
        assert rule["annotations"]["summary"].startswith(f"{kind.plural.capitalize()} are ")
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks/{kind.name}-{promise.value}.md"
        assert (ROOT / rule["annotations"]["runbook_url"]).exists()


@every_kind
def test_a_kind_has_its_panels(kind: Kind[Any, Any]) -> None:
    mine = [panel for name, panel in PANELS if name == "slo.json" and shows(panel, kind)]
    titles = {panel["title"] for panel in mine}
    plural = kind.plural.capitalize()
    wanted = {
        f"{kind.title} latency",
        f"{kind.title}: goodput",
        f"{kind.title}: P99",
        f"{kind.title}: error budget left",
    }
    wanted |= {f"{plural} by result", f"{plural} by stage", f"{plural} rejected for load"}
    wanted |= {
        f"{plural}: {what}" for what in ("out of time", "errors of ours", "faults of the client")
    }
    wanted |= set() if kind.label is None else {f"{kind.title} P99 by {kind.label}"}
    assert wanted <= titles
    assert any(
        row["title"].startswith(f"{plural} (")
        for row in BOARDS["slo.json"]["panels"]
        if row["type"] == "row"
    )
    assert any(name == "fleet.json" and shows(panel, kind) for name, panel in PANELS)
    for panel in mine:
        for expr in expressions(panel):
            assert {
                re.sub(r"_(bucket|sum|count|total)$", "", name) for name in named(expr)
            } <= known()


@every_kind
def test_a_kind_is_known_to_the_registry(kind: Kind[Any, Any]) -> None:
    text = generate_latest(Metrics(CollectorRegistry(), OBJECTIVES).registry).decode()
    for sample in ("slo_threshold_seconds{", "slo_attainment_ratio{", "slo_requests_total{"):
        assert f'npu_gr_{sample}kind="{kind.name}"' in text


def test_no_rule_and_no_panel_names_a_kind_that_is_not_in_the_table() -> None:
    texts = [rule["expr"] for group in RULES["groups"] for rule in group["rules"]]
    texts += [expr for _, panel in PANELS for expr in expressions(panel)]
    named_kinds = {name for text in texts for name in re.findall(r'kind="(\w+)"', text)}
    assert named_kinds == KINDS.keys()


def test_every_runbook_is_led_to_and_names_panels_that_exist() -> None:
    pages = {path.name: path.read_text() for path in RUNBOOKS.glob("*.md")}
    assert {
        f"{one['annotations']['runbook_url'].rpartition('/')[2]}" for one in ALERTS.values()
    } == pages.keys()
    shown = {panel["title"] for _, panel in PANELS} | {board["title"] for board in BOARDS.values()}
    shown |= {kind.plural.capitalize() for kind in KINDS.values()}  # a row begins with it
    for name, text in pages.items():
        flat = " ".join(text.split())  # a title may stand on two lines
        titles = re.findall(r"(?<!\*)\*([^*]+)\*(?!\*)", flat)
        assert titles or name == "instance-not-ready.md", name
        assert {*titles} <= shown, name
        for link in re.findall(r"\]\(([^)]+)\)", text):
            assert (RUNBOOKS / link).exists(), f"{name}: {link}"


def shows(panel: dict[str, Any], kind: Kind[Any, Any]) -> bool:
    """Whether every expression of the panel is about this kind."""
    own = (f'kind="{kind.name}"', f'"{kind.name}-.+"', f"npu_gr_{kind.name}_duration_seconds")
    return all(any(word in expr for word in own) for expr in expressions(panel))
