"""What the image installs is known by hash, is what pyproject.toml asks for, and can be listed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# of the image
EXTRAS = re.findall(r"(?m)^IMAGE_EXTRAS = (.+)$", (ROOT / "Makefile").read_text())[0].split()
OF_THE_BASE = {"serve", "npu", "triton"}  # torch and what is made for one version of it
NOT_OF_AN_IMAGE = {
    "plot",
    "ray",
    "bench",
    "feast",
    "tensorboard",
    "mooncake",
}  # of commands for a developer, of a Ray cluster's own image, and another package for each device
LOCKS = [ROOT / "deploy" / name for name in ("requirements.lock", "requirements-build.lock")]


def locked(path: Path) -> dict[str, tuple[Version, list[str]]]:
    """Name -> version and hashes."""
    found = {}
    lines = [
        line for line in path.read_text().splitlines() if line and not line.lstrip().startswith("#")
    ]
    for entry in re.split(r"\n(?=\S)", "\n".join(lines)):
        match = re.match(r"([a-z0-9-]+)==(\S+) \\\n", entry)
        assert match is not None, entry
        found[match[1]] = (
            Version(match[2]),
            re.findall(r"--hash=sha256:([0-9a-f]{64})(?:\s|$)", entry),
        )
    return found


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_every_entry_has_hashes_and_nothing_else(path: Path) -> None:
    for name, (_, hashes) in locked(path).items():
        assert hashes, name
        assert len(hashes) == len(set(hashes)), name
    assert not re.search(r"://|file:|--index|--find-links|-e ", path.read_text())


def test_the_lock_has_what_the_project_asks_for() -> None:
    asked = [
        *PROJECT["dependencies"],
        *(one for extra in EXTRAS for one in PROJECT["optional-dependencies"][extra]),
    ]
    found = locked(LOCKS[0])
    for text in asked:
        requirement = Requirement(text)
        version, _ = found[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), text
    assert not [name for name in found if re.match("torch|nvidia|triton", name)]


def test_the_image_has_whatever_a_process_in_it_may_ask_for() -> None:
    """Of each extra that a message of ours tells somebody to install."""
    told = {
        extra
        for path in (ROOT / "npu_gr").rglob("*.py")
        for extra in re.findall(r"npu_gr\[(\w+)\]", path.read_text())
    }
    assert {"grpc", "otel", "redis", "picker"} <= told
    assert told - OF_THE_BASE - NOT_OF_AN_IMAGE - {"client"} == set(EXTRAS)
    assert "$(LOCK) $(IMAGE_EXTRAS:%=--extra %) pyproject.toml" in (ROOT / "Makefile").read_text()


def test_versions_with_published_holes_are_rejected() -> None:
    asked = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["serve"]]
    floors = {Requirement(text).name: Requirement(text).specifier for text in asked}
    for name, bad in (("aiohttp", "3.13.3"), ("orjson", "3.11.5"), ("torch", "2.5.1")):
        assert not floors[name].contains(bad), name


def test_the_image_is_made_of_the_lock_and_runs_as_nobody() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    build, operators, last = re.split(r"(?m)^FROM ", text)[1:]
    installs = re.findall(r"pip install [^\n]+", build)
    assert len(installs) == 3
    for one in installs:
        assert "--require-hashes" in one or "--no-index" in one
    assert not re.search(r"pip install|g\+\+", operators + last)
    assert re.findall(r"apt-get install[^&]*recommends ([^&]+) &&", last) == ["haproxy"]
    assert re.search(r"(?m)^USER 10001:10001$", last)
    assert "no check builds it for a device" in text
    copied = {
        word
        for line in re.findall(
            r"(?m)^COPY "
            r"(?!--from)(.+) \S+$",
            text,
        )
        for word in line.split()
    }
    assert all((ROOT / name).exists() for name in copied)
    kept = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    for name in copied:
        assert any(Path(name).match(one) or name.startswith(f"{one}/") for one in kept), name


def test_the_list_of_the_image_is_made_from_the_lock(tmp_path: Path) -> None:
    if shutil.which("cyclonedx-py", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("needs cyclonedx-bom (in the extra dev)")
    out = tmp_path / "sbom.json"
    command = [
        str(Path(sys.executable).parent / "cyclonedx-py"),
        "requirements",
        "--output-reproducible",
    ]
    subprocess.run(
        [*command, "--output-file", out, LOCKS[0]], check=True, capture_output=True, timeout=120
    )
    made = json.loads(out.read_text())
    assert made["bomFormat"] == "CycloneDX"
    listed = {one["name"]: one["version"] for one in made["components"]}
    assert listed == {name: str(version) for name, (version, _) in locked(LOCKS[0]).items()}
