"""`npu-gr demo --monitor`: the demo under replay, with Prometheus and dashboards.

Prometheus must be installed (Debian: `prometheus`). Grafana is in neither Debian nor PyPI, so the
command writes provisioning files for Grafana, and prints how to start it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import yaml
from rich.console import Console

from npu_gr.core.errors import ConfigError
from npu_gr.core.kinds import EVENTS
from npu_gr.metrics.dashboards import write
from npu_gr.replay.run import replay, stop_on_interrupt
from npu_gr.tools import demo
from npu_gr.tools.demo_instance import served, started

SCRAPE_S = 2.0
EVALUATE_S = 5.0  # between evaluations of the rules
_HOW_TO_GRAFANA = """Grafana      run it with Docker and open http://127.0.0.1:3000:
  docker run --network host -v {folder}/grafana:/etc/grafana/provisioning \\
    -v {folder}:/dashboards grafana/grafana
  or import the JSON files into your Grafana"""


async def monitor(
    made: demo.MadeDemo, console: Console, port: int, admin_port: int, prometheus_port: int
) -> None:
    """Serve, scrape, and replay the traffic repeatedly, until Ctrl-C.

    Args:
        made: The demo's site; its folder is absolute.
        console: Output.
        port: Port of the service.
        admin_port: Port of its admin address.
        prometheus_port: Port of Prometheus.

    Raises:
        ConfigError, DataError, Unavailable: as `demo.run`; also if Prometheus is not installed.
    """
    prepared = await demo.prepare_traffic(made, console, port, admin_port)
    boards = made.folder / "monitor"
    await asyncio.to_thread(write, boards, prepared.instance.config.slo.objectives())
    admin_url = prepared.instance.admin_url
    async with (
        served(prepared.instance) as url,
        prometheus(
            boards, {"npu_gr": urlsplit(admin_url).netloc}, prometheus_port
        ) as prometheus_url,
    ):
        await asyncio.to_thread(_provision_grafana, boards, prometheus_url)
        console.print(
            f"status page  {admin_url}/\nmetrics      {admin_url}/metrics\nPrometheus   "
            f"{prometheus_url}"
        )
        console.print(f"alerts       {prometheus_url}/alerts\ndashboards   {boards}/*.json")
        console.print(_HOW_TO_GRAFANA.format(folder=boards), soft_wrap=True)
        console.print("replaying until Ctrl-C")
        with stop_on_interrupt() as stop:
            records = prepared.records
            seed = 0
            while not stop.is_set():
                report = await replay(records, demo.options(prepared, url, seed=seed), stop=stop)
                within = report.num_within_slo / max(report.num_ranks, 1)
                seed += 1
                console.print(
                    f"round {seed}: {report.num_ranks} ranks, {within:.2%} within the SLO"
                )
                # the store has the events after the first round
                records = [record for record in prepared.records if record.kind != EVENTS.name]


def check_machine(ports: Mapping[str, int]) -> None:
    """Check that the machine has what a run needs.

    Args:
        ports: Option -> port on the loopback address that must be free.

    Raises:
        ConfigError: something is missing; the message names all of it.
    """
    lacks = (
        []
        if shutil.which("prometheus")
        else ["the program prometheus (Debian: apt-get install prometheus)"]
    )
    for option, port in ports.items():
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError as error:
            lacks.append(f"a free port: {option} {port}: {os.strerror(error.errno or 0)}")
    if lacks:
        raise ConfigError(f"monitor: needs {'; '.join(lacks)}")


@contextlib.asynccontextmanager
async def prometheus(
    folder: Path,
    targets: Mapping[str, str],
    port: int,
    scrape_s: float = SCRAPE_S,
    evaluate_s: float = EVALUATE_S,
) -> AsyncIterator[str]:
    """Run Prometheus for the block, and yield its URL.

    Args:
        folder: Folder with `rules.yml`; receives the configuration, data and log.
        targets: Job -> its scraped address, as host:port.
        port: Port of Prometheus.
        scrape_s: Interval of scrapes.
        evaluate_s: Interval of evaluations of the rules.

    Raises:
        ConfigError: Prometheus is not installed.
        Unavailable: it did not start.
    """
    check_machine({})
    every = {
        name: f"{round(s * 1e3)}ms"
        for name, s in (("scrape", scrape_s), ("evaluation", evaluate_s))
    }
    config = {
        "global": {
            "scrape_interval": every["scrape"],
            "scrape_timeout": every["scrape"],
            "evaluation_interval": every["evaluation"],
        },
        "rule_files": ["rules.yml"],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [target]}]}
            for job, target in targets.items()
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    url = f"http://127.0.0.1:{port}"
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
    ]
    process = await started("prometheus", command, f"{url}/-/ready", folder / "prometheus.log")
    try:
        yield url
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def _provision_grafana(folder: Path, prometheus_url: str) -> None:
    """Write Grafana's provisioning files: the data source and the folder of the dashboards."""
    source = {"name": "Prometheus", "type": "prometheus", "url": prometheus_url, "isDefault": True}
    provider = {"name": "npu_gr", "type": "file", "options": {"path": "/dashboards"}}
    for kind, content in (("datasources", [source]), ("dashboards", [provider])):
        home = folder / "grafana" / kind
        home.mkdir(parents=True, exist_ok=True)
        text = {"apiVersion": 1, "datasources" if kind == "datasources" else "providers": content}
        (home / "npu_gr.yaml").write_text(yaml.safe_dump(text))
