"""What the entrance tells the shedder of room is for requests that are still on their way."""

from __future__ import annotations

import pytest

from npu_gr.admission.config import AdmissionConfig
from npu_gr.admission.door import Door, Slot
from npu_gr.core.errors import Refusal
from npu_gr.core.kinds import RANK
from npu_gr.server.auth.key_ring import KeyRing
from npu_gr.server.config import ServerConfig
from npu_gr.server.entrance.entrance import ON_ITS_WAY, Entrance
from tests.server.fake import metrics_of_all_kinds

OBJECTIVE_S = 0.05


class Guest:
    """Counts its refusals."""

    def __init__(self) -> None:
        self.refusals = 0

    def let_in(self, slot: Slot) -> None:
        pass

    def refuse(self, reason: Refusal) -> None:
        self.refusals += 1


@pytest.mark.parametrize("budget_s", [0.02, OBJECTIVE_S, 1.0])
async def test_what_goes_up_is_not_refused_although_a_part_of_its_time_is_over(budget_s: float) -> None:
    door = Door(AdmissionConfig(), lambda _kind: OBJECTIVE_S, clock=lambda: 100.0, call_later=lambda _s, _call: None)
    entrance = Entrance(ServerConfig(), door, metrics_of_all_kinds(), KeyRing(None))
    while not door.waiting:
        door.arrive(RANK.name, "", 100.0, 1.0, Guest())
    on_its_way_s = ON_ITS_WAY * min(OBJECTIVE_S, budget_s)
    guests = [Guest() for _ in range(door.room(RANK.name, "", budget_s))]
    room = entrance.room(RANK.name, "", budget_s)
    for guest in guests:
        door.arrive(RANK.name, "", 100.0 - on_its_way_s, budget_s, guest)
    refused = [guest.refusals for guest in guests]
    assert room > 0
    assert not any(refused[:room])
    assert refused[-1], "no more go up than where nothing is on its way"
