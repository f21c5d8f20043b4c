"""The requests that a client sends: what stands in their bodies, and the headers that place them."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from npu_gr.client.channel import AGAIN, SafeCall
from npu_gr.client.columns import Behaviours, Features, Names, feature_columns, feature_row, item_column
from npu_gr.core.errors import Unprocessable
from npu_gr.core.words import quoted
from npu_gr.server.codec.events import MAX_KEY, PRINTABLE
from npu_gr.server.codec.features import RankFeatures, RequestFeatures, SignalFeatures
from npu_gr.server.codec.fields import UserBody
from npu_gr.server.codec.media import JSON, MSGPACK

USER_HEADER, TENANT_HEADER = "X-User-Id", "X-Tenant-Id"  # by which routers and balancers place a request
MAX_HEADER = 512  # characters of the name of a user or a tenant
L = TypeVar("L", str, bytes)
F = TypeVar("F", SignalFeatures, RequestFeatures, RankFeatures)


def parts(pieces: Sequence[L], most: int, most_long: int) -> Iterator[list[L]]:
    """Cut pieces into parts: of so many pieces, and so long together, at most; a longer piece is alone."""
    part: list[L] = []
    length = 0
    for one in pieces:
        if len(part) == most or (part and length + len(one) >= most_long):
            yield part
            part, length = [], 0
        part.append(one)
        length += len(one) + 1
    if part:
        yield part


def checked_key(idempotency_key: str | None) -> str:
    """Check a key, or make one."""
    if idempotency_key is None:
        return uuid.uuid4().hex
    if not re.fullmatch(PRINTABLE, idempotency_key):
        raise Unprocessable(f"idempotency_key: {quoted(idempotency_key)}: 1 to {MAX_KEY} printable ASCII characters")
    return idempotency_key


def feature_body(features: Features | None, cls: type[F]) -> F | msgspec.UnsetType:
    """Make the part of a body. Raises Unprocessable where the call has no place for some of them."""
    if features is None:
        return msgspec.UNSET
    body: dict[str, Any] = {"user": None if features.user is None else feature_row(features.user)}
    if features.request:
        body["request"] = feature_row(features.request)
    if features.cross:
        body["cross"] = feature_columns(features.cross, "features.cross")
    for name in body:
        if name not in cls.__struct_fields__:
            raise Unprocessable(f"features.{name}: this call takes {', '.join(cls.__struct_fields__)} alone")
    return cls(**body)


def history_body(history: Behaviours | None) -> Any:
    """Make the part of a body; None = the history store has it."""
    return None if history is None else history.on_the_wire("history")


def optional_items(names: Names | None, field: str) -> bytes | None:
    """Make a column of items that the caller may leave out."""
    return None if names is None else item_column(names, field)


def call_of(
    path: str,
    body: UserBody,
    accept: str = JSON,
    headers: Mapping[str, str] | None = None,
    again: frozenset[int] = AGAIN,
) -> SafeCall:
    """Make a request about one user.

    Args:
        path: of the kind.
        body: what was not given is left out.
        accept: media type of the answer.
        headers: more of them.
        again: statuses after which it may be sent once more.
    """
    of_user = {"Content-Type": MSGPACK, USER_HEADER: _as_header(str(body.user_id))}
    if body.tenant:
        of_user[TENANT_HEADER] = _as_header(body.tenant)
    content = msgspec.msgpack.encode(given(body))
    return SafeCall(path=path, body=content, accept=accept, headers={**of_user, **(headers or {})}, again=again)


def given(body: msgspec.Struct) -> dict[str, Any]:
    """Leave out what was not given, so that an older service knows every field."""
    found = {
        name: value
        for name, value in msgspec.structs.asdict(body).items()
        if value not in (None, msgspec.UNSET, {}, [])
    }
    if found.get("tenant") == "":
        del found["tenant"]
    return found


def _as_header(name: str) -> str:
    """Write a name for placing: routers take so many bytes, and the beginning of a longer one places as well."""
    return quote(name, safe="")[:MAX_HEADER]
