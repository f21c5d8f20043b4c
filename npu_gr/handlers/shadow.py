"""A shadow: one more ranker that scores a share of the served ranks, when the device has time.

    rank is answered -> offered, by share -> waits for spare time -> passes -> compared

The shadow reads the history and the candidates of a rank that the served ranker has answered. No
request waits for it, and what it does wrong is an outcome of its own (`Skipped`).

Spare time: nothing is admitted, queued or running when a pass begins, and a pass has at most
`STEP` tokens or candidates. A request that arrives meanwhile waits for one pass. So a pass is short
against the served ranker's P99, or it is paid for by `LONG_RATIO` of the time, so that few requests
meet one, and is at most `LONGEST_RATIO` of the P99. Then the P99 rises by 2 % at most
(`test_the_p99_of_the_served_ranker_stays`, a device on a virtual clock).

Spare memory: its prefixes are spare entries of the served ranker's pool, which make room first.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import xxhash
from msgspec.structs import replace

from npu_gr.core.arrays import F32
from npu_gr.core.errors import NpuGrError, PoolExhausted
from npu_gr.core.history import UserKey
from npu_gr.core.lifetime import cancel_all
from npu_gr.core.request import RankAnswer, RankRequest
from npu_gr.engine.kv_cache.prefix_pool import PrefixEntry
from npu_gr.engine.kv_cache.tier import PrefixKey
from npu_gr.engine.page_jobs import CachedPrefix
from npu_gr.engine.queue import BEHIND_S, JobOrder
from npu_gr.engine.rank_engine import RankPass
from npu_gr.handlers.prefix_histories import UserHistory
from npu_gr.handlers.ranking import Ranking
from npu_gr.model.history_tokenizer import UNKNOWN
from npu_gr.relay.lookup import longest
from npu_gr.replay.score_difference import ScoreDifference, score_difference

log = logging.getLogger(__name__)

STEP = 64  # most tokens or candidates of a pass; a tile of attention, as in `relay/refresh.py`
SHORT_RATIO = 0.02  # of the served ranker's P99: a pass of at most that is short
LONGEST_RATIO = 0.5  # of the P99: no pass is longer
LONG_RATIO = 0.005  # share of the time for longer passes
SAVED_S = 60.0  # time whose share for longer passes may be saved up
P99_S = 5.0  # age of the P99 after which it is read again
WAIT_S = 2.0  # from the answer until the last pass has begun
POLL_S = 0.01  # between two looks for spare time, while a rank waits
MOST_WAITING = 8  # ranks
WINDOW = 512  # newest compared ranks, of which figures are means
FORGOTTEN_S = 60.0  # longer than a request of an erased user may still be served


class Skipped(StrEnum):
    """Why an offered rank was not scored; the value of the metric label `reason`."""

    BUSY = "busy"  # the device had no time for it within `WAIT_S`, or too many ranks wait
    LONG = "long"  # one of its passes takes too long for any spare time
    UNREADABLE = "unreadable"  # the shadow cannot read its history or features
    FAILED = "failed"  # a pass failed, or a score is not finite


class Compared(NamedTuple):
    """One rank that both rankers scored."""

    number: int  # of the scored ranks, from 0
    answer: RankAnswer  # of the served ranker
    version: str  # of the shadow
    scores: dict[str, F32]  # of the shadow: task -> [c]; NaN = unknown item
    took_s: float  # of its passes
    difference: ScoreDifference  # of the first task that both have


class NotScored(Exception):
    """An offered rank is not scored, for a reason. Never leaves this file."""

    def __init__(self, reason: Skipped) -> None:
        self.reason = reason


class SpareTime:
    """Says whether a pass may run now. Event loop only."""

    def __init__(
        self,
        is_idle: Callable[[], bool],
        p99_s: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with the share of `SAVED_S`.

        Args:
            is_idle: Whether nothing is admitted, queued or running.
            p99_s: Returns the P99 of the served ranker's answers in seconds; 0 = unknown.
            clock: Monotonic seconds.
        """
        self._is_idle = is_idle
        self._read_p99_s = p99_s
        self._clock = clock
        self._saved_s = LONG_RATIO * SAVED_S  # of longer passes that may run now
        self._saved_at = clock()
        self._p99_s = 0.0
        self._read_at = -P99_S

    def take(self, pass_s: float) -> bool:
        """Return whether a pass of so many seconds may run now; if so, its time is taken."""
        if not self._is_idle():
            return False
        self._refresh(self._clock())
        if self._is_short(pass_s):
            return True
        if pass_s > min(self._saved_s, LONGEST_RATIO * self._p99_s):
            return False
        self._saved_s -= pass_s
        return True

    def has_for(self, passes_s: Sequence[float]) -> bool:
        """Return whether there is time for the longer ones of these passes, one after the other.

        Raises:
            NotScored: there never is.
        """
        now_at = self._clock()
        self._refresh(now_at)
        long_s = sum(one for one in passes_s if not self._is_short(one))
        if long_s > LONG_RATIO * SAVED_S or max(passes_s) > LONGEST_RATIO * self._p99_s:
            raise NotScored(Skipped.LONG)
        return long_s <= self._saved_s

    def _is_short(self, pass_s: float) -> bool:
        return pass_s <= SHORT_RATIO * self._p99_s

    def _refresh(self, now_at: float) -> None:
        if now_at - self._read_at >= P99_S:
            self._read_at = now_at
            self._p99_s = self._read_p99_s()
        saved_s = self._saved_s + LONG_RATIO * (now_at - self._saved_at)
        self._saved_s, self._saved_at = min(saved_s, LONG_RATIO * SAVED_S), now_at


