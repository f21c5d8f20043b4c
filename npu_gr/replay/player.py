"""Send planned requests to a service, and make a `Sample` of each.

Open loop: every request is sent at its due time, independent of earlier answers. Latency counts
from the due time, so a stall of the service counts for all delayed requests (no coordinated
omission). The lag of the player itself is reported separately.

Writes are ordered: a user's events are sent after the answers to the user's earlier requests, and
later requests of the user after the answer to the write. The latency of a rank includes this wait,
the lag does not.

Closed loop (option `closed`): a fixed number of requests is in flight, and the next one is sent
when one ends. Latency then counts from sending.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice

import aiohttp
import msgspec

from npu_gr.core.calling import calling_context, calling_headers, placing_headers
from npu_gr.core.history import UserKey
from npu_gr.core.kinds import SIGNAL, Routing
from npu_gr.replay.log import RECORDED, QueryRecord
from npu_gr.replay.plan import Action, ReplayOptions, user_of
from npu_gr.replay.requests import Sample, SentHistories, encode, read_answer

BATCH = 256  # requests that a thread reads and encodes ahead
# switch interval of the interpreter, which bounds the delay by that thread
SWITCH_S = 1e-4
SETTLE_S = 0.1  # from the first encoded batch to the first due time
PATIENCE_S = 1.0  # client timeout beyond the deadline of the request
# the last part of a sleep runs in a thread, since timers of an event loop may be 1 ms late
_THREAD_S = 0.005


async def sleep_until(wake_at: float) -> None:
    """Sleep until an instant of `time.monotonic()`; if it is past, yield to the event loop once."""
    wait_s = wake_at - time.monotonic()
    if wait_s <= 0:
        await asyncio.sleep(0)
        return
    if wait_s > 2 * _THREAD_S:
        await asyncio.sleep(wait_s - _THREAD_S)
    await asyncio.to_thread(time.sleep, max(0.0, wake_at - time.monotonic()))


async def play(
    actions: Iterable[Action],
    options: ReplayOptions,
    on_sample: Callable[[Sample], None],
    start_at: float | None = None,
) -> None:
    """Send all requests, and report each when it ends. Cancelling stops it at once.

    Args:
        actions: Planned requests; a thread reads them on demand.
        options: Service and way of sending.
        on_sample: Callback on the event loop, for each finished request.
        start_at: Instant of `time.monotonic()` from which due times count; None for `SETTLE_S`
            after the first requests are encoded.
    """
    headers = {"Content-Type": "application/json", **calling_headers(options.api_key)}
    base_url = options.base_url.rstrip("/") + "/"  # a router may be below a path
    connector = aiohttp.TCPConnector(limit=0, ssl=calling_context())
    async with aiohttp.ClientSession(base_url, connector=connector, headers=headers) as http:
        player = _Player(http, options, on_sample)
        batches = _ahead(actions, player.body)
        try:
            with _low_jitter():
                first: list[tuple[Action, bytes]] = await anext(batches, [])
                player.start_at = time.monotonic() + SETTLE_S if start_at is None else start_at
                await sleep_until(player.start_at)
                await player.send_all(first)
                async for batch in batches:
                    await player.send_all(batch)
                await player.finish()
        finally:
            await player.cancel()
            await batches.aclose()


class _Player:
    def __init__(
        self,
        http: aiohttp.ClientSession,
        options: ReplayOptions,
        on_sample: Callable[[Sample], None],
    ) -> None:
        self._http = http
        self._options = options
        self._on_sample = on_sample
        self._histories = SentHistories(options.histories)
        self._slots = None if options.closed is None else asyncio.Semaphore(options.closed)
        self._sent: set[asyncio.Task[None]] = set()
        # running requests by user; True for a write
        self._open: dict[UserKey, dict[asyncio.Task[None], bool]] = {}
        self.start_at = 0.0  # of time.monotonic()

    def body(self, record: QueryRecord) -> bytes:
        """Encode a body ahead, unless it depends on earlier answers (deltas)."""
        return encode(record) if self._options.histories == "logged" else b""

    async def send_all(self, batch: list[tuple[Action, bytes]]) -> None:
        """Start each request at its due time."""
        for action, body in batch:
            due_at = self.start_at + action.due_at
            if self._slots is not None:
                await self._slots.acquire()
                due_at = time.monotonic()
            else:
                await sleep_until(due_at)  # even if late, so that started tasks can send
            self._start(action, body, due_at)

    def _start(self, action: Action, body: bytes, due_at: float) -> None:
        record = action.record
        user = user_of(record)
        is_write = _is_write(record)
        running = self._open.get(user, {})
        after = [task for task, writes in running.items() if is_write or writes]
        task = asyncio.get_running_loop().create_task(self._send(action, body, due_at, after))
        self._sent.add(task)
        if record.kind != SIGNAL.name:  # nothing waits for a signal
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
            task.result()  # raises an error of ours

    async def finish(self) -> None:
        """Wait for every answer."""
        while self._sent:
            await asyncio.gather(*self._sent)

    async def cancel(self) -> None:
        """Cancel the running requests."""
        running = list(self._sent)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _send(
        self, action: Action, body: bytes, due_at: float, after: list[asyncio.Task[None]]
    ) -> None:
        record = action.record
        is_write = _is_write(record)
        free_at = due_at  # earliest possible time of sending
        if after:
            await asyncio.wait(after)
            free_at = max(due_at, time.monotonic())
            if is_write:
                due_at = free_at
        outgoing = self._histories.outgoing(record)
        body = body or encode(outgoing)
        budget_ms = record.deadline_ms or self._options.timeout_s * 1e3
        lag_s = time.monotonic() - free_at
        content, error = await self._request(record, body, budget_ms)
        was_resent = error == "409" and outgoing is not record
        if was_resent:
            content, error = await self._request(record, encode(record), budget_ms)
        latency_s = time.monotonic() - due_at  # without decoding
        answer = None
        if not error:
            try:
                answer, fingerprint = read_answer(record, content, self._options.item_key)
            except (msgspec.MsgspecError, ValueError):
                error = "bad answer"
            else:
                self._histories.answered(record, fingerprint)
        self._on_sample(
            Sample(
                record=record,
                due_at=due_at - self.start_at if self._slots or is_write else action.due_at,
                lag_s=lag_s,
                latency_s=latency_s,
                error=error,
                answer=answer,
                number=action.number,
                num_bytes=len(body),
                was_resent=was_resent,
            )
        )

    async def _request(
        self, record: QueryRecord, body: bytes, budget_ms: float
    ) -> tuple[bytes, str]:
        """Return the body of the answer, and the error as in `Sample.error`."""
        kind = RECORDED[record.kind]
        path = kind.path.lstrip("/")  # relative to the session's base
        timeout = aiohttp.ClientTimeout(total=budget_ms * 1e-3 + PATIENCE_S)
        # a router reads the user from a header to place the request
        headers = {"X-Request-Timeout-Ms": f"{budget_ms:.3f}", **placing_headers(record.user_id)}
        try:
            async with self._http.request(
                kind.method, path, data=body, headers=headers, timeout=timeout
            ) as response:
                return await response.read(), "" if response.ok else str(response.status)
        except TimeoutError:
            return b"", "timeout"
        except aiohttp.ClientError:
            return b"", "no connection"


def _is_write(record: QueryRecord) -> bool:
    return RECORDED[record.kind].routing is Routing.ONCE


async def _ahead(
    actions: Iterable[Action], body: Callable[[QueryRecord], bytes]
) -> AsyncGenerator[list[tuple[Action, bytes]], None]:
    """Yield batches of actions with their bodies; a thread makes the next one meanwhile."""
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
def _low_jitter() -> Iterator[None]:
    """Reduce jitter: let threads yield quickly, and exempt existing objects from the collector."""
    before_s = sys.getswitchinterval()
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)
        gc.unfreeze()
