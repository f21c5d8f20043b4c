"""`npu-gr doctor`: check the machine and the ops of each backend, with remedies.

`backend/checks.py` has the checks; this module is independent of devices.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from npu_gr.backend.checks import Finding, FindingState, compare, device_findings, usable_backends
from npu_gr.backend.choose import choose
from npu_gr.backend.names import BackendName
from npu_gr.core.errors import ConfigError

MACHINE = "machine"


def examine(backend: BackendName | None = None, hstu_library: Path | None = None) -> list[Finding]:
    """Run all checks in the order in which a start needs the parts: the chosen backend first.

    Args:
        backend: Backend that must work; None for all available ones.
        hstu_library: Value of the setting `hstu_library`.
    """
    python = f"{platform.python_version()}, {platform.machine()}, {os.cpu_count()} CPUs"
    machine = [
        Finding("python", FindingState.OK, python, section=MACHINE),
        Finding("torch", FindingState.OK, torch.__version__, section=MACHINE),
    ]
    found = device_findings(backend, hstu_library)
    for name in usable_backends(found, backend):
        try:
            made = choose(name)
        except ConfigError as error:
            found[name].append(Finding(f"ops {name}", FindingState.BROKEN, str(error)))
            continue
        found[name] += compare(made)
    chosen = backend or "cpu"
    ordered = sorted(found, key=lambda name: name != chosen)
    return machine + [
        one._replace(section=_title(name, backend)) for name in ordered for one in found[name]
    ]


def _title(name: BackendName, chosen: BackendName | None) -> str:
    if chosen is None:
        return f"backend {name}{' (the default)' if name == 'cpu' else ''}"
    return f"backend {name} ({'chosen' if name == chosen else 'not chosen'})"


def is_well(findings: list[Finding]) -> bool:
    """Whether nothing is broken; missing optional parts are not."""
    return all(each.state is not FindingState.BROKEN for each in findings)