class _Offered(NamedTuple):
    request: RankRequest
    history: UserHistory
    answer: RankAnswer
    shown_at: int
    at: float


class Shadow:
    """Scores a share of ranks with a ranker that does not serve. Event loop only."""

    def __init__(
        self,
        ranking: Ranking,
        share: float,
        spare: SpareTime,
        on_compared: Callable[[Compared], None],
        on_skipped: Callable[[Skipped], None],
        *,
        is_before: bool = False,
    ) -> None:
        """Score nothing before `start`.

        Args:
            ranking: Ranker over the pages of the served one.
            share: Share of the users whose ranks are offered, 0 to 1.
            spare: Says when a pass may run.
            on_compared, on_skipped: Called with the result of each offered rank.
            is_before: Whether it served before the served one: differences are always from the
                older to the newer ranker.
        """
        self.ranking = ranking
        self.share = share
        self.is_before = is_before
        self.num_scored = 0
        self.num_skipped = dict.fromkeys(Skipped, 0)
        self.differences: deque[ScoreDifference] = deque(maxlen=WINDOW)
        self._spare = spare
        self._on_compared = on_compared
        self._on_skipped = on_skipped
        self._waiting: deque[_Offered] = deque()
        self._came = asyncio.Event()
        self._numbers = itertools.count()
        self._task: asyncio.Task[None] | None = None
        self._scoring: tuple[UserKey, asyncio.Task[None]] | None = None
        self._forgotten: OrderedDict[UserKey, float] = OrderedDict()

    def start(self) -> None:
        """Score what is offered from now on."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Score nothing any more; returns when no pass of it runs."""
        self._waiting.clear()
        running = set() if self._scoring is None else {self._scoring[1]}
        if self._task is not None:
            running.add(self._task)
        await cancel_all(running)

    def offer(self, request: RankRequest, history: UserHistory, answer: RankAnswer) -> None:
        """Offer a rank that the served ranker has answered; most calls do nothing."""
        if not _is_chosen(request.user, self.share) or request.user in self._forgotten:
            return
        if len(self._waiting) >= MOST_WAITING:
            self._skip(Skipped.BUSY)
            return
        shown_at = int(time.time()) if request.timestamp is None else request.timestamp
        self._waiting.append(_Offered(request, history, answer, shown_at, time.monotonic()))
        self._came.set()

    async def forget(self, user: UserKey) -> None:
        """Drop what waits of an erased user; returns when no pass reads it."""
        now_at = time.monotonic()
        while self._forgotten and next(iter(self._forgotten.values())) < now_at - FORGOTTEN_S:
            self._forgotten.popitem(last=False)
        self._forgotten[user] = now_at
        self._forgotten.move_to_end(user)
        self._waiting = deque(one for one in self._waiting if one.request.user != user)
        if self._scoring is not None and self._scoring[0] == user:
            task = self._scoring[1]
            task.cancel()
            await asyncio.wait({task})

    def knows(self, user: UserKey) -> bool:
        """Whether a rank of the user waits or is scored."""
        is_scored = self._scoring is not None and self._scoring[0] == user
        return is_scored or any(one.request.user == user for one in self._waiting)

    def drop_prefixes(self) -> None:
        """Free the pages of its prefixes."""
        pool = self.ranking.relay.tiers.pool
        layout_id = pool.arena.layout.layout_id
        for user in pool.users():
            for entry in pool.find(user, self.ranking.version, layout_id):
                pool.drop(entry)

    # ---- scoring

    async def _run(self) -> None:
        while True:
            await self._came.wait()
            self._came.clear()
            while self._waiting:
                one = self._waiting.popleft()
                task = asyncio.get_running_loop().create_task(self._attempt(one))
                self._scoring = one.request.user, task
                await asyncio.wait({task})
                self._scoring = None
                if not task.cancelled() and task.exception() is not None:
                    log.error("the shadow failed", exc_info=task.exception())
                    self._skip(Skipped.FAILED)

    async def _attempt(self, one: _Offered) -> None:
        try:
            scores, took_s = await self._scores(one)
        except NotScored as error:
            self._skip(error.reason)
            return
        except NpuGrError:  # the scheduler stops, or its queue is full
            self._skip(Skipped.BUSY)
            return
        task = next(name for name in one.answer.scores if name in scores)
        pair = one.answer.scores[task], scores[task]
        difference = score_difference(*(reversed(pair) if self.is_before else pair))
        self.num_scored += 1
        self.differences.append(difference)
        number = next(self._numbers)
        self._on_compared(
            Compared(number, one.answer, self.ranking.version, scores, took_s, difference)
        )

    def _skip(self, reason: Skipped) -> None:
        self.num_skipped[reason] += 1
        self._on_skipped(reason)

    async def _scores(self, one: _Offered) -> tuple[dict[str, F32], float]:
        """Return the scores of each task, and the device seconds of the passes."""
        ranking, request = self.ranking, one.request
        try:
            tokens = ranking.tokenize(one.history, is_request=False)
            rows = ranking.vocabulary.rows(request.candidates)
            known = rows != UNKNOWN
            work = RankPass(tokens, 0, rows[known], one.shown_at)
            late = ranking.late.of_rank(request, tokens, work.candidates, known, one.shown_at)
        except NpuGrError:
            raise NotScored(Skipped.UNREADABLE) from None
        passes = _Passes(ranking, self._spare, one.at + WAIT_S)
        logits = np.full((len(rows), len(ranking.model.tasks)), np.nan, np.float32)
        if len(work.candidates):
            whole = RankPass(tokens, 0, work.candidates, one.shown_at, features=late)
            logits[known] = await passes.scored(request.user, whole)
            if not np.isfinite(logits[known]).all():
                raise NotScored(Skipped.FAILED)
        return dict(zip(ranking.model.tasks, logits.T, strict=True)), passes.took_s


