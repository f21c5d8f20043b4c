"""HTTP through a front worker is what HTTP in one process is: every kind, errors, bounds in time, faults."""

from __future__ import annotations

import asyncio
import io
import json
import math
import socket
import time
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest

from npu_gr.admission.config import AdmissionConfig
from npu_gr.core.arrays import I64
from npu_gr.core.errors import (
    DeadlineExceeded,
    NotTaken,
    Overloaded,
    Refusal,
    StoreFailed,
    StoreFault,
    UnknownPrefix,
    Unprocessable,
)
from npu_gr.core.kinds import KINDS, Kind, Routing
from npu_gr.core.names import FIRST_HASHED
from npu_gr.core.tls import ServerTlsConfig
from npu_gr.front import frames
from npu_gr.front.engine import workers as engine_module
from npu_gr.front.worker import remote_service as worker_module
from tests.certificates import Authority
from tests.front.rig import Rig, fronted
from tests.server.examples import EXAMPLES
from tests.server.fake import FakeNames, FakeService, serving_fake
from tests.server.test_recording import request_of
from tests.serving import until

ALL = {name: example.answer for name, example in EXAMPLES.items()}
JSON = {"Content-Type": "application/json"}
LONG = {"X-Request-Timeout-Ms": "20000"}
HIDDEN = ("Date", "traceparent", "X-Request-Id", "Retry-After-Ms", "Server")


async def send(rig: Rig, kind: Kind[Any, Any], **headers: str) -> tuple[int, dict[str, str], bytes]:
    example = EXAMPLES[kind.name]
    async with rig.session.request(
        kind.method,
        rig.url(example.path),
        data=None if example.body is None else json.dumps(example.body),
        headers={**JSON, **LONG, "X-Request-Id": "the-one", **headers},  # a busy machine
    ) as response:
        return response.status, dict(response.headers), await response.read()


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
@pytest.mark.parametrize("media", ["application/json", "application/msgpack"])
async def test_every_kind_is_answered_as_in_one_process(kind: Kind[Any, Any], media: str) -> None:
    asked = EXAMPLES[kind.name]
    service = FakeService(ALL)
    async with fronted(service) as rig:
        status, headers, body = await send(rig, kind, Accept=media)
    alone = FakeService(ALL)
    async with (
        serving_fake(alone) as (client, _),
        client.request(
            kind.method,
            asked.path,
            data=None if asked.body is None else json.dumps(asked.body),
            headers={**JSON, **LONG, "X-Request-Id": "the-one", "Accept": media},
        ) as response,
    ):
        assert (status, body) == (response.status, await response.read())
        for name in {*headers, *response.headers} - {*HIDDEN}:
            assert headers.get(name) == response.headers.get(name), name
    ((name, request, _),), ((_, request_alone, _),) = service.served, alone.served
    assert name == kind.name
    assert type(request) is kind.request
    assert repr(request) == repr(request_alone)


