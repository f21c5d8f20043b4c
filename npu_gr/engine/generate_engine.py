"""The `generate` job on one device: a history of items in, the best items out. READ after `beam_search.py`.

A history is a prompt of semantic IDs: L tokens an item. Its KV lies in pages, wherever it came from: encoded before,
by a signal or an earlier request, or now. Only the last token runs again, for its logits.

`Generator` runs on the device threads, one request at a time on each; `GenerateEngine` is the event loop's side of it.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import xxhash
from torch import Tensor

from npu_gr.backend.base import Backend
from npu_gr.catalogue.filters import Filter
from npu_gr.catalogue.tokens import window_start
from npu_gr.catalogue.trie import DEAD, I32, Trie
from npu_gr.core.errors import Unprocessable
from npu_gr.core.request import F32, I64
from npu_gr.engine.beam_search import Beams, Query, SearchOptions, Tables, search
from npu_gr.engine.cost import CostModel, fit
from npu_gr.engine.queue import Demand, Step
from npu_gr.engine.rank_engine import Cached, PageJobs, chunks
from npu_gr.engine.scheduler import Done, Scheduler, Urgency
from npu_gr.kv.arena import KVArena, Slab
from npu_gr.kv.beam_arena import BeamArena
from npu_gr.kv.layout import KVLayout, Run
from npu_gr.model.decoder import Decoder, LayerSlabs

# Below, one attention stage is expected to be faster: the middle of what others measured (128 to 256, TensorRT-LLM
# PR 14396); until `GenerateEngine.warm_up` has measured it on this device.
SPLIT_FROM_TOKENS = 192


class Status(StrEnum):
    """Whether there are as many items as were asked for."""

    COMPLETE = "complete"
    EXHAUSTED = "exhausted"  # the catalogue, the filter or the beam has no more


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Generated:
    """Flat arrays, best first. n = items."""

    item_ids: I64  # [n]
    sids: I32  # [n, L]
    scores: F32  # [n] log-probability of the item's semantic ID; items that share one have equal scores
    status: Status


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A history as the decoder reads it. n = tokens: L of each item, oldest first."""

    tokens: I64  # [n]
    unknown_items: int = 0  # that the catalogue lacks; they are left out
    cut_items: int = 0  # oldest ones that the window has no room for
    _fingerprints: dict[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def timestamps(self) -> I64:
        """[n] zeros: the decoder knows an order and no times."""
        return np.zeros(len(self.tokens), np.int64)

    def fingerprint(self, num_tokens: int) -> str:
        """Of the first `num_tokens`; made once each."""
        known = self._fingerprints.get(num_tokens)
        if known is None:
            part = np.ascontiguousarray(self.tokens[:num_tokens])
            known = self._fingerprints[num_tokens] = xxhash.xxh3_128_hexdigest(part.data)
        return known

    def newest(self, num_tokens: int, num_levels: int) -> Prompt:
        """At most the newest tokens, whole items."""
        keep = num_tokens // num_levels * num_levels
        return Prompt(self.tokens[len(self.tokens) - keep :], self.unknown_items)


class Part(NamedTuple):
    """Consecutive tokens of a prompt: the first `num_tokens` of some pages."""

    arena: KVArena
    runs: Sequence[Run]
    num_tokens: int


class Ask(NamedTuple):
    """One request of a generator, its prompt encoded."""

    trie: Trie  # of one version of the catalogue
    tables: Tables  # its, on this device
    tokens: I64  # the whole prompt, at least one token
    parts: Sequence[Part]  # where its KV is, in order
    options: SearchOptions
    num_items: int  # how many are wanted
    allow: Filter | None = None  # the items that the request may see; None = all


def layout_of(decoder: Decoder, page_tokens: int = 64) -> KVLayout:
    """Pages for a decoder's prompts, in its own dtype."""
    config = decoder.config
    return KVLayout(
        num_layers=config.num_layers,
        num_heads=config.num_kv_heads,
        qk_dim=config.head_dim,
        v_dim=config.head_dim,
        page_tokens=page_tokens,
        dtype=str(decoder.dtype).removeprefix("torch."),
    )


def make_prompt(trie: Trie, item_ids: I64, max_tokens: int, cut_step_items: int = 1) -> Prompt:
    """Semantic IDs of a history, oldest first; of a longer one the newest items that fit.

    Args:
        trie: the catalogue.
        item_ids: [n] external ids.
        max_tokens: at least L.
        cut_step_items: a history that does not fit begins at a multiple of this, as in `catalogue/tokens.py`, so that
            its start, and with it every cached prefix, stands still for a while.
    """
    leaves = trie.find(item_ids)
    known = leaves[leaves != DEAD]
    cut = window_start(0, len(known), max_tokens // trie.num_levels, cut_step_items)
    tokens = trie.sid_of(known[cut:]).astype(np.int64) + np.array(trie.codebooks.vocab_base, np.int64)
    return Prompt(tokens.ravel(), len(item_ids) - len(known), cut)


class Generator:
    """A decoder and what it reuses from request to request; every method runs on a device thread."""

    def __init__(
        self,
        decoder: Decoder,
        backend: Backend,
        max_beams: int,
        num_levels: int,
        num_streams: int = 1,
        max_rows: int | None = None,
    ) -> None:
        """Allocate a slab for the beams of each stream.

        Args:
            decoder: the model.
            backend: its device.
            max_beams: of one request.
            num_levels: codes of a semantic ID, the same in every version of a catalogue.
            num_streams: threads that may call `generate` at once.
            max_rows: beams of all requests of a pass; None = those of one.
        """
        config = decoder.config
        self.decoder, self.backend, self.max_beams, self._num_slots = decoder, backend, max_beams, num_levels - 1
        self.split_from_tokens = SPLIT_FROM_TOKENS
        self._beams: queue.SimpleQueue[BeamArena] = queue.SimpleQueue()  # those that no thread is using
        for _ in range(num_streams):
            self._beams.put(
                BeamArena(
                    num_layers=config.num_layers,
                    num_heads=config.num_kv_heads,
                    head_dim=config.head_dim,
                    max_beams=max(max_beams, max_rows or 0),
                    num_slots=num_levels - 1,
                    dtype=decoder.dtype,
                    device=backend.device,
                    fork=backend.beam_fork_,
                )
            )

    @property
    def max_prompt_tokens(self) -> int:
        """What the model's positions leave for a prompt."""
        return self.decoder.config.max_tokens - self._num_slots

    def encode(self, tokens: I64, before: Sequence[Part], into: Part, offset: int = 0) -> None:
        """Encode the next tokens of a prompt into pages, behind those that other pages hold already.

        Args:
            tokens: [n] the next ones.
            before: where the KV of those before them is, in order.
            into: the pages that receive them.
            offset: tokens of `into` that come before them (its own part of `before`).
        """
        start = sum(part.num_tokens for part in before)

        def sink(layer: int, k: Tensor, v: Tensor) -> None:
            into.arena.write(layer, into.runs, offset, k, v)

        new = self.backend.upload(tokens)
        self.decoder.prefill(self.backend, new, start, _slabs(before, start) if start else None, sink)

    def generate(
        self,
        trie: Trie,
        tables: Tables,
        tokens: I64,
        parts: Sequence[Part],
        options: SearchOptions,
        num_items: int,
        allow: Filter | None = None,
    ) -> Generated:
        """The best items after one prompt; see `generate_all`."""
        return self.generate_all([Ask(trie, tables, tokens, parts, options, num_items, allow)])[0]

    def generate_all(self, asks: Sequence[Ask]) -> list[Generated]:
        """The best items after some prompts whose KV is in pages, in one search.

        Raises:
            Unprocessable: a beam or a prompt over the limit. FloatingPointError: the model's weights are broken.
        """
        queries = [self._query(ask) for ask in asks]
        beams = self._beams.get()
        try:
            found = search(self.decoder, self.backend, queries, beams)
        finally:
            self._beams.put(beams)
        return [_generated(ask, each) for ask, each in zip(asks, found, strict=True)]

    def _query(self, ask: Ask) -> Query:
        tokens, last = ask.tokens, len(ask.tokens) - 1
        if ask.options.width > self.max_beams:
            raise Unprocessable(f"beam_width: {ask.options.width}, the limit is {self.max_beams}")
        if not 0 < len(tokens) <= self.max_prompt_tokens:
            raise Unprocessable(f"history: {len(tokens)} tokens, the model takes 1 to {self.max_prompt_tokens}")
        newest = self.backend.upload(tokens[last:])
        before = _slabs(ask.parts, last) if last else None
        allow = ask.allow
        return Query(
            tables=ask.tables,
            prompt=_slabs(ask.parts, len(tokens)),
            num_prompt_tokens=len(tokens),
            hidden=self.decoder.prefill(self.backend, newest, last, before, None),
            options=ask.options,
            allowed=None if allow is None else tuple(self.backend.upload(level) for level in allow.valid),
            split=len(tokens) >= self.split_from_tokens,
        )


def _generated(ask: Ask, found: Beams) -> Generated:
    items = ask.trie.items_of(found.leaves, allowed=None if ask.allow is None else ask.allow.allowed)
    item_ids = items.item_ids[: ask.num_items]
    of_leaf = np.repeat(np.arange(len(found.leaves)), items.counts)[: ask.num_items]
    return Generated(
        item_ids=item_ids,
        sids=ask.trie.sid_of(found.leaves)[of_leaf],
        scores=found.scores[of_leaf],
        status=Status.COMPLETE if len(item_ids) == ask.num_items else Status.EXHAUSTED,
    )


def _slabs(parts: Sequence[Part], num_tokens: int) -> LayerSlabs:
    def views(layer: int) -> list[Slab]:
        slabs, left = [], num_tokens
        for arena, runs, count in parts:
            slabs += arena.views(layer, runs, min(count, left))
            left -= min(count, left)
        return slabs

    return views


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """One request: what is searched for, and what of its prompt is encoded already."""

    trie: Trie
    tables: Tables
    prompt: Prompt
    options: SearchOptions
    num_items: int
    allow: Filter | None = None
    cached: Cached | None = None  # the KV of its first tokens
    keep: tuple[Run, ...] | None = None  # pages that receive the KV, behind that of `cached`
    vocabulary: int = 0  # of the model, for what a pass may hold

    @property
    def demand(self) -> Demand:
        """What the pass computes."""
        cached = self.cached.num_tokens if self.cached else 0
        return Demand(len(self.prompt) - cached, self.options.width, self.options.width * self.vocabulary)


class GenerateEngine(PageJobs):
    """Prefill and generate as jobs of the device thread, which other engines may share."""

    def __init__(self, generator: Generator, scheduler: Scheduler, arena: KVArena) -> None:
        """`arena`: pages of prompts. Tokens that no page is reserved for are encoded into a scratch of our own."""
        super().__init__(scheduler, generator.backend, arena)
        self.generator = generator
        self._scratch_pages = arena.layout.pages(generator.max_prompt_tokens)  # of one request
        pages = self._scratch_pages * scheduler.config.max_batch_requests
        self._scratch: queue.SimpleQueue[KVArena] = queue.SimpleQueue()  # those that no thread is using
        for _ in range(scheduler.config.streams):
            self._scratch.put(KVArena(arena.layout, pages, generator.backend.device))

    async def prefill(
        self, tokens: Prompt, keep: tuple[Run, ...], deadline_at: float, urgency: Urgency, first_token: int = 0
    ) -> int:
        """Encode a prompt into the pages `keep`, chunk after chunk; see `Engine.prefill`."""

        def step(start: int, stop: int) -> Step:
            before = [Part(self.arena, keep, start)] if start else []

            def run() -> None:
                self.generator.encode(tokens.tokens[start:stop], before, Part(self.arena, keep, stop), start)
                self.backend.synchronize()

            return Step(run, self.cost.pass_s(stop - start, start, 0))

        limits = list(chunks(first_token, len(tokens), self.scheduler.config.prefill_chunk_tokens))
        steps = [step(start, stop) for start, stop in limits]
        done = await self.scheduler.sequence(steps, deadline_at, urgency, is_sheddable=True, kind="prefill")
        return limits[done.steps - 1][1] if done.steps else first_token

    async def generate(self, work: Work, deadline_at: float, arrived_at: float | None = None) -> Done[Generated]:
        """Encode what is missing of the prompt and search, in a pass that others may share."""
        cached = work.cached.num_tokens if work.cached else 0
        expected_s = self.cost.pass_s(len(work.prompt) - cached, cached, work.options.width)
        work = replace(work, vocabulary=self.generator.decoder.config.vocab_size)
        done: Done[Generated] = await self.scheduler.batch(
            work,
            self._run,
            deadline_at,
            objective_s=self.objective_s,
            arrived_at=arrived_at,
            takes_s=expected_s,
            kind="generate",
        )
        if work.cached is None and done.batch_size == 1:
            self._correct(expected_s, done.device_s)
        return done

    def _run(self, works: Sequence[Work]) -> list[Generated]:
        scratch = self._scratch.get()
        try:
            return self.generator.generate_all([self._ask(work, scratch, n) for n, work in enumerate(works)])
        finally:
            self._scratch.put(scratch)

    def _ask(self, work: Work, scratch: KVArena, place: int) -> Ask:
        """With the whole prompt encoded: what is missing goes into pages to keep, or into the place's own scratch."""
        tokens, parts = work.prompt.tokens, list[Part]()
        start = work.cached.num_tokens if work.cached else 0
        if work.cached:
            parts.append(Part(self.arena, work.cached.runs, start))
        if work.keep:
            whole = Part(self.arena, work.keep, len(tokens))
            self.generator.encode(tokens[start:], parts, whole, start)
            parts = [whole]
        elif start < len(tokens):
            own = Part(scratch, (Run(place * self._scratch_pages, self._scratch_pages),), len(tokens) - start)
            self.generator.encode(tokens[start:], parts, own)
            parts.append(own)
        return Ask(work.trie, work.tables, work.prompt.tokens, parts, work.options, work.num_items, work.allow)

    async def warm_up(self, trie: Trie, tables: Tables, lengths: Sequence[int], widths: Sequence[int]) -> CostModel:
        """Run every shape once cold and once timed; fit and keep the cost model, candidates = beams.

        Also finds the shortest of the lengths from which two attention stages beat one at the widest beam.

        Args:
            trie, tables: a catalogue with at least one item.
            lengths: tokens of a prompt. widths: beams.
        """
        random = np.random.default_rng(0)
        items = trie.leaf_item[random.integers(0, trie.num_items, max(lengths))]

        def work(n: int, width: int) -> Work:
            prompt, options = make_prompt(trie, items, n), SearchOptions(width=width)
            return Work(trie=trie, tables=tables, prompt=prompt, options=options, num_items=width)

        def split_from(scratch: KVArena) -> int:
            for n in lengths:
                each = work(n, max(widths))
                tokens, part = each.prompt.tokens, Part(scratch, (Run(0, scratch.num_pages),), len(each.prompt))
                self.generator.encode(tokens, [], part)
                searched_s = []
                for self.generator.split_from_tokens in (0, n + 1):  # two stages, one
                    search_once = partial(
                        self.generator.generate, trie, tables, tokens, [part], each.options, each.num_items
                    )
                    searched_s.append(min(_timed(search_once) for _ in range(_TRIES)))
                if searched_s[0] < searched_s[1]:
                    return n
            return max(lengths) + 1

        def measure() -> list[tuple[int, int, float]]:
            scratch = self._scratch.get()
            self.generator.split_from_tokens = split_from(scratch)
            self._scratch.put(scratch)
            shapes = [(work(n, width), width) for n in lengths for width in widths]
            return [(len(each.prompt), width, _timed(partial(self._run, [each]))) for each, width in shapes]

        done = await self.scheduler.call(measure, float("inf"))
        self.cost = fit(done.value)
        return self.cost


_TRIES = 3


def _timed(run: Callable[[], Any]) -> float:
    """Seconds, after one run that is not counted."""
    run()
    began_at = time.perf_counter()
    run()
    return time.perf_counter() - began_at
