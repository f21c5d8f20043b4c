"""The engine's end of the connection to one front worker: its calls and its questions.

Invariants:
  F1  a call ends in one Answer or one Failure, or its worker has cancelled it or is gone
  F2  what a call holds is released when it ends in any way, also when the worker dies
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from npu_gr.core.arrays import I64, holds_any
from npu_gr.core.errors import DeadlineExceeded, NotFound, NpuGrError
from npu_gr.core.names import is_hashed
from npu_gr.core.trace import CURRENT, Trace
from npu_gr.front import frames
from npu_gr.front.engine.door import EngineDoor
from npu_gr.front.frames import BUILD, BY_CALL, Gauges, KindFrames
from npu_gr.front.peer import Peer
from npu_gr.front.questions import QUESTIONS
from npu_gr.front.wire import pack_error
from npu_gr.server.service_protocol import ServiceProtocol

log = logging.getLogger(__name__)

Answers = Mapping[str, Callable[[Any], Awaitable[Any]]]


class WorkerConnection:
    """One worker, as the engine sees it. Event loop only."""

    def __init__(
        self,
        number: int,
        service: ServiceProtocol,
        door: EngineDoor,
        answers: Answers,
        *,
        on_hello: Callable[[WorkerConnection], None],
        on_load: Callable[[WorkerConnection], None],
        on_stats: Callable[[frames.StatsFrame], None],
        on_lost: Callable[[WorkerConnection], None],
    ) -> None:
        """Serve nothing yet.

        Args:
            number: of the worker.
            service: answers the calls.
            door: counts them.
            answers: to questions, by name.
            on_hello: called when the worker has said who it is.
            on_load: called when its door has said something.
            on_stats: called with what it counted.
            on_lost: called once when it is gone.
        """
        self.number = number
        self.pid = 0
        self.load = frames.LoadFrame({}, {}, 0.0, {}, {})
        self.gauges: Gauges | None = None
        self.credit: dict[str, int] = {}  # that it was told last
        self.spent = Counter[str]()  # by the others, that it was not told yet
        self.earned = Counter[str]()
        self.silent_s = 0.0  # since it was heard
        self.unread_s = 0.0  # since when it has not taken what was sent
        self._service = service
        self._door = door
        self._answers = answers
        self._on_hello = on_hello
        self._on_load = on_load
        self._on_stats = on_stats
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._kept = set[asyncio.Task[None]]()  # those that must finish although their worker is gone
        self._must_finish = set[int]()
        self._steps: dict[int, bool] = {}  # of this turn
        self._outside = set[int]()  # calls of which the worker believes that they are
        self.peer = Peer(f"front worker {number}", self._received, self._lost)
        self.peer.before_flush = self._send_steps

    @property
    def num_calls(self) -> int:
        """Calls that have not ended."""
        return len(self._calls)

    # ---- frames

    def _received(self, frame: Any) -> None:
        self.silent_s = 0.0
        found = BY_CALL.get(type(frame))
        if found is not None and self.pid:
            self._begin(frame.id, self._serve(found, frame), must_finish=found.kind.must_finish)
            return
        match frame:
            case frames.HelloFrame():
                if frame.build != BUILD:
                    raise ValueError(f"it is of build {frame.build}, this is {BUILD}")
                self.pid = frame.pid
                self._on_hello(self)
            case _ if not self.pid:
                raise ValueError(f"{type(frame).__name__} before Hello")
            case frames.CancelFrame():
                if frame.id in self._calls and frame.id not in self._must_finish:
                    self._calls[frame.id].cancel()
            case frames.AskFrame():
                self._begin(frame.id, self._answer(frame))
            case frames.LoadFrame():
                self.load = frame
                self._on_load(self)
            case frames.StatsFrame():
                self.gauges = frame.gauges
                self._on_stats(frame)
            case _:
                raise ValueError(f"{type(frame).__name__}: a worker does not send it")

    def _lost(self, why: str) -> None:
        if why:
            log.warning("front worker %d is gone: %s", self.number, why)
        for number, task in self._calls.items():
            if number in self._must_finish:
                self._kept.add(task)
                task.add_done_callback(self._kept.discard)
            else:
                task.cancel()
        self._on_lost(self)

    def _begin(self, number: int, work: Any, *, must_finish: bool = False) -> None:
        if number in self._calls:
            work.close()
            raise ValueError(f"call {number} is open")
        task = self._loop.create_task(work)
        self._calls[number] = task
        if must_finish:
            self._must_finish.add(number)
        task.add_done_callback(partial(self._ended, number))

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        del self._calls[number]
        self._must_finish.discard(number)
        self._steps.pop(number, None)
        self._outside.discard(number)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("call %d of front worker %d", number, self.number, exc_info=error)

    # ---- calls

    async def _serve(self, found: KindFrames, call: Any) -> None:
        """Answer one call; what it holds is released before the answer is sent."""
        if call.trace is not None:
            CURRENT.set(Trace(*call.trace))
        try:
            request = frames.unpack(found.request, call.request)
            with self._door.take(found.kind.name, request.user.tenant, call.came_at) as slot:
                slot.on_step = partial(self._stepped, call.id)
                left_s = call.due_at - time.monotonic()
                if left_s <= 0:
                    raise DeadlineExceeded("the time budget ran out on the way to the engine")
                answer = await self._service.serve(found.kind, request, left_s, slot)
            ids: I64 | None = getattr(answer, found.named, None) if found.named else None
            names = titles = None
            if ids is not None and len(ids):
                if holds_any(is_hashed(ids)):
                    names = tuple(self._service.names.items(ids))
                if call.wants_titles:
                    titles = tuple(self._service.names.titles(ids))
            out = found.answer(call.id, frames.pack(found.answered, answer), names, titles)
            self.peer.send(out, is_alone=len(self._calls) == 1)
        except Exception as error:  # noqa: BLE001  (the caller is told, whatever it is)
            self._fail(call.id, error)

    def _fail(self, number: int, error: Exception) -> None:
        if not isinstance(error, NpuGrError):
            log.error("call %d of front worker %d failed", number, self.number, exc_info=error)
        self.peer.send(frames.FailureFrame(number, pack_error(error)))

    def _stepped(self, number: int, is_outside: bool) -> None:
        self._steps[number] = is_outside
        self.peer.flush_soon()

    def _send_steps(self) -> None:
        """Tell of the calls that are elsewhere than the worker believes; one that did not wait has not moved."""
        for number, is_outside in self._steps.items():
            if is_outside != (number in self._outside):
                (self._outside.add if is_outside else self._outside.discard)(number)
                self.peer.send(frames.StepFrame(number, is_outside))
        self._steps.clear()

    # ---- questions

    async def _answer(self, ask: frames.AskFrame) -> None:
        try:
            question = QUESTIONS.get(ask.name)
            if question is None:
                raise NotFound(f"{ask.name}: there is no such question")
            told = await self._answers[ask.name](question.read(ask.body))
            self.peer.send(frames.ToldFrame(ask.id, question.write_answer(told)))
        except Exception as error:  # noqa: BLE001  (whoever asked is told)
            self._fail(ask.id, error)

    # ---- the worker

    def hello(self, settings: frames.WorkerSettings) -> None:
        """Say who the engine is, and how the worker is to serve."""
        self.peer.send(frames.HelloFrame(BUILD, os.getpid(), self.number, settings))

    def tell_credit(self, slots: dict[str, int]) -> None:
        """Tell what may be open, and what keys and tenants have spent at the other workers."""
        self.credit = slots
        self.peer.send(frames.CreditFrame(slots, dict(self.spent), dict(self.earned)))
        self.spent.clear()
        self.earned.clear()
