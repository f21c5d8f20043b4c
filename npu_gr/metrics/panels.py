"""Grafana panels as plain dicts: a title, what it says, a unit, expressions. A row is filled from the left.

`$job` and `$instance` are the dashboard's variables; `of(name, ...)` selects a metric of the instances chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Panel = dict[str, Any]
Steps = Sequence[tuple[float | None, str]]  # (from this value on, colour); the first from None

COLUMNS = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WINDOW = "$__rate_interval"
CHOSEN = ('job=~"$job"', 'instance=~"$instance"')


def of(name: str, *matchers: str) -> str:
    """A selector of `npu_gr_<name>` on the chosen instances."""
    return "npu_gr_" + name + "{" + ", ".join((*CHOSEN, *matchers)) + "}"


def rate(name: str, *matchers: str) -> str:
    """Its increase a second."""
    return f"rate({of(name, *matchers)}[{WINDOW}])"


def total(name: str, by: str = "", *matchers: str) -> str:
    """The rates' sum, by some labels."""
    return f"sum by ({by}) ({rate(name, *matchers)})" if by else f"sum({rate(name, *matchers)})"


def quantile(share: float, name: str, by: str = "", *matchers: str) -> str:
    """A quantile of a histogram."""
    labels = ", ".join(filter(None, (by, "le")))
    return f"histogram_quantile({share:g}, sum by ({labels}) ({rate(f'{name}_bucket', *matchers)}))"


def mean(name: str, by: str = "", *matchers: str) -> str:
    """The mean of a histogram."""
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
    """Lines over time; `exprs`: legend -> expression. `limit` draws a line, `top` ends the axis."""
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
    """The newest value, large, coloured by thresholds."""
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
    """The newest values as bars from 0 to `top`."""
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
    """The labels of the newest samples, one row each."""
    panel = _panel("table", title, text, "none", {"": expr}, width, 7)
    panel["targets"][0] |= {"format": "table", "instant": True}
    excluded = dict.fromkeys(("Time", "__name__", "job", "Value", *hidden), True)
    panel["transformations"] = [{"id": "organize", "options": {"excludeByName": excluded}}]
    return panel


def _thresholds(steps: Steps) -> dict[str, Any]:
    return {"mode": "absolute", "steps": [{"value": value, "color": colour} for value, colour in steps]}


def dashboard(uid: str, title: str, text: str, rows: Mapping[str, Sequence[Panel]]) -> dict[str, Any]:
    """Rows of panels, placed from the left; a panel that has no room begins a new line."""
    placed: list[Panel] = []
    y = 0
    for name, panels in rows.items():
        placed.append(
            {"type": "row", "title": name, "collapsed": False, "panels": [], "gridPos": _at(0, y, COLUMNS, 1)}
        )
        y, x, height = y + 1, 0, 0
        for panel in panels:
            size = panel["gridPos"]
            if x + size["w"] > COLUMNS:
                x, y, height = 0, y + height, 0
            placed.append({**panel, "gridPos": _at(x, y, size["w"], size["h"])})
            x, height = x + size["w"], max(height, size["h"])
        y += height
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
