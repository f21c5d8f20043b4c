"""Choose what runs a ranker's attention: at the warm-up, by measuring what can run it here, once for its whole life.

A prefix is exact because its hit is computed as its cold pass is, so a ranker keeps one way. Each
candidate encodes one history into pages, and ranks over it, cold and from the pages; scores that
are not those of plain torch ops reject it. The CPU has one way, which its build decides: nothing is
measured there, and no answer depends on a clock.

Right scores of one history prove little: a way may read behind the last token, where a fresh page
has zeros, or write into somebody else's page. So small requests are checked too (`cases`,
`observe`, `rejection`): all pages hold NaN before, as one may that another user leaves; those of
two users stand in turns, with others between them; what no token wrote must hold the same bytes
behind every pass; and a second time everything is the same.
"""

from __future__ import annotations

import logging
import time
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
from npu_gr.core.errors import ConfigError, DeviceError
from npu_gr.core.served import AttentionWay
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import KVLayout, PageRun
from npu_gr.engine.page_jobs import CachedPrefix, warmup_order
from npu_gr.engine.rank_engine import RankEngine, RankPass
from npu_gr.model.history_tokenizer import Tokens
from npu_gr.model.hstu import HSTU

log = logging.getLogger(__name__)

# the way that the others are compared with; `npu-gr doctor` compares it with the definition
PLAIN = "torch"
# of the deviation
DRIFT = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
SAMPLES = 3  # of each pass; the fastest counts
MEASURE_S = 2.0  # no further sample of a way after so long
WORTH = 0.95  # a way further down the order must take less than this of the best time
NEW_TOKENS = 64  # that a timed rank computes behind the cached ones
_FAR = float("inf")
_NOTHING: I64 = np.empty(0, np.int64)


def shape_of(model: HSTU, layout: KVLayout) -> HstuShape:
    """Say of a ranker what decides who can run its attention."""
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
    """What every way computes."""

    tokens: Tokens  # a history
    cached: int  # tokens of it in pages, the last `chunk` of them encoded in the timed pass
    chunk: int
    candidates: I64  # [c] item rows
    # pages of the engine's arena for the history that nobody else uses; zero at the end
    runs: tuple[PageRun, ...]
    other: Tokens  # another user's history

    @property
    def query_time(self) -> int:
        """Unix seconds of its requests."""
        # a token of the user alone has no event
        return int(self.tokens.events.timestamps.max(initial=0))


def possible(engine: RankEngine, backend: Backend, wanted: AttentionMode) -> Sequence[str]:
    """Name the ways of the backend that may run the engine's ranker, in its order.

    Args:
        engine: of the ranker.
        backend: has the ways.
        wanted: the configuration's `attention`; "auto" = any.

    Raises:
        ConfigError: the wanted way cannot run this ranker here.
    """
    ways = backend.hstu_ways(shape_of(engine.model, engine.arena.layout))
    if wanted != "auto" and wanted not in ways:
        raise ConfigError(
            f"attention: {wanted} cannot run this ranker here; what can: {', '.join(ways)}"
        )
    return ways if wanted == "auto" else (wanted,)


