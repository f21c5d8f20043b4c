"""The open-loop player: every request leaves when it is due, whatever became of the ones before it.

Latency counts from the due time, so a service that stalls is charged for the requests that it kept waiting (no
coordinated omission), and the player's own lateness is published beside it. A user's events leave after the answer
to the user's ranks and events before them.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypedDict

import aiohttp
import msgspec

from npu_gr.replay.log import LoggedHistory, Record
from npu_gr.replay.plan import Action
from npu_gr.replay.timer import Timer


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayerOptions:
    """Where to, and how long to wait."""

    url: str
    deadline_ms: float = 1000.0  # for records that name none; sent along, and the client gives up a second later
    api_key: str | None = None


class AnsweredHistory(TypedDict):
    """What the report needs of the answer's history."""

    num_tokens: int


class Answer(TypedDict):
    """What the report needs of a rank's answer."""

    outcome: str
    reason: str
    scores: dict[str, list[float | None]]  # task -> one a candidate; None = unknown item
    stages_s: dict[str, float]
    prefix_tokens: int
    history: AnsweredHistory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """What became of one request. Times in seconds."""

    record: Record
    due_s: float
    lag_s: float  # sent that much after it was due
    latency_s: float  # answered that much after it was due
    error: str  # "" = none; an HTTP status, "timeout", "no connection" or "bad answer"
    answer: Answer | None  # of a rank without error


_PATHS = {kind: f"v1/{kind}" for kind in ("rank", "signal", "events")}
_ANSWER = msgspec.json.Decoder(Answer)


def encode(record: Record) -> bytes:
    """The record's request body."""
    body: dict[str, object] = {"user_id": record.user_id}
    if record.tenant:
        body["tenant"] = record.tenant
    if record.kind == "events":
        body["events"] = _columns(record.events)
        return msgspec.json.encode(body)
    if record.history is not None:
        body["history"] = _columns(record.history)
    if record.kind == "signal":
        if record.candidates:
            body["num_candidates"] = len(record.candidates)
        return msgspec.json.encode(body)
    body["candidates"] = record.candidates
    if record.timestamp is not None:
        body["timestamp"] = record.timestamp
    if record.top_k is not None:
        body["top_k"] = record.top_k
    return msgspec.json.encode(body)


def _columns(history: LoggedHistory | None) -> dict[str, list[int]]:
    assert history is not None
    return {"items": history.items, "actions": history.actions, "timestamps": history.timestamps}


async def play(
    actions: Sequence[Action], options: PlayerOptions, progress: Callable[[int], None] = lambda _done: None
) -> list[Sample]:
    """Send everything; the samples in order of their answers.

    Cancelling it stops sending, waits for nothing more, and loses no sample: they are in the exception's `samples`.

    Raises:
        PlayInterrupted: it was cancelled.
    """
    bodies = [encode(action.record) for action in actions]
    samples: list[Sample] = []
    sent: set[asyncio.Task[None]] = set()
    awaited = {index for action in actions for index in action.after}
    earlier: dict[int, asyncio.Task[None]] = {}  # those that later actions wait for
    headers = {"Content-Type": "application/json"}
    if options.api_key:
        headers["Authorization"] = f"Bearer {options.api_key}"
    connector = aiohttp.TCPConnector(limit=0)
    base_url = options.url.rstrip("/") + "/"  # a router may live under a path
    async with aiohttp.ClientSession(base_url, connector=connector, headers=headers) as http, Timer() as timer:
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            start_s = time.monotonic() + 0.1
            for index, (action, body) in enumerate(zip(actions, bodies, strict=True)):
                await timer.until(start_s + action.due_s)  # a late player too must let its tasks send
                after = [earlier[i] for i in action.after]
                task = asyncio.create_task(_send(http, action, body, start_s, options, samples, after))
                sent.add(task)
                task.add_done_callback(sent.discard)
                if index in awaited:
                    earlier[index] = task
                progress(1)
            await asyncio.gather(*sent)
        except asyncio.CancelledError as error:
            for task in list(sent):
                task.cancel()
            await asyncio.gather(*sent, return_exceptions=True)
            raise PlayInterrupted(samples) from error
        finally:
            gc.enable()
            gc.unfreeze()
    return samples


class PlayInterrupted(asyncio.CancelledError):
    """A run was cancelled; `samples` holds what was answered before."""

    def __init__(self, samples: list[Sample]) -> None:
        super().__init__()
        self.samples = samples


async def _send(
    http: aiohttp.ClientSession,
    action: Action,
    body: bytes,
    start_s: float,
    options: PlayerOptions,
    samples: list[Sample],
    after: Sequence[asyncio.Task[None]],
) -> None:
    record, due_s = action.record, start_s + action.due_s
    if after:
        await asyncio.wait(after)
        due_s = max(due_s, time.monotonic())  # waiting for the user's rank is no lateness
    budget_ms = record.deadline_ms or options.deadline_ms
    timeout = aiohttp.ClientTimeout(total=budget_ms * 1e-3 + 1.0)
    lag_s = time.monotonic() - due_s
    content, error = b"", ""
    try:
        async with http.post(
            _PATHS[record.kind], data=body, headers={"X-Request-Timeout-Ms": f"{budget_ms:.3f}"}, timeout=timeout
        ) as response:
            content = await response.read()
            error = "" if response.ok else str(response.status)
    except TimeoutError:
        error = "timeout"
    except aiohttp.ClientError:
        error = "no connection"
    latency_s = time.monotonic() - due_s  # before anything is decoded
    answer = None
    if record.kind == "rank" and not error:
        try:
            answer = _read(content, len(record.candidates))
        except ValueError:
            error = "bad answer"
    samples.append(
        Sample(
            record=record,
            due_s=action.due_s,
            lag_s=lag_s,
            latency_s=latency_s,
            error=error,
            answer=answer,
        )
    )


def _read(content: bytes, num_candidates: int) -> Answer:
    """Raises ValueError where the service broke its contract."""
    answer = _ANSWER.decode(content)
    if any(len(scores) != num_candidates for scores in answer["scores"].values()):
        raise ValueError(f"expected {num_candidates} scores a task")
    return answer
