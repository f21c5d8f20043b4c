"""A request and its answer pass unchanged; a request that another parser could read differently is rejected."""

from __future__ import annotations

import asyncio
import io
import os

import aiohttp
import pytest

from tests.router.fake import site


async def raw(port: int, data: bytes, timeout_s: float = 3.0) -> bytes:
    """Send bytes. Returns everything that comes back until the connection closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(), timeout_s)
    finally:
        writer.close()


def post(*lines: bytes, body: bytes = b"") -> bytes:
    head = b"\r\n".join((b"POST /v1/rank HTTP/1.1", b"Host: a", b"X-User-Id: u", b"Connection: close", *lines))
    return head + b"\r\n\r\n" + body


async def test_signal_and_rank_meet_and_the_answer_says_where() -> None:
    async with site() as s:
        for i in range(30):
            status, signalled, headers = await s.post("signal", f"u{i}")
            assert status == 202
            assert headers["X-NpuGr-Placement"] == f"{signalled['instance']}@{s.router.members.ring.epoch}"
            status, ranked, headers = await s.post("rank", f"u{i}")
            assert (status, ranked["hit"], headers["X-NpuGr-Instance"]) == (200, True, signalled["instance"])
            assert ranked["instance"] == s.owner(f"u{i}").name
        assert all(fake.prefixes for fake in s.fakes)


async def test_a_placement_that_the_rank_brings_beats_the_ring() -> None:
    async with site() as s:
        other = next(fake for fake in s.fakes if fake is not s.owner("u"))
        _, answer, _ = await s.post("rank", X_NpuGr_Placement=f"{other.name}@01234567+spilled")
        assert answer["instance"] == other.name
        _, answer, _ = await s.post("rank", X_NpuGr_Placement="unknown@01234567")
        assert answer["instance"] == s.owner("u").name


@pytest.mark.parametrize("size", [0, 1, 70_000, 3_000_000])
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_of_any_size_arrives_as_it_was(size: int, is_chunked: bool) -> None:
    body = os.urandom(size)

    async def pieces() -> object:
        for start in range(0, size, 50_000):
            yield body[start : start + 50_000]

    async with (
        site(1) as s,
        s.http.post(
            f"{s.url}/v1/rank", data=pieces() if is_chunked else io.BytesIO(body), headers={"X-User-Id": "u"}
        ) as answer,
    ):
        assert (await answer.json())["size"] == size
        assert s.fakes[0].bodies == [body]


async def test_a_chunked_answer_comes_back_whole() -> None:
    async with site(1) as s:
        async with s.http.get(f"{s.url}/v1/catalog") as answer:
            assert await answer.read() == b"one two three"
        old = await raw(s.port, b"GET /v1/catalog HTTP/1.0\r\n\r\n")
        assert b"chunked" not in old
        assert old.endswith(b"\r\n\r\none two three")


async def test_connections_are_kept_on_both_sides() -> None:
    async with site(1) as s:
        for _ in range(5):
            await s.post("rank")
        assert len(s.router.connections) == 1
        assert len({request.transport for request in s.fakes[0].seen} | {None}) <= 2


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with site(1) as s:
        one = b"POST /v1/rank HTTP/1.1\r\nHost: a\r\nX-User-Id: u\r\nX-Request-Id: r%d\r\nContent-Length: %d\r\n\r\n"
        requests = b"".join(one % (i, i) + b"x" * i for i in range(5)) + post(b"X-Request-Id: last")
        answer = await raw(s.port, requests)
        assert [int(part.split(b"}")[0]) for part in answer.split(b'"size": ')[1:]] == [0, 1, 2, 3, 4, 0]


async def test_what_is_passed_on_and_what_is_not() -> None:
    async with site(1) as s:
        headers = {
            "X-Request-Timeout-Ms": "500",
            "X-Request-Id": "abc",
            "traceparent": "t",
            "Keep-Alive": "1",
            "X-A": "b",
        }
        headers |= {"Connection": "keep-alive, X-A", "Authorization": "Bearer k"}
        async with s.http.post(f"{s.url}/v1/rank", headers={"X-User-Id": "u", **headers}):
            pass
        seen = s.fakes[0].seen[0].headers
        assert 300 < float(seen["X-Request-Timeout-Ms"]) <= 500
        assert (seen["X-Request-Id"], seen["traceparent"], seen["Authorization"]) == ("abc", "t", "Bearer k")
        assert "X-A" not in seen
        assert "Keep-Alive" not in seen


async def test_connection_cannot_drop_what_a_request_needs() -> None:
    async with site(1) as s:
        named = b"Connection: close, host, Content-Length, authorization, x-user-id, x-request-id, X-Tenant-Id, x-a"
        lines = (b"X-Request-Id: i", b"Authorization: Bearer k", b"X-Tenant-Id: t", b"X-A: b", b"Content-Length: 1")
        request = b"\r\n".join((b"POST /v1/rank HTTP/1.1", b"Host: a", b"X-User-Id: u", named, *lines)) + b"\r\n\r\na"
        assert (await raw(s.port, request)).startswith(b"HTTP/1.1 200 ")
        seen = s.fakes[0].seen[0].headers
        assert [seen[name] for name in ("Host", "X-User-Id", "X-Request-Id", "X-Tenant-Id")] == ["a", "u", "i", "t"]
        assert (seen["Authorization"], s.fakes[0].bodies) == ("Bearer k", [b"a"])
        assert "X-A" not in seen


REFUSED = [
    (b"GET /v1/models HTTP/1.1\r\n\r\n", 400),  # no host
    (post(b"Content-Length: 3", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"), 400),
    (post(b"Transfer-Encoding: chunked", b"Content-Length: 3", body=b"0\r\n\r\n"), 400),
    (post(b"Content-Length: 3", b"Content-Length: 4", body=b"abcd"), 400),
    (post(b"Content-Length: 3", b"Content-Length: 3", body=b"abc"), 400),
    (post(b"Content-Length: +3", body=b"abc"), 400),
    (post(b"Content-Length: 3, 3", body=b"abc"), 400),
    (post(b"Content-Length : 3", body=b"abc"), 400),
    (post(b"Transfer-Encoding: chunked, identity", body=b"0\r\n\r\n"), 400),
    (post(b"Transfer-Encoding: xchunked", body=b"0\r\n\r\n"), 400),
    (post(b"Transfer-Encoding: chunked", body=b"zz\r\n"), 400),
    (post(b"A: b\n c"), 400),
    (post(b"A\x00: b"), 400),
    (post(b"Host: b"), 400),
    (post(b"x-user-id: v"), 400),
    (b"POST /v1/rank HTTP/1.1\nHost: a\n\n", 400),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),  # TLS
    (b"PUT /v1/rank HTTP/1.1\r\nHost: a\r\n\r\n", 405),
    (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", 405),
    (b"GET http://a/v1/models HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    (post(b"Content-Length: 99999999"), 413),
    (post(b"Transfer-Encoding: chunked", body=b"%x\r\n%s\r\n" % (9_000_000, b"x" * 9_000_000)), 413),
    (post(b"A: " + b"b" * 20_000), 431),
    (post(*[b"A: b"] * 200), 431),
    (b"GET /" + b"a" * 30_000, 431),
    (post(b"X-Request-Timeout-Ms: soon"), 400),
    (b"GET /debug/config HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", 404),
]


@pytest.mark.parametrize(("data", "status"), REFUSED, ids=range(len(REFUSED)))
async def test_bad_http_is_refused_and_reaches_nobody(data: bytes, status: int) -> None:
    async with site(1) as s:
        answer = await raw(s.port, data)
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:300]
        assert answer.count(b"HTTP/1.1") == 1
        assert b"application/problem+json" in answer
        assert not s.fakes[0].bodies  # of a long one it may have seen the beginning
        assert (await s.post("rank"))[0] == 200


async def test_without_the_user_header_400_names_it() -> None:
    async with site(1) as s:
        for path in ("rank", "signal", "events"):
            status, body, _ = await s.post(path, user=None)
            assert status == 400
            assert "x-user-id" in body["detail"]
        assert (await s.post("rank", user=None, X_NpuGr_Service="normal"))[0] == 200


async def test_a_client_that_leaves_takes_its_work_with_it() -> None:
    async with site(1) as s:
        s.fakes[0].delay_s = 30.0
        task = asyncio.create_task(s.post("rank"))
        await s.until(lambda: s.fakes[0].seen)
        task.cancel()
        await s.until(lambda: s.fakes[0].cancelled)
        await s.until(lambda: not s.router.in_flight)
        assert s.router.members.instances["i0"].in_flight == 0


async def test_no_answer_in_time_is_504_in_time() -> None:
    async with site(1) as s:
        s.fakes[0].delay_s = 30.0
        began_at = asyncio.get_running_loop().time()
        for path in ("rank", "signal"):
            assert (await s.post(path, X_Request_Timeout_Ms="100"))[0] == 504
        assert asyncio.get_running_loop().time() - began_at < 2.0
        await s.until(lambda: s.fakes[0].cancelled >= 2)


async def test_a_slow_body_holds_no_instance_and_ends_with_408() -> None:
    async with site(1) as s:
        answer = await raw(s.port, post(b"X-Request-Timeout-Ms: 100", b"Content-Length: 10", body=b"abc"))
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert not s.fakes[0].seen


async def test_slow_headers_end_with_408() -> None:
    async with site(1, header_timeout_s=0.1) as s:
        assert (await raw(s.port, b"POST /v1/rank HT")).startswith(b"HTTP/1.1 408 ")


async def test_expected_to_continue_it_says_so() -> None:
    async with site(1) as s:
        reader, writer = await asyncio.open_connection("127.0.0.1", s.port)
        writer.write(post(b"Expect: 100-continue", b"Content-Length: 3"))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"abc")
        assert b'"size": 3' in await reader.read()
        writer.close()


async def test_over_its_limits_it_refuses_at_once() -> None:
    async with site(1, limits={"instance_inflight": 1, "max_connections": 3}) as s:
        s.fakes[0].delay_s = 0.5
        first = asyncio.create_task(s.post("rank"))
        await s.until(lambda: s.fakes[0].seen)
        for path in ("rank", "signal"):
            status, _, headers = await s.post(path)
            assert (status, headers["Retry-After"]) == (429, "1")
        assert (await first)[0] == 200
        held = [await asyncio.open_connection("127.0.0.1", s.port) for _ in range(2)]
        assert (await raw(s.port, b"")).startswith(b"HTTP/1.1 503 ")
        for _, writer in held:
            writer.close()


async def test_a_reader_that_is_slow_holds_back_the_instance_not_the_memory() -> None:
    async with site(1) as s:
        size = 8_000_000
        reader, writer = await asyncio.open_connection("127.0.0.1", s.port, limit=1024)
        writer.write(post(b"Content-Length: %d" % size, body=b"x" * size))
        await asyncio.wait_for(writer.drain(), 5)
        assert b'"size": %d' % size in await reader.read()
        writer.close()


async def test_draining_it_answers_what_it_has_and_says_so() -> None:
    async with site(1) as s:
        s.fakes[0].delay_s = 0.2
        task = asyncio.create_task(s.post("rank"))
        await s.until(lambda: s.fakes[0].seen)
        s.router.is_draining = True
        async with s.http.get(f"{s.url}/readyz") as answer:
            assert answer.status == 503
        status, _, headers = await task
        assert (status, headers["Connection"]) == (200, "close")


async def test_the_admin_says_who_owns_whom_and_what_was_counted() -> None:
    async with site() as s:
        await s.post("rank")
        async with s.http.get(f"{s.admin}/owner?user=u") as answer:
            assert (await answer.json())["order"][0] == s.owner("u").name
        async with s.http.get(f"{s.admin}/metrics") as answer:
            text = await answer.text()
        assert 'npu_gr_router_requests_total{kind="rank",status="200"} 1.0' in text
        assert f'npu_gr_router_placed_total{{backend="{s.owner("u").name}",how="home"}} 1.0' in text
        async with s.http.get(f"{s.admin}/status") as answer:
            seen = await answer.json()
        assert (seen["name"], seen["ready"], len(seen["instances"])) == ("router", True, 3)
        assert {row["name"]: row["requests"] for row in seen["instances"]}[s.owner("u").name] == 1
        async with s.http.get(f"{s.admin}/") as answer:
            assert '"/status"' in await answer.text()
        async with s.http.get(f"{s.admin}/instances") as answer:
            assert len((await answer.json())["instances"]) == 3
        async with aiohttp.request("POST", f"{s.admin}/instances/nobody/drain") as answer:
            assert answer.status == 404