async def choose_way(
    engine: RankEngine, backend: Backend, ways: Sequence[str], trial: Trial
) -> tuple[AttentionWay, ...]:
    """Set the engine's backend to the fastest way that computes what it should.

    Args:
        engine: of the ranker. Its jobs wait as live ones do; it serves nobody yet.
        backend: has the ways.
        ways: of `possible`. Of equals the first one is chosen.
        trial: what is computed.

    Returns:
        what was tried, in order.

    Raises:
        ConfigError: a single way computes something else.
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
        raise ConfigError(f"attention: {best.name} is of no use here: {best.rejected}")
    engine.backend = backend.running(best.name)
    log.info("attention by %s: %s", best.name, "; ".join(map(told, tried)))
    return tuple(tried)


def fastest(tried: Sequence[AttentionWay]) -> AttentionWay:
    """Return the fastest; a later one only where it is faster by more than measurements differ."""
    best = tried[0]
    for way in tried[1:]:
        if way.total_ms < best.total_ms * WORTH:
            best = way
    return best


def told(way: AttentionWay) -> str:
    """Say how a way did."""
    if way.prefill_ms is None or way.rank_ms is None:
        return f"{way.name} rejected: {way.rejected}"
    return f"{way.name} {way.prefill_ms:.2f} ms a chunk and {way.rank_ms:.2f} ms a rank"


class _Checked(NamedTuple):
    """What every way should compute: what plain torch ops do."""

    logits: list[F32]
    small: list[Observed]  # of small requests, the cases

    @classmethod
    async def of(cls, engine: RankEngine, trial: Trial) -> _Checked:
        """Ask the engine's backend."""
        logits = await _logits(engine, trial)
        users = trial.tokens, trial.other
        small = cases(
            users, trial.candidates, trial.runs, engine.arena.layout.page_tokens, trial.query_time
        )
        return cls(logits, [await observe(engine, case, trial.runs) for case in small])

    def drift(self, logits: Sequence[F32]) -> float:
        """Return the greatest difference from the logits, in their deviations; a NaN stays one."""
        return float(np.max([_drift(*pair) for pair in zip(logits, self.logits, strict=True)]))


async def _rejection(engine: RankEngine, trial: Trial, checked: _Checked, drift: float) -> str:
    """Say why the engine's way is not to be used; "" = it may be."""
    limit = DRIFT[engine.model.dtype]
    if not drift <= limit:
        return (
            f"scores differ from plain torch ops' by {drift:.1e} of their deviation, the limit "
            f"is {limit:.0e}"
        )
    spread = float(checked.logits[0].std())
    for want in checked.small:
        if why := rejection(await observe(engine, want.case, trial.runs), want, spread, limit):
            return why
    return ""


async def _try(engine: RankEngine, way: str, trial: Trial, checked: _Checked) -> AttentionWay:
    try:
        drift = checked.drift(await _logits(engine, trial))
        if why := await _rejection(engine, trial, checked, drift):
            return AttentionWay(name=way, drift=drift, rejected=why)
        prefill, rank = _passes(trial)
        prefill_ms = await _fastest_ms(engine, prefill)
        rank_ms = await _fastest_ms(engine, rank)
    except DeviceError as error:
        if way == PLAIN:
            raise
        return AttentionWay(name=way, rejected=str(error))
    return AttentionWay(name=way, prefill_ms=prefill_ms, rank_ms=rank_ms, drift=drift)


def _passes(trial: Trial) -> tuple[RankPass, RankPass]:
    """The two that are timed: the last chunk of a prefill, and a rank behind it."""
    start = trial.cached - trial.chunk
    known = CachedPrefix(trial.runs, start) if start else None
    prefill = RankPass(trial.tokens[: trial.cached], 0, _NOTHING, 0, cached=known, keep=trial.runs)
    return prefill, _rank(trial, CachedPrefix(trial.runs, trial.cached))


def _rank(trial: Trial, cached: CachedPrefix | None) -> RankPass:
    return RankPass(trial.tokens, 0, trial.candidates, trial.query_time, cached=cached)


async def _logits(engine: RankEngine, trial: Trial) -> list[F32]:
    """Rank cold, and over pages that this way has written."""
    cold = await engine.rank(_rank(trial, None), _FAR)
    await engine.prefill(trial.tokens[: trial.cached], trial.runs, _FAR, warmup_order())
    hit = await engine.rank(_rank(trial, CachedPrefix(trial.runs, trial.cached)), _FAR)
    return [cold.logits, hit.logits]


async def _fastest_ms(engine: RankEngine, work: RankPass) -> float:
    began_at = time.monotonic()
    fastest_s = _FAR
    for _ in range(SAMPLES):
        fastest_s = min(fastest_s, await engine.timed(partial(engine.forward, [work])))
        if time.monotonic() - began_at > MEASURE_S / 2:
            break
    return fastest_s * 1e3


