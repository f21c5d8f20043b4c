"""A real builder builds the image from deploy/Dockerfile; its commands run in it as nobody.

Takes 5 minutes, root that may mount, buildah and debootstrap (Debian: apt-get install buildah
debootstrap), and the package index: `python -m pytest -m image tests/deploy/test_image.py`;
`.ci/packages` runs it. The base is a bare Debian without torch, so that no registry is needed; what
it stands for is another image for each device.
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

from tests.ports import free_port
from tests.sources import ROOT

pytestmark = pytest.mark.image
MIRROR = "http://deb.debian.org/debian"
PACKAGES = "python3,python3-venv,ca-certificates,libgomp1"
BASE, MADE = "localhost/npu-gr-base", "localhost/npu-gr"
MOST_MIB = 500  # that the image adds to its base
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"

# Starts a router, asks whether it lives, ends it; prints the answer's status and how it ended.
ROUTE = """
import subprocess, sys, time, urllib.error, urllib.request

port, admin_port = sys.argv[2:]
ports = ["--set", f"port={port}", "--set", f"admin_port={admin_port}", "--set", "drain_grace_s=0"]
router = subprocess.Popen(["npu-gr", "route", "--config", sys.argv[1], *ports])
ends_at = time.monotonic() + 60
while time.monotonic() < ends_at and router.poll() is None:
    try:
        print(urllib.request.urlopen(f"http://127.0.0.1:{admin_port}/healthz", timeout=2).status)
        break
    except urllib.error.URLError:
        time.sleep(0.1)
router.terminate()
print(router.wait(30))
"""

Run = Callable[..., str]


def run(*words: object) -> str:
    done = subprocess.run(
        [*map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=3000, check=False
    )
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
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip(
            "needs the right to mount (CAP_SYS_ADMIN): a container for it is a privileged one"
        )
    folder = tmp_path_factory.mktemp("image")
    policy = folder / "policy.json"
    policy.write_text(json.dumps({"default": [{"type": "insecureAcceptAnything"}]}))
    buildah = [
        "buildah",
        "--root",
        folder / "storage",
        "--runroot",
        folder / "run",
        "--storage-driver",
        "vfs",
    ]
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

    build = (
        "bud",
        *trusting,
        "--isolation",
        "chroot",
        "--pull-never",
        "--build-arg",
        f"BASE={BASE}",
    )
    run(*buildah, *build, "-f", ROOT / "deploy" / "Dockerfile", "-t", MADE, ROOT)
    container = run(*buildah, "from", *trusting, "--pull-never", MADE)
    try:
        yield lambda *words: run(*buildah, "run", "--isolation", "chroot", container, "--", *words)
    finally:
        run(*buildah, "rm", "--all")
        run(*buildah, "rmi", "--all", "--force")


def test_commands_answer_as_nobody_from_a_place_that_nobody_may_write(inside: Run) -> None:
    assert inside("id", "-u") == "10001"
    for words in (
        ("--help",),
        ("route", "--help"),
        ("replay", "--help"),
        ("kafka-ingest", "--help"),
    ):
        assert "Usage:" in inside("npu-gr", *words)
    assert inside("sh", "-c", "touch /opt/npu-gr/here 2>/dev/null || echo rejected") == "rejected"
    for program in ("g++", "pip"):
        assert inside("sh", "-c", f"command -v {program} || echo none") == "none", program


def test_the_packages_are_those_of_the_lock(inside: Run) -> None:
    code = (
        "import importlib.metadata as m; print(*(f'{d.name}=={d.version}' for d in "
        "m.distributions()))"
    )
    installed = {
        re.sub(r"[-_.]+", "-", one).lower()
        for one in inside("/opt/npu-gr/bin/python", "-c", code).split()
    }
    locked = re.findall(
        r"(?m)^([a-z0-9-]+==\S+) "
        r"\\$",
        (ROOT / "deploy" / "requirements.lock").read_text(),
    )
    assert {re.sub(r"[-_.]+", "-", one).lower() for one in locked} <= installed
    modules = (
        "grpc, faiss, pyarrow, aiokafka, redis.asyncio, zstandard, hpack, "
        "opentelemetry.sdk, "
        "google.protobuf"
    )
    assert inside("/opt/npu-gr/bin/python", "-c", f"import {modules}; print('all')") == "all"


def test_what_it_adds_to_its_base_is_small(inside: Run) -> None:
    assert (
        int(inside("du", "--summarize", "--block-size=MiB", "/opt/npu-gr").partition("MiB")[0])
        <= MOST_MIB
    )


def test_a_router_reads_its_configuration_and_answers(inside: Run) -> None:
    shipped = inside(
        "sh", "-c", "echo /opt/npu-gr/lib/python3*/site-packages/npu_gr/_data/configs/router.yaml"
    )
    assert "static_resources" in json.loads(inside("npu-gr", "fleet", "envoy", "--config", shipped))
    said = inside("/opt/npu-gr/bin/python", "-c", ROUTE, shipped, free_port(), free_port())
    assert said.split() == ["200", "0"]
