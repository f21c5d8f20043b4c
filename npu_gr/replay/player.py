"""The player. Open loop: every request leaves when it is due, whatever became of the ones before it.

Latency counts from the due time, so a service that stalls is charged for the requests that it kept waiting (no
coordinated omission), and the player's own lateness is published beside it. One thing is kept in order: a user's
events leave after the answers to the user's requests before them, and the user's requests after the answers to the
events before them. Waiting for that is charged to a rank, and is no lateness of the player.

Closed loop by choice: a number of requests in flight, the next one when one is over; latency counts from sending.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import NotRequired, TypedDict
from urllib.parse import quote

import aiohttp
import msgspec

from npu_gr.core.request import UserKey
from npu_gr.replay.body import Histories, Mode, encode
from npu_gr.replay.log import UNRANKED, Record
from npu_gr.replay.plan import Action, user_of
from npu_gr.replay.timer import Timer

BATCH = 256  # actions that are read and encoded ahead, in a thread
SWITCH_S = 1e-4  # what that thread may keep the player from its clock


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayerOptions:
    """Where to, and how long to wait."""

    url: str
    deadline_ms: float = 1000.0  # for records that name none; sent along, and the client gives up a second later
    api_key: str | None = None
    closed: int | None = None  # requests in flight; None = open loop
    histories: Mode = "logged"


class AnsweredHistory(TypedDict):
    """What the report needs of the answer's history."""

    num_tokens: int
    fingerprint: NotRequired[str]


class Answer(TypedDict):
    """What the report needs of an answer to a rank or a generate."""

    outcome: str
    reason: str
    scores: dict[str, list[float | None]]  # task -> one a candidate; None = unknown item. Of a generate: {"": ...}
    stages_s: dict[str, float]
    prefix_tokens: int
    history: AnsweredHistory
    items: NotRequired[list[int]]  # of a generate
    model_version: NotRequired[str]


class _Generated(TypedDict):
    outcome: str | None  # null: a recommend whose rank failed
    reason: str
    scores: list[float | None]
    stages_s: dict[str, float]
    prefix_tokens: int
    history: AnsweredHistory
    items: list[int]
    model_version: NotRequired[str]


class _Matched(TypedDict):
    basis: str
    vectors_version: str
    items: list[int]
    scores: list[float | None]
    stages_s: dict[str, float]


class _Signalled(TypedDict):
    history: AnsweredHistory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """What became of one request. Times in seconds."""

    record: Record
    due_at: float
    lag_s: float  # sent that much after it could leave
    latency_s: float  # answered that much after it was due
    error: str  # "" = none; an HTTP status, "timeout", "no connection" or "bad answer"
    answer: Answer | None  # of a rank or a generate without error
    number: int = 0  # the action's
    num_bytes: int = 0  # of the body
    was_resent: bool = False  # the service had forgotten the prefix of a delta


_PATHS = {kind: f"v1/{kind}" for kind in ("rank", "signal", "generate", "match", "recommend", "events")}
_ANSWER = msgspec.json.Decoder(Answer)
_GENERATED = msgspec.json.Decoder(_Generated)
_MATCHED = msgspec.json.Decoder(_Matched)
_SIGNALLED = msgspec.json.Decoder(_Signalled)


async def play(
    actions: Iterable[Action],
    options: PlayerOptions,
    on_sample: Callable[[Sample], None],
    start_s: float | None = None,
) -> None:
    """Send everything; each request becomes a sample when it is over.

    Args:
        actions: read as they are needed, in a thread.
        on_sample: called on the event loop.
        start_s: instant of `time.monotonic()` that due times count from; None = now.

    Cancelling it stops sending and waits for nothing more.
    """
    headers = {"Content-Type": "application/json"}
    if options.api_key:
        headers["Authorization"] = f"Bearer {options.api_key}"
    base_url = options.url.rstrip("/") + "/"  # a router may live under a path
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(base_url, connector=connector, headers=headers) as http, Timer() as timer:
        player = _Player(http, options, on_sample)
        batches = _ahead(actions, player.body)
        try:
            with _alert():
                first: list[tuple[Action, bytes]] = await anext(batches, [])
                player.start_s = time.monotonic() + 0.1 if start_s is None else start_s
                await timer.until(player.start_s)
                await player.send_all(first, timer)
                async for batch in batches:
                    await player.send_all(batch, timer)
                await player.finish()
        finally:
            await player.cancel()
            await batches.aclose()


