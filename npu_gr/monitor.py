"""`npu-gr monitor`: the demo's service under replay, a Prometheus that scrapes it, and the dashboards to open.

Prometheus is a program of its own (Debian: `prometheus`). Grafana is in neither Debian nor PyPI: the folder gets what
it needs to provision itself, and the command says how to start it.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import yaml
from rich.console import Console

from npu_gr import demo
from npu_gr.errors import ConfigError, Unavailable
from npu_gr.metrics.dashboards import write
from npu_gr.replay.run import replay, stop_on_interrupt

SCRAPE_S, EVALUATE_S = 2, 5
_HOW_TO_GRAFANA = """Grafana      is a program of its own; with Docker, then http://127.0.0.1:3000:
  docker run --network host -v {folder}/grafana:/etc/grafana/provisioning -v {folder}:/dashboards grafana/grafana
  or import the JSON files into a Grafana of yours"""


async def run(config_path: Path, folder: Path, console: Console, port: int, prometheus_port: int) -> None:
    """Serve, scrape and replay, over and over, until Ctrl-C. `folder`: absolute.

    Raises:
        ConfigError, DataError, Unavailable: as `demo.run`, and where there is no Prometheus.
    """
    if shutil.which("prometheus") is None:
        raise ConfigError("monitor: needs the program prometheus (Debian: apt-get install prometheus)")
    prepared = await demo.prepare(config_path, folder, console, port)
    boards = folder / "monitor"
    await asyncio.to_thread(write, boards, prepared.config.slo.objectives())
    async with demo.served(prepared) as url, _prometheus(boards, url, prometheus_port) as prometheus:
        await asyncio.to_thread(_provision_grafana, boards, prometheus)
        console.print(f"status page  {url}/\nmetrics      {url}/metrics\nPrometheus   {prometheus}")
        console.print(f"alerts       {prometheus}/alerts\ndashboards   {boards}/*.json")
        console.print(_HOW_TO_GRAFANA.format(folder=boards), soft_wrap=True)
        console.print("replaying until Ctrl-C")
        with stop_on_interrupt() as stop:
            records, seed = prepared.records, 0
            while not stop.is_set():
                report = await replay(records, demo.options(prepared, url, seed=seed), stop=stop)
                within, seed = report.num_within_slo / max(report.num_ranks, 1), seed + 1
                console.print(f"round {seed}: {report.num_ranks} ranks, {within:.2%} in time")
                records = [record for record in prepared.records if record.kind != "events"]  # they have happened


@contextlib.asynccontextmanager
async def _prometheus(folder: Path, url: str, port: int) -> AsyncIterator[str]:
    """One that scrapes `url` and evaluates the rules in `folder`; its own URL."""
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{EVALUATE_S}s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [{"job_name": "npu_gr", "static_configs": [{"targets": [urlsplit(url).netloc]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{port}"
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--enable-feature=exemplar-storage",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
    try:
        await asyncio.sleep(1.0)
        if process.returncode is not None:
            raise Unavailable(f"prometheus did not start; its log: {folder / 'prometheus.log'}")
        yield f"http://{address}"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def _provision_grafana(folder: Path, prometheus: str) -> None:
    """What a Grafana reads at its start: where Prometheus is, where the dashboards are."""
    source = {"name": "Prometheus", "type": "prometheus", "url": prometheus, "isDefault": True}
    provider = {"name": "npu_gr", "type": "file", "options": {"path": "/dashboards"}}
    for kind, content in (("datasources", [source]), ("dashboards", [provider])):
        at = folder / "grafana" / kind
        at.mkdir(parents=True, exist_ok=True)
        text = {"apiVersion": 1, "datasources" if kind == "datasources" else "providers": content}
        (at / "npu_gr.yaml").write_text(yaml.safe_dump(text))
