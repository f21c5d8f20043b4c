"""Finds an Ascend NPU: checks every requirement, cheapest first, and names the one that fails.

torch_npu is imported only after CANN was found: without CANN its import fails and leaves torch half
patched. If torch_npu is installed, plain `import torch` imports it too, unless
TORCH_DEVICE_BACKEND_AUTOLOAD=0 was set before; `npu_gr/core/process.py` does so.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from npu_gr.core.errors import ConfigError

DRIVER_LIBRARY = "libascendcl.so"  # CANN's runtime; torch_npu is linked against it


class NpuEvent(Protocol):
    """A point in a stream."""

    def record(self, stream: NpuStream) -> None:
        """Mark the end of the work that is queued so far."""
        ...

    def synchronize(self) -> None:
        """Let the host wait for the marked work."""
        ...


class NpuStream(Protocol):
    """A queue of work on the device."""

    def wait_event(self, event: NpuEvent) -> None:
        """Let later work wait for the event."""
        ...

    def synchronize(self) -> None:
        """Let the host wait for all work of the stream."""
        ...


class Runtime(Protocol):
    """The part of the namespace `torch.npu` that we use."""

    Stream: Callable[[], NpuStream]
    Event: Callable[[], NpuEvent]

    def is_available(self) -> bool:
        """Return whether there is a device and a driver."""
        ...

    def device_count(self) -> int:
        """Return the number of devices that this process may use."""
        ...

    def current_device(self) -> int:
        """Return the index of this thread's device."""
        ...

    def set_device(self, device: torch.device) -> None:
        """Set this thread's device."""
        ...

    def get_device_name(self, device: int) -> str:
        """Return the name of the SoC, e.g. Ascend910B1."""
        ...

    def current_stream(self) -> NpuStream:
        """Return this thread's stream."""
        ...

    def stream(self, stream: NpuStream) -> AbstractContextManager[Any]:
        """Set this thread's stream within the block."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Npu:
    """A device that can be used."""

    runtime: Runtime
    device: torch.device
    soc: str
    version: str  # version of torch_npu


class NpuNotFound(ConfigError):
    """A requirement of the NPU is not met; the message has the reason and a remedy."""

    def __init__(self, step: str, why: str, remedy: str) -> None:
        super().__init__(f"{why}; {remedy}")
        self.step = step  # one of STEPS
        self.why = why
        self.remedy = remedy


STEPS = ("torch_npu", "CANN", "import", "device")


def _package() -> None:
    if importlib.util.find_spec("torch_npu") is None:
        raise NpuNotFound("torch_npu", "torch_npu is not installed", "pip install 'npu_gr[npu]'")


def _cann() -> None:
    try:
        ctypes.CDLL(DRIVER_LIBRARY)
    except OSError as error:
        raise NpuNotFound(
            "CANN", f"CANN is not there: {error}", "install it and source its set_env.sh"
        ) from error


def _import() -> Any:
    try:
        return importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        remedy = (
            f"install the torch-npu that was made for torch {torch.__version__} and for this CANN"
        )
        raise NpuNotFound("import", f"torch_npu cannot be imported: {error}", remedy) from error


def _device(package: Any) -> Npu:
    runtime: Runtime = package.npu
    if not runtime.is_available() or not runtime.device_count():
        remedy = "see npu-smi info and ASCEND_RT_VISIBLE_DEVICES"
        raise NpuNotFound("device", "torch_npu sees no NPU", remedy)
    index = runtime.current_device()
    return Npu(
        runtime, torch.device("npu", index), runtime.get_device_name(index), package.__version__
    )


def find() -> Npu:
    """Find the current device of this process.

    Raises:
        NpuNotFound: A requirement is not met; `step` names it.
    """
    _package()
    _cann()
    return _device(_import())
