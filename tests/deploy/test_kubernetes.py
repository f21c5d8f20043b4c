"""The manifests match Kubernetes' own schemas, each other and our configurations."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from npu_gr.core.kinds import KINDS, Routing
from npu_gr.core.settings import from_table as settings_from_table
from npu_gr.core.settings import override
from npu_gr.metrics.registry import Metrics
from npu_gr.route.config import PickerConfig, RouterConfig
from npu_gr.route.discovery import InstancesFile
from npu_gr.service.config import Config, SLOConfig, from_table

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
VERSION = "1.30"
FILES = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
OBJECTS: list[dict[str, Any]] = [
    one for name in FILES for one in yaml.safe_load_all((FOLDER / name).read_text())
]
OPERATORS = ("PodMonitor", "PrometheusRule")  # the Prometheus operator's; no schema comes with it
WORKLOADS = [one for one in OBJECTS if one["kind"] in ("StatefulSet", "Deployment")]
PODS = pytest.mark.parametrize("workload", WORKLOADS, ids=lambda one: one["metadata"]["name"])


def named(kind: str, name: str) -> dict[str, Any]:
    return next(one for one in OBJECTS if (one["kind"], one["metadata"]["name"]) == (kind, name))


def table(map_name: str, file: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(named("ConfigMap", map_name)["data"][file])
    return found


def instance_config() -> Config:
    """The instance's configuration.

    The store's password is in a Secret, which is a file in a pod.
    """
    given = table("npu-gr-config", "instance.yaml")
    assert given["history_store"]["url"] == {"file": "/etc/npu-gr-redis/url"}
    given["history_store"]["url"] = "rediss://:password@redis:6379/0"
    return from_table(given)


def router_config() -> RouterConfig:
    given = table("npu-gr-router-config", "router.yaml")
    return settings_from_table(given, RouterConfig)


def test_every_file_is_listed() -> None:
    assert {path.name for path in FOLDER.glob("*.yaml")} == {*FILES, "kustomization.yaml"}


@pytest.mark.parametrize(
    "thing", OBJECTS, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}"
)
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
    instance = instance_config()
    data = named("ConfigMap", "npu-gr-router-config")["data"]
    router = router_config()
    listed = settings_from_table(yaml.safe_load(data["instances.yaml"]), InstancesFile).instances
    assert router.relay.t_life_s == instance.relay.t_life_s <= instance.server.drain_grace_s
    pod = named("StatefulSet", "npu-gr")["spec"]["template"]["spec"]
    assert (
        pod["terminationGracePeriodSeconds"]
        > instance.server.drain_grace_s + instance.server.shutdown_timeout_s
    )
    ports = {one["name"]: one["containerPort"] for one in pod["containers"][0]["ports"]}
    server = instance.server
    assert ports == {"https": server.port, "admin": server.admin_port, "agent": server.agent_port}
    assert router.instances_tls is not None
    assert router.instances_tls.server_name == "npu-gr"
    most = named("HorizontalPodAutoscaler", "npu-gr")["spec"]["maxReplicas"]
    assert [one.name for one in listed] == [f"npu-gr-{i}" for i in range(most)]
    assert {one.host for one in listed} == {f"npu-gr-{i}.npu-gr" for i in range(most)}
    assert {(one.port, one.admin_port, one.agent_port) for one in listed} == {
        (server.port, server.admin_port, server.agent_port)
    }


def test_the_autoscaler_reads_metrics_that_exist() -> None:
    metrics = Metrics(CollectorRegistry(), SLOConfig().objectives())
    text = generate_latest(metrics.registry).decode()
    rule = named("PrometheusRule", "npu-gr-autoscale")["spec"]["groups"][0]["rules"][0]
    assert "# TYPE npu_gr_rank_duration_seconds histogram" in text
    assert "npu_gr_rank_duration_seconds_bucket" in rule["expr"]
    assert "npu_gr_queue_depth" in text
    spec = named("HorizontalPodAutoscaler", "npu-gr")["spec"]
    assert [one["external"]["metric"]["name"] for one in spec["metrics"]] == [
        rule["record"],
        "npu_gr_queue_depth",
    ]


@PODS
def test_a_pod_can_change_nothing_but_its_scratch(workload: dict[str, Any]) -> None:
    pod = workload["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not any(pod.get(name) for name in ("hostNetwork", "hostPID", "hostIPC"))
    (container,) = pod["containers"]
    secured = container["securityContext"]
    assert secured["readOnlyRootFilesystem"] is True
    assert secured["allowPrivilegeEscalation"] is False
    assert secured["capabilities"] == {"drop": ["ALL"]}
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert {one["name"] for one in container["volumeMounts"]} == volumes.keys()
    for mount in container["volumeMounts"]:
        volume = volumes[mount["name"]]
        assert mount.get("readOnly", False) is ("emptyDir" not in volume), mount
        assert "subPath" not in mount, "a renewed certificate would never reach the pod"
        if "emptyDir" in volume:
            assert volume["emptyDir"]["sizeLimit"]
        if "secret" in volume:
            assert volume["secret"]["defaultMode"] == 0o440
            assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsUser"]


@PODS
def test_a_pod_has_limits_of_everything_that_it_shares(workload: dict[str, Any]) -> None:
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    for name in ("requests", "limits"):
        assert {"cpu", "memory", "ephemeral-storage"} <= container["resources"][name].keys()


@PODS
def test_an_image_is_named_by_its_digest(workload: dict[str, Any]) -> None:
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    (image,) = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["images"]
    assert container["image"] == image["name"], (
        "a tag in the manifest would stand beside the digest"
    )
    assert re.fullmatch("sha256:[0-9a-f]{64}", image["digest"])
    assert "newTag" not in image
    assert image["newName"].startswith("registry.invalid/"), (
        "without a registry of one's own nothing starts"
    )


@PODS
def test_probes_need_neither_a_key_nor_a_certificate(workload: dict[str, Any]) -> None:
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    probes = {name: probe["httpGet"] for name, probe in container.items() if name.endswith("Probe")}
    assert {"readinessProbe", "livenessProbe"} <= probes.keys()
    asks_callers = (
        instance_config().server.tls.client_ca if workload["kind"] == "StatefulSet" else None  # type: ignore[union-attr]
    )
    for probe in probes.values():
        assert probe["scheme"] == "HTTPS"
        assert probe["path"] in ("/healthz", "/readyz")
        assert probe["port"] == "admin" or asks_callers is None


def test_callers_need_keys_and_every_hop_is_over_tls() -> None:
    instance, router = (
        table("npu-gr-config", "instance.yaml"),
        table("npu-gr-router-config", "router.yaml"),
    )
    for settings in (instance["server"], router):
        assert settings["api_keys_file"] == "/etc/npu-gr-keys/keys.yaml"
        assert "allow_unauthenticated" not in settings
        assert settings["admin_host"] == "0.0.0.0"
        assert settings["tls"]["certificate"] == "/etc/npu-gr-tls/tls.crt"
    assert instance["server"]["admin_port"] == 8081
    assert instance["server"]["tls"]["client_ca"] == "/etc/npu-gr-tls/ca.crt"
    assert set(router["instances_tls"]) == {"ca", "certificate", "key", "server_name"}
    assert instance["history_store"]["tls"]["ca"] == "/etc/npu-gr-tls/ca.crt"


def test_an_npu_pod_opens_its_device_and_keeps_within_its_memory() -> None:
    pod = named("StatefulSet", "npu-gr")["spec"]["template"]["spec"]
    assert 1000 in pod["securityContext"]["supplementalGroups"], "HwHiAiUser has the devices"
    config = instance_config()
    assert (config.backend, config.native, config.dtype) == ("npu", "require", "bfloat16")
    limit = pod["containers"][0]["resources"]["limits"]["memory"]
    assert limit.endswith("Gi")
    assert config.kv_cache.dram_bytes <= int(limit[:-2]) * 2**30 // 2, "the process needs the rest"


@PODS
def test_files_that_a_configuration_names_are_mounted(workload: dict[str, Any]) -> None:
    pod = workload["spec"]["template"]["spec"]
    mounts = [one["mountPath"] for one in pod["containers"][0]["volumeMounts"]]
    (config,) = [one["configMap"]["name"] for one in pod["volumes"] if "configMap" in one]
    named_files = re.findall(
        r"/(?:etc|models)[\w./-]+", yaml.safe_dump(named("ConfigMap", config)["data"])
    )
    assert named_files
    for name in named_files:
        assert any(name.startswith(f"{mount}/") for mount in mounts), name


def mounted_secrets() -> set[str]:
    volumes = [
        one for workload in WORKLOADS for one in workload["spec"]["template"]["spec"]["volumes"]
    ]
    return {one["secret"]["secretName"] for one in volumes if "secret" in one}


def test_secrets_are_documented() -> None:
    text = (FOLDER / "kustomization.yaml").read_text()
    used = mounted_secrets()
    for scraped in (one for one in OBJECTS if one["kind"] == "PodMonitor"):
        (endpoint,) = scraped["spec"]["podMetricsEndpoints"]
        assert (endpoint["port"], endpoint["scheme"]) == ("admin", "https")
        used |= {
            endpoint["tlsConfig"]["ca"]["secret"]["name"],
            endpoint["authorization"]["credentials"]["name"],
        }
    assert {name for name in used if f"#   {name} " not in text} == set()


@PODS
def test_who_may_call_whom(workload: dict[str, Any]) -> None:
    """Both directions are closed but for what is named, and the admin port is not for callers."""
    name = workload["metadata"]["name"]
    policy = named("NetworkPolicy", name)["spec"]
    assert policy["podSelector"]["matchLabels"] == workload["spec"]["selector"]["matchLabels"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    ports = {
        one["name"]: one["containerPort"]
        for one in workload["spec"]["template"]["spec"]["containers"][0]["ports"]
    }
    came = {port["port"]: one.get("from") for one in policy["ingress"] for port in one["ports"]}
    assert came.keys() == set(ports.values())
    operators = [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}},
        {"podSelector": {"matchLabels": {"npu-gr.example/operator": "true"}}},
    ]
    router = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "npu-gr-router"}}}
    # changes of the catalogue come by it
    assert came[ports["admin"]] == operators + [router] * (name == "npu-gr")
    assert came[ports["https"]] == ([router] if name == "npu-gr" else None)
    assert came.get(ports.get("agent")) == ([router] if name == "npu-gr" else None)
    goes = sorted(port["port"] for one in policy["egress"] for port in one["ports"] if one["to"])
    assert goes == ([53, 53, 4318, 6379] if name == "npu-gr" else [53, 53, 8080, 8081, 8082])


def test_cert_manager_makes_the_secrets_that_pods_mount() -> None:
    folder = FOLDER / "cert-manager"
    assert yaml.safe_load((folder / "kustomization.yaml").read_text())["kind"] == "Component"
    made = [
        one
        for one in yaml.safe_load_all((folder / "certificates.yaml").read_text())
        if one["kind"] == "Certificate"
    ]
    usages = {one["spec"]["secretName"]: set(one["spec"].get("usages", ())) for one in made}
    assert usages["npu-gr-tls"] >= {"server auth", "client auth"}  # Redis asks for one
    assert "client auth" not in usages["npu-gr-router-tls"], (
        "what the public sees opens no instance"
    )
    assert "server auth" not in usages["npu-gr-router-client-tls"]
    assert {name for name in mounted_secrets() if name.endswith("tls")} <= usages.keys()
    names = next(
        one["spec"]["dnsNames"] for one in made if one["spec"]["secretName"] == "npu-gr-tls"
    )
    tls = router_config().instances_tls
    assert tls is not None
    assert tls.server_name in names


@pytest.mark.parametrize("extra", ["", "components: [cert-manager, gateway]\n"])
def test_kustomize_builds_it_with_every_image_by_digest(extra: str, tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl, for its kustomize")
    folder = shutil.copytree(FOLDER, tmp_path / "base")
    (folder / "kustomization.yaml").write_text((FOLDER / "kustomization.yaml").read_text() + extra)
    built = subprocess.run(
        ["kubectl", "kustomize", folder], capture_output=True, text=True, timeout=60
    )
    assert built.returncode == 0, built.stderr
    images = re.findall(r"image: (\S+)", built.stdout)
    assert len(images) == len(WORKLOADS)
    assert all(
        re.fullmatch(r"registry\.invalid/npu-gr@sha256:[0-9a-f]{64}", image) for image in images
    )
    for one in ("cert-manager.io/v1", "kind: InferencePool", "picker.host=0.0.0.0"):
        assert (one in built.stdout) == bool(extra), one


def component(name: str) -> list[dict[str, Any]]:
    """The objects of a component."""
    folder = FOLDER / name
    files = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    return [one for file in files for one in yaml.safe_load_all((folder / file).read_text())]


@pytest.mark.parametrize("name", ["gateway"])
def test_the_objects_of_components_follow_their_schemas(name: str) -> None:
    for one in component(name):
        if not one["apiVersion"].startswith(
            ("inference.networking.k8s.io/", "gateway.networking.k8s.io/")
        ):
            kubernetes_validate.validate(one, VERSION, strict=True)


def test_the_gateway_passes_on_what_one_instance_can_answer_and_asks_our_picker() -> None:
    objects = {one["kind"]: one for one in component("gateway") if one["kind"] != "NetworkPolicy"}
    (rule,) = objects["HTTPRoute"]["spec"]["rules"]
    passed_on = {(match["method"], match["path"]["value"]) for match in rule["matches"]}
    assert passed_on == {
        (kind.method, kind.path)
        for kind in KINDS.values()
        if kind.routing is not Routing.EVERYWHERE
    }
    pool = objects["InferencePool"]
    assert rule["backendRefs"][0]["name"] == pool["metadata"]["name"]
    assert (
        pool["spec"]["selector"]["matchLabels"]
        == named("StatefulSet", "npu-gr")["spec"]["selector"]["matchLabels"]
    )
    assert pool["spec"]["targetPorts"] == [{"number": instance_config().server.port}]
    asked = pool["spec"]["endpointPickerRef"]
    service = objects["Service"]
    assert (asked["name"], asked["failureMode"]) == (service["metadata"]["name"], "FailOpen")
    assert asked["port"]["number"] == service["spec"]["ports"][0]["port"] == PickerConfig().port
    patch = yaml.safe_load((FOLDER / "gateway/kustomization.yaml").read_text())["patches"][0]
    added = [one["value"] for one in yaml.safe_load(patch["patch"])]
    router = override(router_config(), [added[1]])
    assert router.picker == PickerConfig(host="0.0.0.0")
