"""How HTTP reads and writes each kind of request: one module a kind, and this table of them."""

from __future__ import annotations

from typing import Any

from npu_gr.core.kinds import ERASE, EVENTS, GENERATE, MATCH, RANK, RECOMMEND, SIGNAL
from npu_gr.server.codec import erase, events, generate, match, rank, recommend, signal
from npu_gr.server.codec.base import Codec

CODECS: dict[str, Codec[Any, Any, Any]] = {  # name of the kind -> its codec
    SIGNAL.name: signal.CODEC,
    RANK.name: rank.CODEC,
    GENERATE.name: generate.CODEC,
    MATCH.name: match.CODEC,
    RECOMMEND.name: recommend.CODEC,
    EVENTS.name: events.CODEC,
    ERASE.name: erase.CODEC,
}
