"""What is counted: answers in time, refusals, and the latency of the admitted requests."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from npu_gr.bench import overload
from npu_gr.bench.overload import drive, lines
from npu_gr.core.errors import DeadlineExceeded, Overloaded
from npu_gr.core.kinds import SIGNAL, Kind


class Service:
    """Answers at once, refuses, is late or fails by the number of the user."""

    def __init__(self) -> None:
        self.signalled = set[str]()
        self.histories = set[bytes]()

    async def serve(self, kind: Kind[Any, Any], request: Any, _budget_s: float) -> None:
        await (self.signal if kind is SIGNAL else self.rank)(request)

    async def signal(self, request: Any) -> None:
        self.signalled.add(request.user.user)
        self.histories.add(request.history.events.items.tobytes())
        if int(request.user.user) % 2:
            raise Overloaded("planted")

    async def rank(self, request: Any) -> None:
        assert request.user.user in self.signalled
        match int(request.user.user) % 4:
            case 0:
                raise Overloaded("planted")
            case 1:
                await asyncio.sleep(0.3)
            case 2 if request.user.user.endswith("6"):
                await asyncio.sleep(0.15)
                raise DeadlineExceeded("planted")
            case _:
                pass


async def test_every_request_is_counted_once() -> None:
    service: Any = Service()
    load = await drive(service, 8, 400.0, 0.5, 0.2, 0)
    assert len(service.signalled) == len(service.histories) == 200
    assert load.refused == pytest.approx(0.25, abs=0.02)
    assert load.attained == pytest.approx(0.45, abs=0.03)  # of four: one refused, one late, a fifth of another failed
    assert load.goodput_per_s == pytest.approx(load.attained * load.offered_per_s)
    assert load.p99_s == np.inf


async def test_an_error_that_is_not_ours_is_not_swallowed() -> None:
    service: Any = Service()
    service.rank = None
    with pytest.raises(TypeError):
        await drive(service, 8, 400.0, 0.1, 0.2, 0)


def test_the_whole_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload, "LIGHT", (0.5,))
    monkeypatch.setattr(overload, "HEAVY", (5.0,))
    found = list(lines("cpu", 64, 1, 0.3, 0))
    assert len(found) == 4
    assert [line.target for line in found if line.target] == [0.9, 1.0]
    assert "without admission" in found[-1].case
    assert all(line.ratio >= 0.0 for line in found)