class _Passes:
    """The passes of one rank, each in spare time."""

    def __init__(self, ranking: Ranking, spare: SpareTime, until_at: float) -> None:
        self.took_s = 0.0
        self._ranking = ranking
        self._engine = ranking.engine
        self._spare = spare
        self._until_at = until_at

    async def scored(self, user: UserKey, work: RankPass) -> F32:
        """Return the logits [c, tasks] of a rank, by way of a prefix of its history."""
        pool = self._ranking.relay.tiers.pool
        tokens = work.tokens
        key = PrefixKey(
            user,
            self._ranking.version,
            pool.arena.layout.layout_id,
            tokens.fingerprint(len(tokens)),
        )
        entry = longest(pool.find(user, key.model_version, key.layout_id), tokens)
        if entry is None or len(tokens) - entry.num_tokens > STEP:
            if entry is not None:
                pool.drop(entry)
            entry = await self._encoded(key, work) if len(tokens) else None
        if entry is None:  # no room, or no history: one pass
            self._begin([self._estimate_s(work)])
            return await self._run(work, self._estimate_s(work))
        with pool.lease(entry, consume=True):
            parts = self._parts(
                work.leasing(CachedPrefix(tuple(entry.runs), entry.num_tokens), None)
            )
            return np.concatenate([await self._run(one, self._estimate_s(one)) for one in parts])

    def _begin(self, passes_s: Sequence[float]) -> None:
        if not self._spare.has_for(passes_s):
            raise NotScored(Skipped.BUSY)

    async def _encoded(self, key: PrefixKey, work: RankPass) -> PrefixEntry | None:
        """Encode a history into spare pages; None without room for it."""
        pool = self._ranking.relay.tiers.pool
        tokens = work.tokens
        try:
            entry = pool.reserve(key, len(tokens), is_spare=True)
        except PoolExhausted:
            return None
        try:
            runs = tuple(entry.runs)
            passes = self._engine.prefill_passes(tokens, runs, STEP)
            after = self._parts(work.leasing(CachedPrefix(runs, len(tokens)), None))
            self._begin([one.estimate_s for one in passes] + [*map(self._estimate_s, after)])
            for one in passes:
                await self._run(one.work, one.estimate_s)
            if not pool.publish(entry):
                raise NotScored(Skipped.BUSY)  # its user was erased
        finally:
            pool.abandon(entry)
        with pool.lease(entry, consume=True):
            pass  # so that it may be evicted
        return entry

    def _parts(self, work: RankPass) -> list[RankPass]:
        """Cut the candidates; cross features are not cut."""
        size = STEP if work.features.cross is None else len(work.candidates)
        return [
            replace(work, candidates=work.candidates[start : start + size])
            for start in range(0, len(work.candidates), size)
        ]

    def _estimate_s(self, work: RankPass) -> float:
        cached = work.cached.num_tokens if work.cached else 0
        return self._engine.cost.pass_s(len(work.tokens) - cached, cached, len(work.candidates))

    async def _run(self, work: RankPass, estimate_s: float) -> F32:
        """Run a pass as soon as there is time for it."""
        while not self._spare.take(estimate_s):
            if time.monotonic() >= self._until_at:
                raise NotScored(Skipped.BUSY)
            await asyncio.sleep(POLL_S)

        def attempt() -> F32 | Exception:
            try:
                return self._engine.forward([work])[0]
            except Exception as error:  # a fault of the shadow is none of the device
                log.exception("a pass of the shadow failed")
                return error

        done = await self._engine.scheduler.call(
            attempt,
            self._until_at,
            JobOrder(float("inf"), time.monotonic() + BEHIND_S),
            estimate_s=estimate_s,
            preemptible=True,
            kind="shadow",
        )
        self.took_s += done.device_s
        if isinstance(done.value, Exception):
            raise NotScored(Skipped.FAILED)
        return done.value


def _is_chosen(user: UserKey, share: float) -> bool:
    """Choose users, not ranks, so that their prefixes are used again."""
    hashed = xxhash.xxh3_64_intdigest(f"{user.tenant}\0{user.user}".encode())
    return hashed < share * 2**64
