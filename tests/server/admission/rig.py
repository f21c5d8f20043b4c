"""An instance behind admission on a virtual clock.

It is an event loop, and a device that serves passes of a few requests.

    arrive (parse a little) -> admission -> loop work -> device pass, shared -> loop work -> leave

Nothing here depends on the machine, so a test can say to the request what admission must do.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from npu_gr.core.errors import Overloaded
from npu_gr.core.kinds import RANK
from npu_gr.server.admission.controller import AdmissionConfig, AdmissionController

OBJECTIVE_S = 0.05


@dataclass
class Seen:
    """What the clients saw."""

    counts: Counter[str] = field(default_factory=Counter)  # in_time, late, rejected
    latencies_s: list[float] = field(default_factory=list)  # of the answered
    rejected_after_s: list[float] = field(default_factory=list)

    @property
    def in_time(self) -> int:
        return self.counts["in_time"]


class Instance:
    """Make it inside a virtual loop."""

    def __init__(
        self,
        *,
        host_s: float = 0.0005,
        pass_s: float = 0.0008,
        request_s: float = 0.0005,
        rejection_s: float = 0.00001,
        batch: int = 4,
        objective_s: Callable[[str], float] = lambda _kind: OBJECTIVE_S,
        **settings: Any,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.host_s = host_s
        self.pass_s = pass_s
        self.request_s = request_s
        self.rejection_s = rejection_s
        self.batch = batch
        self.admission = AdmissionController(
            AdmissionConfig(**settings), objective_s, batch_requests=batch, clock=self.loop.time
        )
        self._host_free_at = 0.0
        self._queue: list[tuple[float, asyncio.Future[None]]] = []
        self._is_busy = False

    @property
    def capacity_per_s(self) -> float:
        return 1 / max(self.host_s, self.pass_s / self.batch + self.request_s)

    async def on_host(self, takes_s: float) -> None:
        now_at = self.loop.time()
        self._host_free_at = max(self._host_free_at, now_at) + takes_s
        await asyncio.sleep(self._host_free_at - now_at)

    def pause(self, for_s: float) -> None:
        """Stop the event loop of the instance for so long."""
        self._host_free_at = max(self._host_free_at, self.loop.time()) + for_s

    async def on_device(self, takes_s: float) -> None:
        future = self.loop.create_future()
        self._queue.append((takes_s, future))
        if not self._is_busy:
            self._is_busy = True
            self.loop.call_soon(self._begin_pass)
        await future

    def _begin_pass(self) -> None:
        jobs, self._queue = self._queue[: self.batch], self._queue[self.batch :]
        self._is_busy = bool(jobs)
        if jobs:
            took_s = self.pass_s + sum(takes_s for takes_s, _ in jobs)
            self.loop.call_later(took_s, self._end_pass, jobs)

    def _end_pass(self, jobs: list[tuple[float, asyncio.Future[None]]]) -> None:
        for _, future in jobs:
            if not future.done():
                future.set_result(None)
        self._begin_pass()

    async def ask(
        self,
        seen: Seen,
        kind: str = RANK.name,
        tenant: str = "",
        budget_s: float = 1.0,
        times: float = 1.0,
    ) -> bool:
        """One request; True = it was answered."""
        due_at = self.loop.time()
        try:
            slot = await self.admission.enter(kind, tenant, due_at, budget_s)
        except Overloaded:
            await self.on_host(self.rejection_s)
            seen.counts["rejected"] += 1
            seen.rejected_after_s.append(self.loop.time() - due_at)
            return False
        with slot:
            await self.on_host(self.host_s * 0.6 * times)
            await self.on_device(self.request_s * times)
            await self.on_host(self.host_s * 0.4 * times)
        took_s = self.loop.time() - due_at
        seen.latencies_s.append(took_s)
        seen.counts["in_time" if took_s <= OBJECTIVE_S else "late"] += 1
        return True

    async def closed(
        self, seen: Seen, clients: int, seconds: float, service_time_s: float = 0.0, **options: Any
    ) -> None:
        """Clients that send again at once.

        After a rejection after `service_time_s`, which stands for the pacing.
        """
        end_at = self.loop.time() + seconds

        async def client() -> None:
            while self.loop.time() < end_at:
                if not await self.ask(seen, **options):
                    await asyncio.sleep(service_time_s)

        await asyncio.gather(*(client() for _ in range(clients)))

    async def bursts(self, seen: Seen, size: int, every_s: float, count: int) -> None:
        tasks = []
        for _ in range(count):
            tasks += [asyncio.ensure_future(self.ask(seen)) for _ in range(size)]
            await asyncio.sleep(every_s)
        await asyncio.gather(*tasks)


def virtually(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run it on a virtual loop."""
    from npu_gr.simulate.clock import VirtualLoop

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work())
