"""`RemoteService`: the service of another process, for HTTP in a front worker.

    request -> Call -> engine -> Answer | Failure
       |                            ^
       '-- caller gone: Cancel -----'   the engine lets go of everything; an answer that comes later is dropped

Without an engine every request is refused at once: it was not begun, and another instance may take it. A call that the
engine had when it died ends with the same error, unless it may have changed something.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from contextlib import AbstractContextManager
from typing import Any, Literal, cast

from npu_gr.admission.deadline import Deadline
from npu_gr.admission.door import Door, Slot
from npu_gr.core.arrays import I64
from npu_gr.core.errors import NotFound, NotTaken, Unavailable, Unprocessable
from npu_gr.core.feature_schema.columns import ModelFeatures
from npu_gr.core.history import UserKey
from npu_gr.core.kinds import A, Kind, Q, Routing
from npu_gr.core.names import ActionNames
from npu_gr.core.served import CatalogueChange, CatalogueInfo, ModelInfo, VectorsInfo
from npu_gr.core.trace import CURRENT
from npu_gr.front import frames
from npu_gr.front.frames import BY_ANSWER, BY_KIND
from npu_gr.front.peer import Peer
from npu_gr.front.questions import QUESTIONS
from npu_gr.front.wire import unpack_error
from npu_gr.server.codec.base import Shown

log = logging.getLogger(__name__)

NO_FEATURES = ModelFeatures()
SILENT_S = 3.0  # an engine that says nothing for so long serves nobody
_CHANGES = (Routing.ONCE, Routing.BY_LOAD, Routing.EVERYWHERE)  # kinds that change something


class AnswerNames:
    """Names for one request: of actions before it, of the items in its answer after it."""

    def __init__(
        self,
        state: frames.StateFrame | None,
        actions: dict[str, ActionNames | None],
        features: dict[str, ModelFeatures],
    ) -> None:
        self._state = state
        self._actions = actions
        self._features = features
        self._names: tuple[str | int, ...] | None = None
        self._titles: tuple[str | None, ...] | None = None

    @property
    def unsorted_history(self) -> Literal["refuse", "sort"]:
        return "sort" if self._state is not None and self._state.unsorted_history == "sort" else "refuse"

    def actions(self, version: str | None) -> ActionNames | None:
        if self._state is None:
            raise NotTaken("the engine does not run")
        if (version or "") not in self._actions:
            raise NotFound("no such model version")
        return self._actions[version or ""]

    def features(self, version: str | None) -> ModelFeatures:
        self.actions(version)  # raises where the version is not served
        return self._features.get(version or "", NO_FEATURES)

    def learn(self, names: tuple[str | int, ...] | None, titles: tuple[str | None, ...] | None) -> None:
        """Take what the answer said of its items."""
        self._names = names
        self._titles = titles

    def items(self, ids: I64) -> list[str | int]:
        return ids.tolist() if self._names is None else list(self._names)

    def titles(self, ids: I64) -> list[str | None]:
        return [None] * len(ids) if self._titles is None else list(self._titles)


class _Open:
    """A call or a question that the engine has."""

    __slots__ = ("future", "kind", "outside", "slot")

    def __init__(self, future: asyncio.Future[Any], kind: Kind[Any, Any] | None, slot: Slot | None) -> None:
        self.future = future
        self.kind = kind  # None = a question
        self.slot = slot
        self.outside: AbstractContextManager[None] | None = None  # while it waits for something else

    def step(self, is_outside: bool) -> None:
        """Follow the call: it holds no place while it waits for something else than this instance."""
        if is_outside and self.outside is None and self.slot is not None:
            self.outside = self.slot.outside()
            self.outside.__enter__()
        elif not is_outside and self.outside is not None:
            outside, self.outside = self.outside, None
            outside.__exit__(None, None, None)


class RemoteService:
    """A `ServiceProtocol`. Event loop only."""

    def __init__(self, door: Door) -> None:
        """Know no engine yet.

        Args:
            door: of this worker.
        """
        self.door = door
        self.state: frames.StateFrame | None = None  # that an engine told last
        self._is_told = False  # by the present one
        self._actions: dict[str, ActionNames | None] = {}
        self._features: dict[str, ModelFeatures] = {}
        self._peer: Peer | None = None
        self._heard_at = 0.0
        self._numbers = itertools.count(1)
        self._open: dict[int, _Open] = {}
        self._catalogue = _Catalogue(self)
        self._vectors = _Vectors(self)

    # ---- the engine

    def connected(self, peer: Peer) -> None:
        """Send what comes from now on to this engine."""
        self._peer = peer
        self._heard_at = time.monotonic()

    def lost(self) -> None:
        """The engine is gone: nothing that it had will be answered, and nothing that it said holds for the next one."""
        self._peer = None
        self._is_told = False
        for one in list(self._open.values()):
            if not one.future.done():
                one.future.set_exception(_not_taken(one.kind))
        self._open.clear()

    def heard(self) -> None:
        """The engine said something."""
        self._heard_at = time.monotonic()

    def received(self, frame: Any) -> None:
        """Take a frame that belongs to a call, a question, or the state of the instance.

        Raises:
            ValueError: an engine does not send it.
        """
        if (found := BY_ANSWER.get(type(frame))) is not None:
            if (one := self._ended(frame.id)) is not None:
                one.future.set_result((frames.unpack(found.answered, frame.answer), frame.names, frame.titles))
            return
        match frame:
            case frames.FailureFrame():
                if (one := self._ended(frame.id)) is not None:
                    one.future.set_exception(unpack_error(frame.error))
            case frames.StepFrame():
                if frame.id in self._open:
                    self._open[frame.id].step(frame.is_outside)
            case frames.ToldFrame():
                if (one := self._ended(frame.id)) is not None:
                    one.future.set_result(frame.body)
            case frames.StateFrame():
                self.state = frame
                self._is_told = True
                self._actions = {
                    version: None if names is None else ActionNames(names) for version, names in frame.actions.items()
                }
                self._features = {version: ModelFeatures(features) for version, features in frame.features.items()}
            case _:
                raise ValueError(f"{type(frame).__name__}: an engine does not send it")

    def _ended(self, number: int) -> _Open | None:
        """Take an open call out; None = nobody waits for it any more."""
        one = self._open.pop(number, None)
        return None if one is None or one.future.done() else one

    # ---- requests

    async def serve(
        self, kind: Kind[Q, A], request: Q, budget_s: float, slot: Slot | None = None, shown: Shown | None = None
    ) -> A:
        if slot is None and not kind.must_finish:
            entered = await self.door.enter(kind.name, request.user.tenant, time.monotonic(), budget_s)
            with entered as own:
                return await self._serve(kind, request, budget_s, own, shown)
        return await self._serve(kind, request, budget_s, slot, shown)

    async def _serve(self, kind: Kind[Q, A], request: Q, budget_s: float, slot: Slot | None, shown: Shown | None) -> A:
        came_at = time.monotonic() if slot is None else slot.arrived_at
        if kind.must_finish:
            return await self._call(kind, request, float("inf"), came_at, slot, shown)
        async with Deadline(budget_s) as due_at:
            return await self._call(kind, request, due_at, came_at, slot, shown)

    async def _call(
        self, kind: Kind[Q, A], request: Q, due_at: float, came_at: float, slot: Slot | None, shown: Shown | None
    ) -> A:
        form = BY_KIND[kind.name]
        trace = CURRENT.get()
        wants_titles = shown is not None and "title" in shown.fields
        number = next(self._numbers)
        call = form.call(
            number,
            due_at,
            came_at,
            None if trace is None else tuple(trace),
            wants_titles,
            frames.pack(form.request, request),
        )
        answer, names, titles = await self._ask_engine(number, call, _Open(_future(), kind, slot))
        if shown is not None and isinstance(shown.names, AnswerNames):
            shown.names.learn(names, titles)
        return cast("A", answer)

    async def _ask_engine(self, number: int, frame: Any, one: _Open) -> Any:
        if self._peer is None:
            raise NotTaken("the engine does not run")
        try:
            self._peer.send(frame)
        except (UnicodeEncodeError, OverflowError) as error:
            raise Unprocessable("a text of the request is not Unicode, or a number is over 2^64 - 1") from error
        self._open[number] = one
        try:
            return await one.future
        finally:
            one.step(False)
            # still there: nobody waits for it any more
            if self._open.pop(number, None) is not None and self._peer is not None:
                self._peer.send(frames.CancelFrame(number))

    async def ask(self, name: str, asked: Any = None) -> Any:
        """Ask the engine a question of `QUESTIONS`.

        Raises:
            NpuGrError: as the engine answers. NotTaken: there is no engine.
        """
        question = QUESTIONS[name]
        number = next(self._numbers)
        frame = frames.AskFrame(number, name, question.write(asked))
        return question.read_answer(await self._ask_engine(number, frame, _Open(_future(), None, None)))

    # ---- what is true

    def models(self) -> list[ModelInfo]:
        return [] if self.state is None else list(self.state.models)

    def kind_versions(self) -> dict[str, tuple[str, ...]]:
        return {} if self.state is None else dict(self.state.kind_versions)

    def is_ready(self) -> tuple[bool, str]:
        if self._peer is None or self.state is None or not self._is_told:
            return False, "the engine does not run"
        if time.monotonic() - self._heard_at > SILENT_S:
            return False, f"the engine has said nothing for {SILENT_S:g} s"
        return not self.state.why_not, self.state.why_not

    @property
    def names(self) -> AnswerNames:
        return AnswerNames(self.state, self._actions, self._features)

    # ---- administration

    async def effective_config(self) -> dict[str, Any]:
        return cast("dict[str, Any]", await self.ask("config"))

    async def knows(self, user: UserKey) -> dict[str, bool]:
        return cast("dict[str, bool]", await self.ask("knows", user))

    async def items(self, ids: I64) -> tuple[list[str | int], list[str | None]]:
        named = await self.ask("items", ids)
        return list(named.names), list(named.titles)

    async def reload_models(self) -> list[ModelInfo]:
        return list(await self.ask("reload"))

    @property
    def catalogue(self) -> _Catalogue:
        return self._catalogue

    @property
    def vectors(self) -> _Vectors:
        return self._vectors


class _Catalogue:
    """The engine's catalogue."""

    def __init__(self, service: RemoteService) -> None:
        self._service = service

    async def info(self) -> CatalogueInfo:
        return cast("CatalogueInfo", await self._service.ask("catalogue"))

    async def reload(self) -> CatalogueInfo:
        return cast("CatalogueInfo", await self._service.ask("catalogue reload"))

    async def rollback(self) -> CatalogueInfo:
        return cast("CatalogueInfo", await self._service.ask("catalogue rollback"))

    async def update(self, change: CatalogueChange) -> CatalogueInfo:
        return cast("CatalogueInfo", await self._service.ask("catalogue update", change))


class _Vectors:
    """The engine's vectors."""

    def __init__(self, service: RemoteService) -> None:
        self._service = service

    async def info(self) -> VectorsInfo:
        return cast("VectorsInfo", await self._service.ask("vectors"))

    async def reload(self) -> VectorsInfo:
        return cast("VectorsInfo", await self._service.ask("vectors reload"))

    async def rollback(self) -> VectorsInfo:
        return cast("VectorsInfo", await self._service.ask("vectors rollback"))


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


def _not_taken(kind: Kind[Any, Any] | None) -> Unavailable:
    if kind is None or kind.routing in _CHANGES:
        return Unavailable("the engine stopped; what was asked may have been done, or not")
    return NotTaken("the engine stopped")
