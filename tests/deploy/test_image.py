"""The image is built by a real builder from deploy/Dockerfile, and its commands run in it as nobody.

Takes minutes, root, buildah and debootstrap (Debian: apt-get install buildah debootstrap), and the package index:
`python -m pytest -m image tests/deploy/test_image.py`. The base is a bare Debian without torch, so that no registry is
needed; what it stands for is another image for each device.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.sources import ROOT

pytestmark = pytest.mark.image
MIRROR = "http://deb.debian.org/debian"
PACKAGES = "python3,python3-venv,ca-certificates,libgomp1"
BASE, MADE = "localhost/npu-gr-base", "localhost/npu-gr"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"

Run = Callable[..., str]


def run(*words: object) -> str:
    done = subprocess.run([*map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-4000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs a command in a container of the image."""
    for program in ("buildah", "debootstrap"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program} (Debian: apt-get install {program})")
    if os.geteuid():
        pytest.skip("needs root: debootstrap makes a root file system")
    folder = tmp_path_factory.mktemp("image")
    policy = folder / "policy.json"
    policy.write_text(json.dumps({"default": [{"type": "insecureAcceptAnything"}]}))
    buildah = ["buildah", "--root", folder / "storage", "--runroot", folder / "run", "--storage-driver", "vfs"]
    trusting = ("--signature-policy", policy)

    files = folder / "base"
    run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", files, MIRROR)
    (files / "usr/bin/python").symlink_to("python3")  # as images with torch have it
    for path in ("/etc/pip.conf", CERTIFICATES):  # how this machine reaches its package index
        if Path(path).exists():
            shutil.copyfile(path, f"{files}{path}")
    container = run(*buildah, "from", *trusting, "scratch")
    run(*buildah, "copy", "--quiet", container, files, "/")
    run(*buildah, "config", "--env", f"PIP_CERT={CERTIFICATES}", container)
    run(*buildah, "commit", *trusting, "--quiet", "--rm", container, BASE)

    build = ("bud", *trusting, "--isolation", "chroot", "--pull-never", "--build-arg", f"BASE={BASE}")
    run(*buildah, *build, "-f", ROOT / "deploy" / "Dockerfile", "-t", MADE, ROOT)
    container = run(*buildah, "from", *trusting, "--pull-never", MADE)
    try:
        yield lambda *words: run(*buildah, "run", "--isolation", "chroot", container, "--", *words)
    finally:
        run(*buildah, "rm", "--all")
        run(*buildah, "rmi", "--all", "--force")


def test_commands_answer_as_nobody_from_a_place_that_nobody_may_write(inside: Run) -> None:
    assert inside("id", "-u") == "10001"
    for words in (("--help",), ("route", "--help"), ("replay", "--help"), ("consume", "--help")):
        assert "Usage:" in inside("npu-gr", *words)
    assert inside("sh", "-c", "touch /opt/npu-gr/here 2>/dev/null || echo refused") == "refused"
    for program in ("g++", "pip"):
        assert inside("sh", "-c", f"command -v {program} || echo none") == "none", program


def test_the_packages_are_those_of_the_lock(inside: Run) -> None:
    code = "import importlib.metadata as m; print(*(f'{d.name}=={d.version}' for d in m.distributions()))"
    installed = {re.sub(r"[-_.]+", "-", one).lower() for one in inside("/opt/npu-gr/bin/python", "-c", code).split()}
    locked = re.findall(r"(?m)^([a-z0-9-]+==\S+) \\$", (ROOT / "deploy" / "requirements.lock").read_text())
    assert {re.sub(r"[-_.]+", "-", one).lower() for one in locked} <= installed
    modules = "grpc, faiss, pyarrow, aiokafka, redis.asyncio, zstandard, hpack, opentelemetry.sdk, google.protobuf"
    assert inside("/opt/npu-gr/bin/python", "-c", f"import {modules}; print('all')") == "all"


def test_a_router_reads_its_configuration(inside: Run) -> None:
    shipped = "/opt/npu-gr/lib/python3*/site-packages/npu_gr/_data/configs/router.yaml"
    assert "static_resources" in json.loads(inside("sh", "-c", f"npu-gr fleet envoy --config {shipped}"))
