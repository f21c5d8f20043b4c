"""Runs the prefill jobs of one relay in the background: at most one for each prefix key.

A rank that needs the prefix of a running job joins it. If the job is a prefill that no other rank
waits for, the rank adopts it instead: the prefill stops after its current chunk, and the rank
encodes the rest in its own pass. That costs less than to finish the prefill and then rank, and
never more than a full inference.

Source: RelayGR (arXiv:2601.01712), memory-aware expander. `prefill_job.py` has the states.
Invariant: however a job ends, its reservations, leases and counts are released. Held by
tests/relay/test_prefill_manager.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Generic

from npu_gr.core.errors import DeadlineExceeded, Overloaded, ResourceError, StaleEntry
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
from npu_gr.relay.prefill_job import Adoption, PrefillJob, PrefillKind, PrefillState


class PrefixFiller(Generic[P]):
    """Fills the entry of a prefill job and publishes it. Event loop only."""

    def __init__(self, engine: Encoder[P], tiers: Tiers, max_reloads: int) -> None:
        """Allow at most `max_reloads` copies from DRAM at a time."""
        self._engine = engine
        self._tiers = tiers
        self._max_reloads = max_reloads
        self._reload_slots = asyncio.Semaphore(max_reloads)

    def reconfigure(self, max_reloads: int) -> None:
        """Change the limit for later reloads; running reloads still count against the old one."""
        if max_reloads != self._max_reloads:
            self._max_reloads = max_reloads
            self._reload_slots = asyncio.Semaphore(max_reloads)

    def reload_s(self, num_tokens: int, num_reloading: int) -> float:
        """Predict the seconds of a reload of `num_tokens` tokens behind `num_reloading` others."""
        copy_s = self._tiers.pool.arena.layout.bytes(num_tokens) / self._engine.copy_bytes_per_s
        return copy_s * (1 + num_reloading // self._max_reloads)

    async def compute(self, tokens: P, deadline_at: float, job: PrefillJob) -> None:
        """Encode a prefix from where the job stopped last time, and publish it when it is complete.

        If the job's order is cancelled at a step, its `encoded_tokens` say how far it got.

        Args:
            tokens: the whole prefix.
            deadline_at: instant of the clock; what has not begun by then is dropped.
            job: the job that owns the entry; its `base` is leased until it has been copied.
        """
        entry, base = job.entry, job.base
        runs = tuple(entry.runs)
        arena = self._tiers.pool.arena
        first = job.encoded_tokens
        if base is not None and not first:
            await self._engine.copy(
                PageCopy(arena, base.runs, arena, runs, base.num_tokens),
                deadline_at,
                job.order,
            )
            first = base.num_tokens
        encoded_tokens = await self._engine.prefill(tokens, runs, deadline_at, job.order, first)
        if encoded_tokens < len(tokens):
            job.encoded_tokens = encoded_tokens
        elif self._tiers.pool.publish(entry) and base is not None:
            self._tiers.pool.drop(base)  # its readers go on; later ranks use the longer prefix

    async def refresh(self, tokens: P, deadline_at: float, job: PrefillJob) -> None:
        """Encode a prefix, unless a later delta touches it or the device has no time."""
        with suppress(DeadlineExceeded, Overloaded, StaleEntry):
            await self.compute(tokens, deadline_at, job)

    async def reload(
        self, copy: DramEntry, patience_s: float, deadline_at: float, job: PrefillJob
    ) -> None:
        """Copy a prefix back from DRAM.

        Args:
            copy: the prefix in DRAM.
            patience_s: how long to wait for a reload slot.
            deadline_at: instant of the clock; a copy that has not begun by then is dropped.
            job: the job that owns the entry.

        Raises:
            DeadlineExceeded: no reload slot came free within `patience_s`.
            StaleEntry: the DRAM pages were reused during the copy.
        """
        pool, dram = self._tiers
        slots = self._reload_slots  # `reconfigure` may replace it before the release
        assert dram is not None, "the copy lies in it"
        with dram.lease(copy):
            try:
                await asyncio.wait_for(slots.acquire(), patience_s)
            except TimeoutError as error:
                raise DeadlineExceeded(
                    f"no reload slot came free within {patience_s:.3f} s"
                ) from error
            try:
                dram.verify(copy)
                runs = job.entry.runs
                pages = PageCopy(dram.arena, copy.runs, pool.arena, runs, copy.num_tokens)
                await self._engine.copy(pages, deadline_at, job.order)
                dram.verify(copy)
            finally:
                slots.release()
        pool.publish(job.entry)


class PrefillTable:
    """The prefill jobs that have not ended, by key, by user and by tenant."""

    def __init__(self) -> None:
        self._by_key: dict[PrefixKey, PrefillJob] = {}
        self._by_user: ByUser[PrefillJob] = ByUser()

    def __len__(self) -> int:
        """Count the jobs, whether a task or the pass of a rank fills their entries."""
        return len(self._by_key)

    def __contains__(self, key: PrefixKey) -> bool:
        return key in self._by_key

    def add(self, job: PrefillJob) -> None:
        """Add a job, whose key must have none."""
        self._by_key[job.key] = job
        self._by_user.add(job)

    def remove(self, job: PrefillJob) -> None:
        """Remove a job that has ended."""
        del self._by_key[job.key]
        self._by_user.remove(job)

    def of(self, user: UserKey) -> list[PrefillJob]:
        """Return the jobs of a user's prefixes."""
        return self._by_user.of(user)

    def in_flight(self, kind: PrefillKind | None = None) -> int:
        """Count the jobs of a kind whose tasks run; None = those that signals and ranks wait for.

        A rank that keeps the prefix it encodes does not count.
        """
        at_work = (job for job in self._by_key.values() if job.is_at_work)
        return sum(
            job.kind is kind or (kind is None and job.kind is not PrefillKind.REFRESH)
            for job in at_work
        )

    def at_work_of(self, account: Account) -> list[PrefillJob]:
        """Return the jobs of one tenant whose tasks run, oldest first, without refreshes."""
        return [
            each
            for each in self._by_key.values()
            if each.entry.account is account
            and each.is_at_work
            and each.kind is not PrefillKind.REFRESH
        ]

    def youngest_over(self, shares: Iterable[tuple[Account, int]]) -> PrefillJob | None:
        """Find the job that should give way first: the youngest of a tenant over its share.

        Args:
            shares: each tenant's account in the pool, and how many running jobs are its share.
        """
        over = [
            each
            for account, share in shares
            if len(of_it := self.at_work_of(account)) > share
            for each in reversed(of_it)  # of two that came at the same instant, the later one
            if each.may_give_way
        ]
        return max(over, key=lambda each: each.order.arrived_at or 0.0, default=None)


