"""The door of an engine behind front workers: it lets everybody in, for the workers' doors have decided.

It learns the pace of the whole instance, and its windows are what the workers share.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from npu_gr.admission.config import AdmissionConfig
from npu_gr.admission.door import Door, Slot
from npu_gr.core.errors import Refusal


class EngineDoor(Door):
    """Counts who is inside, and who waits at the workers' doors."""

    def __init__(self, config: AdmissionConfig, objective_s: Callable[[str], float], *, batch_requests: int) -> None:
        super().__init__(_open(config), objective_s, batch_requests=batch_requests)
        self.read_pressure: Callable[[], float] = lambda: 0.0  # of the workers' doors

    def reconfigure(self, config: AdmissionConfig, objective_s: Callable[[str], float]) -> None:
        """Apply other settings from now on; nobody is refused here."""
        super().reconfigure(_open(config), objective_s)

    @property
    def pressure(self) -> float:
        """That of the worker whose callers wait longest."""
        return self.read_pressure()

    def take(self, kind: str, tenant: str, came_at: float) -> Slot:
        """Let a request in.

        Args:
            kind: its name.
            tenant: whose it is.
            came_at: when its last byte came to the worker.
        """
        guest = _Guest()
        self.arrive(kind, tenant, came_at, float("inf"), guest)
        assert guest.slot is not None, "nobody is refused"
        return guest.slot


class _Guest:
    slot: Slot | None = None

    def let_in(self, slot: Slot) -> None:
        self.slot = slot

    def refuse(self, reason: Refusal) -> None:
        raise AssertionError(f"refused for {reason} by a door that is open")


def _open(config: AdmissionConfig) -> AdmissionConfig:
    return msgspec.structs.replace(config, enabled=False)
