"""Chooses the attention implementation (the "way") of a ranker at its warm-up, by measuring.

A ranker keeps one way for its whole life, since a hit equals a cold pass only if both are computed
the same way. Each candidate encodes one history into pages and ranks it, cold and from the pages.
It is rejected if its scores differ from those of plain torch ops; of the others the fastest wins.
The CPU build has only one way, so nothing is measured there and no answer depends on a clock.

The scores of one history are not enough: a way may read after the last token, where a fresh page
has zeros, or write into a page of another user. So small requests are checked too (`cases`,
`observe`, `rejection`). Before each, all pages hold NaN, as the pages of another user might; the
pages of two users alternate; a pass must not change the bytes where it has no tokens to write; and
a second run must give the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from npu_gr.backend.base import Backend
from npu_gr.backend.calls import HstuShape
from npu_gr.backend.names import AttentionMode
from npu_gr.backend.tiles import TILE_TOKENS
from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import ConfigError
from npu_gr.core.served import AttentionWay
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import KVLayout, PageRun
from npu_gr.engine.page_jobs import CachedPrefix, warmup_order
from npu_gr.engine.rank_engine import RankEngine, RankPass
from npu_gr.engine.ways import DRIFT, PLAIN, Checked, Timed, fastest, try_way
from npu_gr.model.history_tokenizer import Tokens
from npu_gr.model.hstu import HSTU

log = logging.getLogger(__name__)

NEW_TOKENS = 64  # tokens that a timed rank computes after the cached ones
_FAR = float("inf")
_NOTHING: I64 = np.empty(0, np.int64)


def shape_of(model: HSTU, layout: KVLayout) -> HstuShape:
    """Describe a ranker by what decides which ways can run its attention."""
    config = model.config
    return HstuShape(
        config.num_heads,
        config.qk_dim,
        config.v_dim,
        model.dtype,
        getattr(torch, layout.dtype),
        layout.page_tokens,
        config.v_dim if config.norm == "group" else config.num_heads * config.v_dim,
        config.residual == "concat",
        config.relative_bias != "none",
        config.has_plain_layers,
        config.has_plain_times,
    )


class Trial(NamedTuple):
    """The requests that every way computes."""

    tokens: Tokens  # a history
    cached: int  # tokens of it in pages, the last `chunk` of them encoded in the timed pass
    chunk: int
    candidates: I64  # [c] item rows
    # Otherwise unused pages of the engine's arena for the history; zero at the end.
    runs: tuple[PageRun, ...]
    other: Tokens  # another user's history

    @property
    def query_time(self) -> int:
        """Unix seconds of the requests."""
        # 0 if the history has no event, only a token of the user
        return int(self.tokens.events.timestamps.max(initial=0))


def possible(engine: RankEngine, backend: Backend, wanted: AttentionMode) -> Sequence[str]:
    """List the ways of the backend that can run the engine's ranker, in the backend's order.

    Args:
        engine: Engine of the ranker.
        backend: Backend with the ways.
        wanted: `attention` of the configuration; "auto" = any way.

    Raises:
        ConfigError: the wanted way cannot run this ranker here.
    """
    ways = backend.hstu_ways(shape_of(engine.model, engine.arena.layout))
    if wanted != "auto" and wanted not in ways:
        raise ConfigError(
            f"attention: {wanted} cannot run this ranker here; available: {', '.join(ways)}"
        )
    return ways if wanted == "auto" else (wanted,)


async def choose_way(
    engine: RankEngine, backend: Backend, ways: Sequence[str], trial: Trial
) -> tuple[AttentionWay, ...]:
    """Set the engine's backend to the fastest way that computes the right scores.

    Args:
        engine: Engine of the ranker, which serves no requests yet; its jobs queue as live ones do.
        backend: Backend with the ways.
        ways: Result of `possible`; of equally fast ways the first one is chosen.
        trial: Requests to compute.

    Returns:
        The results of the ways, in the order of `ways`.

    Raises:
        ConfigError: no way computes the right scores.
        DeviceError: plain torch ops fail.
    """
    tried = list[AttentionWay]()
    try:
        engine.backend = backend.running(PLAIN)
        checked = await _Checked.of(engine, trial)
        for way in ways:
            engine.backend = backend.running(way)
            tried.append(await _try(engine, way, trial, checked))
    finally:
        await engine.zero(engine.arena, trial.runs)
    best = fastest(tried)
    if best.rejected:
        raise ConfigError(f"attention: {best.name} cannot be used here: {best.rejected}")
    engine.backend = backend.running(best.name)
    log.info("attention by %s: %s", best.name, "; ".join(map(summary, tried)))
    return tuple(tried)


def summary(way: AttentionWay) -> str:
    """Describe the result of a way in one phrase, for the log."""
    if way.prefill_ms is None or way.rank_ms is None:
        return f"{way.name} rejected: {way.rejected}"
    return f"{way.name} {way.prefill_ms:.2f} ms a chunk and {way.rank_ms:.2f} ms a rank"


class _Checked(NamedTuple):
    """The results of plain torch ops, which every way must reproduce."""

    logits: list[F32]
    small: list[Observed]  # of the small requests (`cases`)

    @classmethod
    async def of(cls, engine: RankEngine, trial: Trial) -> _Checked:
        """Compute them with the engine's current backend."""
        logits = await _logits(engine, trial)
        users = trial.tokens, trial.other
        small = cases(
            users, trial.candidates, trial.runs, engine.arena.layout.page_tokens, trial.query_time
        )
        return cls(logits, [await observe(engine, case, trial.runs) for case in small])

    def drift(self, logits: Sequence[F32]) -> float:
        """Return the largest difference of logits, in their standard deviations; NaN if any is."""
        return float(np.max([_drift(*pair) for pair in zip(logits, self.logits, strict=True)]))


