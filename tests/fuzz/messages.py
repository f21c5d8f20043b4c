"""Messages for the fuzzer: valid requests of every kind and format, broken at random, and bombs.

All of it follows from a seed.
"""

from __future__ import annotations

import base64
import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from npu_gr.core.kinds import KINDS
from tests.serving import FIRST_ID

JSON, MSGPACK = b"application/json", b"application/msgpack"
COLUMNS = {
    "items": "q",
    "actions": "h",
    "timestamps": "q",
    "candidates": "q",
    "allow_items": "q",
    "deny_items": "q",
}
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**15, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(
        0.5,
        -0.0,
        1e308,
        5e-324,
        float("nan"),
        float("inf"),
        "",
        "x",
        "\0",
        "é" * 50,
        "\ud800",
        "a" * 2000,
        "%41",
        "1",
    ),
    *(
        [],
        [[]],
        [1],
        [None],
        ["a"],
        [-1],
        [2**63],
        {},
        {"a": 1},
        {"": {}},
        b"",
        b"\1" * 7,
        b"\xff" * 16,
    ),
)
HEADERS: tuple[tuple[bytes, tuple[bytes, ...]], ...] = (
    (
        b"Content-Type",
        (
            b"text/plain",
            b"",
            b"application/json; charset=utf-16",
            b"application/x-\xff",
            b"a" * 300,
        ),
    ),
    (b"Accept", (b"application/msgpack", b"*/*", b"\xff\xfe", b"application/msgpack;q=0")),
    (
        b"X-Request-Timeout-Ms",
        (b"0", b"0.01", b"1", b"-1", b"1e3", b"\xd9\xa1", b"999999999", b"9" * 50, b""),
    ),
    (b"grpc-timeout", (b"1n", b"99999999H", b"0S", b"x", b"1")),
    (b"Idempotency-Key", (b"k", b"k" * 128, b"k" * 129, b"\xff", b"")),
    (b"traceparent", (b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01", b"00-0-0-0", b"\xff" * 55)),
    (b"Content-Encoding", (b"gzip", b"identity", b"br, gzip", b"")),
    (b"Authorization", (b"Bearer \xff", b"Bearer", b"Basic eDp5", b"Bearer " + b"k" * 5000)),
    (b"X-User-Id", (b"\xf0\x9f\x98\x80", b"a" * 5000)),
    (b"Cookie", (b"a=b; " * 500,)),
    (b"Forwarded", (b'for="[::1]";by=x',)),
)
PATHS = (
    b"/",
    b"/healthz",
    b"/readyz",
    b"/v1/models",
    b"/v2",
    b"/v2/models/x",
    b"/metrics",
    b"/v1/catalog",
    b"/x",
    b"*",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What is sent.

    `is_framed`: everybody agrees where it ends, so exactly one answer comes, and the next request.
    """

    sent: bytes
    is_framed: bool
    about: str  # what was done to it

    def __str__(self) -> str:
        shown = (
            repr(self.sent)
            if len(self.sent) <= 4000
            else (f"{self.sent[:4000]!r}... of {len(self.sent)} bytes")
        )
        return f"{self.about}: {shown}"


class Maker:
    """Makes messages, one after the other."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._number = 0

    def message(self) -> Message:
        """The next one, with its id in `X-Request-Id` to tell its answer from another's."""
        self._number += 1
        kind = self.random.choice([kind for kind in KINDS.values() if kind.method == "POST"])
        what = self.random.random()
        if what < 0.04:
            return self._without_body()
        media = self.random.choice((JSON, MSGPACK))
        body = self._valid(kind.name)
        about = f"{kind.name} {media.decode()}"
        if what < 0.6:
            for _ in range(self.random.choice((1, 1, 1, 2, 5))):
                body, did = self._break(body)
                about += f", {did}"
        packed = self._pack(body, media)
        if 0.5 < what < 0.85:
            for _ in range(self.random.choice((1, 1, 2, 8))):
                packed = self._break_bytes(packed)
            about += ", bytes"
        headers = {b"Content-Type": media, b"X-Request-Id": b"%d" % self._number}
        for name, values in self.random.choices(HEADERS, k=self.random.choice((0, 0, 1, 2))):
            headers[name] = self.random.choice(values)
        if self.random.random() < 0.15:
            return self._framed_wrong(kind.path.encode(), headers, packed, about)
        return Message(
            sent=self._framed(kind.path.encode(), headers, packed), is_framed=True, about=about
        )

    # ---- bodies

    def _valid(self, name: str) -> dict[str, Any]:
        draw = self.random
        body: dict[str, Any] = {"user_id": f"u{draw.randrange(50)}"}
        num = draw.choice((0, 1, 3, 30, 200))
        history = {
            "items": [FIRST_ID + draw.randrange(300) for _ in range(num)],
            "actions": [draw.choice((1, 2, "3")) for _ in range(num)],
            "timestamps": sorted(draw.randrange(2**31) for _ in range(num)),
        }
        if draw.random() < 0.3:
            body["tenant"] = draw.choice(("", "t", "another"))
        if name == "events":
            return body | {"events": history}
        if name == "ingest":
            users = [
                {"user_id": f"u{draw.randrange(50)}", "events": history}
                for _ in range(draw.choice((1, 2, 20)))
            ]
            mode = draw.choice(({}, {"mode": "merge"}, {"mode": "replace"}, {"mode": "x"}))
            return (
                {"users": users} | {name: body[name] for name in ("tenant",) if name in body} | mode
            )
        if draw.random() < 0.8:
            body["history"] = history
        if name == "rank":
            body["candidates"] = [
                FIRST_ID + draw.randrange(400) for _ in range(draw.choice((1, 5, 300)))
            ]
            body |= draw.choice(
                ({}, {"top_k": 3}, {"timestamp": 1_700_000_000}, {"model_version": "x"})
            )
        elif name == "generate":
            body |= draw.choice(
                ({}, {"num_items": 5}, {"attributes": {"kind": ["a", "b"]}}, {"temperature": 0.5})
            )
            body |= draw.choice(({}, {"exclude_seen": False}))
        elif name == "recommend":
            body |= draw.choice(
                ({}, {"num_items": 5}, {"context": {"page": "home"}}, {"deny_items": [FIRST_ID]})
            )
            body |= draw.choice(({}, {"unknown_items": "drop"}))
            body |= draw.choice(({}, {"format": "columns"}, {"explain": True}))
        elif name == "match":
            body |= draw.choice(({}, {"num_items": 5}, {"exclude_seen": False}))
        return body

    def _break(self, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Change one place of a body."""
        draw = self.random
        body = dict(body)
        place: dict[str, Any] = body
        if isinstance(body.get("history"), dict) and draw.random() < 0.4:
            place = body["history"] = dict(body["history"])
        name = draw.choice(list(place) or ["user_id"])
        did = draw.choice(("odd", "odd", "drop", "add", "grow", "element", "other"))
        if did == "odd":
            place[name] = draw.choice(ODD)
        elif did == "drop":
            place.pop(name, None)
        elif did == "add":
            place[draw.choice(("", "x", "histori", "é", "a" * draw.choice((63, 64, 5000))))] = (
                draw.choice(ODD)
            )
        elif did == "grow":
            value = place.get(name, "a")
            # over max_body_bytes an answer may be lost
            times = draw.choice((2, 50)) if name != "users" else 2
            place[name] = value * times if isinstance(value, list | str) else value
        elif did == "element" and isinstance(place.get(name), list) and place[name]:
            place[name] = list(place[name])
            place[name][draw.randrange(len(place[name]))] = draw.choice(ODD)
        else:
            place[
                draw.choice(("base", "model_version", "num_items", "candidates", "attributes"))
            ] = draw.choice(ODD)
        return body, f"{did} {name[:20]}"

    def _pack(self, body: dict[str, Any], media: bytes) -> bytes:
        if self.random.random() < 0.4:
            body = {name: self._raw(name, value) for name, value in body.items()}
        if media == JSON:
            return json.dumps(body, default=lambda raw: base64.b64encode(raw).decode()).encode()
        return msgspec.msgpack.encode(_packable(body))

    def _raw(self, name: str, value: Any) -> Any:
        """Write columns as raw bytes, where they can be."""
        if isinstance(value, dict):
            return {inner: self._raw(inner, kept) for inner, kept in value.items()}
        if name not in COLUMNS or not isinstance(value, list):
            return value
        try:
            return struct.pack(f"<{len(value)}{COLUMNS[name]}", *value)
        except (struct.error, TypeError):
            return value

    def _break_bytes(self, body: bytes) -> bytes:
        draw = self.random
        if not body:
            return b"\0"
        at = draw.randrange(len(body))
        to = min(len(body), at + draw.choice((1, 1, 4, 40)))
        did = draw.randrange(6)
        if did == 0:
            return body[:at] + bytes([body[at] ^ (1 << draw.randrange(8))]) + body[at + 1 :]
        if did == 1:
            return body[:at] + body[to:]
        if did == 2:
            return body[:to] + body[at:]
        if did == 3:
            return body[:at]
        if did == 4:
            return body[:at] + draw.randbytes(draw.choice((1, 4, 40))) + body[at:]
        return (
            body[:at]
            + draw.choice(
                (b"\xdf\xff\xff\xff\xff", b"[" * 50, b'":', b"\xc1", b"1e999", b"\\ud800")
            )
            + body[to:]
        )

    # ---- framing

    def _framed(self, path: bytes, headers: dict[bytes, bytes], body: bytes) -> bytes:
        if self.random.random() < 0.2:
            return _head(
                b"POST", path, headers | {b"Transfer-Encoding": b"chunked"}
            ) + self._chunked(body)
        return _head(b"POST", path, headers | {b"Content-Length": b"%d" % len(body)}) + body

    def _chunked(self, body: bytes) -> bytes:
        draw = self.random
        chunks = []
        while body:
            num = draw.choice((1, 7, 100, 10_000))
            extension = draw.choice((b"", b"", b";a=b"))
            chunks.append(b"%x%s\r\n%s\r\n" % (len(body[:num]), extension, body[:num]))
            body = body[num:]
            if len(chunks) > 500:
                chunks.append(b"%x\r\n%s\r\n" % (len(body), body) if body else b"")
                body = b""
        return b"".join(chunks) + b"0\r\n\r\n"

    def _framed_wrong(
        self, path: bytes, headers: dict[bytes, bytes], body: bytes, about: str
    ) -> Message:
        draw = self.random
        sent = self._framed(path, headers, body)
        head, end, rest = sent.partition(b"\r\n\r\n")
        did = draw.choice(
            (
                "head",
                "length",
                "both",
                "twice",
                "bare",
                "huge",
                "version",
                "method",
                "path",
                "cut",
                "chunk",
            )
        )
        if did == "head":
            head = self._break_bytes(head)
        elif did == "length":
            head += b"\r\nContent-Length: " + draw.choice(
                (b"-1", b"+5", b"0x5", b"9" * 30, b"5, 5", b"", b"1_0")
            )
        elif did == "both":
            head += b"\r\nTransfer-Encoding: " + draw.choice(
                (b"chunked", b"gzip, chunked", b"x", b"identity", b"chunked,")
            )
        elif did == "twice":
            head += b"\r\n" + draw.choice(head.split(b"\r\n")[1:])
        elif did == "bare":
            head = head.replace(
                b"\r\n", draw.choice((b"\n", b"\r", b"\r\n ", b"\r\n\r")), draw.choice((1, 99))
            )
        elif did == "huge":
            head += draw.choice(
                (
                    b"\r\nX: " + b"a" * 70_000,
                    b"\r\na: b" * 3000,
                    b"\r\n" + b"a" * 9000 + b": b",
                    b"\r\n: b",
                )
            )
        elif did == "version":
            head = head.replace(
                b"HTTP/1.1",
                draw.choice((b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"HTTP/1.10", b"")),
                1,
            )
        elif did == "method":
            methods = (
                b"GET",
                b"HEAD",
                b"OPTIONS",
                b"PUT",
                b"DELETE",
                b"TRACE",
                b"CONNECT",
                b"PRI",
                b"\xff",
                b"A" * 300,
            )
            head = head.replace(b"POST", draw.choice(methods), 1)
        elif did == "path":
            paths = (
                b"*",
                b"http://x/v1/rank",
                b"//v1/rank",
                b"/v1/%72ank",
                b"/v1/rank?" + b"a" * 9000,
                b"/\xff",
                b"/v1/../x",
            )
            head = head.replace(path, draw.choice(paths), 1)
        elif did == "cut":
            return Message(
                sent=sent[: draw.randrange(1, len(sent))], is_framed=False, about=f"{about}, cut"
            )
        else:
            head = head.replace(b"Content-Length", b"X-Length") + b"\r\nTransfer-Encoding: chunked"
            rest = draw.choice(
                (
                    b"zz\r\n",
                    b"-1\r\n",
                    b"5\r\nabc\r\n",
                    b"5;" + b"a" * 9000 + b"\r\n",
                    b"0\r\n" + b"a: b\r\n" * 50,
                )
            )
            rest += draw.choice((b"", b"\r\n", b"0\r\n\r\n"))
        return Message(sent=head + end + rest, is_framed=False, about=f"{about}, framing {did}")

    def _without_body(self) -> Message:
        draw = self.random
        head = {b"X-Request-Id": b"%d" % self._number}
        if draw.random() < 0.3:
            path = b"/v1/users/" + draw.choice(
                (b"u1", b"%ff", b"a%2541", b"x" * 200, b"%00", b"a/b", b"%")
            )
            return Message(sent=_head(b"DELETE", path, head), is_framed=True, about="erase")
        method = draw.choice((b"GET", b"GET", b"POST", b"PUT", b"OPTIONS"))
        if method in (b"POST", b"PUT"):
            head[b"Content-Length"] = b"0"
        return Message(
            sent=_head(method, draw.choice(PATHS), head), is_framed=True, about="no body"
        )


def _head(method: bytes, path: bytes, headers: dict[bytes, bytes]) -> bytes:
    lines = [
        b"%s %s HTTP/1.1" % (method, path),
        b"Host: localhost",
        *(b"%s: %s" % pair for pair in headers.items()),
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _packable(value: Any) -> Any:
    """Leave out what msgpack has no place for."""
    if isinstance(value, dict):
        return {_packable(name): _packable(kept) for name, kept in value.items()}
    if isinstance(value, list):
        return [_packable(kept) for kept in value]
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if type(value) is int and not -(2**63) <= value < 2**64:
        return 0
    return value


# ---- bombs

SIZE = 4_000_000  # just under server.max_body_bytes


def _many(part: Callable[[int], bytes], between: bytes = b",", size: int = SIZE) -> bytes:
    num = size // (len(part(10**6)) + len(between))
    return between.join(map(part, range(num)))


def _same(part: bytes, between: bytes = b",", size: int = SIZE) -> bytes:
    return between.join([part] * (size // (len(part) + len(between))))


def _json(path: str, body: bytes) -> bytes:
    return (
        _head(b"POST", path.encode(), {b"Content-Type": JSON, b"Content-Length": b"%d" % len(body)})
        + body
    )


def _msgpack(path: str, body: bytes) -> bytes:
    return (
        _head(
            b"POST", path.encode(), {b"Content-Type": MSGPACK, b"Content-Length": b"%d" % len(body)}
        )
        + body
    )


def _u32(num: int) -> bytes:
    return num.to_bytes(4, "big")


def bombs() -> dict[str, bytes]:
    """Well-framed requests that ought to be cheap to reject.

    Each is one of about 4 MB, or many small ones.
    """
    user = b'{"user_id":"u",'
    packed = b"\x83\xa7user_id\xa1u"
    chunk_head = {b"Content-Type": JSON, b"Transfer-Encoding": b"chunked"}
    hour = b"1" * 10
    lists = b'"history":{"items":[%s],"actions":[%s],"timestamps":[%s]}'
    return {
        "brackets": _json("/v1/rank", b"[" * SIZE),
        "brackets in a field": _json("/v1/rank", user + b'"base":' + b"[" * SIZE),
        "braces": _json("/v1/rank", b'{"user_id":' * (SIZE // 11)),
        "candidates": _json("/v1/rank", user + b'"candidates":[' + _same(b"1") + b"]}"),
        "long candidates": _json("/v1/rank", user + b'"candidates":[' + _same(hour) + b"]}"),
        "candidates with spaces": _json(
            "/v1/rank", user + b'"candidates":[' + _same(b" 1 ") + b"]}"
        ),
        "names": _json("/v1/rank", user + b'"candidates":[' + _same(b'"a,\\",b"') + b"]}"),
        "empty names": _json("/v1/rank", user + b'"candidates":[' + _same(b'""') + b"]}"),
        "a name of escapes": _json(
            "/v1/rank", user + b'"candidates":["' + b'\\"' * (SIZE // 2) + b'"]}'
        ),
        "the longest valid names": _json(
            "/v1/rank",
            user
            + b'"candidates":[1],'
            + lists
            % (
                b",".join(b'"SKU,%030d"' % number for number in range(64_000)),
                _same(b'"1"', size=260_000),
                _same(hour, size=700_000),
            )
            + b"}",
        ),
        "a candidate of many digits": _json(
            "/v1/rank", user + b'"candidates":[' + b"9" * SIZE + b"]}"
        ),
        "a fraction of many digits": _json(
            "/v1/generate", user + b'"temperature":0.' + b"9" * SIZE + b"}"
        ),
        "the longest valid rank": _json(
            "/v1/rank",
            user
            + b'"candidates":['
            + _same(hour, size=110_000)
            + b"],"
            + lists
            % (_same(hour, size=720_000), _same(b"1", size=131_000), _same(hour, size=720_000))
            + b"}",
        ),
        "a history too long": _json(
            "/v1/rank", user + lists % (_same(hour, size=SIZE - 200), b"1", b"1") + b"}"
        ),
        "attributes": _json(
            "/v1/generate", user + b'"attributes":{' + _many(lambda n: b'"%06d":[1]' % n) + b"}}"
        ),
        "values of an attribute": _json(
            "/v1/generate", user + b'"attributes":{"a":[' + _same(b'""') + b"]}}"
        ),
        "context": _json(
            "/v1/recommend", user + b'"context":{' + _many(lambda n: b'"%06d":1' % n) + b"}}"
        ),
        "many small attributes": _json(
            "/v1/generate",
            user + b'"attributes":{' + _many(lambda n: b'"%05d":[1]' % n, size=65_000) + b"}}",
        ),
        "an unknown name": _json("/v1/rank", b'{"' + b"a" * SIZE + b'":1}'),
        "an unknown name of a column": _json(
            "/v1/rank", user + b'"history":{"' + b"a" * SIZE + b'":1}}'
        ),
        "a choice that is none": _json(
            "/v1/generate", user + b'"normalise":"' + b"a" * SIZE + b'"}'
        ),
        "a name": _json("/v1/rank", b'{"user_id":"' + b"a" * SIZE + b'"}'),
        "escapes": _json("/v1/rank", b'{"user_id":"' + b"\\u00e9" * (SIZE // 6) + b'"}'),
        "the same field": _json("/v1/rank", b"{" + _same(b'"user_id":"u"') + b"}"),
        "the same history": _json(
            "/v1/rank",
            b"{" + _same(b'"history":{"items":[1,1],"actions":[1],"timestamps":[]}') + b"}",
        ),
        "spaces": _json("/v1/rank", b" " * SIZE),
        "base64": _json("/v1/rank", user + b'"candidates":"' + b"A" * SIZE + b'"}'),
        "bytes that are no text": _json("/v1/rank", b'{"user_id":"' + b"\xff" * SIZE + b'"}'),
        "events": _json("/v1/events", user + b'"events":{"items":[' + _same(b"1") + b"]}}"),
        "an idempotency key": _json(
            "/v1/events", user + b'"idempotency_key":"' + b"a" * SIZE + b'"}'
        ),
        "items of the catalogue": _json(
            "/v1/catalog/items",
            b'{"add":[' + _many(lambda n: b'{"item_id":%d,"sid":[1,2,3]}' % n) + b"]}",
        ),
        "as many items as may be": _json(
            "/v1/catalog/items",
            b'{"add":['
            + _many(lambda n: b'{"item_id":%d,"sid":[1,2,3]}' % n, size=260_000)
            + b"]}",
        ),
        "attributes of an item": _json(
            "/v1/catalog/items",
            b'{"add":[{"item_id":1,"sid":[1],"attributes":{'
            + _many(lambda n: b'"%d":1' % n, size=260_000)
            + b"}}]}",
        ),
        "items to withdraw": _json("/v1/catalog/items", b'{"withdraw":[' + _same(b"1") + b"]}"),
        "an order to record": _json("/debug/record", b'{"' + b"a" * SIZE + b'":1}'),
        "packed candidates": _msgpack(
            "/v1/rank", packed + b"\xaacandidates\xdd" + _u32(SIZE) + b"\1" * SIZE
        ),
        "packed nothing": _msgpack(
            "/v1/rank", packed + b"\xaacandidates\xdd" + _u32(SIZE) + b"\xc0" * SIZE
        ),
        "packed 4 G candidates": _msgpack(
            "/v1/rank", packed + b"\xaacandidates\xdd\xff\xff\xff\xff" + b"\1" * SIZE
        ),
        "packed 4 G bytes": _msgpack(
            "/v1/rank", packed + b"\xaacandidates\xc6\xff\xff\xff\xff" + b"\1" * SIZE
        ),
        "packed 4 G names": _msgpack(
            "/v1/rank", b"\xdf\xff\xff\xff\xff" + b"\xa4base\xc0" * (SIZE // 6)
        ),
        "packed arrays": _msgpack("/v1/rank", packed + b"\xa4base" + b"\x91" * SIZE),
        "packed empty arrays": _msgpack(
            "/v1/rank", packed + b"\xa4base\xdd" + _u32(SIZE) + b"\x90" * SIZE
        ),
        "packed extensions": _msgpack(
            "/v1/rank", packed + b"\xa4base\xdd" + _u32(SIZE // 3) + b"\xd4\5\0" * (SIZE // 3)
        ),
        "a packed extension": _msgpack(
            "/v1/rank", packed + b"\xa4base\xc9\xff\xff\xff\xff\5" + b"\0" * SIZE
        ),
        "packed attributes": _msgpack(
            "/v1/generate",
            packed
            + b"\xaaattributes\xdf"
            + _u32(500_000)
            + _many(lambda n: b"\xa5%05x\x91\1" % (n % 10**6), b""),
        ),
        "many small packed attributes": _msgpack(
            "/v1/generate",
            packed
            + b"\xaaattributes\xdf"
            + _u32(10_000)
            + b"".join(b"\xa3" + _u32(n)[1:] + b"\x91\1" for n in range(9999)),
        ),
        "gzip": _head(
            b"POST", b"/v1/rank", {b"Content-Encoding": b"gzip", b"Content-Length": b"%d" % SIZE}
        )
        + b"\0" * SIZE,
        "chunks of a byte": _head(b"POST", b"/v1/rank", chunk_head)
        + b"1\r\n \r\n" * (SIZE // 6)
        + b"0\r\n\r\n",
        "a trailer": _head(b"POST", b"/v1/rank", chunk_head)
        + b"0\r\n"
        + b"a: b\r\n" * (SIZE // 6)
        + b"\r\n",
        "an extension of a chunk": _head(b"POST", b"/v1/rank", chunk_head)
        + b"1;"
        + b"a" * SIZE
        + b"\r\n",
        "headers": _head(b"POST", b"/v1/rank", {b"X%d" % n: b"" for n in range(6000)}),
        "a request line": b"GET /" + b"a" * SIZE,
        "requests without a body": b"POST /v1/rank HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
        b"0\r\n\r\n" * 20_000,
        "requests for health": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10_000,
        "requests that nobody knows": b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10_000,
        "line ends": b"\r\n" * (SIZE // 2),
        "a query": _head(
            b"DELETE", b"/v1/users/u?" + b"&".join(b"a%d=1" % n for n in range(900)), {}
        ),
    }
