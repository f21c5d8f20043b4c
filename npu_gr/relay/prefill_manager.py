"""The producers of one relay: at most one for each prefix key.

They fill HBM entries in the background.

    RUNNING ---adopt---> STOPPING ---its task has stopped---> ADOPTED ---release---> ENDED, or RUNNING again
       |                    |                                                          if others still wait for it
       |                    +--the adopter goes away--> DESERTED --its task has stopped--> ENDED, or RUNNING again
       +--published, failed, erased--> ENDED

A rank that needs the prefix meanwhile joins its producer. The first such rank adopts a prefill
instead: the prefill stops after the chunk that runs, and the rank encodes the rest in its own pass.
That costs less than the rest of the prefill and then a rank, and never more than a full inference.

Source: RelayGR (arXiv:2601.01712), memory-aware expander. `docs/relay.md` draws all states with the
events that move a producer. Invariant: however a producer ends, nothing that it reserved, leased or
counted stays behind. Held by tests/relay/test_prefill_manager.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from functools import partial
from typing import Any, Generic

from npu_gr.core.errors import DeadlineExceeded, ResourceError
from npu_gr.core.history import UserKey
from npu_gr.core.request import Verdict
from npu_gr.core.shares import Account
from npu_gr.engine.kv_cache.prefix_pool import PrefixEntry, PrefixPool
from npu_gr.engine.kv_cache.tier import ByUser, DramEntry, PrefixKey
from npu_gr.engine.kv_cache.tiers import Tiers
from npu_gr.engine.page_jobs import PageCopy
from npu_gr.engine.queue import JobOrder
from npu_gr.relay.background import BackgroundTasks
from npu_gr.relay.encoder import Encoder, P


class PrefillKind(StrEnum):
    """The work that fills the entry; the value is its label in metrics."""

    PREFILL = "prefill"  # the device encodes tokens
    RELOAD = "reload"  # a copy from DRAM


class PrefillState(Enum):
    """Who fills the entry now.

    In every state but ENDED the entry is reserved, and ranks may join.
    """

    RUNNING = auto()  # its task does
    STOPPING = auto()  # its task, which a rank waits for to end with the chunk that runs
    # its task, which ends with the chunk that runs; the rank that wanted that has gone
    DESERTED = auto()
    ADOPTED = auto()  # the pass of a rank; there is no task
    ENDED = auto()  # nobody: the entry was published, or never will be


@dataclass(slots=True, eq=False)
class PrefillJob:
    """One prefix on its way into HBM."""

    entry: PrefixEntry
    kind: PrefillKind
    # fills and publishes the entry, unless it is stopped before
    fill: Callable[[PrefillJob], Coroutine[Any, Any, None]]
    order: JobOrder  # of its work in the device queue
    state: PrefillState = PrefillState.RUNNING
    task: asyncio.Task[None] | None = None  # None = no task has run: it began with a rank
    adoption: Adoption | None = None  # by the rank that stops it, or whose pass fills the entry
    encoded_tokens: int = 0  # that the pages held when its task stopped
    joiners: int = 0  # ranks that wait for it
    is_divisible: bool = True  # as of the prefix: a rank can go on where its task has stopped
    # to another tenant: its task is cancelled, and ends with the chunk that runs
    gives_way: bool = False
    ended: asyncio.Future[None] = field(init=False)  # done in state ENDED

    @property
    def key(self) -> PrefixKey:
        """The key of the prefix."""
        return self.entry.key

    @property
    def is_adoptable(self) -> bool:
        """Whether a rank may encode the rest itself: it is a prefill, no rank has adopted it, and none waits for it.

        A prefill in one piece has no rest: a rank joins it.
        """
        has_task = self.state in (PrefillState.RUNNING, PrefillState.DESERTED)
        return (
            self.kind is PrefillKind.PREFILL and self.is_divisible and has_task and not self.joiners
        )

    @property
    def is_at_work(self) -> bool:
        """Whether a task fills the entry, not only the pass of a rank."""
        return self.task is not None and not self.task.done() and not self.gives_way

    def give_way(self) -> None:
        """End it for another tenant's: its prefix is not produced."""
        assert self.task is not None
        self.gives_way = True
        self.task.cancel()

    @property
    def may_give_way(self) -> bool:
        """Whether nobody needs it yet: it is a prefill that no rank waits for."""
        is_running = self.kind is PrefillKind.PREFILL and self.state is PrefillState.RUNNING
        return is_running and self.is_at_work and not self.joiners