@pytest.mark.parametrize(
    "error",
    [
        UnknownPrefix("base: it is not known here"),
        Overloaded("full", 3.0, Refusal.SHED),
        StoreFailed("the disk is full", StoreFault.DISK_FULL),
        DeadlineExceeded("not done within 5 ms"),
        NotTaken("draining"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_errors_are_answered_as_in_one_process(error: Exception) -> None:
    kind = KINDS["rank"]
    async with fronted(FakeService({kind.name: error})) as rig:
        status, headers, body = await send(rig, kind)
    asked = EXAMPLES[kind.name]
    async with serving_fake(FakeService({kind.name: error})) as (client, _):
        response = await client.post(asked.path, json=asked.body, headers={"X-Request-Id": "the-one"})
        assert (status, body) == (response.status, await response.read())
        assert headers.get("Retry-After") == response.headers.get("Retry-After")
        assert headers.get("X-NpuGr-Not-Taken") == response.headers.get("X-NpuGr-Not-Taken")


async def test_a_defect_of_the_engine_is_500_and_the_worker_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    service = FakeService({"rank": "no answer at all"})
    async with fronted(service) as rig:
        status, _, body = await send(rig, KINDS["rank"])
        assert status == 500
        assert b"the log has it under this request id" in body
        service.answers["rank"] = ALL["rank"]
        assert (await send(rig, KINDS["rank"]))[0] == 200
    assert any("failed" in one.message and one.exc_info for one in caplog.records)


class HashedNames(FakeNames):
    """Every hashed item has a name."""

    def items(self, ids: I64) -> list[str | int]:
        return [f"item {one - FIRST_HASHED}" if one >= FIRST_HASHED else one for one in ids.tolist()]


async def test_items_are_shown_by_their_names_and_titles() -> None:
    answer = msgspec.structs.replace(ALL["generate"], item_ids=np.array([FIRST_HASHED + 5, 6]))
    service = FakeService({"generate": answer})
    service.names = HashedNames()
    async with fronted(service) as rig:
        body = {**(EXAMPLES["generate"].body or {}), "fields": ["title"]}
        async with rig.session.post(rig.url("/v1/generate"), json=body) as response:
            shown = await response.json()
        async with rig.session.get(rig.url("/v1/items?ids=3,11&names=12")) as response:
            found = await response.json()
    assert shown["items"] == ["item 5", 6]
    assert shown["titles"] == [None, "title of 6"]
    assert found == [
        {"id": 3, "name": 3, "title": "title of 3"},
        {"id": 11, "name": 11, "title": None},
        {"id": 12, "name": "12", "title": None},
    ]


# ---- time


async def test_a_deadline_goes_with_the_call_and_is_kept_by_the_worker() -> None:
    """The engine gets what is left; a worker whose engine stands still answers 504 all the same, and cancels."""
    service = FakeService(ALL)
    service.waits = asyncio.Event()
    async with fronted(service) as rig:
        status, _, _ = await send(rig, KINDS["rank"], **{"X-Request-Timeout-Ms": "300"})
        assert status == 504
        ((_, _, budget_s),) = service.served
        assert 0 < budget_s <= 0.3
        worker = rig.workers._workers[0]
        await until(lambda: worker.num_calls == 0)  # it was cancelled
        assert sum(rig.door.counts("rank").values()) == 0


async def test_a_call_that_comes_too_late_is_not_begun() -> None:
    service = FakeService(ALL)
    async with fronted(service) as rig:
        remote = rig.fronts[0]._service
        assert remote is not None
        form = frames.BY_KIND["rank"]
        request = frames.pack(form.request, _request("rank"))
        one = worker_module._Open(asyncio.get_running_loop().create_future(), KINDS["rank"], None)
        late = form.call(10**6, time.monotonic() - 0.1, time.monotonic() - 1.0, None, False, request)
        with pytest.raises(DeadlineExceeded, match="on the way to the engine"):
            await remote._ask_engine(10**6, late, one)
        assert service.served == []


def _request(kind: str) -> Any:
    return request_of(KINDS[kind])


async def test_a_caller_that_hangs_up_is_forgotten_by_the_engine() -> None:
    service = FakeService(ALL)
    service.waits = asyncio.Event()
    async with fronted(service) as rig:
        asked = asyncio.create_task(send(rig, KINDS["rank"]))
        await service.waits.wait()
        worker = rig.workers._workers[0]
        assert worker.num_calls == 1
        assert rig.door.counts("rank")["inside"] == 1
        asked.cancel()
        await until(lambda: worker.num_calls == 0)
        assert rig.door.counts("rank") == {"waiting": 0, "inside": 0, "outside": 0}
        front = rig.fronts[0]._service
        assert front is not None
        assert front._open == {}
        assert front.door.admitted == 0


async def test_an_erasure_is_done_though_its_worker_died() -> None:
    done = asyncio.Event()

    class Slow(FakeService):
        async def serve(self, *args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(0.2)
            done.set()
            return await super().serve(*args, **kwargs)

    async with fronted(Slow(ALL)) as rig:
        asked = asyncio.create_task(send(rig, KINDS["erase"]))
        await until(lambda: rig.workers._workers[0].num_calls == 1)
        await rig.unlink()
        assert (await asked)[0] == 503
        await asyncio.wait_for(done.wait(), 5)
        await rig.link(0)


# ---- the engine dies


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
async def test_an_engine_that_dies_is_503_and_says_whether_another_may_be_asked(kind: Kind[Any, Any]) -> None:
    service = FakeService(ALL)
    service.waits = asyncio.Event()
    async with fronted(service) as rig:
        asked = asyncio.create_task(send(rig, kind))
        await service.waits.wait()
        await rig.unlink()
        status, headers, _ = await asked
        assert status == 503
        changes = kind.routing in (Routing.ONCE, Routing.BY_LOAD, Routing.EVERYWHERE)
        assert ("X-NpuGr-Not-Taken" in headers) is not changes
        status, headers, _ = await send(rig, kind)  # and while there is none, nothing was begun
        assert (status, headers["X-NpuGr-Not-Taken"]) == (503, "1")
        service.waits = None
        await rig.link(0)
        front = rig.fronts[0]._service
        assert front is not None
        await until(lambda: front.is_ready()[0])
        assert (await send(rig, kind))[0] == kind.status


async def test_health_says_what_is_the_matter_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    service = FakeService(ALL)
    async with fronted(service) as rig:

        async def ready() -> tuple[int, str]:
            async with rig.session.get(rig.url("/readyz")) as response:
                return response.status, await response.text()

        assert (await ready())[0] == 200
        service.why_not_ready = "draining"
        front = rig.fronts[0]._service
        assert front is not None
        await until(lambda: not front.is_ready()[0])
        assert (await ready())[0] == 503
        assert "draining" in (await ready())[1]
        service.why_not_ready = ""
        await until(lambda: front.is_ready()[0])
        monkeypatch.setattr(worker_module, "SILENT_S", -1.0)
        assert "has said nothing" in (await ready())[1]
        monkeypatch.undo()
        await rig.unlink()
        assert "does not run" in (await ready())[1]
        async with rig.session.get(rig.url("/metrics", admin=True)) as response:
            assert "npu_gr_ready 0.0" in await response.text()  # the worker's own numbers
        await rig.link(0)


# ---- a worker misbehaves


async def test_a_worker_that_says_nothing_is_told_of_to_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fronted(FakeService(ALL)) as rig:
        monkeypatch.setattr(engine_module, "SILENT_S", 0.2)
        monkeypatch.setattr(rig.fronts[0], "_send", lambda _frame: False)
        assert rig.fronts[0]._reports is not None
        monkeypatch.setattr(rig.fronts[0]._reports, "_send", lambda _frame: False)
        await until(lambda: bool(rig.stuck))
        assert rig.stuck == [(0, "it has said nothing for 0.2 s")]
        assert len(rig.workers) == 0
        monkeypatch.undo()
        await rig.link(0)


async def test_a_worker_that_takes_nothing_is_told_of_to_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fronted(FakeService(ALL)) as rig:
        monkeypatch.setattr(engine_module, "UNREAD_S", 0.1)
        monkeypatch.setattr(engine_module, "UNREAD_BYTES", 100_000)
        peer = rig.fronts[0]._peer
        assert peer is not None
        assert peer._transport is not None
        peer._transport.pause_reading()
        worker = rig.workers._workers[0]
        worker.peer.send(frames.ToldFrame(1, bytes(4_000_000)))
        await until(lambda: bool(rig.stuck))
        assert "has not taken" in rig.stuck[0][1]
        await until(lambda: rig.fronts[0]._peer is None or peer.is_open)
        peer.cut("")
        await until(lambda: rig.fronts[0]._peer is None)
        await rig.link(0)


@pytest.mark.parametrize(
    "frame",
    [
        frames.CreditFrame({}, {}, {}),
        frames.HelloFrame("another build", 1, 0),
        frames.AskFrame(1, "metrics", b"no msgpack"),
        frames.AskFrame(1, "no such question", b""),
    ],
    ids=["a frame of the engine's", "another build", "no question", "an unknown question"],
)
async def test_nonsense_of_a_worker_costs_that_worker_alone(frame: Any) -> None:
    """What no worker sends ends its connection; a question that cannot be read is answered with an error."""
    async with fronted(FakeService(ALL), num_workers=2) as rig:
        first = rig.workers._workers[0]
        front = rig.fronts[0]
        front._send(frame)
        if isinstance(frame, frames.AskFrame):
            await asyncio.sleep(0.1)
            assert first.peer.is_open
        else:
            await until(lambda: not first.peer.is_open)
            await until(lambda: front._peer is None)
            await rig.link(0)
        other = rig.fronts[1]._service
        assert other is not None
        assert other.is_ready()[0]


# ---- the door


async def test_a_call_that_waits_elsewhere_holds_no_place_at_the_worker() -> None:
    waits, goes_on = asyncio.Event(), asyncio.Event()

    class Outside(FakeService):
        async def serve(self, kind: Any, request: Any, budget_s: float, slot: Any = None, shown: Any = None) -> Any:
            with slot.outside():  # and back at once: nobody is told
                pass
            with slot.outside():
                waits.set()
                await goes_on.wait()
            await asyncio.sleep(0.05)
            return self.answers[kind.name]

    async with fronted(Outside(ALL)) as rig:
        front = rig.fronts[0]._service
        assert front is not None
        asked = [asyncio.create_task(send(rig, KINDS["rank"], **LONG)) for _ in range(3)]
        await waits.wait()
        await until(lambda: front.door.counts("rank")["outside"] == 3)
        assert front.door.counts("rank")["inside"] == 0
        asked[0].cancel()  # hung up while outside
        await until(lambda: front.door.counts("rank")["outside"] == 2)
        goes_on.set()
        await until(lambda: front.door.counts("rank")["inside"] == 2)
        assert [status for status, _, _ in await asyncio.gather(*asked[1:])] == [200, 200]
        await until(lambda: front.door.admitted == 0)
        assert front.door.counts("rank") == {"waiting": 0, "inside": 0, "outside": 0}


async def test_the_windows_follow_what_all_workers_want() -> None:
    service = FakeService(ALL)
    service.waits = asyncio.Event()
    async with fronted(service, num_workers=2) as rig:
        rig.door._lanes["rank"].pace.seconds = 5.0 * 0.35 / 10  # the window of the whole instance: 10
        doors = [front._service.door for front in rig.fronts if front._service is not None]
        for door in doors:
            door._lanes["rank"].pace.seconds = 5.0 * 0.35 / 60
        asked = [asyncio.create_task(send(rig, KINDS["rank"], **LONG)) for _ in range(60)]
        await until(lambda: all(door.window("rank") <= 10 for door in doors))
        assert all(door.window("rank") >= 4 for door in doors)
        assert 10 <= sum(door.window("rank") for door in doors) <= 12
        for one in asked:
            one.cancel()
        await until(lambda: all(door._lanes["rank"].slots == math.inf for door in doors))  # nobody wants anything


async def test_the_parts_of_the_workers_are_those_of_the_instance() -> None:
    admission = AdmissionConfig(max_inflight=9)
    async with fronted(FakeService(ALL), num_workers=2, admission=admission, max_connections=101) as rig:
        for front in rig.fronts:
            assert front._service is not None
            assert front._service.door._config.max_inflight == 5
            assert front._keys_and_door is not None


async def test_texts_that_are_no_unicode_are_the_callers_fault() -> None:
    async with fronted(FakeService(ALL)) as rig:
        remote = rig.fronts[0]._service
        assert remote is not None
        request = msgspec.structs.replace(_request("rank"), model_version="\ud800")
        with pytest.raises(Unprocessable, match="not Unicode"):
            await remote.serve(KINDS["rank"], request, 1.0)
        assert remote._open == {}


async def test_an_engine_that_only_starts_is_none_yet() -> None:
    """A connection is there as soon as its process is; until it has said Hello, nothing is sent into the void."""
    async with fronted(FakeService(ALL)) as rig:
        await rig.unlink()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            rig.supervisors[0].send("engine", sockets=[theirs])
        await until(lambda: rig.fronts[0]._peer is not None)
        status, headers, _ = await send(rig, KINDS["rank"])
        assert (status, headers["X-NpuGr-Not-Taken"]) == (503, "1")
        await rig.workers.connect(0, ours)
        front = rig.fronts[0]._service
        assert front is not None
        await until(lambda: front.is_ready()[0])
        assert (await send(rig, KINDS["rank"]))[0] == 200


async def test_tls_ends_at_the_workers(authority: Authority) -> None:
    pair = authority.issue("127.0.0.1")
    tls = ServerTlsConfig(certificate=str(pair.certificate), key=str(pair.key))
    async with fronted(FakeService(ALL), tls=tls) as rig:
        example = EXAMPLES["rank"]
        url = rig.url(example.path).replace("http://", "https://")
        async with rig.session.post(url, json=example.body, ssl=authority.client()) as response:
            assert response.status == 200
        with pytest.raises(aiohttp.ClientError):
            await send(rig, KINDS["rank"])  # in clear
        await until(lambda: rig.workers._workers[0].gauges is not None)
        expires_at = rig.metrics.registry.get_sample_value(
            "npu_gr_tls_certificate_expires_at_seconds", {"of": "server"}
        )
        assert expires_at is not None
        assert time.time() < expires_at < time.time() + 3 * 86_400


async def test_a_long_request_and_a_long_answer_go_through() -> None:
    """Longer than what is read at a time, both ways."""
    num = 60_000
    answer = msgspec.structs.replace(ALL["rank"], scores={"click": np.arange(num, dtype=np.float32)})
    service = FakeService({"rank": answer})
    async with fronted(service, max_history_events=num) as rig:
        body = {
            **(EXAMPLES["rank"].body or {}),
            "history": {"items": list(range(num)), "actions": ["1"] * num, "timestamps": list(range(num))},
        }
        async with rig.session.post(
            rig.url("/v1/rank"), data=io.BytesIO(json.dumps(body).encode()), headers=JSON
        ) as response:
            assert response.status == 200
            assert (await response.json())["scores"]["click"] == list(range(num))
    ((_, request, _),) = service.served
    assert np.array_equal(request.history.events.items, np.arange(num))


async def test_bodies_that_are_no_request_never_reach_the_engine() -> None:
    service = FakeService(ALL)
    async with fronted(service) as rig:
        frames_seen = rig.workers._workers[0]._received
        seen: list[Any] = []

        def noted(frame: Any) -> None:
            seen.append(frame)
            frames_seen(frame)

        rig.workers._workers[0].peer._on_frame = noted
        for body, status in ((b"[" * 100_000, 422), (b"{", 400), (b'{"user_id": "u"}', 422)):
            async with rig.session.post(rig.url("/v1/rank"), data=body, headers=JSON) as response:
                assert response.status == status
        assert service.served == []
        assert not [one for one in seen if isinstance(one, frames.BY_KIND["rank"].call)]
