"""Make the backend that the configuration names, once, at start.

A backend that cannot be used is an error: there is no silent fallback.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any, cast

from npu_gr.backend.base import Backend
from npu_gr.backend.names import AttentionMode, BackendName, NativeMode
from npu_gr.core.errors import ConfigError

_CLASSES = {
    "cpu": ("npu_gr.backend.cpu.backend", "CPUBackend"),
    "cuda": ("npu_gr.backend.cuda", "CUDABackend"),
    "npu": ("npu_gr.backend.npu.backend", "NPUBackend"),
    "reference": ("npu_gr.backend.reference", "ReferenceBackend"),
}
_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
_ATTENTIONS: dict[BackendName, tuple[AttentionMode, ...]] = {
    "cuda": ("auto", "triton", "torch"),
    "npu": ("auto", "ascend_c", "mxrec", "triton", "torch"),
}


def choose(
    name: BackendName,
    native: NativeMode = "auto",
    hstu_library: str | None = None,
    attention: AttentionMode = "auto",
    device: int | None = None,
) -> Backend:
    """Make the backend of that name.

    Args:
        name: The configuration's `backend`.
        native: Use of our own kernels; `CPUBackend` and `NPUBackend` explain the modes.
        hstu_library: Path of the library with Huawei's operator for rankers without a relative
            bias; backend npu only.
        attention: Implementation of rankers' attention; "auto" = measured at warm-up. Whether it
            supports a ranker is not checked here.
        device: Index of the device among those that the process sees, which sees no other from now
            on; None = the first one.

    Raises:
        ConfigError: There is no such backend, or its device, package or required kernels are
            missing.
    """
    if name not in _CLASSES:
        raise ConfigError(f"backend: {name!r} is none of {', '.join(_CLASSES)}")
    if attention not in (known := _ATTENTIONS.get(name, ("auto",))):
        raise ConfigError(
            f"attention: {attention} is not for the backend {name}: one of {', '.join(known)}"
        )
    if device is not None:
        _see_only(name, device)
    options: dict[str, Any] = {}
    has_kernels = name in ("cpu", "npu")
    if native == "require" and not has_kernels:
        raise ConfigError(f"native: require is for the backends cpu and npu, not {name}")
    if hstu_library is not None:
        if name != "npu":
            raise ConfigError(f"hstu_library: the operator is for the backend npu, not {name}")
        options["hstu_library"] = Path(hstu_library)
    if name == "npu":
        options["attention"] = attention
    module, cls = _CLASSES[name]
    made = getattr(importlib.import_module(module), cls)
    return cast("Backend", made(native, **options) if has_kernels else made())


def _see_only(name: BackendName, device: int) -> None:
    """Hide all devices but one from this process, before the driver reads what it may use.

    So no thread can work, or wait, on another device by mistake.
    """
    variable = _VISIBLE.get(name)
    if variable is None:
        raise ConfigError(f"device: is for the backends {' and '.join(_VISIBLE)}, not {name}")
    seen = os.environ.get(variable)
    indices = [one.strip() for one in seen.split(",")] if seen else None
    if indices is not None and device >= len(indices):
        raise ConfigError(f"device: {device}, but {variable} has {len(indices)}: {seen}")
    os.environ[variable] = str(device) if indices is None else indices[device]