class _Player:
    def __init__(
        self, http: aiohttp.ClientSession, options: PlayerOptions, on_sample: Callable[[Sample], None]
    ) -> None:
        self._http, self._options, self._on_sample = http, options, on_sample
        self._histories = Histories(options.histories)
        self._slots = None if options.closed is None else asyncio.Semaphore(options.closed)
        self._sent: set[asyncio.Task[None]] = set()
        self._open: dict[UserKey, dict[asyncio.Task[None], bool]] = {}  # a user's running requests; True = events
        self.start_s = 0.0

    def body(self, record: Record) -> bytes:
        """What can be encoded ahead; deltas depend on the answers before them."""
        return encode(record) if self._options.histories == "logged" else b""

    async def send_all(self, batch: list[tuple[Action, bytes]], timer: Timer) -> None:
        """Start each request when it is due."""
        for action, body in batch:
            due_at = self.start_s + action.due_at
            if self._slots is not None:
                await self._slots.acquire()
                due_at = time.monotonic()
            else:
                await timer.until(due_at)  # a late player too must let its tasks send
            self._start(action, body, due_at)

    def _start(self, action: Action, body: bytes, due_at: float) -> None:
        record = action.record
        is_write, user = record.kind == "events", user_of(record)
        running = self._open.get(user, {})
        after = [task for task, writes in running.items() if is_write or writes]
        task = asyncio.get_running_loop().create_task(self._send(action, body, due_at, after))
        self._sent.add(task)
        if record.kind != "signal":
            self._open.setdefault(user, {})[task] = is_write
        task.add_done_callback(lambda done: self._over(done, user))

    def _over(self, task: asyncio.Task[None], user: UserKey) -> None:
        self._sent.discard(task)
        running = self._open.get(user)
        if running is not None:
            running.pop(task, None)
            if not running:
                del self._open[user]
        if self._slots is not None:
            self._slots.release()
        if not task.cancelled():
            task.result()  # a defect of ours is raised, not kept

    async def finish(self) -> None:
        """Wait for every answer."""
        while self._sent:
            await asyncio.gather(*self._sent)

    async def cancel(self) -> None:
        """Give up what is still running."""
        running = list(self._sent)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _send(self, action: Action, body: bytes, due_at: float, after: list[asyncio.Task[None]]) -> None:
        record, free_s = action.record, due_at
        if after:
            await asyncio.wait(after)
            free_s = max(due_at, time.monotonic())
            if record.kind == "events":
                due_at = free_s
        outgoing = self._histories.outgoing(record)
        body = body or encode(outgoing)
        budget_ms = record.deadline_ms or self._options.deadline_ms
        lag_s = time.monotonic() - free_s
        content, error = await self._post(record, body, budget_ms)
        was_resent = error == "409" and outgoing is not record
        if was_resent:
            content, error = await self._post(record, encode(record), budget_ms)
        latency_s = time.monotonic() - due_at  # before anything is decoded
        answer = None
        if not error:
            try:
                answer, fingerprint = _read(record, content)
            except (msgspec.MsgspecError, ValueError):
                error = "bad answer"
            else:
                self._histories.answered(record, fingerprint)
        self._on_sample(
            Sample(
                record=record,
                due_at=due_at - self.start_s if self._slots or record.kind == "events" else action.due_at,
                lag_s=lag_s,
                latency_s=latency_s,
                error=error,
                answer=answer,
                number=action.number,
                num_bytes=len(body),
                was_resent=was_resent,
            )
        )

    async def _post(self, record: Record, body: bytes, budget_ms: float) -> tuple[bytes, str]:
        timeout = aiohttp.ClientTimeout(total=budget_ms * 1e-3 + 1.0)
        # the user also in a header: what a router places it by
        headers = {"X-Request-Timeout-Ms": f"{budget_ms:.3f}", "X-User-Id": quote(record.user_id)}
        try:
            async with self._http.post(_PATHS[record.kind], data=body, headers=headers, timeout=timeout) as response:
                return await response.read(), "" if response.ok else str(response.status)
        except TimeoutError:
            return b"", "timeout"
        except aiohttp.ClientError:
            return b"", "no connection"


def _read(record: Record, content: bytes) -> tuple[Answer | None, str]:
    """The answer and its history's fingerprint. Raises ValueError where the service broke its contract."""
    match record.kind:
        case "rank":
            answer = _ANSWER.decode(content)
            num = len(record.candidate_ids())
            if any(len(scores) != num for scores in answer["scores"].values()):
                raise ValueError(f"expected {num} scores a task")
        case "generate" | "recommend":
            made = _GENERATED.decode(content)
            answer = Answer(**{**made, "outcome": made["outcome"] or UNRANKED, "scores": {"": made["scores"]}})
        case "match":
            found = _MATCHED.decode(content)
            answer = Answer(
                outcome=found["basis"],
                reason="",
                scores={"": found["scores"]},
                stages_s=found["stages_s"],
                prefix_tokens=0,
                history={"num_tokens": 0},
                items=found["items"],
                model_version=found["vectors_version"],
            )
        case "signal":
            try:
                return None, _SIGNALLED.decode(content)["history"].get("fingerprint", "")
            except msgspec.MsgspecError:
                return None, ""
        case _:
            return None, ""
    return answer, answer["history"].get("fingerprint", "")


async def _ahead(
    actions: Iterable[Action], body: Callable[[Record], bytes]
) -> AsyncGenerator[list[tuple[Action, bytes]], None]:
    """Batches of actions with their bodies; the next is made in a thread while one is being sent."""
    rest: Iterator[Action] = iter(actions)

    def take() -> list[tuple[Action, bytes]]:
        return [(action, body(action.record)) for action in islice(rest, BATCH)]

    following = asyncio.create_task(asyncio.to_thread(take))
    try:
        while batch := await following:
            following = asyncio.create_task(asyncio.to_thread(take))
            yield batch
    finally:
        await asyncio.gather(following, return_exceptions=True)


@contextmanager
def _alert() -> Iterator[None]:
    """Nothing that the run does not make itself is looked at by the garbage collector; threads yield soon."""
    before_s = sys.getswitchinterval()
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)
        gc.unfreeze()
