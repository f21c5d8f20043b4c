"""Make the Grafana dashboards that `npu-gr dashboards` writes from the templates in `boards/`.

A template is a dashboard in YAML: rows of panels, each with a title, a sentence that explains it, a
unit, and PromQL expressions by legend. Expressions use two variables:

    $of   label matchers of the instances that the reader chose
    $w    window of a rate

A row or panel with `each` is repeated for every kind of request in that group, so a new kind gets
its panels without a change here. Its expressions and texts use the variables that `_words` returns,
such as `$kind`, `$Title` and `$plural`. A row or panel with `empty` has no data unless what it says
is so; the panel's description ends with it.

Tests check three things: the files in `dashboards/` are up to date with the templates, every metric
is in the registry, and every expression returns data on a real Prometheus that scrapes a real
service; under the demo's traffic only those panels are empty that say so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import yaml

from npu_gr.core.kinds import KINDS, Kind
from npu_gr.metrics.rules import RUNBOOKS, rules
from npu_gr.metrics.slo import Objective

Panel = dict[str, Any]

BOARDS = ("slo", "relay", "engine", "fleet", "store")
COLUMNS = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTHS = {"series": 8, "number": 4, "bars": 8, "table": 24}  # default width of a panel
HEIGHTS = {"series": 7, "number": 4, "bars": 7, "table": 7}
TYPES = {"series": "timeseries", "number": "stat", "bars": "bargauge", "table": "table"}
EXEMPLARS = "npu_gr_request_duration_seconds_bucket"  # the histogram that has exemplars
OF = {"of": 'job=~"$job", instance=~"$instance"', "w": "$__rate_interval"}


def dashboards(objectives: Sequence[Objective]) -> dict[str, dict[str, Any]]:
    """Make all dashboards, by file name. There is one objective for each kind of request."""
    return {f"{name}.json": _dashboard(name, objectives) for name in BOARDS}


def files(objectives: Sequence[Objective], runbooks: str = RUNBOOKS) -> dict[str, str]:
    """Make the text of every dashboard and of `rules.yml`, by file name."""
    texts = {
        name: json.dumps(board, indent=1) + "\n" for name, board in dashboards(objectives).items()
    }
    head = (
        "# Written by `npu-gr dashboards`: change the objectives or npu_gr/metrics/rules.py, "
        "not this file.\n"
    )
    return {
        **texts,
        "rules.yml": head + yaml.safe_dump(rules(objectives, runbooks), sort_keys=False, width=120),
    }


def write(folder: Path, objectives: Sequence[Objective], runbooks: str = RUNBOOKS) -> list[Path]:
    """Write every file into a folder.

    Args:
        folder: Folder to write, made if it does not exist.
        objectives: One objective for each kind of request.
        runbooks: Folder of the runbook pages, a path or a URL.

    Returns:
        The paths of the files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in files(objectives, runbooks).items():
        path = folder / name
        path.write_text(text)
        paths.append(path)
    return paths


def _dashboard(name: str, objectives: Sequence[Objective]) -> dict[str, Any]:
    text = resources.files("npu_gr.metrics").joinpath("boards", f"{name}.yml").read_text()
    template = yaml.safe_load(text)
    placed = list(_placed(template["rows"], [_words(objective) for objective in objectives]))
    return {
        "uid": template["uid"],  # identifies the dashboard in Grafana, so it never changes
        "title": template["title"],
        "description": template["text"],
        "tags": ["npu_gr"],
        "schemaVersion": 41,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [_datasource(), _variable("job", ""), _variable("instance", 'job=~"$job"')]
        },
        "links": [_LINKS],
        "annotations": {"list": []},
        "panels": [{**panel, "id": place} for place, panel in enumerate(placed, 1)],
    }


def _placed(
    rows: Sequence[Mapping[str, Any]], kinds: Sequence[Mapping[str, str]]
) -> Iterator[Panel]:
    """Place the panels of each row from the left, and begin a new line where one does not fit."""
    y = 0
    for row, words in _repeated(rows, kinds):
        at = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        yield {
            "type": "row",
            "title": _said(row["row"], words),
            "collapsed": False,
            "panels": [],
            "gridPos": at,
        }
        y += 1
        x = 0
        line_height = 0
        for panel, own in _repeated(row["panels"], kinds, words):
            made = _panel({"empty": row.get("empty"), **panel}, own)
            size = made["gridPos"]
            if x + size["w"] > COLUMNS:
                x = 0
                y += line_height
                line_height = 0
            yield {**made, "gridPos": {**size, "x": x, "y": y}}
            x += size["w"]
            line_height = max(line_height, size["h"])
        y += line_height


def _repeated(
    parts: Sequence[Mapping[str, Any]],
    kinds: Sequence[Mapping[str, str]],
    own: Mapping[str, str] | None = None,
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, str]]]:
    """List rows or panels with their template variables; those with `each` once for every kind.

    Args:
        parts: Rows, or panels of one row.
        kinds: Template variables of every kind.
        own: Template variables of the row, if it is repeated for a kind.
    """
    for part in parts:
        if "each" not in part:
            yield part, own or {}
            continue
        for words in [own] if own else kinds:
            if part["each"] in words["is"]:
                yield part, words