def _drift(got: F32, want: F32) -> float:
    return float(np.abs(got - want).max()) / max(float(want.std()), 1e-6)


MOST_PAGES = 8  # of a trial's that the check uses
MOST_CANDIDATES = 40


class Asker(NamedTuple):
    """One request of a case: a history, whose first `cached` tokens are in pages, and candidates."""

    tokens: Tokens
    cached: int
    candidates: I64
    runs: tuple[PageRun, ...]  # in token order; none where nothing is cached


class Case(NamedTuple):
    """Requests that share a pass."""

    name: str
    askers: tuple[Asker, ...]
    query_time: int


class Observed(NamedTuple):
    """What a way did with a case."""

    case: Case
    logits: list[F32]  # of each asker
    kept: list[F32]  # of each asker: the keys and values of its cached tokens
    stray: str  # which pages it wrote that were not its to write; "" = none
    repeats: bool  # a second time everything was the same, bit for bit


def cases(
    users: Sequence[Tokens],
    candidates: I64,
    runs: Sequence[PageRun],
    page_tokens: int,
    query_time: int,
) -> list[Case]:
    """Make the small requests that every way answers.

    Args:
        users: two histories that differ.
        candidates: item rows.
        runs: pages that nobody else uses.
        page_tokens: of a page.
        query_time: unix seconds of the requests.
    """
    random = np.random.default_rng(19)
    mine, other = _in_turns(runs)
    room = min(len(users[0]), len(mine) * page_tokens)

    def asker(user: int, num_tokens: int, cached: int, pages: tuple[PageRun, ...]) -> Asker:
        count = int(random.integers(1, min(len(candidates), MOST_CANDIDATES) + 1))
        used = pages[: -(-cached // page_tokens)]
        return Asker(users[user][:num_tokens], cached, random.permutation(candidates)[:count], used)

    def alone(num_tokens: int, cached: int) -> Case:
        one = asker(0, min(num_tokens, room), max(1, min(cached, room)), mine)
        return Case(f"{one.cached} of {len(one.tokens)} tokens cached", (one,), query_time)

    full = page_tokens
    lengths = [1, full, full + 1, *random.integers(2, max(3, room + 1), 2).tolist()]
    delta = alone(full + 5, full - 2)
    held = min(len(users[1]) - 1, len(other) * full)
    both = (*delta.askers, asker(1, held + 1, held, other), asker(1, min(len(users[1]), 11), 0, ()))
    return [
        *(alone(n, n) for n in lengths),
        delta,
        Case("requests of two users in a pass", both, query_time),
    ]


def _in_turns(runs: Sequence[PageRun]) -> tuple[tuple[PageRun, ...], tuple[PageRun, ...]]:
    """Deal pages to two users; the first one's are in no order of memory."""
    pages = _pages(runs)
    return tuple(reversed(pages[::2])), tuple(pages[1::2])


def _pages(runs: Sequence[PageRun]) -> list[PageRun]:
    """List the pages that the check uses, one by one."""
    return [PageRun(first, 1) for run in runs for first in range(run.first_page, sum(run))][
        :MOST_PAGES
    ]


async def observe(engine: RankEngine, case: Case, runs: Sequence[PageRun]) -> Observed:
    """Answer a case twice with the engine's backend, each time from pages that held NaN.

    Args:
        engine: of the ranker; its arena has the pages, which hold zeros behind it.
        case: the requests.
        runs: pages that nobody else uses, the case's among them.
    """
    try:
        first, second = [await _answer(engine, case, runs) for _ in range(2)]
    finally:
        await engine.zero(engine.arena, _pages(runs))
    pairs = zip([*first.logits, *first.kept], [*second.logits, *second.kept], strict=True)
    return first._replace(repeats=all(one.tobytes() == two.tobytes() for one, two in pairs))


def rejection(got: Observed, want: Observed, spread: float, limit: float) -> str:
    """Say in words why a way is rejected by what it did with a case; "" = it is not.

    Args:
        got: of the way.
        want: of plain torch ops. Where those do not give the same twice, nothing has to.
        spread: the deviation of the ranker's scores.
        limit: of differences, in deviations.
    """
    if got.stray:
        return f"{got.case.name}: {got.stray}"
    if want.repeats and not got.repeats:
        return f"{got.case.name}: the same request has other scores a second time"
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
                f"{got.case.name}: {what} differ from plain torch ops' by {drift:.1e} of their "
                "deviation, "
                f"the limit is {limit:.0e}"
            )
    return ""


async def _answer(engine: RankEngine, case: Case, runs: Sequence[PageRun]) -> Observed:
    arena, page_tokens = engine.arena, engine.arena.layout.page_tokens
    pages = _pages(runs)
    call = partial(engine.scheduler.call, deadline_at=_FAR, order=warmup_order())

    def poison() -> _Contents:
        arena.fill(pages, float("nan"))
        engine.backend.synchronize()  # the next writer may be in another stream
        return _Contents(arena, pages)

    empty = (await call(poison)).value
    for asker in case.askers:
        if asker.cached:
            await engine.prefill(asker.tokens[: asker.cached], asker.runs, _FAR, warmup_order())
    before = (await call(partial(_Contents, arena, pages))).value
    passes = [
        RankPass(
            *(asker.tokens, 0, asker.candidates, case.query_time),
            cached=CachedPrefix(asker.runs, asker.cached) if asker.cached else None,
        )
        for asker in case.askers
    ]
    logits = (await call(partial(engine.forward, passes))).value
    after = (await call(partial(_Contents, arena, pages))).value
    held = {page: count for asker in case.askers for page, count in _held(asker, page_tokens)}
    stray = ""
    if not all(before.same(empty, page, held.get(page, 0)) for page in pages):
        stray = "a prefill writes where its tokens do not stand"
    elif not all(after.same(before, page, 0) for page in pages):
        stray = "a rank writes into pages"
    kept = [before.tokens(_held(asker, page_tokens)) for asker in case.askers]
    return Observed(case, logits, kept, stray, repeats=True)


def _held(asker: Asker, page_tokens: int) -> Iterator[tuple[PageRun, int]]:
    """Yield an asker's pages, each with how many of its places hold tokens."""
    for number, page in enumerate(asker.runs):
        yield page, min(page_tokens, asker.cached - number * page_tokens)


class _Contents:
    """What pages hold at one instant, on the host."""

    def __init__(self, arena: KVArena, pages: Sequence[PageRun]) -> None:
        parts = iter(arena.copies(pages))
        # [layer, token or tile, head, ..]
        self._of = {page: (next(parts)[:, 0], next(parts)[:, 0]) for page in pages}
        # tokens that are written together
        self._step = TILE_TOKENS if arena.layout.arrangement == "tiles" else 1

    def same(self, other: _Contents, page: PageRun, num_tokens: int) -> bool:
        """Whether a page has the same bytes in both behind its first tokens."""
        first = -(-num_tokens // self._step)
        pairs = zip(self._of[page], other._of[page], strict=True)
        return all(
            torch.equal(_bytes(one[:, first:]), _bytes(two[:, first:])) for one, two in pairs
        )

    def tokens(self, held: Iterator[tuple[PageRun, int]]) -> F32:
        """Return what pages hold of their first tokens, one page behind the other.

        Of tiles, the full ones.
        """
        full = [(self._of[page], count // self._step) for page, count in held]
        parts = [
            plane[:, :count].float().numpy().ravel() for planes, count in full for plane in planes
        ]
        return np.concatenate([np.zeros(1, np.float32), *parts])


def _bytes(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.uint8)
