"""Options that several benches have."""

from __future__ import annotations

from pathlib import Path

import click

from npu_gr.cli.options import FILE, THREAD_COUNT
from npu_gr.core import shipped

DEMO = Path(".demo/ranker")  # where `npu-gr demo` leaves its ranker

AS_JSON_LINES = click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
BACKEND = click.option("--backend", default="cpu", show_default=True, help="As in a configuration.")
SEED = click.option("--seed", default=0, show_default=True)
THREADS = click.option("--threads", default=1, show_default=True, type=THREAD_COUNT)
SHIPPED_CONFIG = click.option(
    "--config",
    type=FILE,
    default="configs/cpu.yaml",
    show_default=True,
    callback=lambda _context, _option, path: shipped.found(path),
    help="Of the instance, as it ships.",
)
DEMO_CHECKPOINT = click.option(
    "--checkpoint", type=FILE, help="By default the demo's, if it is there; else an untrained model of its shape."
)