class Adoption:
    """A rank's right to fill the rest of a producer's entry in its own pass, and then to publish it.

    The right ends with `release`, which the rank calls however it ends. A released adoption never
    affects a rank that has adopted the same producer since.
    """

    def __init__(self, producer: PrefillJob, on_release: Callable[[PrefillJob], None]) -> None:
        self.producer = producer
        self._on_release = on_release

    @property
    def is_held(self) -> bool:
        """Whether the rank may still write into the entry, and publish it."""
        return self.producer.adoption is self

    def release(self) -> None:
        """End the adoption. Joined ranks get the prefix if it was published.

        Otherwise a task fills the rest for them.

        A second call does nothing.
        """
        if self.is_held:
            self.producer.adoption = None
            self._on_release(self.producer)


class PrefixFiller(Generic[P]):
    """Fills the entry of a producer and publishes it. Event loop only."""

    def __init__(self, engine: Encoder[P], tiers: Tiers, max_reloads: int) -> None:
        """`max_reloads`: copies from DRAM at once."""
        self._engine = engine
        self._tiers = tiers
        self._max_reloads = max_reloads
        self._reload_slots = asyncio.Semaphore(max_reloads)

    def reconfigure(self, max_reloads: int) -> None:
        """Change the limit for later reloads.

        Reloads of now give their slots back to the limit before.
        """
        if max_reloads != self._max_reloads:
            self._max_reloads = max_reloads
            self._reload_slots = asyncio.Semaphore(max_reloads)

    def reload_s(self, num_tokens: int, num_reloading: int) -> float:
        """Predict the seconds of a reload of `num_tokens` tokens behind `num_reloading` others."""
        copy_s = self._tiers.pool.arena.layout.bytes(num_tokens) / self._engine.copy_bytes_per_s
        return copy_s * (1 + num_reloading // self._max_reloads)

    async def compute(
        self, tokens: P, base: PrefixEntry | None, deadline_at: float, producer: PrefillJob
    ) -> None:
        """Encode a prefix, from where the producer was stopped before.

        Args:
            tokens: the whole prefix.
            base: a leased resident prefix of the same history, to copy instead of encoding it
                again; None = none.
            deadline_at: instant of the clock; what has not begun by then is dropped.
            producer: whose entry to fill. If its order is cancelled at a step, its `encoded_tokens`
                say how far it got.
        """
        entry = producer.entry
        runs = tuple(entry.runs)
        arena = self._tiers.pool.arena
        first = producer.encoded_tokens
        if base is not None and not first:
            await self._engine.copy(
                PageCopy(arena, base.runs, arena, runs, base.num_tokens),
                deadline_at,
                producer.order,
            )
            first = base.num_tokens
        encoded_tokens = await self._engine.prefill(
            tokens, runs, deadline_at, producer.order, first
        )
        if encoded_tokens < len(tokens):
            producer.encoded_tokens = encoded_tokens
        elif self._tiers.pool.publish(entry, tokens.timestamps) and base is not None:
            self._tiers.pool.drop(base)  # its readers go on; nobody else needs the shorter prefix

    async def reload(
        self, copy: DramEntry, patience_s: float, deadline_at: float, producer: PrefillJob
    ) -> None:
        """Copy a prefix back from DRAM.

        Args:
            copy: the prefix in DRAM.
            patience_s: how long to wait for a reload slot.
            deadline_at: instant of the clock; a copy that has not begun by then is dropped.
            producer: whose entry to fill.

        Raises:
            DeadlineExceeded: no slot came free in time. StaleEntry: the DRAM pages were reused
                during the copy.
        """
        pool, dram = self._tiers
        slots = self._reload_slots  # the slot goes back to the limit that gave it
        assert dram is not None, "the copy lies in it"
        with dram.lease(copy):
            try:
                await asyncio.wait_for(slots.acquire(), patience_s)
            except TimeoutError as error:
                raise DeadlineExceeded("no turn to reload came in time") from error
            try:
                dram.verify(copy)
                runs = producer.entry.runs
                pages = PageCopy(dram.arena, copy.runs, pool.arena, runs, copy.num_tokens)
                await self._engine.copy(pages, deadline_at, producer.order)
                dram.verify(copy)
            finally:
                slots.release()
        assert copy.timestamps is not None, "only complete copies are found"
        pool.publish(producer.entry, copy.timestamps)


class PrefillTable:
    """The producers that have not ended: by key, by user, by tenant."""

    def __init__(self) -> None:
        self._by_key: dict[PrefixKey, PrefillJob] = {}
        self._by_user: ByUser[PrefillJob] = ByUser()

    def __len__(self) -> int:
        """Count the producers, whether a task or a rank fills their entry."""
        return len(self._by_key)

    def __contains__(self, key: PrefixKey) -> bool:
        return key in self._by_key

    def add(self, producer: PrefillJob) -> None:
        """Add the producer of a key that has none."""
        self._by_key[producer.key] = producer
        self._by_user.add(producer)

    def remove(self, producer: PrefillJob) -> None:
        """Remove a producer that has ended."""
        del self._by_key[producer.key]
        self._by_user.remove(producer)

    def of(self, user: UserKey) -> list[PrefillJob]:
        """Return the producers of a user's prefixes."""
        return self._by_user.of(user)

    def in_flight(self, kind: PrefillKind | None = None) -> int:
        """Count the producers at work; a rank that keeps what it encodes is none.

        None = of both kinds.
        """
        at_work = (producer for producer in self._by_key.values() if producer.is_at_work)
        return sum(kind is None or producer.kind is kind for producer in at_work)

    def at_work_of(self, account: Account) -> list[PrefillJob]:
        """Return the producers at work for one tenant.

        Args:
            account: of the tenant, in the pool.
        """
        return [
            each
            for each in self._by_key.values()
            if each.entry.account is account and each.is_at_work
        ]

    def youngest_over(self, shares: Iterable[tuple[Account, int]]) -> PrefillJob | None:
        """Find the producer that should give way first, of a tenant that has more of them at work than its share.

        Args:
            shares: each tenant's account in the pool, and how many producers at work are its share.
        """
        over = [
            each
            for account, share in shares
            if len(of_it := self.at_work_of(account)) > share
            for each in reversed(of_it)  # of two that came at once, the later one
            if each.may_give_way
        ]
        return max(over, key=lambda each: each.order.arrived_at or 0.0, default=None)


class PrefillManager(Generic[P]):
    """Starts producers, moves them through their states, and forgets them when they end.

    Event loop only.
    """

    def __init__(
        self,
        filler: PrefixFiller[P],
        pool: PrefixPool,
        background: BackgroundTasks,
        clock: Callable[[], float],
    ) -> None:
        """Nothing runs yet.

        Args:
            filler: does the work.
            pool: where the entries are reserved.
            background: where the tasks run.
            clock: the event loop's.
        """
        self._filler = filler
        self._pool = pool
        self._background = background
        self._clock = clock
        self.table = PrefillTable()

    # ---- start

    def compute(
        self,
        key: PrefixKey,
        tokens: P,
        order: JobOrder,
        base: PrefixEntry | None,
        deadline_at: float,
    ) -> Verdict:
        """Prefill `key`. If `base` fits next to it, copy `base` and encode only the rest.

        Args:
            key: of the prefix; it has no producer.
            tokens: the whole prefix.
            order: its place in the device queue.
            base: a shorter resident prefix of the same history; None = none.
            deadline_at: instant of the clock; work that has not begun by then is dropped.

        Returns:
            EXTEND if `base` is used, otherwise PREINFER.

        Raises:
            ResourceError: there is no room.
        """
        held = ExitStack()
        if base is not None:
            held.enter_context(self._pool.lease(base, consume=False))
        try:
            entry = self._pool.reserve(key, len(tokens), is_signalled=True)
        except ResourceError:
            held.close()
            if base is None:
                raise
            base = None  # without its lease, its own pages may make the room
            entry = self._pool.reserve(key, len(tokens), is_signalled=True)
        fill = partial(self._filler.compute, tokens, base, deadline_at)
        made = PrefillJob(entry, PrefillKind.PREFILL, fill, order, is_divisible=tokens.is_divisible)
        self._run(self._add(made), held)
        return Verdict.PREINFER if base is None else Verdict.EXTEND

    def reload(
        self,
        copy: DramEntry,
        order: JobOrder,
        patience_s: float,
        deadline_at: float,
        *,
        is_signalled: bool,
    ) -> PrefillJob:
        """Copy a prefix back from DRAM. It gives up if no reload slot frees within `patience_s`.

        Args:
            copy: the prefix in DRAM; its key has no producer.
            order: its place in the device queue.
            patience_s: how long it may wait for a reload slot.
            deadline_at: instant of the clock; a copy that has not begun by then is dropped.
            is_signalled: for a rank to come, not for one that is there.

        Raises:
            ResourceError: there is no room.
        """
        entry = self._pool.reserve(copy.key, copy.num_tokens, is_signalled=is_signalled)
        fill = partial(self._filler.reload, copy, patience_s, deadline_at)
        producer = self._add(PrefillJob(entry, PrefillKind.RELOAD, fill, order))
        self._run(producer, ExitStack())
        return producer

    def keep(self, key: PrefixKey, tokens: P, deadline_at: float) -> Adoption:
        """Reserve `key` for a rank that encodes the whole prefix: its pass fills the entry.

        Args:
            key: of the prefix; it has no producer.
            tokens: the whole prefix.
            deadline_at: of the prefill that follows if the rank releases the adoption and others
                have joined.

        Raises:
            ResourceError: there is no room.
        """
        entry = self._pool.reserve(key, len(tokens))
        fill = partial(self._filler.compute, tokens, None, deadline_at)
        order = JobOrder(float("inf"), self._clock())
        producer = self._add(
            PrefillJob(entry, PrefillKind.PREFILL, fill, order, PrefillState.ADOPTED)
        )
        producer.adoption = Adoption(producer, self._released)
        return producer.adoption

    def _add(self, producer: PrefillJob) -> PrefillJob:
        producer.ended = asyncio.get_running_loop().create_future()
        self.table.add(producer)
        return producer

    # ---- from state to state

    def _run(self, producer: PrefillJob, held: ExitStack) -> None:
        """-> RUNNING. `held` is closed when the task has ended."""
        producer.state = PrefillState.RUNNING
        task = producer.task = self._background.start(
            producer.kind.value, partial(producer.fill, producer)
        )

        def ended(_: asyncio.Task[None]) -> None:
            held.close()
            if producer.task is task:  # and no later one, that began before this callback ran
                self._task_ended(producer)

        task.add_done_callback(ended)

    async def adopt(self, producer: PrefillJob, timeout_s: float) -> Adoption | None:
        """Stop a prefill after the chunk that runs, and hand the rest to the caller.

        Args:
            producer: an adoptable one.
            timeout_s: how long to wait for the chunk.

        Returns:
            the adoption, which the caller must release. None: the producer has ended meanwhile, or
            the chunk takes too long.
        """
        task = producer.task
        assert task is not None, "an adoptable producer has a task"
        adoption = producer.adoption = Adoption(producer, self._released)
        producer.state = PrefillState.STOPPING
        producer.order.cancel_at_step()
        try:
            await asyncio.wait({task}, timeout=max(timeout_s, 0.0))
        except asyncio.CancelledError:
            adoption.release()
            raise
        if task.done():
            self._task_ended(producer)  # its callback may still be due
        if producer.state is PrefillState.ADOPTED:
            return adoption
        adoption.release()
        return None

    def _released(self, producer: PrefillJob) -> None:
        """The adopter is done: it has published the prefix, or it will not."""
        if producer.state is PrefillState.STOPPING and not producer.is_at_work:
            self._task_ended(producer)  # its callback is still due
        if producer.entry.is_published:
            self._end(producer)
        elif producer.state is PrefillState.STOPPING:
            producer.state = PrefillState.DESERTED
        elif producer.state is PrefillState.ADOPTED:
            self._restart_or_end(producer)

    def _task_ended(self, producer: PrefillJob) -> None:
        """The task has ended: finished, failed, cancelled, or stopped after a chunk.

        A second call does nothing.
        """
        task = producer.task
        assert task is not None
        match producer.state:
            case PrefillState.ADOPTED | PrefillState.ENDED:
                return
            case _ if (
                task.cancelled() or task.exception() is not None or producer.entry.is_published
            ):
                self._end(producer)
            # erased: the prefix was complete, and could not be published
            case PrefillState.RUNNING:
                self._end(producer)
            case PrefillState.STOPPING:
                producer.state = PrefillState.ADOPTED
            case PrefillState.DESERTED:
                self._restart_or_end(producer)

    def _restart_or_end(self, producer: PrefillJob) -> None:
        """-> RUNNING if other ranks wait for the prefix, else -> ENDED."""
        if not producer.joiners or producer.entry.is_erased:
            self._end(producer)
            return
        # one that is not cancelled
        producer.order = JobOrder(producer.order.order_at, producer.order.arrived_at)
        self._run(producer, ExitStack())

    def _end(self, producer: PrefillJob) -> None:
        """-> ENDED. A second call does nothing."""
        if producer.state is PrefillState.ENDED:
            return
        producer.state = PrefillState.ENDED
        producer.adoption = None
        self._pool.abandon(producer.entry)  # nothing, if it was published
        producer.ended.set_result(None)
        self.table.remove(producer)
