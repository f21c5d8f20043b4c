"""The end of a request is found wherever its bytes are cut, and what cannot be framed is named."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_gr.core.errors import BadRequest
from npu_gr.server.entrance.framing import HEAD_END, Chunks, Head, granted_s, parse_head, tenant_of


def head_of(text: str) -> Head:
    data = text.replace("\n", "\r\n").encode() + b"\r\n\r\n"
    return parse_head(data, len(data))


def test_a_head() -> None:
    head = head_of("POST /v1/rank?x=1 HTTP/1.1\nHost: a\nContent-Length: 12\nConnection: Close\nExpect: 100-continue")
    assert (head.method, head.path, head.body_bytes) == (b"POST", b"/v1/rank", 12)
    assert head.closes
    assert head.waits_for_continue
    assert not head.is_chunked


@pytest.mark.parametrize(
    ("version", "header", "closes"),
    [("1.1", "X: 1", False), ("1.0", "X: 1", True), ("1.0", "Connection: keep-alive", False)],
)
def test_who_closes(version: str, header: str, closes: bool) -> None:
    assert head_of(f"GET / HTTP/{version}\n{header}").closes is closes


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("GET /", "METHOD PATH"),
        ("GET / HTTP/2.0", "METHOD PATH"),
        ("POST / HTTP/1.1\nContent-Length: -1", "Content-Length"),
        ("POST / HTTP/1.1\nContent-Length: 1e3", "Content-Length"),
        ("POST / HTTP/1.1\nContent-Length: 1234567890123456", "Content-Length"),
    ],
)
def test_what_is_no_head(text: str, detail: str) -> None:
    with pytest.raises(BadRequest, match=detail):
        head_of(text)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("X: 1", 1.0),
        ("X-Request-Timeout-Ms: 250", 0.25),
        ("x-request-timeout-ms: 250\ngrpc-timeout: 100m", 0.1),
        ("X-Request-Timeout-Ms: soon", 1.0),  # the handler will say what is wrong with it
        ("X-Request-Timeout-Ms: 999999", 30.0),
    ],
)
def test_the_budget(header: str, seconds: float) -> None:
    assert granted_s(head_of(f"POST / HTTP/1.1\n{header}"), 1.0, 30.0) == pytest.approx(seconds)


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.data())
def test_the_end_of_a_chunked_body_is_found_however_it_is_cut(parts: list[bytes], data: st.DataObject) -> None:
    head = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = b"".join(b"%x;ext=1\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\nTrailer: x\r\n\r\n"
    behind = b"GET / HTTP/1.1\r\n"
    message = head + body + behind
    whole_at = len(head) + len(body)
    cuts = sorted(data.draw(st.lists(st.integers(len(head), len(message)), max_size=5)))
    chunks = Chunks(len(head))
    found = None
    for cut in [*cuts, len(message)]:
        found = chunks.end(message[:cut])
        assert (found is None) == (cut < whole_at)
        if found is not None:
            break
    assert found == whole_at


@pytest.mark.parametrize("size", [b"zz", b"", b"-1", b"fffffffffffffff"])
def test_a_chunk_without_a_size(size: bytes) -> None:
    with pytest.raises(BadRequest, match="chunk"):
        Chunks(0).end(size + b"\r\n")


@pytest.mark.parametrize("tenant", ["", "shop", "a" * 100, "ü"])
def test_the_tenant_of_a_body(tenant: str) -> None:
    body = {"user_id": 'x"tenant":"y', "tenant": tenant, "candidates": [1, 2]}
    assert tenant_of(json.dumps(body, ensure_ascii=False).encode(), 0) == tenant
    assert tenant_of(msgspec.msgpack.encode({"tenant": tenant, "candidates": [1]}), 0) == tenant


@pytest.mark.parametrize(
    "body", [{"tenant": "shop", "items": list(range(10_000))}, {"items": list(range(10_000)), "tenant": "shop"}]
)
def test_the_tenant_at_either_end_of_a_long_body(body: dict[str, object]) -> None:
    assert tenant_of(b"head" + json.dumps(body).encode(), 4) == "shop"
    assert tenant_of(b"head" + msgspec.msgpack.encode(body), 4) == "shop"


@given(st.binary(max_size=200))
def test_any_bytes_have_a_tenant(body: bytes) -> None:
    assert isinstance(tenant_of(body, 0), str)
    assert isinstance(tenant_of(b"\x81\xa6tenant" + body, 0), str)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_head_or_a_bad_request(noise: bytes) -> None:
    data = b"POST / HTTP/1.1\r\n" + noise.replace(HEAD_END, b"") + HEAD_END
    try:
        head = parse_head(data, len(data))
    except BadRequest:
        return
    assert head.body_bytes >= 0
