"""Check a way of attention on small requests: what it reads, what it writes, and whether it says the same twice.

Right scores of one history prove little: a way may read behind the last token, where a fresh page has zeros, or write
into somebody else's page. So all pages hold NaN before, as one may that another user leaves; those of two users stand
in turns, with others between them; and what no token wrote must hold the same bytes behind every pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from npu_gr.backend.tiles import TILE_TOKENS
from npu_gr.catalogue.tokens import Tokens
from npu_gr.core.arrays import F32, I64
from npu_gr.engine.kv.arena import KVArena
from npu_gr.engine.kv.layout import PageRun
from npu_gr.engine.page_jobs import CachedPrefix, proof_order
from npu_gr.engine.rank_engine import RankEngine, RankPass

MOST_PAGES = 8  # of a trial's that the check uses
MOST_CANDIDATES = 40
_FAR = float("inf")


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
    users: Sequence[Tokens], candidates: I64, runs: Sequence[PageRun], page_tokens: int, query_time: int
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
    return [*(alone(n, n) for n in lengths), delta, Case("requests of two users in a pass", both, query_time)]


def _in_turns(runs: Sequence[PageRun]) -> tuple[tuple[PageRun, ...], tuple[PageRun, ...]]:
    """Deal pages to two users; the first one's are in no order of memory."""
    pages = _pages(runs)
    return tuple(reversed(pages[::2])), tuple(pages[1::2])


def _pages(runs: Sequence[PageRun]) -> list[PageRun]:
    """List the pages that the check uses, one by one."""
    return [PageRun(first, 1) for run in runs for first in range(run.first_page, sum(run))][:MOST_PAGES]


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


def refusal(got: Observed, want: Observed, spread: float, limit: float) -> str:
    """Say in words why a way is refused by what it did with a case; "" = it is not.

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
    for what, mine, right in (("scores", got.logits, want.logits), ("keys and values", got.kept, want.kept)):
        deviation = spread if what == "scores" else max(float(np.std(np.concatenate(right))), 1e-6)
        drift = float(np.max([np.abs(a - b).max(initial=0.0) for a, b in zip(mine, right, strict=True)])) / deviation
        if not drift <= limit:  # a NaN is refused
            return (
                f"{got.case.name}: {what} differ from plain torch ops' by {drift:.1e} of their deviation, "
                f"the limit is {limit:.0e}"
            )
    return ""


async def _answer(engine: RankEngine, case: Case, runs: Sequence[PageRun]) -> Observed:
    arena, page_tokens = engine.arena, engine.arena.layout.page_tokens
    pages = _pages(runs)
    call = partial(engine.scheduler.call, deadline_at=_FAR, order=proof_order())

    def poison() -> _Contents:
        arena.fill(pages, float("nan"))
        engine.backend.synchronize()  # the next writer may be in another stream
        return _Contents(arena, pages)

    empty = (await call(poison)).value
    for asker in case.askers:
        if asker.cached:
            await engine.prefill(asker.tokens[: asker.cached], asker.runs, _FAR, proof_order())
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
        self._of = {page: (next(parts)[:, 0], next(parts)[:, 0]) for page in pages}  # [layer, token or tile, head, ..]
        self._step = TILE_TOKENS if arena.layout.arrangement == "tiles" else 1  # tokens that are written together

    def same(self, other: _Contents, page: PageRun, num_tokens: int) -> bool:
        """Whether a page has the same bytes in both behind its first tokens."""
        first = -(-num_tokens // self._step)
        pairs = zip(self._of[page], other._of[page], strict=True)
        return all(torch.equal(_bytes(one[:, first:]), _bytes(two[:, first:])) for one, two in pairs)

    def tokens(self, held: Iterator[tuple[PageRun, int]]) -> F32:
        """Return what pages hold of their first tokens, one page behind the other; of tiles, the full ones."""
        full = [(self._of[page], count // self._step) for page, count in held]
        parts = [plane[:, :count].float().numpy().ravel() for planes, count in full for plane in planes]
        return np.concatenate([np.zeros(1, np.float32), *parts])


def _bytes(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.uint8)
