"""`npu_gr.v1.Recommender`: every kind of the table as a call, in messages made of the Structs of its codec.

A kind that was registered after npu_gr.proto was made has no message there: it is served over HTTP alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from npu_gr.core.errors import NpuGrError, TooLarge
from npu_gr.core.kinds import KINDS, Kind, Scope
from npu_gr.server.codec import CODECS
from npu_gr.server.codec.base import Codec, Shown, UrlParts
from npu_gr.server.codec.bulk import LOOSE_BYTES
from npu_gr.server.codec.media import MSGPACK, convert
from npu_gr.server.kind_routes import parse_body
from npu_gr.server.rpc.calls import Calls, RpcCall, title_of, told
from npu_gr.server.rpc.messages import OURS, message, methods
from npu_gr.server.rpc.shapes import ITEMS, FieldShape, fields_of, shapes_of, table_of

_PACKAGE = OURS.rpartition(".")[0]
SIGNALS = "Signals"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """How a kind looks in messages."""

    kind: Kind[Any, Any]
    codec: Codec[Any, Any, Any]
    request: Any  # classes of protobuf
    answer: Any
    body: list[FieldShape]  # [] = the body is a URL over HTTP
    out: list[FieldShape]


class RecommenderService:
    """The calls of the service."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        there = {one.name for one in methods(OURS)}
        self._forms = {kind.name.title(): _form(kind) for kind in KINDS.values() if kind.name.title() in there}

    def unary(self) -> dict[str, tuple[Scope | None, Callable[[RpcCall, bytes], Awaitable[bytes]]]]:
        """Name the methods with one message: the scope that each needs, and its work."""
        return {title: (form.kind.scope, self._work(form)) for title, form in self._forms.items()}

    def _work(self, form: _Form) -> Callable[[RpcCall, bytes], Awaitable[bytes]]:
        shared = self._calls.shared
        service = shared.service
        codec = form.codec

        async def work(call: RpcCall, body: bytes) -> bytes:
            call.kind = form.kind
            if codec.loose_bytes != LOOSE_BYTES and len(body) > codec.loose_bytes:
                raise TooLarge(f"message: {len(body)} bytes, the limit of {form.kind.plural} is {codec.loose_bytes}")
            asked = await self._calls.decoded(call, form.request, body, codec.loose_bytes)

            def parse() -> tuple[Any, Shown]:
                made: Any
                if codec.body is None:
                    made = UrlParts({"user_id": asked.user_id}, {"tenant": asked.tenant})
                else:
                    made = convert(table_of(asked, form.body, "", shared.config), codec.body)
                assert call.key is not None
                return parse_body(call.key, made, codec, service, shared.config, shared.keys, call.is_about)

            def write(answer: Any, shown: Shown) -> bytes:
                out = codec.render(answer, call.request_id, MSGPACK, shown)
                fields = {"request_id": call.request_id} if out is None else fields_of(out, form.out)
                made = form.answer(**fields)
                _name_items(form, made, out, shown)
                written: bytes = made.SerializeToString()
                return written

            return await self._calls.ask(call, form.kind, asked.tenant, parse, write)

        return work

    async def signalled(self, context: Any, body: bytes) -> bytes:
        """Answer a message of Signals: an error is a verdict, too, and the stream goes on."""
        form = self._forms["Signal"]
        call: list[RpcCall] = []

        async def work(made: RpcCall, message_body: bytes) -> bytes:
            call.append(made)
            return await self._work(form)(made, message_body)

        verdict = message(f"{_PACKAGE}.SignalVerdict")
        try:
            answer = await self._calls.message(f"/{OURS}/{SIGNALS}", form.kind.scope, work, context, body)
        except Exception as error:  # noqa: BLE001  (counted and logged; the caller is told)
            problem = {
                "status": error.status if isinstance(error, NpuGrError) else 500,
                "title": title_of(error),
                "detail": told(error),
                "request_id": call[0].request_id if call else "",
            }
            refused: bytes = verdict(problem=problem).SerializeToString()
            return refused
        given: bytes = verdict(answer=form.answer.FromString(answer)).SerializeToString()
        return given


def _form(kind: Kind[Any, Any]) -> _Form:
    codec = CODECS[kind.name]
    title = kind.name.title()
    return _Form(
        kind=kind,
        codec=codec,
        request=message(f"{_PACKAGE}.{title}Request"),
        answer=message(f"{_PACKAGE}.{title}Answer"),
        body=[] if codec.body is None else shapes_of(codec.body),
        out=shapes_of(codec.answer or codec.begun),
    )


def _name_items(form: _Form, made: Any, out: msgspec.Struct | None, shown: Shown) -> None:
    """Put the names of items beside their ids."""
    for shape in form.out:
        if shape.type == ITEMS and out is not None and made.HasField(shape.name):
            column = getattr(made, shape.name)
            ids = np.fromiter(column.ids, np.int64, len(column.ids))
            column.names.extend(str(name) for name in shown.names.items(ids))
