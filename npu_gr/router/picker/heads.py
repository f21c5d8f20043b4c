"""A gateway's request as the router reads requests: the head from its headers, the user from its body."""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from npu_gr.router.answers import Refused
from npu_gr.router.config import RouterConfig
from npu_gr.router.picker import external_processor_pb2 as pb
from npu_gr.router.request import RequestHead, headers_read, too_many_headers
from npu_gr.router.router import Router
from npu_gr.server.codec.fields import Tenant, UserId
from npu_gr.server.codec.media import JSON, decode

_OF_THE_REQUEST_LINE = (b":method", b":path", b":authority")


class UserInBody(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a body that says whose it is; the instance checks the rest."""

    user_id: UserId
    tenant: Tenant = ""


def names_read(config: RouterConfig) -> dict[str, bytes]:
    """Names of the headers that `head_of` reads, as the gateway writes them and as the router does."""
    return {name.decode(): name for name in (*headers_read(config), *_OF_THE_REQUEST_LINE)}


def head_of(headers: pb.HeaderMap, names: Mapping[str, bytes], router: Router) -> RequestHead:
    """Read the head of a request.

    Args:
        headers: all of them.
        names: as `names_read` says.
        router: bounds them.

    Raises:
        Refused: it is over a limit, or what the router reads stands in it twice.
    """
    head = RequestHead(began_at=time.monotonic())
    limits, seen = router.config.limits, head.seen
    head.num_bytes = headers.ByteSize()
    if head.num_bytes > limits.max_header_bytes or len(headers.headers) > limits.max_headers:
        raise too_many_headers(limits)
    for one in headers.headers:
        name = names.get(one.key)
        if name is None:
            continue
        if name in seen and name in router.once:
            raise Refused(400, f"{one.key}: given twice")
        seen[name] = one.raw_value or one.value.encode()
    if not seen.get(b"content-length", b"0").isdigit():
        raise Refused(400, "content-length: not a number")
    head.method, head.target = seen.pop(b":method", b""), seen.pop(b":path", b"")
    seen.setdefault(b"host", seen.pop(b":authority", b""))
    head.check(limits, router.once)
    return head


def status_of(headers: pb.HeaderMap) -> int:
    """Read the status of an answer; 0 where there is none."""
    text = next((one.raw_value or one.value.encode() for one in headers.headers if one.key == ":status"), b"")
    return int(text) if text.isdigit() else 0


def name_by_body(head: RequestHead, body: bytes, user_header: bytes, tenant_header: bytes) -> None:
    """Let a request be placed by the user that its body names, as the instance will read it.

    Raises:
        UnsupportedMedia: the body is neither JSON nor msgpack. BadRequest: it cannot be parsed.
        Unprocessable: it names no user.
    """
    given = head.seen.get(b"content-type", JSON.encode()).decode("latin-1")
    named = decode(body, given.partition(";")[0].strip().lower(), UserInBody)
    head.seen[user_header] = str(named.user_id).encode()
    if named.tenant:
        head.seen.setdefault(tenant_header, named.tenant.encode())
