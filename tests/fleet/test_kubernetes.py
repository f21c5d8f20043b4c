"""The manifests are what Kubernetes' own schemas allow, and agree with each other and with our configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from npu_gr.core.settings import from_table as settings_from_table
from npu_gr.metrics.registry import Metrics
from npu_gr.router.config import RouterConfig
from npu_gr.router.discovery import InstancesFile
from npu_gr.service.config import SLOConfig, from_table

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
VERSION = "1.30"
FILES = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
OBJECTS: list[dict[str, Any]] = [one for name in FILES for one in yaml.safe_load_all((FOLDER / name).read_text())]
OPERATORS = ("PodMonitor", "PrometheusRule")  # the Prometheus operator's; no schema comes with it


def named(kind: str, name: str) -> dict[str, Any]:
    return next(one for one in OBJECTS if (one["kind"], one["metadata"]["name"]) == (kind, name))


def test_every_file_is_listed() -> None:
    assert {path.name for path in FOLDER.glob("*.yaml")} == {*FILES, "kustomization.yaml"}


@pytest.mark.parametrize("thing", OBJECTS, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_every_object_follows_its_schema(thing: dict[str, Any]) -> None:
    if thing["kind"] in OPERATORS:
        assert thing["apiVersion"] == "monitoring.coreos.com/v1"
        assert thing["spec"]
    else:
        kubernetes_validate.validate(thing, VERSION, strict=True)


def test_the_validator_finds_a_misspelt_field() -> None:
    broken = yaml.safe_load(yaml.safe_dump(named("StatefulSet", "npu-gr")))
    broken["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSION, strict=True)


def test_the_configurations_inside_are_valid_and_agree() -> None:
    instance = from_table(yaml.safe_load(named("ConfigMap", "npu-gr-config")["data"]["instance.yaml"]))
    data = named("ConfigMap", "npu-gr-router-config")["data"]
    router = settings_from_table(yaml.safe_load(data["router.yaml"]), RouterConfig)
    listed = settings_from_table(yaml.safe_load(data["instances.yaml"]), InstancesFile).instances
    assert router.relay.t_life_s == instance.relay.t_life_s <= instance.server.drain_grace_s
    pod = named("StatefulSet", "npu-gr")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > instance.server.drain_grace_s + instance.server.shutdown_timeout_s
    ports = {one["name"]: one["containerPort"] for one in pod["containers"][0]["ports"]}
    assert ports == {"http": instance.server.port, "admin": instance.server.admin_port}
    most = named("HorizontalPodAutoscaler", "npu-gr")["spec"]["maxReplicas"]
    assert [one.name for one in listed] == [f"npu-gr-{i}" for i in range(most)]
    assert {one.host for one in listed} == {f"npu-gr-{i}.npu-gr" for i in range(most)}
    assert {one.port for one in listed} == {instance.server.port}


def test_the_router_reaches_the_public_port_alone_and_prometheus_the_admin_port_alone() -> None:
    instance = from_table(yaml.safe_load(named("ConfigMap", "npu-gr-config")["data"]["instance.yaml"])).server
    callers, operators = named("NetworkPolicy", "npu-gr")["spec"]["ingress"]
    assert callers["ports"] == [{"port": instance.port}]
    assert [list(one) for one in callers["from"]] == [["podSelector"]]
    assert operators["ports"] == [{"port": instance.admin_port}]
    assert [list(one) for one in operators["from"]] == [["namespaceSelector"]]
    assert named("Service", "npu-gr")["spec"]["ports"] == [{"name": "http", "port": instance.port}]
    for name in ("npu-gr", "npu-gr-router"):
        scraped = named("PodMonitor", name)["spec"]["podMetricsEndpoints"]
        assert [one["port"] for one in scraped] == ["admin"]


def test_the_autoscaler_reads_metrics_that_exist() -> None:
    metrics = Metrics(CollectorRegistry(), SLOConfig().objectives())
    text = generate_latest(metrics.registry).decode()
    rule = named("PrometheusRule", "npu-gr-autoscale")["spec"]["groups"][0]["rules"][0]
    assert "# TYPE npu_gr_rank_duration_seconds histogram" in text
    assert "npu_gr_rank_duration_seconds_bucket" in rule["expr"]
    assert "npu_gr_queue_depth" in text
    spec = named("HorizontalPodAutoscaler", "npu-gr")["spec"]
    assert [one["external"]["metric"]["name"] for one in spec["metrics"]] == [rule["record"], "npu_gr_queue_depth"]
