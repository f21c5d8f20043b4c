"""The named choice of a backend: once, at start, loudly. There is no silent fallback."""

from __future__ import annotations

import importlib
from typing import Literal, cast

from npu_gr.backend.base import Backend
from npu_gr.errors import ConfigError

BackendName = Literal["cpu", "cuda", "npu", "reference"]

_CLASSES = {
    "cpu": ("npu_gr.backend.cpu", "CPUBackend"),
    "cuda": ("npu_gr.backend.cuda", "CUDABackend"),
    "npu": ("npu_gr.backend.npu", "NPUBackend"),
    "reference": ("npu_gr.backend.reference", "ReferenceBackend"),
}


def choose(name: BackendName) -> Backend:
    """The backend of that name.

    Raises:
        ConfigError: no such backend, or its device or package is not there.
    """
    if name not in _CLASSES:
        raise ConfigError(f"backend: {name!r} is none of {', '.join(_CLASSES)}")
    module, cls = _CLASSES[name]
    return cast("Backend", getattr(importlib.import_module(module), cls)())
