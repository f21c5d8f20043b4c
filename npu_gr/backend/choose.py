"""Make the backend that the configuration names, once, at start.

A backend that cannot be used is an error: there is no silent fallback.
"""

from __future__ import annotations

import importlib
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
_ATTENTIONS: dict[BackendName, tuple[AttentionMode, ...]] = {
    "cuda": ("auto", "triton", "torch"),
    "npu": ("auto", "ascend_c", "mxrec", "triton", "torch"),
}


def choose(
    name: BackendName,
    native: NativeMode = "auto",
    hstu_library: str | None = None,
    attention: AttentionMode = "auto",
) -> Backend:
    """Make the backend of that name.

    Args:
        name: The configuration's `backend`.
        native: Use of our own kernels; `CPUBackend` and `NPUBackend` explain the modes.
        hstu_library: Path of the library with Huawei's operator for rankers without a relative
            bias; backend npu only.
        attention: Implementation of rankers' attention; "auto" = measured at warm-up. Whether it
            supports a ranker is not checked here.

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
