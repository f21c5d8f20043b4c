"""Finding an NPU names each missing step, and imports torch_npu only if its driver is installed."""

from __future__ import annotations

import ast
import ctypes
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from npu_gr.backend.choose import choose
from npu_gr.backend.npu import device as npu_device
from npu_gr.backend.npu.device import NpuNotFound, find
from npu_gr.core.errors import ConfigError
from tests.ops.test_build import npu_headers

ROOT = Path(__file__).parents[3]
WITHOUT_CANN = "raise ImportError('libhccl.so: cannot open shared object file')\n"
# as much of torch_npu as `find` uses
WORKING = """
import os, types
__version__ = "2.13.0"
count = int(os.environ["FAKE_COUNT"])
npu = types.SimpleNamespace(
    is_available=lambda: count > 0, device_count=lambda: count, current_device=lambda: 0,
    get_device_name=lambda index: "Ascend910B1", Stream=object, Event=object,
)
"""


def install(folder: Path, code: str) -> None:
    """A torch_npu with the entry point by which torch imports it unasked."""
    (folder / "torch_npu").mkdir()
    (folder / "torch_npu" / "__init__.py").write_text(code)
    about = folder / "torch_npu-2.13.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.13.0\n")
    (about / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")


def python(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {
        "PYTHONPATH": f"{folder}:{ROOT}",
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    return subprocess.run(
        [sys.executable, *arguments], env=variables, capture_output=True, text=True, check=False
    )


def test_the_cpu_starts_where_torch_npu_is_installed_without_cann(tmp_path: Path) -> None:
    install(tmp_path, WITHOUT_CANN)
    trap = python(tmp_path, "-c", "import torch")
    assert trap.returncode, "plain torch dies of it: the trap is real"
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" in trap.stderr
    done = python(tmp_path, "-m", "npu_gr", "doctor", "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    answer = json.loads(done.stdout)
    checks = {check["name"]: check for check in answer["checks"]}
    assert answer["ok"]
    assert checks["torch autoload"]["state"] == "ok"
    assert checks["NPU: CANN"]["state"] == "missing", "the import was not even tried"
    assert "set_env.sh" in checks["NPU: CANN"]["remedy"]
    assert all(check["state"] == "ok" for name, check in checks.items() if name.startswith("cpu: "))
    needed = python(tmp_path, "-m", "npu_gr", "doctor", "--backend", "npu")
    assert needed.returncode == 1
    assert "broken  NPU: CANN" in needed.stdout


@pytest.mark.parametrize(
    ("code", "count", "want"),
    [
        (WITHOUT_CANN, "1", "torch_npu cannot be imported: libhccl.so"),
        (WORKING, "0", "torch_npu sees no NPU"),
        (WORKING, "1", "Ascend910B1 npu:0 2.13.0"),
    ],
    ids=["import", "device", "found"],
)
def test_what_is_behind_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, count: str, want: str
) -> None:
    install(tmp_path, code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FAKE_COUNT", count)
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: None)
    # torch_npu gives the device its name, which no test may: it cannot be taken back, and training
    # here asks for it
    monkeypatch.setattr(
        npu_device, "torch", SimpleNamespace(__version__="2.13", device="{}:{}".format)
    )
    try:
        npu = find()
        found = f"{npu.soc} {npu.device} {npu.version}"
    except NpuNotFound as error:
        found = str(error)
    finally:
        sys.modules.pop("torch_npu", None)
    assert want in found


def test_without_its_driver_torch_npu_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(npu_device, "DRIVER_LIBRARY", "libnowhere.so")
    with pytest.raises(
        NpuNotFound,
        match=r"CANN is not there: libnowhere.so.*; install it and "
        r"source its set_env.sh",
    ):
        find()


# of torch.npu: how many arguments by place, which by name
USED: dict[str, tuple[int, tuple[str, ...]]] = {
    "is_available": (0, ()),
    "device_count": (0, ()),
    "current_device": (0, ()),
    "get_device_name": (1, ()),
    "set_device": (1, ()),
    "current_stream": (0, ()),
    "stream": (1, ()),
    "graph_pool_handle": (0, ()),
    "Stream.__new__": (1, ()),
    "Stream.wait_event": (2, ()),
    "Stream.synchronize": (1, ()),
    "Event.__new__": (1, ()),
    "Event.record": (2, ()),
    "Event.synchronize": (1, ()),
    "NPUGraph.__init__": (1, ()),
    "NPUGraph.replay": (1, ()),
    "graph.__init__": (2, ("pool", "stream", "capture_error_mode")),
}


@pytest.mark.npu_headers
def test_what_is_used_of_torch_npu_is_there() -> None:
    """Each name exists in the real package with our arguments: read its source, never import it."""
    known: dict[str, ast.arguments] = {}
    for source in (npu_headers().parent / "npu").glob("*.py"):
        for node in ast.parse(source.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                known[node.name] = node.args
            elif isinstance(node, ast.ClassDef):
                known |= {
                    f"{node.name}.{f.name}": f.args
                    for f in node.body
                    if isinstance(f, ast.FunctionDef)
                }
    for name, (by_place, by_name) in USED.items():
        arguments = known[name]
        names = [argument.arg for argument in arguments.args]
        assert by_place <= len(names), name
        rest = names[by_place:]
        assert set(by_name) <= set(rest), name
        needed = rest[: max(0, len(rest) - len(arguments.defaults))]
        assert set(needed) <= set(by_name), f"{name} needs {needed}"


def test_a_configured_npu_that_is_not_there_stops_the_start() -> None:
    with pytest.raises(
        ConfigError,
        match=r"backend 'npu' is configured but cannot be loaded: "
        r"torch_npu is not inst",
    ):
        choose("npu")