class PrefillManager(Generic[P]):
    """Starts prefill jobs and moves them from state to state until they end. Event loop only."""

    def __init__(
        self,
        filler: PrefixFiller[P],
        pool: PrefixPool,
        background: BackgroundTasks,
        clock: Callable[[], float],
    ) -> None:
        """Start with no jobs.

        Args:
            filler: Does the work of the tasks.
            pool: HBM tier in which the entries are reserved.
            background: Owner of the tasks.
            clock: The event loop's clock, in seconds.
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
            key: Key of the prefix; it must have no job.
            tokens: the whole prefix.
            order: Place of the work in the device queue.
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
            base = None  # no longer leased, so its pages may be evicted to make room
            entry = self._pool.reserve(key, len(tokens), is_signalled=True)
        fill = partial(self._filler.compute, tokens, deadline_at)
        made = PrefillJob(entry, PrefillKind.PREFILL, fill, order, is_divisible=tokens.is_divisible)
        made.base = base
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
        """Copy a prefix back from DRAM.

        Args:
            copy: The prefix in DRAM; its key must have no job.
            order: Place of the copy in the device queue.
            patience_s: Seconds to wait for a reload slot before it gives up.
            deadline_at: Instant of the clock; a copy that has not begun by then is dropped.
            is_signalled: True for a rank that will come, False for one that waits now.

        Raises:
            ResourceError: there is no room.
        """
        entry = self._pool.reserve(copy.key, copy.num_tokens, is_signalled=is_signalled)
        fill = partial(self._filler.reload, copy, patience_s, deadline_at)
        job = self._add(PrefillJob(entry, PrefillKind.RELOAD, fill, order))
        self._run(job, ExitStack())
        return job

    def refresh(self, key: PrefixKey, tokens: P, order: JobOrder, deadline_at: float) -> PrefillJob:
        """Encode a prefix that no rank waits for.

        Args:
            key: Key of the prefix; it must have no job.
            tokens: the whole prefix.
            order: Place of the work in the device queue.
            deadline_at: instant of the clock; steps that have not begun by then are dropped.

        Raises:
            ResourceError: there is no room.
        """
        entry = self._pool.reserve(key, len(tokens))
        fill = partial(self._filler.refresh, tokens, deadline_at)
        divisible = tokens.is_divisible
        job = self._add(PrefillJob(entry, PrefillKind.REFRESH, fill, order, is_divisible=divisible))
        self._run(job, ExitStack())
        return job

    def keep(self, key: PrefixKey, tokens: P, deadline_at: float) -> Adoption:
        """Reserve an entry that the pass of a rank fills, as it encodes the whole prefix anyway.

        Args:
            key: Key of the prefix; it must have no job.
            tokens: the whole prefix.
            deadline_at: Deadline of the prefill that follows if the rank releases the adoption
                unpublished while others have joined.

        Raises:
            ResourceError: there is no room.
        """
        entry = self._pool.reserve(key, len(tokens))
        fill = partial(self._filler.compute, tokens, deadline_at)
        order = JobOrder(float("inf"), self._clock())
        job = self._add(PrefillJob(entry, PrefillKind.PREFILL, fill, order, PrefillState.ADOPTED))
        job.adoption = Adoption(job, self._released)
        return job.adoption

    def _add(self, job: PrefillJob) -> PrefillJob:
        job.ended = asyncio.get_running_loop().create_future()
        self.table.add(job)
        return job

    # ---- changes of state

    def _run(self, job: PrefillJob, held: ExitStack) -> None:
        """-> RUNNING. `held` is closed when the task has ended."""
        job.state = PrefillState.RUNNING
        task = job.task = self._background.start(job.kind.value, partial(job.fill, job))

        def ended(_: asyncio.Task[None]) -> None:
            held.close()
            if job.task is task:  # a restart may have put a new task before this callback ran
                self._task_ended(job)

        task.add_done_callback(ended)

    async def adopt(self, job: PrefillJob, timeout_s: float) -> Adoption | None:
        """Stop a prefill after its current chunk, and hand the rest to a rank.

        Args:
            job: A job that is adoptable.
            timeout_s: Seconds to wait for the chunk.

        Returns:
            The adoption, which the rank must release. None if the job ended first, or if the chunk
            took longer than `timeout_s`.
        """
        task = job.task
        assert task is not None, "an adoptable job has a task"
        adoption = job.adoption = Adoption(job, self._released)
        job.state = PrefillState.STOPPING
        job.order.cancel_at_step()
        try:
            await asyncio.wait({task}, timeout=max(timeout_s, 0.0))
        except asyncio.CancelledError:
            adoption.release()
            raise
        if task.done():
            self._task_ended(job)  # its callback may still be due
        if job.state is PrefillState.ADOPTED:
            return adoption
        adoption.release()
        return None

    def _released(self, job: PrefillJob) -> None:
        """Handle the end of an adoption: the rank has published the prefix, or it will not."""
        if job.state is PrefillState.STOPPING and not job.is_at_work:
            self._task_ended(job)  # its callback is still due
        if job.entry.is_published:
            self._end(job)
        elif job.state is PrefillState.STOPPING:
            job.state = PrefillState.DESERTED
        elif job.state is PrefillState.ADOPTED:
            job.forget_if_overwritten(self._pool.arena.layout.prefix)
            self._restart_or_end(job)

    def _task_ended(self, job: PrefillJob) -> None:
        """Handle the end of the task: finished, failed, cancelled, or stopped after a chunk.

        A second call does nothing.
        """
        task = job.task
        assert task is not None
        match job.state:
            case PrefillState.ADOPTED | PrefillState.ENDED:
                return
            case _ if task.cancelled() or task.exception() is not None or job.entry.is_published:
                self._end(job)
            # The prefix is complete but was not published: its user was erased.
            case PrefillState.RUNNING:
                self._end(job)
            case PrefillState.STOPPING:
                job.state = PrefillState.ADOPTED
            case PrefillState.DESERTED:
                self._restart_or_end(job)

    def _restart_or_end(self, job: PrefillJob) -> None:
        """-> RUNNING if other ranks wait for the prefix, else -> ENDED."""
        if not job.joiners or job.entry.is_erased:
            self._end(job)
            return
        # The old order is cancelled at a step; the new task needs one that is not.
        job.order = JobOrder(job.order.order_at, job.order.arrived_at)
        self._run(job, ExitStack())

    def _end(self, job: PrefillJob) -> None:
        """-> ENDED. A second call does nothing."""
        if job.state is PrefillState.ENDED:
            return
        job.state = PrefillState.ENDED
        job.adoption = None
        self._pool.abandon(job.entry)  # does nothing to a published entry
        job.ended.set_result(None)
        self.table.remove(job)
