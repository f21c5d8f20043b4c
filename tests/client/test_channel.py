"""A call ends by its deadline, is resent only where safe, and fails with a typed error."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import pytest

from npu_gr.client import AsyncClient, Behaviours, channel
from npu_gr.core.errors import (
    BadAnswer,
    BadRequest,
    ConfigError,
    DeadlineExceeded,
    Forbidden,
    NotFound,
    NpuGrError,
    Overloaded,
    RequestError,
    TooLarge,
    Unauthorized,
    Unavailable,
    UnknownPrefix,
    Unprocessable,
    Unreachable,
    UnsupportedMedia,
)
from npu_gr.core.tls import ClientTlsConfig
from tests.certificates import Authority
from tests.client.scripted import HANG, RANKED, SIGNALLED, Answer, answer, problem, scripted
from tests.ports import free_port
from tests.serving import until

GOOD = answer(RANKED)
SECOND = Behaviours([1], ["view"], [1_700_000_000])
LONG_S = 30.0  # no test waits for it


@pytest.mark.parametrize(
    "bad",
    [
        problem(429, "the queue is full", Retry_After_Ms="20", Retry_After="1"),
        problem(429, "the queue is full", Retry_After="0"),
        problem(503, "it starts", Retry_After="0"),
        problem(408, "too slow"),
        problem(502, "the instance died"),
        answer(b"<html>bad gateway</html>", 502, "text/html"),
        Answer(b"", closes=True),
        Answer(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{",
            closes=True,
        ),
    ],
    ids=["429-ms", "429-s", "503", "408", "502", "html", "closed", "half"],
)
async def test_what_may_be_answered_next_time_is_sent_again(bad: Answer) -> None:
    async with (
        scripted(bad, bad, GOOD) as service,
        AsyncClient(service.url, timeout_s=LONG_S) as client,
    ):
        ranked = await client.rank("u", [1, "a"])
        assert ranked.scores["click"][0] == 0.5
    first, second, third = service.asked
    assert first.body == second.body == third.body
    assert first.headers["x-request-id"] == third.headers["x-request-id"], "one call, one id"
    budgets = [float(one.headers["x-request-timeout-ms"]) for one in service.asked]
    assert LONG_S * 1e3 > budgets[0] > budgets[1] > budgets[2] > 0


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (400, BadRequest),
        (401, Unauthorized),
        (403, Forbidden),
        (404, NotFound),
        (409, UnknownPrefix),
        (413, TooLarge),
        (415, UnsupportedMedia),
        (422, Unprocessable),
        (418, RequestError),
        (500, NpuGrError),
        (504, DeadlineExceeded),
    ],
)
async def test_what_would_fail_again_is_not_sent_again(said: int, error: type[NpuGrError]) -> None:
    async with (
        scripted(problem(said, "history.actions: 7 is none", "what it is"), GOOD) as service,
        AsyncClient(service.url, timeout_s=LONG_S) as client,
    ):
        with pytest.raises(NpuGrError, match=r"^history\.actions: 7 is none$") as raised:
            await client.rank("u", [1])
    assert type(raised.value) is error
    assert (raised.value.status, raised.value.title) == (said, "what it is")
    assert (raised.value.field, raised.value.request_id) == ("history.actions", "of-the-service")
    assert len(service.asked) == 1


async def test_after_max_attempts_the_last_failure_is_raised() -> None:
    async with (
        scripted(problem(503, "one"), problem(503, "two"), GOOD) as service,
        AsyncClient(service.url, timeout_s=LONG_S, max_attempts=2) as client,
    ):
        with pytest.raises(Unavailable, match="two"):
            await client.rank("u", [1])
    assert len(service.asked) == 2


@pytest.mark.parametrize(
    "said",
    [
        answer(b'{"title": "\xff"}', 418, "application/problem+json"),
        answer(b'{"more": ' + b"[" * 100_000, 418, "application/problem+json"),
        answer(b"{}", 418, Retry_After="Mon, 01 Jan 99999999999999999999 00:00:00 GMT"),
    ],
    ids=["no-text", "deep", "date"],
)
async def test_an_answer_that_nobody_of_ours_wrote_is_an_error_of_its_status(said: Answer) -> None:
    async with scripted(said) as service, AsyncClient(service.url, timeout_s=LONG_S) as client:
        with pytest.raises(RequestError, match="the answer was 418") as raised:
            await client.rank("u", [1])
    assert raised.value.retry_after_s == 0.0


async def test_a_rank_without_scores_is_no_answer() -> None:
    async with (
        scripted(answer(RANKED | {"scores": {}})) as service,
        AsyncClient(service.url, timeout_s=LONG_S) as client,
    ):
        with pytest.raises(BadAnswer, match="no scores"):
            await client.rank("u", [1, 2])


@pytest.mark.parametrize(
    ("detail", "field"),
    [
        ("top_k: must be 1 or more", "top_k"),
        ("users[0].events.items: 7 is none", "users[0].events.items"),
        ("attributes[...][2]: too long", "attributes[...][2]"),
        ("unknown field users[0].eventz; did you mean events?", "users[0].eventz"),
        ("the queue is full", None),
    ],
)
async def test_the_field_of_a_message(detail: str, field: str | None) -> None:
    async with (
        scripted(problem(422, detail)) as service,
        AsyncClient(service.url, timeout_s=LONG_S) as client,
    ):
        with pytest.raises(Unprocessable) as raised:
            await client.rank("u", [1])
    assert raised.value.field == field


async def test_a_retry_that_the_deadline_forbids_takes_none_of_the_retries() -> None:
    soon, late = (problem(429, "your rate", Retry_After=after) for after in ("0", "3600"))
    given_up = int(channel.RETRIES_AT_ONCE) * 2
    async with (
        scripted(*[late] * given_up, soon, GOOD) as service,
        AsyncClient(service.url, timeout_s=LONG_S) as client,
    ):
        for _ in range(given_up):
            with pytest.raises(Overloaded):
                await client.rank("u", [1, 2])
        await client.rank("u", [1, 2])
    assert len(service.asked) == given_up + 2


@pytest.mark.parametrize("key", ["", "two\nlines", "k" * 129])
async def test_a_key_that_is_none_is_rejected_before_anything_is_sent(key: str) -> None:
    async with scripted(GOOD) as service, AsyncClient(service.url, timeout_s=LONG_S) as client:
        with pytest.raises(Unprocessable, match=r"^idempotency_key: "):
            await client.ingest({"u": SECOND}, idempotency_key=key)
        with pytest.raises(Unprocessable, match=r"^idempotency_key: "):
            await client.events("u", SECOND, idempotency_key=key)
    assert not service.asked


async def test_one_user_under_two_names_is_rejected_before_anything_is_sent() -> None:
    async with scripted(GOOD) as service, AsyncClient(service.url, timeout_s=LONG_S) as client:
        with pytest.raises(Unprocessable, match=r"^events: index 1: user '7' appears twice"):
            await client.ingest({7: SECOND, "7": SECOND})
    assert not service.asked


async def test_what_was_given_empty_is_sent_empty() -> None:
    """The service rejects it in words; left out, it would mean something else."""
    async with scripted(GOOD) as service, AsyncClient(service.url, timeout_s=LONG_S) as client:
        await client.rank("", [1, 2], base="", model_version="")
    sent = msgspec.msgpack.decode(service.asked[0].body)
    assert {"user_id": "", "base": "", "model_version": ""}.items() <= sent.items()
    assert "tenant" not in sent


async def test_a_rejected_signal_is_not_sent_again() -> None:
    async with (
        scripted(problem(429, "your share"), answer(SIGNALLED, 202)) as service,
        AsyncClient(service.url, timeout_s=LONG_S) as client,
    ):
        with pytest.raises(Overloaded):
            await client.signal("u")
        assert (await client.signal("u")).verdict == "preinfer"
    assert len(service.asked) == 2


async def test_waiting_past_the_deadline_is_not_begun() -> None:
    async with (
        scripted(problem(429, "your rate", Retry_After="3600"), GOOD) as service,
        AsyncClient(service.url, timeout_s=LONG_S) as client,
    ):
        began_at = time.monotonic()
        with pytest.raises(Overloaded) as raised:
            await client.rank("u", [1])
        assert raised.value.retry_after_s == 3600
        assert time.monotonic() - began_at < LONG_S / 2
    assert len(service.asked) == 1


async def test_retry_after_is_waited_for() -> None:
    async with (
        scripted(problem(429, "wait", Retry_After_Ms="300"), GOOD) as service,
        AsyncClient(service.url, timeout_s=LONG_S) as client,
    ):
        began_at = time.monotonic()
        await client.rank("u", [1, 2])
        assert time.monotonic() - began_at >= 0.3


async def test_a_service_that_hangs_costs_the_deadline_and_no_more() -> None:
    async with scripted(HANG) as service, AsyncClient(service.url, timeout_s=0.2) as client:
        with pytest.raises(DeadlineExceeded, match=r"/v1/rank: no answer within 0.2 s$"):
            await client.rank("u", [1])
        # the connection is closed, so the service may stop
        await until(lambda: service.num_left == 1)


async def test_the_deadline_holds_over_the_attempts() -> None:
    slow = Answer(problem(503, "slow and bad").sent, after_s=0.15)
    async with (
        scripted(slow) as service,
        AsyncClient(service.url, timeout_s=0.2, max_attempts=100) as client,
    ):
        with pytest.raises((DeadlineExceeded, Unavailable), match="slow and bad"):
            await client.rank("u", [1])
    assert len(service.asked) <= 2


async def test_a_deadline_of_a_call_is_its_own() -> None:
    async with scripted(HANG) as service, AsyncClient(service.url, timeout_s=LONG_S) as client:
        with pytest.raises(DeadlineExceeded):
            await client.rank("u", [1], timeout_s=0.1)
    assert float(service.asked[0].headers["x-request-timeout-ms"]) <= 100


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf")])
async def test_a_deadline_is_a_finite_time(timeout_s: float) -> None:
    with pytest.raises(Unprocessable, match="timeout_s"):
        AsyncClient(timeout_s=timeout_s)
    async with AsyncClient() as client:
        with pytest.raises(Unprocessable, match="timeout_s"):
            await client.models(timeout_s=timeout_s)


async def test_nobody_at_the_address() -> None:
    port = free_port()
    async with AsyncClient(f"http://127.0.0.1:{port}", timeout_s=LONG_S) as client:
        with pytest.raises(Unreachable, match=str(port)):
            await client.rank("u", [1])
        with pytest.raises(Unreachable):
            await client.is_ready()


@pytest.mark.parametrize(
    "bad",
    [
        answer(b"{"),
        answer(b"[]"),
        answer({**RANKED, "scores": "none"}),
        answer({**RANKED, "scores": {"click": [1.0]}}),
        answer({**RANKED, "scores": {"click": [1.0, 2.0]}, "top": [77]}),
        answer(b"\xff\xfe", media="application/msgpack"),
        answer(b"[" * 100_000),
        answer(b"<html>welcome to the hotel's network</html>", media="text/html"),
        answer(b"", 302, Location="http://elsewhere/"),
        Answer(b"SSH-2.0-OpenSSH_9\r\n\r\n", closes=True),
    ],
    ids=["cut", "array", "type", "short", "top", "msgpack", "deep", "html", "redirect", "ssh"],
)
async def test_an_answer_of_somebody_else_is_rejected_in_words(bad: Answer) -> None:
    async with (
        scripted(bad) as service,
        AsyncClient(service.url, api_key="k", timeout_s=LONG_S) as client,
    ):
        with pytest.raises(BadAnswer, match=r"answer|Bad|Expected"):
            await client.rank("u", [1, 2], top_k=1)
    assert len(service.asked) == 1


async def test_an_endless_answer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MAX_ANSWER_BYTES", 10_000)
    async with (
        scripted(answer(b" " * 20_000)) as service,
        AsyncClient(service.url, timeout_s=LONG_S) as client,
    ):
        with pytest.raises(BadAnswer, match="over the limit of 10000 bytes"):
            await client.rank("u", [1])


async def test_retries_are_one_in_five_calls_in_the_long_run() -> None:
    async with (
        scripted(problem(503, "down")) as service,
        AsyncClient(service.url, timeout_s=LONG_S, max_attempts=2) as client,
    ):
        for _ in range(60):
            with pytest.raises(Unavailable):
                await client.rank("u", [1])
    first = int(channel.RETRIES_AT_ONCE)
    assert 60 + first <= len(service.asked) <= 60 + first + 60 * channel.RETRIES_PER_CALL + 1


async def test_events_are_sent_again_under_one_key() -> None:
    done = answer({"request_id": "r", "num_events": 3, "sorted_events": 0})
    async with (
        scripted(Answer(b"", closes=True), problem(504, "late"), done) as service,
        AsyncClient(service.url, timeout_s=LONG_S) as client,
    ):
        with pytest.raises(DeadlineExceeded):
            await client.events("u", SECOND)
        assert (await client.events("u", SECOND, idempotency_key="mine")).num_events == 3
    keys = [one.headers["idempotency-key"] for one in service.asked]
    assert keys[0] == keys[1] != keys[2] == "mine"
    assert len(keys[0]) == 32


async def test_what_was_not_given_is_not_sent() -> None:
    async with scripted(GOOD) as service, AsyncClient(service.url, timeout_s=LONG_S) as client:
        await client.rank(7, [1, 2])
    [one] = service.asked
    assert msgspec.msgpack.decode(one.body) == {
        "user_id": "7",
        "candidates": bytes([1, *[0] * 7, 2, *[0] * 7]),
    }
    assert one.headers["content-type"] == "application/msgpack"
    assert one.headers["accept"] == "application/msgpack"
    assert one.headers["accept-encoding"] == "identity"
    assert one.headers["x-user-id"] == "7"
    assert "x-tenant-id" not in one.headers


async def test_connections_are_kept() -> None:
    async with scripted(GOOD) as service, AsyncClient(service.url, timeout_s=LONG_S) as client:
        for _ in range(5):
            await client.rank("u", [1, 2])
        await asyncio.gather(*(client.rank("u", [1, 2]) for _ in range(3)))
    assert [one.connection for one in service.asked[:5]] == [0] * 5
    assert {one.connection for one in service.asked} <= {0, 1, 2}


async def test_a_service_may_start_again_between_two_calls() -> None:
    port = free_port()
    async with AsyncClient(f"http://127.0.0.1:{port}", timeout_s=LONG_S) as client:
        for _ in range(3):
            async with scripted(GOOD, port=port) as service:
                await client.rank("u", [1, 2])
            assert len(service.asked) == 1


async def test_more_calls_than_connections_wait_their_turn() -> None:
    slow = Answer(GOOD.sent, after_s=0.02)
    async with (
        scripted(slow) as service,
        AsyncClient(service.url, timeout_s=LONG_S, max_connections=2) as client,
    ):
        await asyncio.gather(*(client.rank("u", [1, 2]) for _ in range(8)))
    assert {one.connection for one in service.asked} == {0, 1}


async def test_a_cancelled_call_closes_its_connection() -> None:
    async with (
        scripted(HANG, GOOD) as service,
        AsyncClient(service.url, timeout_s=LONG_S) as client,
    ):
        call = asyncio.create_task(client.rank("u", [1, 2]))
        await until(lambda: len(service.asked) == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: service.num_left == 1)
        await client.rank("u", [1, 2])  # the client is as good as before


async def test_outside_of_its_block_a_client_says_so() -> None:
    client = AsyncClient()
    with pytest.raises(RuntimeError, match="async with"):
        await client.models()
    async with client:
        pass
    with pytest.raises(RuntimeError, match="async with"):
        await client.models()


async def test_the_key_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with scripted(GOOD) as service:
        monkeypatch.setenv("NPU_GR_API_KEY", "of-the-environment")
        (tmp_path / "key").write_text("of-the-file\n")
        for given in ({}, {"api_key": "given"}, {"api_key_file": tmp_path / "key"}):
            async with AsyncClient(service.url, timeout_s=LONG_S, **given) as client:
                await client.rank("u", [1, 2])
        monkeypatch.delenv("NPU_GR_API_KEY")
        async with AsyncClient(service.url, timeout_s=LONG_S) as client:
            await client.rank("u", [1, 2])
    shown = [one.headers.get("authorization") for one in service.asked]
    assert shown == ["Bearer of-the-environment", "Bearer given", "Bearer of-the-file", None]


async def test_a_new_key_in_the_file_is_taken_when_the_old_one_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("old")
    rejected = problem(401, "no such key")
    async with (
        scripted(GOOD, rejected, GOOD, rejected) as service,
        AsyncClient(service.url, api_key_file=path, timeout_s=LONG_S) as client,
    ):
        await client.rank("u", [1, 2])
        path.write_text("new\n")
        await client.rank("u", [1, 2])
        with pytest.raises(Unauthorized):  # the file has nothing newer
            await client.rank("u", [1, 2])
        path.unlink()
        with pytest.raises(Unauthorized):
            await client.rank("u", [1, 2])
    shown = [one.headers["authorization"].split()[1] for one in service.asked]
    assert shown == ["old", "old", "new", "new", "new"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"base_url": "localhost:8080"}, "base_url: .*expected http"),
        ({"base_url": "http://[half"}, "base_url"),
        ({"base_url": "ftp://host"}, "base_url: .*expected http"),
        ({"base_url": "http://me:secret@host"}, "base_url: .*expected http"),
        ({"max_connections": 0}, "max_connections: 0 is below 1"),
        ({"max_attempts": 0}, "max_attempts: 0 is below 1"),
        ({"api_key": "two\nlines"}, "api_key: is not a key"),
        ({"api_key": ""}, "api_key: is not a key"),
        ({"api_key": "a", "api_key_file": Path("b")}, "set one of them"),
        ({"api_key_file": Path("/not/there")}, "api_key_file: /not/there: No such file"),
        (
            {"base_url": "https://host", "tls": ClientTlsConfig(ca="/not/there")},
            "tls: /not/there: No such file",
        ),
    ],
)
def test_what_cannot_be_used_is_rejected_at_once(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        AsyncClient(**given)  # type: ignore[arg-type]
    assert "secret" not in str(raised.value)
    assert "lines" not in str(raised.value)


async def test_tls_with_a_certificate_of_its_own(authority: Authority, tmp_path: Path) -> None:
    import ssl

    pair, own = authority.issue("127.0.0.1"), authority.issue("shop")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    context.load_verify_locations(authority.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    trusting = ClientTlsConfig(
        ca=str(authority.ca), certificate=str(own.certificate), key=str(own.key)
    )
    async with scripted(GOOD, ssl=context) as service:
        async with AsyncClient(service.url, tls=trusting, timeout_s=LONG_S) as client:
            await client.rank("u", [1, 2])
        async with AsyncClient(service.url, timeout_s=LONG_S) as client:  # trusts nobody of ours
            with pytest.raises(Unreachable, match="certificate"):
                await client.rank("u", [1, 2])
        nameless = ClientTlsConfig(ca=str(authority.ca))
        async with AsyncClient(
            service.url, tls=nameless, timeout_s=LONG_S, max_attempts=1
        ) as client:
            with pytest.raises(Unreachable):
                await client.rank("u", [1, 2])
    assert len(service.asked) == 1


async def test_a_broken_connection_makes_nobody_unready() -> None:
    async with (
        scripted(
            Answer(b"", closes=True), answer({"ready": True}), problem(503, "it starts")
        ) as service,
        AsyncClient(service.url, timeout_s=LONG_S) as client,
    ):
        assert await client.is_ready()
        assert not await client.is_ready()
    assert len(service.asked) == 3


async def test_a_user_is_no_step_in_a_path() -> None:
    gone = Answer(b"HTTP/1.1 204 No Content\r\n\r\n")
    async with (
        scripted(gone) as service,
        AsyncClient(service.url, tenant="a&b", timeout_s=LONG_S) as client,
    ):
        await client.erase("../models")
    assert service.asked[0].path == "/v1/users/%2E%2E%2Fmodels?tenant=a%26b"


async def test_a_path_of_a_gateway_is_kept() -> None:
    async with (
        scripted(GOOD) as service,
        AsyncClient(f"{service.url}/gateway/", timeout_s=LONG_S) as client,
    ):
        await client.rank("u", [1, 2])
    assert service.asked[0].path == "/gateway/v1/rank"


async def test_every_request_about_a_user_names_it_for_proxies() -> None:
    seen = Behaviours([1], ["view"], [1])
    erased = b"HTTP/1.1 204 No Content\r\n\r\n"
    async with (
        scripted(GOOD, Answer(erased)) as service,
        AsyncClient(service.url, timeout_s=LONG_S, tenant="t%") as client,
    ):
        await client.rank("Ann Ö", [1, 2], history=seen)
        await client.erase("a@b/c")
    headers = [(one.headers["x-user-id"], one.headers["x-tenant-id"]) for one in service.asked]
    assert headers == [("Ann%20%C3%96", "t%25"), ("a@b/c", "t%25")]
