"""Admission refuses what it says it refuses, names the kind, and holds no slot outside a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from npu_gr.admission.admission import Admission, AdmissionConfig
from npu_gr.admission.brownout import BrownoutConfig
from npu_gr.core.errors import Overloaded
from npu_gr.core.kinds import ERASE, EVENTS, GENERATE, KINDS, MATCH, RANK, SIGNAL, Kind
from npu_gr.core.request import Brownout

OBJECTIVE_S = 0.1


@dataclass
class Device:
    """A queue that says what the test wants."""

    waits_s: float = 0.0
    pressure: float = 0.0

    def wait_s(self, objective_s: float) -> float:
        assert objective_s == OBJECTIVE_S
        return self.waits_s


def objective_s(_kind: str) -> float:
    return OBJECTIVE_S


def admission(device: Device | None = None, first: Kind[Any, Any] = RANK, **settings: Any) -> Admission:
    brownout = BrownoutConfig(rise_s=0.1, fall_s=1.0)
    return Admission(
        AdmissionConfig(**{"max_inflight": 8, "min_inflight": 2, **settings}),
        brownout,
        objective_s,
        device or Device(),
        first,
    )


def test_a_slot_is_held_while_the_block_runs() -> None:
    door = admission(max_inflight=1)
    with door.admit(RANK, 1.0):
        assert door.inflight == 1
        with pytest.raises(Overloaded, match="1 requests in flight, the limit is 1"):
            door.check(RANK)
    assert door.inflight == 0
    with pytest.raises(ZeroDivisionError), door.admit(RANK, 1.0):
        _ = 1 / 0
    assert door.inflight == 0


def test_a_request_that_would_wait_too_long_is_refused_and_holds_nothing() -> None:
    door = admission(Device(waits_s=0.09))  # of an objective of 0.1 s
    with pytest.raises(Overloaded, match="it would wait 90 ms for the device, the limit is 60"), door.admit(RANK, 1.0):
        pass
    with pytest.raises(Overloaded, match="it would wait 90 ms for the device, it has 50"), door.admit(RANK, 0.05):
        pass
    assert door.inflight == 0


@pytest.mark.parametrize("kind", [kind for kind in KINDS.values() if not kind.uses_device], ids=lambda kind: kind.name)
def test_a_kind_that_does_not_use_the_device_does_not_wait_for_it(kind: Kind[Any, Any]) -> None:
    door = admission(Device(waits_s=9.0))
    with door.admit(kind, 1.0):
        assert door.inflight == (not kind.must_finish)


def test_brownout_refuses_what_matters_less_and_says_what() -> None:
    device = Device(pressure=5.0)
    door = admission(device)
    now_at = 0.0
    while door.observe(now_at) is not Brownout.REJECT:
        now_at += 0.05
    for kind, plural in ((MATCH, "matches"), (GENERATE, "generates"), (SIGNAL, "signals")):
        with pytest.raises(Overloaded, match=f"^overloaded: {plural} are refused, ranks come first$"):
            door.check(kind)
    for allowed in (RANK, EVENTS, ERASE):
        door.check(allowed)


def test_brownout_never_refuses_what_the_instance_is_there_for() -> None:
    door = admission(first=GENERATE)
    door.brownout.step = Brownout.REJECT
    door.check(GENERATE)
    with pytest.raises(Overloaded, match="signals are refused, generates come first"):
        door.check(SIGNAL)


def test_an_erasure_needs_no_slot() -> None:
    door = admission(Device(waits_s=9.0), max_inflight=1)
    with door.admit(EVENTS, 1.0), door.admit(ERASE, 0.0):
        assert door.inflight == 1


def test_other_settings_are_in_force_at_once() -> None:
    door = admission(max_inflight=1)
    with door.admit(RANK, 1.0):
        door.reconfigure(AdmissionConfig(max_inflight=2), BrownoutConfig(), objective_s)
        assert door.limit == 2
        with door.admit(RANK, 1.0), pytest.raises(Overloaded):
            door.check(RANK)
    assert door.inflight == 0
