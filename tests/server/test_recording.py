"""What passes `RecordingService` is offered to the recorder, of recorded kinds and no other."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from npu_gr.core.errors import Overloaded
from npu_gr.core.kinds import ERASE, INGEST, KINDS, Kind
from npu_gr.replay.recorder import RecordConfig, RecordedRequest, Recorder
from npu_gr.server.config import ServerConfig
from npu_gr.server.recording import RecordingService
from npu_gr.server.schemas import CODECS
from npu_gr.server.schemas.fields import UrlParts
from tests.server.examples import EXAMPLES, USER
from tests.server.fake import FakeNames, FakeService

each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


class ListRecorder(Recorder):
    """Keeps what it is offered; its thread is never started."""

    def __init__(self, folder: Path) -> None:
        super().__init__(RecordConfig(folder=str(folder / "traffic"), enabled=True, users="clear"))
        self.offered: list[RecordedRequest] = []

    def offer(self, request: RecordedRequest) -> None:
        self.offered.append(request)


def request_of(kind: Kind[Any, Any]) -> Any:
    codec = CODECS[kind.name]
    body = EXAMPLES[kind.name].body
    if codec.body is None:
        return codec.parse(
            UrlParts({"user_id": USER.user}, {"tenant": USER.tenant}), ServerConfig(), FakeNames()
        )
    return codec.parse(msgspec.convert(body, codec.body), ServerConfig(), FakeNames())


@each_kind
async def test_a_recorded_kind_is_offered_with_its_answer(
    kind: Kind[Any, Any], tmp_path: Path
) -> None:
    service = FakeService({name: example.answer for name, example in EXAMPLES.items()})
    recorder = ListRecorder(tmp_path)
    request = request_of(kind)
    before_at = time.time()
    answer = await RecordingService(service, recorder).serve(kind, request, 0.5)
    if kind is ERASE:
        assert answer.pending == ("recordings",)
    else:
        assert answer is EXAMPLES[kind.name].answer
    assert [(name, budget_s) for name, _, budget_s in service.served] == [(kind.name, 0.5)]
    if kind in (ERASE, INGEST):  # a record is about one user
        assert not recorder.offered
        return
    (offered,) = recorder.offered
    assert (offered.kind, offered.status, offered.budget_s) == (kind.name, 200, 0.5)
    assert offered.user == USER
    assert offered.request is request
    assert offered.answer is answer
    assert before_at <= offered.arrived_at <= time.time()
    assert 0 <= offered.took_s < 1


@each_kind
async def test_an_error_is_offered_with_its_status_and_raised(
    kind: Kind[Any, Any], tmp_path: Path
) -> None:
    recorder = ListRecorder(tmp_path)
    service = RecordingService(FakeService({kind.name: Overloaded("full")}), recorder)
    with pytest.raises(Overloaded):
        await service.serve(kind, request_of(kind), 0.5)
    assert [(offered.status, offered.answer) for offered in recorder.offered] == [
        (429, None)
    ] * kind.is_recorded


async def test_a_request_whose_caller_hangs_up_is_not_offered(tmp_path: Path) -> None:
    recorder = ListRecorder(tmp_path)
    behind = FakeService({})
    behind.waits = asyncio.Event()
    asked = asyncio.create_task(
        RecordingService(behind, recorder).serve(KINDS["rank"], request_of(KINDS["rank"]), 9.0)
    )
    await behind.waits.wait()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert not recorder.offered


async def test_while_it_is_off_nothing_is_offered(tmp_path: Path) -> None:
    recorder = ListRecorder(tmp_path)
    recorder.switch_off()
    service = FakeService({"events": EXAMPLES["events"].answer})
    await RecordingService(service, recorder).serve(
        KINDS["events"], request_of(KINDS["events"]), 0.5
    )
    assert not recorder.offered
