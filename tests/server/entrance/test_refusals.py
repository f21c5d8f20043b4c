"""Refusals of a turn are written together, in their order, and not to connections that are gone."""

from __future__ import annotations

import asyncio
from typing import Any

from npu_gr.server.entrance.refusals import Refusals


class Wire(asyncio.Transport):
    def __init__(self, name: str, written: list[tuple[str, bytes]]) -> None:
        super().__init__()
        self.name = name
        self.written = written

    def write(self, data: Any) -> None:
        self.written.append((self.name, bytes(data)))


class Refused:
    def __init__(self, transport: asyncio.Transport | None) -> None:
        self.transport = transport


async def test_refusals_of_a_turn_are_written_when_it_ends() -> None:
    written: list[tuple[str, bytes]] = []
    refusals = Refusals(asyncio.get_running_loop())
    one, two, gone = Refused(Wire("one", written)), Refused(Wire("two", written)), Refused(Wire("gone", written))
    for connection, answer in ((one, b"1"), (two, b"2"), (gone, b"3"), (one, b"4")):
        refusals.add(connection, answer)
    gone.transport = None
    assert not written
    await asyncio.sleep(0)
    assert written == [("one", b"1"), ("two", b"2"), ("one", b"4")]
    refusals.add(two, b"5")
    refusals.write()
    assert written[3:] == [("two", b"5")], "whoever writes another answer does not wait"
    await asyncio.sleep(0)
    assert len(written) == 4, "once"
