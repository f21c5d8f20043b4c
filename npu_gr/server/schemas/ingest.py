"""The codec of ingests: POST /v1/events/bulk, events of many users of one tenant.

A body that has not this form is rejected whole. A user whose events cannot be used fails alone: the
answer has the reason in the user's place.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from npu_gr.core.errors import NpuGrError, RequestError
from npu_gr.core.history import Mode, UserKey, Write, Written
from npu_gr.core.names import Names
from npu_gr.core.request import IngestAnswer, IngestRequest
from npu_gr.server.config import ServerConfig
from npu_gr.server.schemas.events import Key
from npu_gr.server.schemas.fields import (
    Codec,
    History,
    ResponseFields,
    Tenant,
    UserId,
    stored_events,
)

MOST_USERS = 1000  # of a call
INGEST_BYTES = 262_144  # of a call: decoding it stops the event loop for some 10 ms


class UserEvents(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """New behaviours of one of the users."""

    user_id: UserId
    events: History
    idempotency_key: Key | None = None  # events that come with one key of a user are appended once


class IngestBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """New behaviours of many users; one may be named several times."""

    users: Annotated[list[UserEvents], msgspec.Meta(min_length=1, max_length=MOST_USERS)]
    tenant: Tenant = ""
    # append | merge: only what the store lacks, in time order | replace: in the place of all that it has of these users
    mode: Mode = Mode.APPEND

    @property
    def user(self) -> UserKey:
        """Nobody, of the tenant."""
        return UserKey(self.tenant, "")


class UserFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why nothing was written, as the problem details of a single call say it."""

    status: int
    title: str
    detail: str


class UserWritten(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a user: how many events the store keeps now, and how many of them are new.

    Or the error.

    `num_filled` of the events that a merge found in the store gained features.
    """

    num_events: int | None = None
    num_added: int = 0
    num_filled: int = 0
    error: UserFailure | None = None


class IngestOut(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the users, in the order of the body."""

    request_id: str
    num_added: int
    num_failed: int
    users: list[UserWritten]


def parse(body: IngestBody, config: ServerConfig, names: Names) -> IngestRequest:
    """Make a request of a body; what cannot be read of a user is kept as its error."""

    def write(one: UserEvents) -> Write | RequestError:
        try:
            events = stored_events(one.events, config, names)
        except RequestError as error:
            return error
        return Write(UserKey(body.tenant, str(one.user_id)), events, body.mode, one.idempotency_key)

    return IngestRequest(tenant=body.tenant, writes=tuple(write(one) for one in body.users))


def render(answer: IngestAnswer, request_id: str, _media: str, _shown: ResponseFields) -> IngestOut:
    """Write what became of the users."""

    def out(one: Written | NpuGrError) -> UserWritten:
        if isinstance(one, Written):
            return UserWritten(
                num_events=one.num_events, num_added=one.num_added, num_filled=one.num_filled
            )
        return UserWritten(error=UserFailure(status=one.status, title=one.title, detail=str(one)))

    return IngestOut(
        request_id=request_id,
        num_added=answer.num_added,
        num_failed=answer.num_failed,
        users=[out(one) for one in answer.results],
    )


CODEC = Codec(
    body=IngestBody, answer=IngestOut, parse=parse, render=render, loose_bytes=INGEST_BYTES
)
