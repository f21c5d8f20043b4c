"""What a front worker tells its engine: the load at its door, and what it counted."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from resource import getpagesize
from typing import Any

from npu_gr.admission.door import Door
from npu_gr.core.kinds import KINDS
from npu_gr.core.logs import num_lines_dropped
from npu_gr.core.tls import ServerTls
from npu_gr.front import frames
from npu_gr.metrics.registry import Metrics
from npu_gr.metrics.registry.deltas import Gained
from npu_gr.server.access_log import AccessLog
from npu_gr.server.entrance.entrance import Entrance
from npu_gr.server.entrance.listener import State
from npu_gr.server.newest import AccessLine, EndedLine

LOAD_S = 0.05  # between two looks at the door
STATS_S = 1.0
MOST_ENDED = 128  # requests of one frame that the percentiles come from; each costs the engine's loop 3 us
MOST_SLOW = 8  # beside them


class Reports:
    """Event loop only."""

    def __init__(
        self,
        door: Door,
        entrance: Entrance,
        metrics: Metrics,
        access_log: AccessLog,
        tls: ServerTls | None,
        send: Callable[[Any], bool],
    ) -> None:
        """Begin to count.

        Args:
            door, entrance, metrics, access_log, tls: of this worker.
            send: to the engine; False = there is none.
        """
        self._door = door
        self._entrance = entrance
        self._metrics = metrics
        self._tls = tls
        self._send = send
        self._gained = Gained(metrics.counted)
        self._ended: list[EndedLine] = []
        self._slow: list[tuple[float, int, EndedLine]] = []
        self._numbers = itertools.count()  # of two that took as long, the first comes first
        self._spent = Counter[str]()
        self._earned = Counter[str]()
        self._told: object = None  # None = nothing
        self._lag_s = 0.0
        keep = access_log.on_line

        def on_line(kind: str, line: AccessLine) -> None:
            keep(kind, line)
            self._note(kind, line)

        access_log.on_line = on_line
        entrance.keys.on_spent = self._count_spent
        door.on_device = self._count_earned

    def _note(self, kind: str, line: AccessLine) -> None:
        """Keep the first requests of a second whatever they are, and of the others the slowest."""
        if len(self._ended) < MOST_ENDED:
            self._ended.append(EndedLine(kind, line))
        elif line.status != 429 and (len(self._slow) < MOST_SLOW or line.duration_s > self._slow[0][0]):
            (heapq.heappush if len(self._slow) < MOST_SLOW else heapq.heapreplace)(
                self._slow, (line.duration_s, next(self._numbers), EndedLine(kind, line))
            )

    def _count_spent(self, key: str) -> None:
        self._spent[key] += 1

    def _count_earned(self, tenant: str) -> None:
        self._earned[tenant] += 1

    def send_load(self) -> None:
        """Tell who wants how much, where that has changed."""
        now = (self._door.wanted(), self._door.wanting(), self._door.pressure)
        if now != self._told or self._spent or self._earned:
            is_told = self._send(frames.LoadFrame(*now, dict(self._spent), dict(self._earned)))
            self._told = now if is_told else None
            self._spent.clear()
            self._earned.clear()

    def send_stats(self) -> None:
        """Tell what was counted since the last time; while there is no engine it is kept for the next one."""
        if not self._send(None):
            return
        self._metrics.door.before_scrape()
        deltas = tuple(self._gained.take())
        ended, self._ended = tuple(self._ended), []
        slow = tuple(one for _, _, one in self._slow)
        self._slow.clear()
        self._send(frames.StatsFrame(deltas, ended, slow, self._gauges()))
        self._lag_s = 0.0

    def _gauges(self) -> frames.Gauges:
        entrance = self._entrance
        return frames.Gauges(
            places={kind: self._door.counts(kind) for kind in KINDS},
            connections={state.value: entrance.count(state) for state in State},
            paused=entrance.num_paused,
            lent=entrance.num_lent,
            receiving_bytes=entrance.receiving_bytes,
            in_flight=int(next(iter(self._metrics.requests.in_flight.collect())).samples[0].value),
            refusals_per_s=entrance.pacer.refusals_per_s,
            keys=len(entrance.keys),
            is_stale=entrance.keys.is_stale,
            expires_at=None if self._tls is None else self._tls.expiry(),
            cpu_s=time.process_time(),
            lag_s=self._lag_s,
            resident_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * getpagesize(),
            lines_dropped=num_lines_dropped(),
        )

    async def run(self) -> None:
        """Tell it at regular times, until cancelled."""
        stats_at = 0.0
        while True:
            due_at = time.monotonic() + LOAD_S
            await asyncio.sleep(LOAD_S)
            now_at = time.monotonic()
            self._lag_s = max(self._lag_s, now_at - due_at)
            self.send_load()
            if now_at >= stats_at:
                stats_at = now_at + STATS_S
                self.send_stats()
