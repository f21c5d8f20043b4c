"""The work behind the relay: prefixes are encoded, extended, copied between the tiers and overwritten.

Per key there is at most one producer: a compute, a reload, or the pass of a rank that keeps what it encodes. Who needs
the prefix meanwhile joins it. The first rank takes a compute over after the chunk that runs, and encodes the rest in
its own pass: that costs less than the rest and a rank, and never more than a full inference. The tasks belong to the
relay, not to the request that started them: a request that goes away takes nothing with it.

Source: RelayGR (arXiv:2601.01712), memory-aware expander; `relaygr.md` 2.5.
Invariant: however a task ends, nothing that it reserved, leased or counted stays behind.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic

from npu_gr.core.errors import DeadlineExceeded, NpuGrError, Overloaded, ResourceError
from npu_gr.core.request import UserKey, Verdict
from npu_gr.engine.scheduler import Done, Urgency
from npu_gr.kv.arena import KVArena
from npu_gr.kv.dram_store import DramEntry, DramStore
from npu_gr.kv.keys import PrefixKey
from npu_gr.kv.layout import Run
from npu_gr.kv.prefix_pool import PrefixEntry, PrefixPool
from npu_gr.relay.encoder import Encoder, P

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Producer:
    """One prefix on its way into HBM."""

    entry: PrefixEntry
    work: Callable[[Producer], Coroutine[Any, Any, None]]  # publishes, unless it is cut
    urgency: Urgency
    ended: asyncio.Future[None]  # the entry is published, or never will be
    is_reload: bool = False
    is_taken: bool = False  # by a rank, which publishes
    task: asyncio.Task[None] | None = None  # None = it began with a rank
    encoded_tokens: int = 0  # where it was cut
    joiners: int = 0

    @property
    def may_be_taken(self) -> bool:
        """Nobody waits for it, and it computes."""
        return not (self.is_reload or self.is_taken or self.joiners)

    @property
    def is_at_work(self) -> bool:
        """A task of the relay's, not only a rank."""
        return self.task is not None and not self.task.done()


