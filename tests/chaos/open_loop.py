"""An open-loop client: it sends requests when they are due, and counts their latency from then."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

LOST = 0  # the status of a request that had no answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request."""

    body: dict[str, Any]
    name: str = "rank"  # of its sort, in the samples
    path: str = "/v1/rank"
    headers: dict[str, str] = field(default_factory=dict)
    budget_s: float = 1.0  # that its header grants


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What became of one request."""

    name: str
    due_at: float
    took_s: float  # from the due instant
    status: int
    body: dict[str, Any]


class Answers:
    """Requests and what became of them."""

    def __init__(self, samples: Iterable[Answered]) -> None:
        self.samples = list(samples)

    def of(self, name: str) -> Answers:
        return Answers(sample for sample in self.samples if sample.name == name)

    def due(self, from_at: float, to_at: float) -> Answers:
        return Answers(sample for sample in self.samples if from_at <= sample.due_at < to_at)

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def statuses(self) -> Counter[int]:
        return Counter(sample.status for sample in self.samples)

    def quantile_s(self, share: float) -> float:
        """Of all requests, whatever their status."""
        assert self.samples
        return float(np.quantile([sample.took_s for sample in self.samples], share))

    def check(self, most_failed: float, *also_allowed: int) -> None:
        """Check that all but this share were answered with 2xx or with a status that is allowed."""
        assert self.samples
        failed = [sample for sample in self.samples if not 200 <= sample.status < 300]
        failed = [sample for sample in failed if sample.status not in also_allowed]
        assert len(failed) <= most_failed * len(self.samples), (self.statuses, failed[:2])

    @property
    def failed(self) -> list[tuple[int, dict[str, Any]]]:
        """Those that were not answered with 2xx."""
        return [
            (sample.status, sample.body)
            for sample in self.samples
            if not 200 <= sample.status < 300
        ]


class OpenLoop:
    """Sends requests at a fixed rate while a block runs."""

    def __init__(
        self, url: str, make: Callable[[int], Ask], per_s: float, *, connects_anew: bool = False
    ) -> None:
        """Send nothing yet.

        Args:
            url: of the instance.
            make: the n-th request.
            per_s: how many a second.
            connects_anew: each has a connection of its own.
        """
        self._connects_anew = connects_anew
        self._url = url
        self._make = make
        self._period_s = 1 / per_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._samples: list[Answered] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[OpenLoop]:
        """Send while the block runs, and wait for the answers."""
        connector = aiohttp.TCPConnector(limit=0, force_close=self._connects_anew)
        async with aiohttp.ClientSession(connector=connector) as http:
            sender = asyncio.create_task(self._send_all(http))
            try:
                yield self
            finally:
                sender.cancel()
                await asyncio.gather(sender, return_exceptions=True)
                await asyncio.gather(*self._tasks)

    async def over(self, seconds: float) -> Answers:
        """Wait so long, and for the answers of that time."""
        from_at = time.monotonic()
        await asyncio.sleep(seconds)
        return await self.between(from_at, time.monotonic())

    async def between(self, from_at: float, to_at: float) -> Answers:
        """Wait for the answers of the requests that were due in that time."""
        await asyncio.gather(*self._tasks)
        return Answers(self._samples).due(from_at, to_at)

    async def _send_all(self, http: aiohttp.ClientSession) -> None:
        due_at = time.monotonic()
        number = 0
        while True:
            await asyncio.sleep(due_at - time.monotonic())
            task = asyncio.create_task(self._send(http, self._make(number), due_at))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            due_at, number = due_at + self._period_s, number + 1

    async def _send(self, http: aiohttp.ClientSession, ask: Ask, due_at: float) -> None:
        self._samples.append(await send(http, self._url, ask, due_at))


async def send(
    http: aiohttp.ClientSession, url: str, ask: Ask, due_at: float | None = None
) -> Answered:
    """Send one request; no answer within thrice its budget and a second counts as lost."""
    due_at = time.monotonic() if due_at is None else due_at
    headers = {"X-Request-Timeout-Ms": f"{ask.budget_s * 1e3:.0f}", **ask.headers}
    timeout = aiohttp.ClientTimeout(total=3 * ask.budget_s + 1.0)
    status = LOST
    body: dict[str, Any] = {}
    try:
        async with http.post(
            url + ask.path, json=ask.body, headers=headers, timeout=timeout
        ) as answer:
            status = answer.status
            body = await answer.json(content_type=None)
    except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
        status, body = LOST, {"error": repr(error)}
    return Answered(
        name=ask.name, due_at=due_at, took_s=time.monotonic() - due_at, status=status, body=body
    )