async def _rejection(engine: RankEngine, trial: Trial, checked: _Checked, drift: float) -> str:
    """Return why the engine's way must not be used; "" = it may be used."""
    limit = DRIFT[engine.model.dtype]
    if not drift <= limit:
        return (
            f"scores differ from those of plain torch ops by {drift:.1e} of their standard "
            f"deviation, the limit is {limit:.0e}"
        )
    spread = float(checked.logits[0].std())
    for want in checked.small:
        if why := rejection(await observe(engine, want.case, trial.runs), want, spread, limit):
            return why
    return ""


async def _try(engine: RankEngine, way: str, trial: Trial, checked: _Checked) -> AttentionWay:
    async def check() -> Checked:
        drift = checked.drift(await _logits(engine, trial))
        return Checked(drift, await _rejection(engine, trial, checked, drift))

    def timed(work: RankPass) -> Timed:
        return lambda: engine.timed(partial(engine.forward, [work]))

    done = await try_way(way, check, [timed(work) for work in _passes(trial)])
    prefill_ms, rank_ms = done.passes_ms or (None, None)
    return AttentionWay(
        name=way,
        prefill_ms=prefill_ms,
        rank_ms=rank_ms,
        drift=done.drift,
        rejected=done.rejected,
    )


def _passes(trial: Trial) -> tuple[RankPass, RankPass]:
    """Make the two passes that are timed: the last chunk of a prefill, and a rank after it."""
    start = trial.cached - trial.chunk
    known = CachedPrefix(trial.runs, start) if start else None
    prefill = RankPass(trial.tokens[: trial.cached], 0, _NOTHING, 0, cached=known, keep=trial.runs)
    return prefill, _rank(trial, CachedPrefix(trial.runs, trial.cached))


def _rank(trial: Trial, cached: CachedPrefix | None) -> RankPass:
    return RankPass(trial.tokens, 0, trial.candidates, trial.query_time, cached=cached)


async def _logits(engine: RankEngine, trial: Trial) -> list[F32]:
    """Rank cold, and from pages that the same way has written."""
    cold = await engine.rank(_rank(trial, None), _FAR)
    await engine.prefill(trial.tokens[: trial.cached], trial.runs, _FAR, warmup_order())
    hit = await engine.rank(_rank(trial, CachedPrefix(trial.runs, trial.cached)), _FAR)
    return [cold.logits, hit.logits]


