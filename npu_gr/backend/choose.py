"""Choose a backend by name, once, at start. A backend that cannot be used is an error: there is no silent fallback."""

from __future__ import annotations

import importlib
from typing import cast

from npu_gr.backend.base import Backend
from npu_gr.backend.names import BackendName, NativeMode
from npu_gr.core.errors import ConfigError

_CLASSES = {
    "cpu": ("npu_gr.backend.cpu.backend", "CPUBackend"),
    "cuda": ("npu_gr.backend.cuda", "CUDABackend"),
    "npu": ("npu_gr.backend.npu.backend", "NPUBackend"),
    "reference": ("npu_gr.backend.reference", "ReferenceBackend"),
}


def choose(name: BackendName, native: NativeMode = "auto") -> Backend:
    """Make the backend of that name.

    Args:
        name: the configuration's `backend`.
        native: how our own kernels are used; `CPUBackend` and `NPUBackend` explain the modes.

    Raises:
        ConfigError: no such backend, or its device, its package or its required kernels are missing.
    """
    if name not in _CLASSES:
        raise ConfigError(f"backend: {name!r} is none of {', '.join(_CLASSES)}")
    has_kernels = name in ("cpu", "npu")
    if native == "require" and not has_kernels:
        raise ConfigError(f"native: require is for the backends cpu and npu, not {name}")
    module, cls = _CLASSES[name]
    made = getattr(importlib.import_module(module), cls)
    return cast("Backend", made(native) if has_kernels else made())
