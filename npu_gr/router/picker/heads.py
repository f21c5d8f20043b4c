"""A gateway's request as the router reads requests: the head from its headers, the user from its body.

A header is a message in the message, and making an object of each costs more than all else that is read of a request.
So they come as bytes, of which nearly all have one form: the name and the value, both under 128 bytes. What has another
one is read by the library.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from urllib.parse import quote

import msgspec

from npu_gr.router.access import MAX_NAME_BYTES
from npu_gr.router.answers import Refused
from npu_gr.router.config import RouterConfig
from npu_gr.router.picker import external_processor_pb2 as pb
from npu_gr.router.request import RequestHead, headers_read, too_many_headers
from npu_gr.router.router import Router
from npu_gr.server.codec.fields import Tenant, UserId
from npu_gr.server.codec.media import JSON, decode

_MOST_DIGITS = 15
_OF_THE_REQUEST_LINE = (b":method", b":path")
_OF_THE_STATUS_LINE = (b":status",)
_KEY, _RAW_VALUE = 0x0A, 0x1A  # fields 1 and 3 of a HeaderValue, as protobuf writes them before a length
_TWO_BYTES = 128  # a length from here on takes more than one


class UserInBody(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a body that says whose it is; the instance checks the rest."""

    user_id: UserId
    tenant: Tenant = ""


def names_read(config: RouterConfig) -> frozenset[bytes]:
    """Names of the headers that `head_of` reads."""
    return headers_read(config) | {*_OF_THE_REQUEST_LINE}


def head_of(headers: pb.HeaderMap, names: Collection[bytes], router: Router, began_at: float) -> RequestHead:
    """Read the head of a request.

    Args:
        headers: all of them.
        names: as `names_read` says.
        router: bounds them.
        began_at: when the request came.

    Raises:
        Refused: it is over a limit, or what the router reads stands in it twice. DecodeError: a header is none.
    """
    head = RequestHead(began_at)
    limits = router.config.limits
    given = headers.headers[:]  # as `list` of them, which takes twice as long: it ends in an exception
    head.num_bytes = sum(map(len, given))
    if head.num_bytes > limits.max_header_bytes or len(given) > limits.max_headers:
        raise too_many_headers(limits)
    pairs = pairs_of(given, names)
    seen = head.seen = dict(pairs)
    if len(seen) < len(pairs):
        twice = next((name for name in router.once if sum(one == name for one, _ in pairs) > 1), None)
        if twice is not None:
            raise Refused(400, f"{twice.decode()}: given twice")
    length = seen.get(b"content-length")
    if length is not None and (len(length) > _MOST_DIGITS or not length.isdigit()):
        raise Refused(400, f"content-length: takes up to {_MOST_DIGITS} digits")
    head.method, head.target = seen.pop(b":method", b""), seen.pop(b":path", b"")
    seen[b"host"] = b""  # which the gateway has checked, and nobody here reads
    head.check(limits, router.once)
    return head


def status_of(headers: pb.HeaderMap) -> int:
    """Read the status of an answer; 0 where there is none."""
    _, text = next(iter(pairs_of(headers.headers[:], _OF_THE_STATUS_LINE)), (b"", b""))
    return int(text) if text.isdigit() else 0


def pairs_of(headers: Iterable[bytes], names: Collection[bytes]) -> list[tuple[bytes, bytes]]:
    """Read the headers that have one of these names, in their order.

    Raises:
        DecodeError: a header is none. One whose name is no UTF-8 may be passed over instead.
    """
    pairs = []
    for one in headers:
        size = len(one)
        at = 2 + one[1] if size > 2 else size  # the end of the name
        begin = at + 2  # of the value; before each stand the number of the field and the length
        if (
            begin <= size
            and one[0] == _KEY
            and one[at] == _RAW_VALUE
            and one[1] < _TWO_BYTES
            and one[at + 1] == size - begin < _TWO_BYTES
        ):
            name, value = one[2:at], one[begin:]
        else:
            other = pb.HeaderValue.FromString(one)
            name, value = other.key.encode(), other.raw_value or other.value.encode()
        if name in names:
            pairs.append((name, value))
    return pairs


def name_by_body(head: RequestHead, body: bytes, user_header: bytes, tenant_header: bytes) -> None:
    """Let a request be placed by the user that its body names, as the instance will read it.

    Raises:
        UnsupportedMedia: the body is neither JSON nor msgpack. BadRequest: it cannot be parsed.
        Unprocessable: it names no user.
    """
    given = head.seen.get(b"content-type", JSON.encode()).decode("latin-1")
    named = decode(body, given.partition(";")[0].strip().lower(), UserInBody)
    head.seen[user_header] = _as_header(str(named.user_id))
    if named.tenant:
        head.seen.setdefault(tenant_header, _as_header(named.tenant))


def _as_header(name: str) -> bytes:
    """Write a name as our client does, so that both are placed alike."""
    return quote(name, safe="")[:MAX_NAME_BYTES].encode()