def _words(objective: Objective) -> dict[str, str]:
    """Return the template variables of a kind; `is` lists its groups, which `each` names."""
    kind: Kind[Any, Any] = KINDS[objective.kind]
    groups = ["kind"]
    if kind.label is not None:
        groups.append("labelled kind")
    if {"queue", "device"} <= {*kind.stages}:
        groups.append("kind on the device")
    return {
        "is": ", ".join(groups),
        "kind": kind.name,
        "Title": kind.title,
        "plural": kind.plural,
        "Plural": kind.plural.capitalize(),
        "method": kind.method,
        "path": kind.path,
        "label": kind.label or "",
        "stages": ", ".join((*kind.stages, "http")),
        "ratio": f"{objective.latency_ratio * 100:.4g}",
        "threshold": f"{objective.threshold_s * 1e3:g}",
    }


def _said(text: str, words: Mapping[str, str]) -> str:
    return Template(text).safe_substitute(OF, **words)


def _panel(panel: Mapping[str, Any], words: Mapping[str, str]) -> Panel:
    kind = next(name for name in TYPES if name in panel)
    show = panel["show"] if isinstance(panel["show"], dict) else {"": panel["show"]}
    empty = f" Empty unless {panel['empty']}." if panel["empty"] else ""
    targets: list[dict[str, Any]] = [
        {
            "refId": chr(ord("A") + index),
            "datasource": DATASOURCE,
            "expr": _said(expr, words),
            "legendFormat": _said(legend, words),
            "exemplar": EXEMPLARS in expr,
        }
        for index, (legend, expr) in enumerate(show.items())
    ]
    made: Panel = {
        "type": TYPES[kind],
        "title": _said(panel[kind], words),
        "description": _said(panel["text"] + empty, words),
        "datasource": DATASOURCE,
        "gridPos": {"x": 0, "y": 0, "w": panel.get("width", WIDTHS[kind]), "h": HEIGHTS[kind]},
        "fieldConfig": {"defaults": {"unit": panel.get("unit", "none")}, "overrides": []},
        "options": _OPTIONS[kind],
        "targets": targets,
    }
    defaults = made["fieldConfig"]["defaults"]
    if kind == "series":
        _draw_lines(defaults, panel)
    elif kind == "number":
        defaults |= {"thresholds": _thresholds(panel.get("steps", [[None, "blue"]])), "decimals": 2}
    elif kind == "bars":
        defaults |= {"thresholds": _thresholds(panel["steps"]), "min": 0, "max": 1.0}
    else:  # a table: a row for each sample, a column for each label
        targets[0] |= {"format": "table", "instant": True}
        hidden = dict.fromkeys(("Time", "__name__", "job", "Value"), True)
        made["transformations"] = [{"id": "organize", "options": {"excludeByName": hidden}}]
    return made


def _draw_lines(defaults: dict[str, Any], panel: Mapping[str, Any]) -> None:
    """Set the options of lines over time.

    `stacked` stacks them as areas, `top` is the end of the axis, `limit` is a dashed line.
    """
    stacked = panel.get("stacked", False)
    custom: dict[str, Any] = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 30 if stacked else 8,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
    }
    defaults |= {"custom": custom, "min": 0}
    if "top" in panel:
        defaults["max"] = float(panel["top"])
    if "limit" in panel:
        custom["thresholdsStyle"] = {"mode": "dashed"}
        defaults["thresholds"] = _thresholds([[None, "transparent"], [panel["limit"], "red"]])


def _thresholds(steps: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Make thresholds of (value, colour from this value on); the first value is None."""
    found = [
        {"value": None if value is None else float(value), "color": colour}
        for value, colour in steps
    ]
    return {"mode": "absolute", "steps": found}


_REDUCED = {"calcs": ["lastNotNull"], "fields": "", "values": False}
_OPTIONS: dict[str, dict[str, Any]] = {
    "series": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "number": {
        "reduceOptions": _REDUCED,
        "colorMode": "value",
        "graphMode": "area",
        "textMode": "auto",
    },
    "bars": {
        "reduceOptions": _REDUCED,
        "displayMode": "gradient",
        "orientation": "horizontal",
        "showUnfilled": True,
    },
    "table": {},
}
_LINKS = {
    "type": "dashboards",
    "title": "npu_gr",
    "tags": ["npu_gr"],
    "asDropdown": False,
    "keepTime": True,
    "includeVars": True,
    "icon": "external link",
    "targetBlank": False,
    "tooltip": "",
    "url": "",
}


def _datasource() -> dict[str, Any]:
    return {
        "name": "datasource",
        "type": "datasource",
        "query": "prometheus",
        "label": "Prometheus",
    }


def _variable(label: str, matchers: str) -> dict[str, Any]:
    return {
        "name": label,
        "type": "query",
        "label": label.title(),
        "datasource": DATASOURCE,
        "query": f"label_values(npu_gr_build_info{{{matchers}}}, {label})",
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "current": {"text": ["All"], "value": ["$__all"]},
    }
