"""Gives back memory that a burst of requests or a reload took, while no request waits.

The C library keeps freed blocks in its heaps (`npu_gr/core/process.py`). To give them back stops
allocation, .2 to .5 s a GB, so it waits for a turn without a request. After a reload, when the
version before has ended, it does not wait: the weights of a whole model are free then.

    burst      given back in the first `TURN_S` in which no request began or ran
    reload     given back within `TURN_S` after the version before has ended
    no pause   an instance that never rests keeps the memory of its largest burst, and uses it again
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from npu_gr.core.health import Worker
from npu_gr.core.process import resident_bytes, trim_heap
from npu_gr.handlers.service import Service

TURN_S = 1.0
LEAST_BYTES = 64 << 20  # less is not worth a pause


class IdleHeap:
    """Watches the memory of an instance. Event loop only."""

    def __init__(
        self,
        service: Service,
        resident: Callable[[], int] = resident_bytes,
        trim: Callable[[], None] = trim_heap,
    ) -> None:
        """Begin with the memory that the process has now, which is trimmed.

        Args:
            service: Tells whether requests come, and whether a model has just been freed.
            resident, trim: Read the process's resident bytes; give free memory back.
        """
        self._service = service
        self._resident = resident
        self._trim = trim
        self._kept_bytes = resident()  # when it was last trimmed
        self._begun = 0
        self._was_retiring = False

    async def watch(self, worker: Worker) -> None:
        """Give memory back whenever it is time, until cancelled."""
        async for _ in worker.turns(TURN_S):
            await self.turn()

    async def turn(self) -> None:
        """Give memory back if it is time."""
        parts, begun = self._service.parts, self._service.num_begun
        is_idle = begun == self._begun and not (
            parts.admission.work.admitted or parts.admission.waiting or parts.scheduler.depth
        )
        was_retiring, self._was_retiring = self._was_retiring, self._service.versions.is_retiring
        self._begun = begun
        has_ended = was_retiring and not self._was_retiring
        if is_idle or has_ended:
            await asyncio.to_thread(self._give_back, 0 if has_ended else LEAST_BYTES)

    def _give_back(self, least_bytes: int) -> None:
        """Trim the heap if `least_bytes` have come since the last time."""
        now_bytes = self._resident()
        # a version that has ended frees less than it took: the kept bytes were those of two
        if not least_bytes or now_bytes >= self._kept_bytes + least_bytes:
            self._trim()
            self._kept_bytes = self._resident()
        else:
            self._kept_bytes = min(self._kept_bytes, now_bytes)
