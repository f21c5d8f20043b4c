"""`CODECS`: how HTTP parses and renders each kind of request; one module per kind."""

from __future__ import annotations

from typing import Any

from npu_gr.core.kinds import ERASE, EVENTS, GENERATE, INGEST, MATCH, RANK, RECOMMEND, SIGNAL
from npu_gr.server.schemas import erase, events, generate, ingest, match, rank, recommend, signal
from npu_gr.server.schemas.fields import Codec

CODECS: dict[str, Codec[Any, Any, Any]] = {  # name of the kind -> its codec
    SIGNAL.name: signal.CODEC,
    RANK.name: rank.CODEC,
    GENERATE.name: generate.CODEC,
    MATCH.name: match.CODEC,
    RECOMMEND.name: recommend.CODEC,
    EVENTS.name: events.CODEC,
    INGEST.name: ingest.CODEC,
    ERASE.name: erase.CODEC,
}
