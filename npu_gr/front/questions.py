"""The questions of administration that a worker asks the engine: one table, which both sides read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from npu_gr.core.arrays import I64
from npu_gr.core.history import UserKey
from npu_gr.core.served import CatalogueChange, CatalogueInfo, ModelInfo, VectorsInfo
from npu_gr.front.frames import pack, unpack
from npu_gr.front.wire import Wire, decoder, encoder, wire_of
from npu_gr.metrics.status import StatusReport
from npu_gr.replay.recorder import RecordOrder, RecordStatus
from npu_gr.server.insight import Insight
from npu_gr.server.recording import RecorderAdmin
from npu_gr.server.service_protocol import ServiceProtocol

_encode = encoder().encode


class Named(NamedTuple):
    """Items as callers know them."""

    names: tuple[str | int, ...]
    titles: tuple[str | None, ...]


class Exposed(NamedTuple):
    """The text of `/metrics`."""

    body: bytes
    content_type: str


class Scrape(NamedTuple):
    """What a scrape asks for."""

    accept: str
    names: tuple[str, ...]


class Question:
    """What is asked with, and what is answered."""

    def __init__(self, asked: Any, told: Any) -> None:
        """Derive both forms from types; None = nothing."""
        self._asked = wire_of(type(None) if asked is None else asked)
        self._told = wire_of(type(None) if told is None else told)

    def write(self, asked: Any) -> bytes:
        """Write what is asked with."""
        return _encode(pack(self._asked, asked))

    def write_answer(self, told: Any) -> bytes:
        """Write the answer."""
        return _encode(pack(self._told, told))

    def read(self, body: bytes) -> Any:
        """Read what is asked with. Raises msgspec.DecodeError where it is not of this form."""
        return _read(self._asked, body)

    def read_answer(self, body: bytes) -> Any:
        """Read the answer. Raises msgspec.DecodeError where it is not of this form."""
        return _read(self._told, body)


def _read(wire: Wire, body: bytes) -> Any:
    return unpack(wire, decoder(wire.type).decode(body))


QUESTIONS = {
    "config": Question(None, dict[str, Any]),
    "knows": Question(UserKey, dict[str, bool]),
    "items": Question(I64, Named),
    "reload": Question(None, tuple[ModelInfo, ...]),
    "catalogue": Question(None, CatalogueInfo),
    "catalogue reload": Question(None, CatalogueInfo),
    "catalogue rollback": Question(None, CatalogueInfo),
    "catalogue update": Question(CatalogueChange, CatalogueInfo),
    "vectors": Question(None, VectorsInfo),
    "vectors reload": Question(None, VectorsInfo),
    "vectors rollback": Question(None, VectorsInfo),
    "metrics": Question(Scrape, Exposed),
    "status": Question(None, StatusReport),
    "stacks": Question(None, str),
    "profile": Question(float, str),
    "bundle": Question(None, dict[str, str]),
    "record": Question(None, RecordStatus),
    "record on": Question(RecordOrder, None),
    "record off": Question(None, None),
}


def answers(
    service: ServiceProtocol, insight: Insight, recorder: RecorderAdmin
) -> Mapping[str, Callable[[Any], Awaitable[Any]]]:
    """Say how the engine answers each question.

    Args:
        service: of the instance.
        insight: into the engine's process.
        recorder: of the instance.
    """

    async def items(ids: Any) -> Named:
        names, titles = await service.items(ids)
        return Named(tuple(names), tuple(titles))

    async def reload(_: None) -> tuple[ModelInfo, ...]:
        return tuple(await service.reload_models())

    async def metrics(wanted: Scrape) -> Exposed:
        return Exposed(*await insight.exposition(wanted.accept, wanted.names))

    return {
        "config": lambda _: service.effective_config(),
        "knows": service.knows,
        "items": items,
        "reload": reload,
        "catalogue": lambda _: service.catalogue.info(),
        "catalogue reload": lambda _: service.catalogue.reload(),
        "catalogue rollback": lambda _: service.catalogue.rollback(),
        "catalogue update": lambda change: service.catalogue.update(change),
        "vectors": lambda _: service.vectors.info(),
        "vectors reload": lambda _: service.vectors.reload(),
        "vectors rollback": lambda _: service.vectors.rollback(),
        "metrics": metrics,
        "status": lambda _: insight.status(),
        "stacks": lambda _: insight.stacks(),
        "profile": insight.profile,
        "bundle": lambda _: insight.bundle_texts(),
        "record": lambda _: recorder.status(),
        "record on": recorder.switch_on,
        "record off": lambda _: recorder.switch_off(),
    }