class Producers(Generic[P]):
    """All of one relay. Event loop only."""

    def __init__(
        self,
        engine: Encoder[P],
        pool: PrefixPool,
        dram: DramStore | None,
        max_reloads: int,
        clock: Callable[[], float],
    ) -> None:
        """Nothing runs yet.

        Args:
            engine, pool, dram: what it works with.
            max_reloads: copies from DRAM at once.
            clock: the event loop's.
        """
        self._engine, self._pool, self._dram, self._clock = engine, pool, dram, clock
        self._running: dict[PrefixKey, Producer] = {}
        self._by_user: dict[UserKey, set[PrefixKey]] = {}
        self._spilling: dict[PrefixKey, DramEntry] = {}
        self._overwriting: set[asyncio.Future[Done[None]]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._max_reloads, self._turns = max_reloads, asyncio.Semaphore(max_reloads)
        self.on_error: Callable[[str], None] = lambda _where: None
        pool.on_erased = partial(self._overwrite, pool.arena)
        if dram is not None:
            dram.on_erased = partial(self._overwrite, dram.arena)

    def become(self, max_reloads: int) -> None:
        """Another bound from now on; reloads of now give their turns back to the old one."""
        if max_reloads != self._max_reloads:
            self._max_reloads, self._turns = max_reloads, asyncio.Semaphore(max_reloads)

    def __len__(self) -> int:
        """Pre-infers and reloads at work."""
        return sum(producer.is_at_work for producer in self._running.values())

    def __contains__(self, key: PrefixKey) -> bool:
        return key in self._running

    def of(self, user: UserKey) -> list[Producer]:
        """What is being produced for the user."""
        return [self._running[key] for key in self._by_user.get(user, ())]

    def in_flight(self, work: str) -> int:
        """Prefixes on their way: `prefill` and `reload` into HBM, `spill` into DRAM."""
        if work == "spill":
            return len(self._spilling)
        at_work = (producer for producer in self._running.values() if producer.is_at_work)
        return sum(producer.is_reload == (work == "reload") for producer in at_work)

    def reload_s(self, num_tokens: int) -> float:
        """How long a prefix of so many tokens would take from DRAM, behind the reloads of now."""
        copy_s = self._pool.arena.layout.bytes(num_tokens) / self._engine.copy_bytes_per_s
        return copy_s * (1 + self.in_flight("reload") // self._max_reloads)

    # ---- into HBM

    def compute(
        self, key: PrefixKey, tokens: P, urgency: Urgency, base: PrefixEntry | None, deadline_at: float
    ) -> Verdict:
        """Encode a prefix; on from `base`, a resident one of its own beginning, if there is room beside it.

        Raises:
            ResourceError: there is no room.
        """
        held = ExitStack()
        if base is not None:
            held.enter_context(self._pool.lease(base, consume=False))
        try:
            entry = self._pool.reserve(key, len(tokens))
        except ResourceError:
            held.close()
            if base is None:
                raise
            base, entry = None, self._pool.reserve(key, len(tokens))
        work = partial(self._compute, tokens, base, deadline_at)
        self._run(self._add(Producer(entry, work, urgency, _future())), held)
        return Verdict.PREINFER if base is None else Verdict.EXTEND

    def keep(self, key: PrefixKey, tokens: P, deadline_at: float) -> Producer:
        """For a rank that encodes everything: its pass leaves the prefix in the entry, and `let_go` ends it.

        Raises:
            ResourceError: there is no room.
        """
        entry, work = self._pool.reserve(key, len(tokens)), partial(self._compute, tokens, None, deadline_at)
        return self._add(Producer(entry, work, Urgency(float("inf"), self._clock()), _future(), is_taken=True))

    async def _compute(self, tokens: P, base: PrefixEntry | None, deadline_at: float, producer: Producer) -> None:
        entry, urgency = producer.entry, producer.urgency
        runs, first = tuple(entry.runs), producer.encoded_tokens
        with self._counted("prefill"):
            if base is not None and not first:
                arena, first = self._pool.arena, base.num_tokens
                await self._engine.copy(arena, base.runs, arena, runs, first, deadline_at, urgency)
            encoded_tokens = await self._engine.prefill(tokens, runs, deadline_at, urgency, first)
        if encoded_tokens < len(tokens):
            producer.encoded_tokens = encoded_tokens
        elif self._pool.publish(entry, tokens.timestamps) and base is not None:
            self._pool.drop(base)  # whoever reads it goes on; nobody else needs it

    def reload(self, spilled: DramEntry, urgency: Urgency, patience_s: float, deadline_at: float) -> Producer:
        """Copy a prefix back, when it is its turn; not at all if that takes longer than the patience of who asks.

        Raises:
            ResourceError: there is no room.
        """
        entry = self._pool.reserve(spilled.key, spilled.num_tokens)
        work = partial(self._reload, spilled, patience_s, deadline_at)
        producer = self._add(Producer(entry, work, urgency, _future(), is_reload=True))
        self._run(producer, ExitStack())
        return producer

    async def _reload(self, spilled: DramEntry, patience_s: float, deadline_at: float, producer: Producer) -> None:
        dram, pool, turns, entry = self._dram, self._pool, self._turns, producer.entry
        assert dram is not None
        with self._counted("reload"), dram.lease(spilled):
            try:
                await asyncio.wait_for(turns.acquire(), patience_s)
            except TimeoutError as error:
                raise DeadlineExceeded("no turn to reload came in time") from error
            try:
                dram.verify(spilled)
                runs, urgency = entry.runs, producer.urgency
                await self._engine.copy(
                    dram.arena, spilled.runs, pool.arena, runs, spilled.num_tokens, deadline_at, urgency
                )
                dram.verify(spilled)
            finally:
                turns.release()
        assert spilled.timestamps is not None, "complete copies alone are found"
        pool.publish(entry, spilled.timestamps)

    def _add(self, producer: Producer) -> Producer:
        key = producer.entry.key
        self._running[key] = producer
        self._by_user.setdefault(key.user, set()).add(key)
        return producer

    def _run(self, producer: Producer, held: ExitStack) -> None:
        """Start the work that publishes the entry; however it ends, it leaves nothing reserved and nothing held."""
        task = producer.task = self._own(producer.work(producer))

        def stopped(_: asyncio.Task[None]) -> None:
            held.close()
            if producer.ended.done() or producer.task is not task:  # who took it over went away before this ran
                return
            is_over = not producer.urgency.is_cut or producer.entry.is_published
            if task.cancelled() or task.exception() is not None or is_over:
                self._end(producer)
            elif not producer.is_taken:
                self._end_or_go_on(producer)

        task.add_done_callback(stopped)

    def _end_or_go_on(self, producer: Producer) -> None:
        """It was cut for a rank that went away: others may still wait for it."""
        if not producer.joiners or producer.entry.is_erased:
            self._end(producer)
            return
        producer.urgency = Urgency(producer.urgency.order_at, producer.urgency.arrived_at)
        self._run(producer, ExitStack())

    def _end(self, producer: Producer) -> None:
        entry, user = producer.entry, producer.entry.key.user
        self._pool.abandon(entry)
        producer.ended.set_result(None)
        del self._running[entry.key]
        self._by_user[user].discard(entry.key)
        if not self._by_user[user]:
            del self._by_user[user]

    async def take_over(self, producer: Producer, timeout_s: float) -> bool:
        """Stop a compute after the chunk that runs; True: the caller goes on from there, and calls `let_go` at the end.

        False: it has ended meanwhile, or the chunk takes too long.
        """
        assert producer.task is not None
        producer.is_taken = True
        producer.urgency.cut()
        try:
            await asyncio.wait({producer.task}, timeout=max(timeout_s, 0.0))
        except asyncio.CancelledError:
            self.let_go(producer)
            raise
        if producer.is_at_work:
            producer.is_taken = False
        return producer.is_taken and not producer.ended.done()

    def let_go(self, producer: Producer) -> None:
        """Who took it over is done, and has published the prefix or not."""
        if not producer.is_taken or producer.ended.done():
            return
        producer.is_taken = False
        if producer.entry.is_published:
            self._end(producer)
        elif not producer.is_at_work:
            self._end_or_go_on(producer)

    # ---- into DRAM

    def spill(self, entry: PrefixEntry, order_at: float) -> None:
        """Copy a used prefix in the background, unless it lies there or there is no room.

        Its HBM pages stay readable until somebody needs them.
        """
        dram, key = self._dram, entry.key
        if dram is None or key in self._spilling or dram.get(key) is not None or self._pool.get(key) is not entry:
            return
        try:
            room = dram.reserve(key, entry.num_tokens)
        except ResourceError:
            return
        self._spilling[key] = room
        held = ExitStack()  # from now on: the entry must not be evicted before its copy is queued
        held.enter_context(self._pool.lease(entry, consume=False))

        def ended(_: asyncio.Task[None]) -> None:
            held.close()
            dram.abandon(room)
            if self._spilling.get(key) is room:
                del self._spilling[key]

        self._own(self._spill(dram, room, entry, order_at)).add_done_callback(ended)

    async def _spill(self, dram: DramStore, room: DramEntry, entry: PrefixEntry, order_at: float) -> None:
        with self._counted("spill"):
            await self._engine.copy(
                self._pool.arena,
                entry.runs,
                dram.arena,
                room.runs,
                entry.num_tokens,
                float("inf"),
                order_at,
                is_sheddable=True,
            )
        assert entry.timestamps is not None, "it was published"
        dram.commit(room, entry.timestamps)

    # ---- tasks and their end

    def _own(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._disown)
        return task

    def _disown(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # what was shed or came too late is counted, and under overload there is one a request
            level = logging.DEBUG if isinstance(error, DeadlineExceeded | Overloaded) else logging.WARNING
            log.log(level, "a relay task failed: %s: %s", type(error).__name__, error)

    @contextmanager
    def _counted(self, where: str) -> Iterator[None]:
        try:
            yield
        except NpuGrError:
            self.on_error(where)
            raise

    def _overwrite(self, arena: KVArena, runs: tuple[Run, ...], free: Callable[[], None]) -> None:
        future = self._engine.zero(arena, runs)
        self._overwriting.add(future)

        def ended(future: asyncio.Future[Done[None]]) -> None:
            self._overwriting.discard(future)
            free()
            if not future.cancelled() and (error := future.exception()) is not None:
                log.error("pages of an erased user were not overwritten: %s", error)

        future.add_done_callback(ended)

    async def erase(self, user: UserKey) -> None:
        """End what is produced for the user, forget what lies in the tiers, wait until free pages are overwritten."""
        producing = {producer.task for producer in self.of(user) if producer.task is not None}
        for task in producing:
            task.cancel()
        self._pool.erase_user(user)
        if self._dram is not None:
            self._dram.erase_user(user)
        # copies that run come to nothing: they must not keep a later one out
        self._spilling = {key: room for key, room in self._spilling.items() if key.user != user}
        if producing:  # they end with the chunk that the device is at
            await asyncio.wait(producing)
            await asyncio.sleep(0)  # and give their pages back when that has been noticed
        if self._overwriting:
            done, _ = await asyncio.wait(self._overwriting)  # which, unlike gather, cancels nothing
            for future in done:
                future.result()

    async def settled(self) -> None:
        """Nothing is being produced, spilled or overwritten any more."""
        while self._tasks or self._overwriting:
            await asyncio.gather(*self._tasks, *self._overwriting, return_exceptions=True)
            await asyncio.sleep(0)  # their callbacks

    async def stop(self) -> None:
        """Cancel what still runs and wait for it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()
