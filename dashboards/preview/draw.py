"""draw.py DASHBOARD.json PROMETHEUS_URL OUT.png [MINUTES [GRID_ROWS]] - draw it without Grafana.

Where npm cannot be had, preview.sh cannot run. This draws the same panels from the same expressions
with the plots of our own reports, in Chromium: what the dashboard says, not how Grafana looks.
"""

import json
import math
import subprocess
import sys
import tempfile
import time
from html import escape
from pathlib import Path
from typing import Any

from collect import collect

from npu_gr.replay.page import Axis, areas, lines

WIDTH = 1216
ROW_PX = 36  # of a row of the grid, which has 24 columns
UNITS = {
    "s": ("ms", 1e3),
    "percentunit": ("%", 100.0),
    "reqps": ("per s", 1.0),
    "ops": ("per s", 1.0),
}
STYLE = """
body { margin: 0; background: #f5f6f8; color: #16191f; font: 14px/1.4 system-ui, sans-serif; }
h1 { font-size: 19px; margin: 12px 16px; } .grid { position: relative; }
.panel { position: absolute; box-sizing: border-box; padding: 8px 10px; overflow: hidden;
  background: #fff; border: 1px solid #d5d9e0; border-radius: 6px; }
.row { position: absolute; font-weight: 600; padding: 8px 16px; }
.big { font-size: 36px; text-align: center; margin: 12px 0; white-space: nowrap; }
svg { width: 100%; height: auto; display: block; }
"""


def drawn(panel: dict[str, Any], series: list[dict[str, Any]], start: float, end: float) -> str:
    """A panel's inside, as HTML."""
    unit, factor = UNITS.get(panel["fieldConfig"]["defaults"].get("unit", ""), ("", 1.0))
    found = {
        one["name"]: {float(at): float(value) * factor for at, value in one["values"]}
        for one in series
    }
    if panel["type"] == "stat":
        last = [
            value for values in found.values() for value in values.values() if math.isfinite(value)
        ][-1:]
        return f'<div class="big">{f"{last[0]:.4g} {unit}" if last else "no data"}</div>'
    instants = sorted({at for values in found.values() for at in values})
    x = Axis("minutes", high=(end - start) / 60)
    if panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal":
        points = {
            n: [((at - start) / 60, _finite(v.get(at, 0.0))) for at in instants]
            for n, v in found.items()
        }
        return areas(points, x, Axis(unit)) if points else "no data"
    curves = {
        name: [((at - start) / 60, value) for at, value in sorted(v.items())]
        for name, v in found.items()
    }
    return lines(curves, x, Axis(unit))


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def page(
    board: dict[str, Any],
    panels: dict[int, list[dict[str, Any]]],
    start: float,
    end: float,
    rows: int,
) -> str:
    """The first rows of a dashboard, as HTML."""
    parts = [
        "<!doctype html><meta "
        f"charset=utf-8><style>{STYLE}</style><h1>{escape(board['title'])}</h1>"
    ]
    parts.append('<div class="grid">')
    for panel in board["panels"]:
        at = panel["gridPos"]
        if at["y"] + at["h"] > rows:
            continue
        left, width = at["x"] / 24 * (WIDTH - 16) + 8, at["w"] / 24 * (WIDTH - 16) - 8
        box = (
            f"left: {left:.0f}px; width: {width:.0f}px; top: {at['y'] * ROW_PX}px; height: "
            f"{at['h'] * ROW_PX - 8}px"
        )
        title = escape(panel["title"])
        if panel["type"] == "row":
            parts.append(f'<div class="row" style="{box}">{title}</div>')
        else:
            inside = drawn(panel, panels.get(panel["id"], []), start, end)
            parts.append(f'<div class="panel" style="{box}">{title}{inside}</div>')
    return "".join(parts) + "</div>"


def main(path: str, prometheus: str, out: str, minutes: str = "15", grid_rows: str = "19") -> None:
    """Draw what Prometheus has of the last minutes."""
    board = json.loads(Path(path).read_text())
    end = time.time()
    start = end - 60 * float(minutes)
    panels = collect(board, prometheus, start, end)
    with tempfile.TemporaryDirectory() as folder:
        html = Path(folder, "page.html")
        html.write_text(page(board, panels, start, end, int(grid_rows)))
        size = f"--window-size={WIDTH},{int(grid_rows) * ROW_PX + 60}"
        quiet = (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--hide-scrollbars",
        )
        profile = f"--user-data-dir={folder}/profile"
        command = [
            "chromium",
            *quiet,
            profile,
            size,
            f"--screenshot={Path(out).resolve()}",
            f"file://{html}",
        ]
        subprocess.run(command, check=True, capture_output=True)  # noqa: S603  (a developer's own browser)


if __name__ == "__main__":
    main(*sys.argv[1:])
