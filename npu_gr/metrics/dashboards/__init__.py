"""The Grafana dashboards, as `npu-gr dashboards` writes them; each is a module here, over `panels.py` and `kinds.py`.

Tests hold three things: the files in `dashboards/` are what this package makes, every metric named here is in the
registry, and every expression gives figures on a real Prometheus that scrapes a real service.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from npu_gr.metrics.dashboards.engine import engine_and_beams
from npu_gr.metrics.dashboards.fleet import fleet_and_router
from npu_gr.metrics.dashboards.relay import relay_and_tiers
from npu_gr.metrics.dashboards.slo import slo_overview
from npu_gr.metrics.dashboards.store import history_store
from npu_gr.metrics.rules import RUNBOOKS, rules
from npu_gr.metrics.slo import Objective


def dashboards(objectives: Sequence[Objective]) -> dict[str, dict[str, Any]]:
    """Make all dashboards, by file name."""
    return {
        "slo.json": slo_overview(objectives),
        "relay.json": relay_and_tiers(),
        "engine.json": engine_and_beams(),
        "fleet.json": fleet_and_router(),
        "store.json": history_store(),
    }


def files(objectives: Sequence[Objective], runbooks: str = RUNBOOKS) -> dict[str, str]:
    """Make the text of every dashboard and of `rules.yml`, by file name."""
    texts = {name: json.dumps(board, indent=1) + "\n" for name, board in dashboards(objectives).items()}
    head = "# Written by `npu-gr dashboards`: change the objectives or npu_gr/metrics/rules.py, not this file.\n"
    return {**texts, "rules.yml": head + yaml.safe_dump(rules(objectives, runbooks), sort_keys=False, width=120)}


def write(folder: Path, objectives: Sequence[Objective], runbooks: str = RUNBOOKS) -> list[Path]:
    """Write every file into a folder.

    Args:
        folder: made if it does not exist.
        objectives: one for each kind of request.
        runbooks: folder of the runbook pages, a path or a URL.

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
