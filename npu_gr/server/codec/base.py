"""`Codec`: the body of one kind of request, its answer on the wire, and the two translations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from npu_gr.core.arrays import I64
from npu_gr.core.history import UserKey
from npu_gr.core.kinds import A, Q
from npu_gr.core.names import Names
from npu_gr.server.codec import bulk
from npu_gr.server.config import ServerConfig


class NamesUser(Protocol):
    """A body that names its user. The access log needs the user even of a request that is refused after decoding."""

    @property
    def user(self) -> UserKey:
        """The user that the request is about."""
        ...


B = TypeVar("B", bound=NamesUser)


class UrlParts(NamedTuple):
    """The URL of a request without a body: variables of its path, and its query, each decoded once."""

    path: Mapping[str, str]
    query: Mapping[str, str]

    @property
    def user(self) -> UserKey:
        """The user that the path names; the tenant is in the query."""
        return UserKey(self.query.get("tenant", ""), self.path["user_id"])


class Shown(NamedTuple):
    """What an answer says of its items."""

    names: Names
    fields: tuple[str, ...] = ()  # of `ITEM_FIELDS` in `codec/fields.py`

    def titles(self, ids: I64 | None) -> list[str | None] | msgspec.UnsetType:
        """Return the titles of items where the request asks for them; null = one has none."""
        return self.names.titles(ids) if ids is not None and "title" in self.fields else msgspec.UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec(Generic[B, Q, A]):
    """One kind of request on the wire. B = body, Q = request, A = answer of the service.

    `parse` gets the names of the versions in service, and raises TooLarge or Unprocessable, with the field and the
    limit; `read_headers` raises BadRequest. `render` gets the answer, the request's id, the media type and what is
    shown of items: msgpack carries raw columns where JSON has lists.
    """

    body: type[B] | None  # the Struct that a body is decoded into; None: no body, `parse` gets `UrlParts`
    answer: type[msgspec.Struct] | None  # the Struct that `render` makes; None: an answer without content
    begun: type[msgspec.Struct] | None = None  # the Struct of an answer with status 202: done, but not to the end
    parse: Callable[[B, ServerConfig, Names], Q]
    render: Callable[[A, str, str, Shown], msgspec.Struct | None]
    loose_bytes: int = bulk.LOOSE_BYTES  # that a body may have beside its columns
    read_headers: Callable[[Q, Mapping[str, str]], Q] | None = None  # what the HTTP headers add; None = nothing
    operation: str | None = None  # OpenAPI's operationId; None = the kind's name
    parameters: tuple[dict[str, Any], ...] = ()  # OpenAPI's, beside those of the path and the time limit
    done: str = "Done."  # OpenAPI's description of a good answer
