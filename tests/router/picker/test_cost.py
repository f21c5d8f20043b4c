"""A question stays cheap, counted in calls of Python functions: they are the same on a busy machine and a quiet one."""

from __future__ import annotations

from npu_gr.router.picker.frames import U32, Flag, Type, frame
from tests.router.picker.asked import headers
from tests.router.picker.test_connection import message
from tests.router.picker.test_hostile import OPENING, Peer
from tests.server.entrance.test_cost import Counted

MOST_CALLS = 58  # of a question and the end of its request; 54 when this was written, and 90 before


async def test_a_question_takes_few_calls() -> None:
    """As Envoy asks: the headers and the message in one piece, and later the end of its side with a reset."""
    peer = Peer()
    peer.say(OPENING)
    counts = []
    for number in (1, 3, 5):
        asks = peer.begin(number) + frame(Type.DATA, 0, number, message(headers({"x-user-id": f"u{number}"})))
        ends = frame(Type.DATA, Flag.END_STREAM, number) + frame(Type.RST_STREAM, 0, number, U32.pack(2))
        before = len(peer.wire.written)
        with Counted() as calls:
            peer.connection.data_received(asks)
            peer.connection.data_received(ends)
        counts.append(calls)
        assert len(peer.wire.written) > before
    assert counts[-1]["GrpcConnection._flush"] == 1, "an answer is one write"
    assert counts[-1]["Members.for_rank"] == 1
    assert peer.router.metrics.requests.value(kind="rank") == 3
    assert counts[-1].total() <= MOST_CALLS, counts[-1].most_common()
    peer.lost()