def _drift(got: F32, want: F32) -> float:
    return float(np.abs(got - want).max()) / max(float(want.std()), 1e-6)


MOST_PAGES = 8  # pages of a trial that the small requests use
MOST_CANDIDATES = 40  # of a small request


class CaseRequest(NamedTuple):
    """One request of a case: candidates, and a history whose first `cached` tokens are in pages."""

    tokens: Tokens
    cached: int
    candidates: I64
    runs: tuple[PageRun, ...]  # in token order; empty if nothing is cached


class Case(NamedTuple):
    """Small requests that share a pass."""

    name: str
    requests: tuple[CaseRequest, ...]
    query_time: int


class Observed(NamedTuple):
    """What a way computed for a case."""

    case: Case
    logits: list[F32]  # of each request
    kept: list[F32]  # keys and values of each request's cached tokens
    stray: str  # which pass wrote where it must not; "" = none
    repeats: bool  # a second run gave the same bits


def cases(
    users: Sequence[Tokens],
    candidates: I64,
    runs: Sequence[PageRun],
    page_tokens: int,
    query_time: int,
) -> list[Case]:
    """Make the small requests that every way computes.

    Args:
        users: Two histories that differ.
        candidates: [c] item rows.
        runs: Otherwise unused pages.
        page_tokens: Tokens of a page.
        query_time: Unix seconds of the requests.
    """
    random = np.random.default_rng(19)
    mine, other = _in_turns(runs)
    room = min(len(users[0]), len(mine) * page_tokens)

    def request(user: int, num_tokens: int, cached: int, pages: tuple[PageRun, ...]) -> CaseRequest:
        count = int(random.integers(1, min(len(candidates), MOST_CANDIDATES) + 1))
        used = pages[: -(-cached // page_tokens)]
        rows = random.permutation(candidates)[:count]
        return CaseRequest(users[user][:num_tokens], cached, rows, used)

    def alone(num_tokens: int, cached: int) -> Case:
        one = request(0, min(num_tokens, room), max(1, min(cached, room)), mine)
        return Case(f"{one.cached} of {len(one.tokens)} tokens cached", (one,), query_time)

    full = page_tokens
    lengths = [1, full, full + 1, *random.integers(2, max(3, room + 1), 2).tolist()]
    delta = alone(full + 5, full - 2)
    held = min(len(users[1]) - 1, len(other) * full)
    both = (
        *delta.requests,
        request(1, held + 1, held, other),
        request(1, min(len(users[1]), 11), 0, ()),
    )
    return [
        *(alone(n, n) for n in lengths),
        delta,
        Case("requests of two users in a pass", both, query_time),
    ]


def _in_turns(runs: Sequence[PageRun]) -> tuple[tuple[PageRun, ...], tuple[PageRun, ...]]:
    """Deal pages to two users in turn; those of the first are in reverse order of memory."""
    pages = _pages(runs)
    return tuple(reversed(pages[::2])), tuple(pages[1::2])


def _pages(runs: Sequence[PageRun]) -> list[PageRun]:
    """List the single pages that the check uses."""
    return [PageRun(first, 1) for run in runs for first in range(run.first_page, sum(run))][
        :MOST_PAGES
    ]


async def observe(engine: RankEngine, case: Case, runs: Sequence[PageRun]) -> Observed:
    """Compute a case twice with the engine's backend, each time over pages that held NaN.

    Args:
        engine: Engine of the ranker; its arena has the pages, which hold zeros afterwards.
        case: the requests.
        runs: Otherwise unused pages; they include those of the case.
    """
    try:
        first, second = [await _answer(engine, case, runs) for _ in range(2)]
    finally:
        await engine.zero(engine.arena, _pages(runs))
    pairs = zip([*first.logits, *first.kept], [*second.logits, *second.kept], strict=True)
    return first._replace(repeats=all(one.tobytes() == two.tobytes() for one, two in pairs))


def rejection(got: Observed, want: Observed, spread: float, limit: float) -> str:
    """Return why a way is rejected by its result for a case; "" = it is not rejected.

    Args:
        got: Result of the way.
        want: Result of plain torch ops. If it does not repeat bit for bit, the way need not either.
        spread: Standard deviation of the ranker's scores.
        limit: Largest difference, in standard deviations.
    """
    if got.stray:
        return f"{got.case.name}: {got.stray}"
    if want.repeats and not got.repeats:
        return f"{got.case.name}: a second run of the same request gives other scores"
    for what, mine, right in (
        ("scores", got.logits, want.logits),
        ("keys and values", got.kept, want.kept),
    ):
        deviation = spread if what == "scores" else max(float(np.std(np.concatenate(right))), 1e-6)
        drift = (
            float(
                np.max([np.abs(a - b).max(initial=0.0) for a, b in zip(mine, right, strict=True)])
            )
            / deviation
        )
        if not drift <= limit:  # a NaN is rejected
            return (
                f"{got.case.name}: {what} differ from those of plain torch ops by {drift:.1e} of "
                f"their standard deviation, the limit is {limit:.0e}"
            )
    return ""


async def _answer(engine: RankEngine, case: Case, runs: Sequence[PageRun]) -> Observed:
    arena, page_tokens = engine.arena, engine.arena.layout.page_tokens
    pages = _pages(runs)
    call = partial(engine.scheduler.call, deadline_at=_FAR, order=warmup_order())

    def poison() -> _Contents:
        arena.fill(pages, float("nan"))
        engine.backend.synchronize()  # the next writer may be on another stream
        return _Contents(arena, pages)

    empty = (await call(poison)).value
    for one in case.requests:
        if one.cached:
            await engine.prefill(one.tokens[: one.cached], one.runs, _FAR, warmup_order())
    before = (await call(partial(_Contents, arena, pages))).value
    passes = [
        RankPass(
            *(one.tokens, 0, one.candidates, case.query_time),
            cached=CachedPrefix(one.runs, one.cached) if one.cached else None,
        )
        for one in case.requests
    ]
    logits = (await call(partial(engine.forward, passes))).value
    after = (await call(partial(_Contents, arena, pages))).value
    held = {page: count for one in case.requests for page, count in _held(one, page_tokens)}
    stray = ""
    if not all(before.same(empty, page, held.get(page, 0)) for page in pages):
        stray = "a prefill writes outside of its tokens"
    elif not all(after.same(before, page, 0) for page in pages):
        stray = "a rank writes into pages"
    kept = [before.tokens(_held(one, page_tokens)) for one in case.requests]
    return Observed(case, logits, kept, stray, repeats=True)


def _held(request: CaseRequest, page_tokens: int) -> Iterator[tuple[PageRun, int]]:
    """Yield the pages of a request, each with the number of tokens in it."""
    for number, page in enumerate(request.runs):
        yield page, min(page_tokens, request.cached - number * page_tokens)


class _Contents:
    """A copy, on the host, of what pages hold at one instant."""

    def __init__(self, arena: KVArena, pages: Sequence[PageRun]) -> None:
        parts = iter(arena.copies(pages))
        # [layer, token or tile, head, ...] of keys and of values
        self._of = {page: (next(parts)[:, 0], next(parts)[:, 0]) for page in pages}
        # tokens that can only be written together
        self._step = TILE_TOKENS if arena.layout.arrangement == "tiles" else 1

    def same(self, other: _Contents, page: PageRun, num_tokens: int) -> bool:
        """Return whether a page has the same bytes in both after its first `num_tokens` tokens."""
        first = -(-num_tokens // self._step)
        pairs = zip(self._of[page], other._of[page], strict=True)
        return all(
            torch.equal(_bytes(one[:, first:]), _bytes(two[:, first:])) for one, two in pairs
        )

    def tokens(self, held: Iterator[tuple[PageRun, int]]) -> F32:
        """Return the keys and values of the pages' tokens, page after page; only of full tiles."""
        full = [(self._of[page], count // self._step) for page, count in held]
        parts = [
            plane[:, :count].float().numpy().ravel() for planes, count in full for plane in planes
        ]
        return np.concatenate([np.zeros(1, np.float32), *parts])


def _bytes(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.uint8)
