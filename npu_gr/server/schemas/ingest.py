"""The codec of bulk events: POST /v1/events/bulk, events of many users of one tenant.

A malformed body is rejected as a whole. A user with invalid events fails alone: the answer has the
error at the user's index.
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
    check_user,
    stored_events,
)

MOST_USERS = 1000  # users of a request
INGEST_BYTES = 262_144  # length of a body; decoding it blocks the event loop for about 10 ms


class UserEvents(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """New behaviours of one user."""

    user_id: UserId
    events: History
    # a repeated request of a user with the same key appends once
    idempotency_key: Key | None = None


class IngestBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """New behaviours of many users; a user may appear several times."""

    users: Annotated[list[UserEvents], msgspec.Meta(min_length=1, max_length=MOST_USERS)]
    tenant: Tenant = ""
    # append | merge: add the events that the store lacks, in time order | replace: all events of
    # these users
    mode: Mode = Mode.APPEND

    @property
    def user(self) -> UserKey:
        """The tenant with an empty user id; the access log has no single user."""
        return UserKey(self.tenant, "")


class UserFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a user's events were not written, with the fields of problem details."""

    status: int
    title: str
    detail: str


class UserWritten(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one user: the counts, or the error."""

    num_events: int | None = None  # events that the store now has of the user
    num_added: int = 0
    num_filled: int = 0  # stored events that gained features by a merge
    # new events that came after newer ones of the user, in this request or an earlier one, and were
    # sorted
    sorted_events: int = 0
    error: UserFailure | None = None


class IngestOut(msgspec.Struct, frozen=True, kw_only=True):
    """The results, in the order of the body's users."""

    request_id: str
    num_added: int
    num_failed: int
    users: list[UserWritten]


def parse(body: IngestBody, config: ServerConfig, names: Names) -> IngestRequest:
    """Make a request from a body; a user with invalid events gets the error in its place."""

    def write(one: UserEvents) -> Write | RequestError:
        user = UserKey(body.tenant, str(one.user_id))
        try:
            check_user(user)
            events = stored_events(one.events, config, names)
        except RequestError as error:
            return error
        return Write(user, events, body.mode, one.idempotency_key)

    return IngestRequest(tenant=body.tenant, writes=tuple(write(one) for one in body.users))


def render(
    answer: IngestAnswer, request_id: str, _media: str, _response_fields: ResponseFields
) -> IngestOut:
    """Convert the answer for the wire."""

    def out(one: Written | NpuGrError) -> UserWritten:
        if isinstance(one, Written):
            return UserWritten(
                num_events=one.num_events,
                num_added=one.num_added,
                num_filled=one.num_filled,
                sorted_events=one.num_late,
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
