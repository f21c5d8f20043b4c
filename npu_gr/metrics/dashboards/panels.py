"""Grafana panels and dashboards as plain dicts, and the PromQL expressions in them.

A panel has a title, a sentence that explains it, a unit, and expressions by legend. `$job` and `$instance` are the
variables of a dashboard: `of(name, ...)` selects a metric of the instances that the reader chose there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Panel = dict[str, Any]
Steps = Sequence[tuple[float | None, str]]  # (from this value on, colour); the first value is None

COLUMNS = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WINDOW = "$__rate_interval"
CHOSEN = ('job=~"$job"', 'instance=~"$instance"')
SECONDS = "s"  # unit of a latency; Grafana writes small values in ms


def of(name: str, *matchers: str) -> str:
    """Select `npu_gr_<name>` of the chosen instances; `matchers` narrow it, e.g. `kind="rank"`."""
    return "npu_gr_" + name + "{" + ", ".join((*CHOSEN, *matchers)) + "}"


def rate(name: str, *matchers: str) -> str:
    """The increase of a counter a second."""
    return f"rate({of(name, *matchers)}[{WINDOW}])"


def total(name: str, by: str = "", *matchers: str) -> str:
    """Sum the increase a second of a counter; `by` = labels to keep apart, separated by commas."""
    return f"sum by ({by}) ({rate(name, *matchers)})" if by else f"sum({rate(name, *matchers)})"


def quantile(share: float, name: str, by: str = "", *matchers: str) -> str:
    """A quantile of a histogram.

    Args:
        share: 0.99 = the P99.
        name: of the histogram, without `_bucket`.
        by: labels to keep apart, separated by commas.
        matchers: narrow the selection, e.g. `kind="rank"`.
    """
    labels = ", ".join(filter(None, (by, "le")))
    return f"histogram_quantile({share:g}, sum by ({labels}) ({rate(f'{name}_bucket', *matchers)}))"


def mean(name: str, by: str = "", *matchers: str) -> str:
    """The mean of a histogram; the parameters are those of `quantile`."""
    return f"{total(f'{name}_sum', by, *matchers)} / {total(f'{name}_count', by, *matchers)}"


def _panel(kind: str, title: str, text: str, unit: str, exprs: Mapping[str, str], width: int, height: int) -> Panel:
    targets = [
        {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": expr, "legendFormat": legend}
        for index, (legend, expr) in enumerate(exprs.items())
    ]
    return {
        "type": kind,
        "title": title,
        "description": text,
        "datasource": DATASOURCE,
        "gridPos": {"x": 0, "y": 0, "w": width, "h": height},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "options": {},
        "targets": targets,
    }


def series(
    title: str,
    text: str,
    unit: str,
    exprs: Mapping[str, str],
    *,
    width: int = 8,
    stacked: bool = False,
    limit: float | None = None,
    top: float | None = None,
) -> Panel:
    """Lines over time.

    Args:
        title: of the panel.
        text: explains it in a sentence.
        unit: Grafana's name of the unit, e.g. "reqps".
        exprs: legend -> expression.
        width: in columns; the dashboard has 24.
        stacked: draw the lines as areas on top of each other.
        limit: draw a dashed red line at this value.
        top: end the axis at this value.
    """
    panel = _panel("timeseries", title, text, unit, exprs, width, 7)
    custom: dict[str, Any] = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 30 if stacked else 8,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
    }
    defaults = panel["fieldConfig"]["defaults"]
    defaults |= {"custom": custom, "min": 0}
    if top is not None:
        defaults["max"] = top
    if limit is not None:
        custom["thresholdsStyle"] = {"mode": "dashed"}
        defaults["thresholds"] = _thresholds(((None, "transparent"), (limit, "red")))
    panel["options"] = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return panel


def number(
    title: str, text: str, unit: str, exprs: Mapping[str, str], *, width: int = 4, steps: Steps = ((None, "blue"),)
) -> Panel:
    """The newest value in large type, coloured by `steps`; the other parameters are those of `series`."""
    panel = _panel("stat", title, text, unit, exprs, width, 4)
    panel["fieldConfig"]["defaults"] |= {"thresholds": _thresholds(steps), "decimals": 2}
    panel["options"] = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "area",
        "textMode": "auto",
    }
    return panel


def bars(
    title: str, text: str, unit: str, exprs: Mapping[str, str], *, width: int = 8, steps: Steps, top: float = 1.0
) -> Panel:
    """The newest values as bars from 0 to `top`, coloured by `steps`; other parameters as in `series`."""
    panel = _panel("bargauge", title, text, unit, exprs, width, 7)
    panel["fieldConfig"]["defaults"] |= {"thresholds": _thresholds(steps), "min": 0, "max": top}
    panel["options"] = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "displayMode": "gradient",
        "orientation": "horizontal",
        "showUnfilled": True,
    }
    return panel


def table(title: str, text: str, expr: str, *, width: int = 12, hidden: Sequence[str] = ()) -> Panel:
    """A table of the labels of the newest samples, without those in `hidden`; a sample is a row."""
    panel = _panel("table", title, text, "none", {"": expr}, width, 7)
    panel["targets"][0] |= {"format": "table", "instant": True}
    excluded = dict.fromkeys(("Time", "__name__", "job", "Value", *hidden), True)
    panel["transformations"] = [{"id": "organize", "options": {"excludeByName": excluded}}]
    return panel


def _thresholds(steps: Steps) -> dict[str, Any]:
    return {"mode": "absolute", "steps": [{"value": value, "color": colour} for value, colour in steps]}


def dashboard(uid: str, title: str, text: str, rows: Mapping[str, Sequence[Panel]]) -> dict[str, Any]:
    """Place panels in rows from the left; a panel that does not fit any more begins a new line of its row.

    Args:
        uid: identifies the dashboard in Grafana, so it never changes.
        title: as Grafana lists it.
        text: explains the dashboard.
        rows: title of a row -> its panels.
    """
    placed: list[Panel] = []
    y = 0
    for name, panels in rows.items():
        placed.append(
            {"type": "row", "title": name, "collapsed": False, "panels": [], "gridPos": _at(0, y, COLUMNS, 1)}
        )
        y += 1
        x = 0
        line_height = 0
        for panel in panels:
            size = panel["gridPos"]
            if x + size["w"] > COLUMNS:
                x = 0
                y += line_height
                line_height = 0
            placed.append({**panel, "gridPos": _at(x, y, size["w"], size["h"])})
            x += size["w"]
            line_height = max(line_height, size["h"])
        y += line_height
    for index, panel in enumerate(placed, 1):
        panel["id"] = index
    return {
        "uid": uid,
        "title": title,
        "description": text,
        "tags": ["npu_gr"],
        "schemaVersion": 41,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_datasource(), _variable("job", ""), _variable("instance", 'job=~"$job"')]},
        "links": [
            {
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
        ],
        "annotations": {"list": []},
        "panels": placed,
    }


def _at(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


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
