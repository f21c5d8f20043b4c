"""What `docker compose up` would start: files and commands exist, and addresses meet."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from npu_gr.cli.main import main
from npu_gr.core.settings import override
from npu_gr.route.config import load as load_router
from npu_gr.server.config import ServerConfig
from npu_gr.service.config import from_table
from tests.sources import ROOT

DEPLOY = ROOT / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = [name for name, service in SERVICES.items() if "NPU_GR_IMAGE" in service["image"]]
MADE = ("./site",)  # by npu-gr train all


def binds(service: dict[str, Any]) -> list[tuple[str, str]]:
    pairs = [volume.split(":")[:2] for volume in service["volumes"]]
    return [(source, target) for source, target in pairs if source.startswith(".")]


@pytest.mark.parametrize("name", SERVICES)
def test_what_is_mounted_exists(name: str) -> None:
    for source, _ in binds(SERVICES[name]):
        assert source in MADE or (DEPLOY / source).exists(), source
    named = [
        volume.split(":")[0] for volume in SERVICES[name]["volumes"] if not volume.startswith(".")
    ]
    assert set(named) <= set(COMPOSE["volumes"])


@pytest.mark.parametrize("name", OURS)
def test_our_services_run_our_commands_without_rights(name: str) -> None:
    service = SERVICES[name]
    command, *arguments = service["command"]
    assert command in main.commands
    options = {option for parameter in main.commands[command].params for option in parameter.opts}
    assert {one for one in arguments if one.startswith("--")} <= options
    assert (service["user"], service["read_only"], service["cap_drop"]) == ("10001", True, ["ALL"])
    assert service["security_opt"] == ["no-new-privileges:true"]


def test_a_container_has_the_time_that_draining_takes() -> None:
    server, router = ServerConfig(), load_router(DEPLOY / "router.yaml", [])
    for name, settings in (("instance", server), ("router", router)):
        granted_s = int(SERVICES[name]["stop_grace_period"].rstrip("s"))
        assert granted_s > settings.drain_grace_s + settings.shutdown_timeout_s, name


def test_addresses_meet() -> None:
    """The router asks the instance, Prometheus its admin address, Grafana Prometheus."""
    _, *given = SERVICES["instance"]["command"]
    overrides = [given[at + 1] for at, word in enumerate(given) if word == "--set"]
    server = override(from_table({"checkpoint": "x"}), overrides).server
    (one,) = load_router(DEPLOY / "router.yaml", []).discovery.instances
    found = (one.host, one.port, one.admin_port, one.agent_port)
    assert found == (server.host, server.port, server.admin_port, server.agent_port)
    assert f":{server.port}/readyz" in SERVICES["instance"]["healthcheck"]["test"][-1]
    scraped = yaml.safe_load((ROOT / "dashboards/prometheus.yml").read_text())["scrape_configs"][0]
    assert scraped["static_configs"][0]["targets"] == [f"127.0.0.1:{server.admin_port}"]
    source = yaml.safe_load((DEPLOY / "grafana/datasources/prometheus.yaml").read_text())[
        "datasources"
    ][0]
    (listens,) = (
        one for one in SERVICES["prometheus"]["command"] if one.startswith("--web.listen-address")
    )
    assert source["url"] == f"http://{listens.partition('=')[2]}"


def test_grafana_finds_our_dashboards() -> None:
    provider = yaml.safe_load((DEPLOY / "grafana/dashboards/npu_gr.yaml").read_text())["providers"][
        0
    ]
    targets = {target: source for source, target in binds(SERVICES["grafana"])}
    folder = (DEPLOY / targets[provider["options"]["path"]]).resolve()
    boards = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    assert len(boards) >= 5
    assert all(board["panels"] and board["uid"] for board in boards)
    assert Path(targets["/etc/grafana/provisioning"]).name == "grafana"


@pytest.mark.skipif(
    shutil.which("docker-compose") is None, reason="needs docker-compose (of Debian's package)"
)
def test_compose_itself_reads_it() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = ["docker-compose", "--file", str(DEPLOY / "compose.yaml"), "config", "--services"]
    done = subprocess.run(
        command, env=environment, check=True, timeout=60, capture_output=True, text=True
    )
    assert set(done.stdout.split()) == set(SERVICES)
