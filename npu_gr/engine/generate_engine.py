"""The generator's device work: finds the best next items for a history of items.

Read `beam_search.py` first.

A history becomes a prompt of semantic IDs, L tokens for each item. The prompt's KV is in pages,
encoded by a signal, an earlier request, or this one. For the first logits only one token runs: the
last one of the prompt again, or the start token after it.

`Generator` runs on the device threads; `GenerateEngine` is its counterpart on the event loop.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import xxhash
from torch import Tensor

from npu_gr.backend.base import Backend
from npu_gr.catalogue.filters import Filter
from npu_gr.catalogue.trie import DEAD, I32, Trie
from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import Unprocessable
from npu_gr.engine.beam_search import BeamQuery, BeamResult, SearchOptions, Tables, search
from npu_gr.engine.cost import CostModel, fit
from npu_gr.engine.kv_cache.arena import BeamArena, KVArena, Slab
from npu_gr.engine.kv_cache.pages import KVLayout, PageRun
from npu_gr.engine.page_jobs import CachedPrefix, PageJobs, chunks, warmup_order
from npu_gr.engine.queue import Demand, JobOrder, JobResult, JobStep
from npu_gr.engine.scheduler import Scheduler
from npu_gr.model.generative import GenerativeModel, LayerSlabs
from npu_gr.model.history_tokenizer import window_start

# Prompts of at least this length use two attention stages, shorter ones use one. The value is the
# middle of published measurements (128 to 256, TensorRT-LLM PR 14396); `GenerateEngine.warm_up`
# replaces it by a measurement on this device.
SPLIT_FROM_TOKENS = 192


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GeneratedItems:
    """The items of an answer as parallel arrays, best first. n = items."""

    item_ids: I64  # [n]
    sids: I32  # [n, L]
    # [n] log-probability of the item's semantic ID; items with the same one have equal scores
    scores: F32
    is_cut: bool  # whether allowed items are missing that the beams did not reach


class Frame(NamedTuple):
    """The tokens of a prompt around those of its items."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


BARE = Frame()


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A history as the model reads it: its frame, and L tokens for each item, oldest item first."""

    tokens: I64  # [n], the frame included
    unknown_items: int = 0  # items of the window that the catalogue lacks, so not in the prompt
    cut_items: int = 0  # items of the whole history before the window
    frame: Frame = BARE
    is_divisible: bool = True  # see `Prefix` of the relay; a property of the model
    _fingerprints: dict[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    def earlier(self, since_at: float) -> list[Prompt]:
        """Return nothing: no delta changes a generator."""
        del since_at
        return []

    def fingerprint(self, num_tokens: int) -> str:
        """Return a hash of the tokens on which the KV of the first `num_tokens` tokens depends.

        In a prompt that is not divisible these are all tokens, so its beginning never equals
        another prompt. Computed once for each length.
        """
        known = self._fingerprints.get(num_tokens)
        if known is None:
            part = np.ascontiguousarray(
                self.tokens[: num_tokens if self.is_divisible else len(self.tokens)]
            )
            known = xxhash.xxh3_128_hexdigest(part.data)
            if not self.is_divisible:
                known = f"{known}/{num_tokens}"
            self._fingerprints[num_tokens] = known
        return known

    def num_items(self, num_levels: int) -> int:
        """Return the number of items, each of `num_levels` tokens."""
        return max(len(self) - sum(map(len, self.frame)), 0) // num_levels

    def newest(self, num_tokens: int, num_levels: int) -> Prompt:
        """Return the prompt of the newest items that fit, at least one.

        Args:
            num_tokens: Most tokens of the new prompt, its frame included.
            num_levels: Tokens of an item.
        """
        before, after = map(len, self.frame)
        items = self.tokens[before : len(self.tokens) - after]
        keep = max((num_tokens - before - after) // num_levels, 1) * num_levels
        tokens = np.concatenate(
            [self.tokens[:before], items[-keep:], self.tokens[len(self.tokens) - after :]]
        )
        return replace(self, tokens=tokens, cut_items=0, _fingerprints={})


class PromptKV(NamedTuple):
    """The KV of consecutive prompt tokens, in the first `num_tokens` places of the pages `runs`.

    The KV of a prompt may be in several places: a sequence of these, in token order.
    """

    arena: KVArena
    runs: Sequence[PageRun]
    num_tokens: int


class ItemSearch(NamedTuple):
    """One search for items, after a prompt whose KV is in pages already."""

    trie: Trie  # one version of the catalogue
    tables: Tables  # the same trie on this device
    tokens: I64  # the whole prompt, at least one token
    parts: Sequence[PromptKV]  # the prompt's KV, in token order
    options: SearchOptions
    num_items: int  # most items to return
    allow: Filter | None = None  # items that the request may see; None = all


def layout_of(model: GenerativeModel, page_tokens: int = 64) -> KVLayout:
    """Return the layout of pages for a model's prompts, in the model's own dtype."""
    num_layers, num_heads, head_dim = model.kv_shape
    return KVLayout(
        num_layers=num_layers,
        num_heads=num_heads,
        qk_dim=head_dim,
        v_dim=head_dim,
        page_tokens=page_tokens,
        dtype=str(model.dtype).removeprefix("torch."),
    )


def make_prompt(
    trie: Trie,
    item_ids: I64,
    max_tokens: int,
    cut_step_items: int = 1,
    first_index: int = 0,
    frame: Frame = BARE,
    *,
    is_divisible: bool = True,
) -> Prompt:
    """Turn a history into the semantic IDs of its newest known items that fit, oldest first.

    Args:
        trie: The catalogue.
        item_ids: [n] external ids, oldest first.
        max_tokens: Most tokens of the prompt, at least L and the frame.
        cut_step_items: A history that does not fit starts at a multiple of this, counted in all
            events of the user, as in `history_tokenizer.py`. So its start stays the same for a
            while, and cached prefixes stay usable. A prompt that is not divisible has no usable
            prefix, and always holds as many items as fit.
        first_index: Index of `item_ids[0]` in the user's whole history.
        frame: Tokens around the items. A history without a known item has an empty prompt, without
            a frame.
        is_divisible: Whether the model's prompts are divisible (see `Prefix` of the relay).
    """
    leaves = trie.find(item_ids)
    places = np.flatnonzero(leaves != DEAD)
    max_items = (max_tokens - sum(map(len, frame))) // trie.num_levels
    begin = int(places[-max_items]) if len(places) > max_items else 0
    step = cut_step_items if is_divisible else 1
    cut = begin + window_start(first_index + begin, len(item_ids) - begin, len(item_ids), step)
    known = leaves[places[places >= cut]]
    sids = trie.sid_of(known).astype(np.int64) + np.array(trie.codebooks.vocab_base, np.int64)
    before, after = (np.array(part, np.int64) for part in (frame if len(known) else BARE))
    tokens = np.concatenate([before, sids.ravel(), after])
    return Prompt(tokens, len(item_ids) - cut - len(known), first_index + cut, frame, is_divisible)


class Generator:
    """A model, and the memory that its requests reuse. Every method runs on a device thread."""

    def __init__(
        self,
        model: GenerativeModel,
        backend: Backend,
        max_beams: int,
        num_levels: int,
        num_streams: int = 1,
        max_rows: int | None = None,
        max_prompt_tokens: int | None = None,
    ) -> None:
        """Allocate the memory for the beams of each stream.

        Args:
            model: Model that scores the codes.
            backend: Backend of the model's device.
            max_beams: Most beams of one request.
            num_levels: Codes of a semantic ID; every version of a catalogue has the same number.
            num_streams: Threads that may call `generate` at a time.
            max_rows: Most beams of all requests of a pass; None = `max_beams`.
            max_prompt_tokens: Most tokens of a prompt; None = as many as the model takes.
        """
        num_layers, num_heads, head_dim = model.kv_shape
        self.model = model
        self.backend = backend
        self.max_beams = max_beams
        longest = model.longest_prompt(num_levels)
        self.max_prompt_tokens = (
            longest if max_prompt_tokens is None else min(longest, max_prompt_tokens)
        )
        self.split_from_tokens = SPLIT_FROM_TOKENS
        # The arenas that no thread is using.
        self._beams: queue.SimpleQueue[BeamArena] = queue.SimpleQueue()
        for _ in range(num_streams):
            self._beams.put(
                BeamArena(
                    num_layers=num_layers,
                    num_heads=num_heads,
                    head_dim=head_dim,
                    max_beams=max(max_beams, max_rows or 0),
                    num_slots=num_levels - 1,
                    dtype=model.dtype,
                    device=backend.device,
                    fork=backend.beam_fork_,
                )
            )

    def encode(
        self, tokens: I64, before: Sequence[PromptKV], into: PromptKV, offset: int = 0
    ) -> None:
        """Encode the next tokens of a prompt into pages. The arguments are those of `encoding`."""
        for piece in self.encoding(tokens, before, into, offset):
            piece()

    def encoding(
        self, tokens: I64, before: Sequence[PromptKV], into: PromptKV, offset: int = 0
    ) -> Sequence[Callable[[], None]]:
        """Divide the encoding of the next tokens of a prompt into pieces, to be run in this order.

        May be called on any thread.

        Args:
            tokens: [n] tokens to encode; the whole prompt if it is not divisible.
            before: KV of all earlier tokens, in token order.
            into: Pages that receive the KV.
            offset: Number of earlier tokens that `into` holds already.
        """
        start = sum(part.num_tokens for part in before)

        def sink(layer: int, k: Tensor, v: Tensor) -> None:
            into.arena.write(layer, into.runs, offset, k, v)

        return self.model.encoding(
            self.backend, tokens, start, _slabs(before, start) if start else None, sink
        )

    def generate(
        self,
        trie: Trie,
        tables: Tables,
        tokens: I64,
        parts: Sequence[PromptKV],
        options: SearchOptions,
        num_items: int,
        allow: Filter | None = None,
    ) -> GeneratedItems:
        """Search for the best items after one prompt. The arguments are those of `ItemSearch`."""
        return self.generate_all(
            [ItemSearch(trie, tables, tokens, parts, options, num_items, allow)]
        )[0]

    def generate_all(self, searches: Sequence[ItemSearch]) -> list[GeneratedItems]:
        """Search for the best items after several prompts, in shared rounds.

        Raises:
            Unprocessable: the width of a beam or the length of a prompt is over its limit.
            FloatingPointError: the model's weights are broken.
        """
        queries = [self._query(each) for each in searches]
        beams = self._beams.get()
        try:
            found = search(self.model, self.backend, queries, beams)
        finally:
            self._beams.put(beams)
        return [_generated(each, result) for each, result in zip(searches, found, strict=True)]

    def _query(self, wanted: ItemSearch) -> BeamQuery:
        tokens = wanted.tokens
        if wanted.options.width > self.max_beams:
            raise Unprocessable(
                f"beam_width: {wanted.options.width}, the limit is {self.max_beams}"
            )
        if not 0 < len(tokens) <= self.max_prompt_tokens:
            raise Unprocessable(
                f"history: {len(tokens)} tokens, the model takes 1 to {self.max_prompt_tokens}"
            )
        begun = self.model.begin(self.backend, tokens, partial(_slabs, wanted.parts))
        allow = wanted.allow
        return BeamQuery(
            tables=wanted.tables,
            prompt=_slabs(wanted.parts, len(tokens)),
            num_prompt_tokens=len(tokens),
            hidden=begun.hidden,
            begun=begun.kv,
            options=wanted.options,
            allowed=None
            if allow is None
            else tuple(self.backend.upload(level) for level in allow.valid),
            split=len(tokens) >= self.split_from_tokens,
        )


def _generated(wanted: ItemSearch, found: BeamResult) -> GeneratedItems:
    items = wanted.trie.items_of(
        found.leaves, allowed=None if wanted.allow is None else wanted.allow.allowed
    )
    item_ids = items.item_ids[: wanted.num_items]
    is_cut = len(item_ids) < wanted.num_items and len(item_ids) < _num_allowed(wanted)
    of_leaf = np.repeat(np.arange(len(found.leaves)), items.counts)[: wanted.num_items]
    return GeneratedItems(
        item_ids=item_ids,
        sids=wanted.trie.sid_of(found.leaves)[of_leaf],
        scores=found.scores[of_leaf],
        is_cut=is_cut,
    )


def _num_allowed(wanted: ItemSearch) -> int:
    if wanted.allow is None:
        return wanted.trie.num_items
    return int(np.count_nonzero(wanted.allow.allowed))


def _slabs(parts: Sequence[PromptKV], num_tokens: int) -> LayerSlabs:
    def views(layer: int) -> list[Slab]:
        slabs: list[Slab] = []
        left = num_tokens
        for arena, runs, count in parts:
            slabs += arena.views(layer, runs, min(count, left))
            left -= min(count, left)
        return slabs

    return views


def _divided(
    pieces: Sequence[Callable[[], None]], num_parts: int
) -> list[Sequence[Callable[[], None]]]:
    """Divide pieces into `num_parts` parts of nearly the same length; fewer if there are fewer."""
    num_parts = min(num_parts, len(pieces))
    edges = [len(pieces) * number // num_parts for number in range(num_parts + 1)]
    return [pieces[start:stop] for start, stop in pairwise(edges)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GeneratePass:
    """One request's part of a pass: its prompt, the encoded part of it, and the search."""

    trie: Trie
    tables: Tables
    prompt: Prompt
    options: SearchOptions
    num_items: int
    allow: Filter | None = None
    cached: CachedPrefix | None = None  # the KV of the prompt's first tokens
    # pages for the whole prompt; they include those of `cached`
    keep: tuple[PageRun, ...] | None = None
    vocabulary: int = 0  # tokens of the model's vocabulary, for the limit on the logits of a pass

    @property
    def demand(self) -> Demand:
        """Number of prompt tokens, beams and logits that the pass computes."""
        cached = self.cached.num_tokens if self.cached else 0
        return Demand(
            len(self.prompt) - cached, self.options.width, self.options.width * self.vocabulary
        )


class GenerateEngine(PageJobs):
    """One generator. Other engines may share its scheduler."""

    def __init__(self, generator: Generator, scheduler: Scheduler, arena: KVArena) -> None:
        """Allocate scratch pages for prompts that have no pages in the arena.

        Args:
            generator: Generator that runs on the scheduler's device threads.
            scheduler: Queue of the prefills and generates.
            arena: Pages of prompt KV.
        """
        super().__init__(scheduler, generator.backend, arena)
        self.generator = generator
        # Scratch pages of one request of a pass.
        self._scratch_pages = arena.layout.pages(generator.max_prompt_tokens)
        pages = self._scratch_pages * scheduler.config.max_batch_requests
        # The arenas that no thread is using.
        self._scratch: queue.SimpleQueue[KVArena] = queue.SimpleQueue()
        for _ in range(scheduler.config.streams):
            self._scratch.put(KVArena(arena.layout, pages, generator.backend.device))

    async def prefill(
        self,
        tokens: Prompt,
        keep: tuple[PageRun, ...],
        deadline_at: float,
        order: JobOrder,
        first_token: int = 0,
    ) -> int:
        """Encode a prompt into pages, in steps of about a chunk (see `Encoder.prefill`)."""
        size = self.scheduler.config.prefill_chunk_tokens
        limits = (
            list(chunks(first_token, len(tokens), size))
            if tokens.is_divisible
            else [(0, len(tokens))]
        )
        steps: list[JobStep] = []
        # Number of encoded tokens before the first step, after it, after the second, ...
        encoded = [first_token]
        for start, stop in limits:
            before = [PromptKV(self.arena, keep, start)] if start else []
            into = PromptKV(self.arena, keep, stop)
            pieces = self.generator.encoding(tokens.tokens[start:stop], before, into, start)
            parts = _divided(pieces, -(-(stop - start) // size))
            each_s = self.cost.pass_s(stop - start, start, 0) / len(parts)
            steps += [JobStep(partial(self._run, part), each_s) for part in parts]
            encoded += [start] * (len(parts) - 1) + [stop]
        done = await self.scheduler.sequence(
            steps, deadline_at, order, preemptible=True, kind="prefill"
        )
        return encoded[done.steps]

    def _run(self, pieces: Sequence[Callable[[], None]]) -> None:
        for piece in pieces:
            piece()
        self.backend.synchronize()

    async def generate(
        self,
        work: GeneratePass,
        deadline_at: float,
        arrived_at: float | None = None,
        tenant: str = "",
    ) -> JobResult[GeneratedItems]:
        """Encode the missing part of the prompt, and search, in a pass shared with other generates.

        Args:
            work: the request; its `vocabulary` is set here.
            deadline_at: instant on time.monotonic(); a pass that has not begun by then is dropped.
            arrived_at: Instant at which the request arrived, before its history was read (see
                `RankEngine.rank`); None = now.
            tenant: Tenant of the request (see `Scheduler.batch`).

        Raises:
            Overloaded, DeadlineExceeded, DeviceError: as `Scheduler.batch`.
            Unprocessable: the width of a beam or the length of a prompt is over its limit.
        """
        cached = work.cached.num_tokens if work.cached else 0
        expected_s = self.cost.pass_s(len(work.prompt) - cached, cached, work.options.width)
        work = replace(work, vocabulary=len(self.generator.model.head_weight))
        done: JobResult[GeneratedItems] = await self.scheduler.batch(
            work,
            self.run_batch,
            deadline_at,
            objective_s=self.objective_s,
            arrived_at=arrived_at,
            tenant=tenant,
            estimate_s=expected_s,
            kind="generate",
        )
        if work.cached is None and done.batch_size == 1:
            self.observe_pass(expected_s, done.device_s)
        return done

    def run_batch(self, works: Sequence[GeneratePass]) -> list[GeneratedItems]:
        scratch = self._scratch.get()
        try:
            return self.generator.generate_all(
                [self._encoded(work, scratch, n) for n, work in enumerate(works)]
            )
        finally:
            self._scratch.put(scratch)

    def _encoded(self, work: GeneratePass, scratch: KVArena, place: int) -> ItemSearch:
        """Encode the missing part of the prompt, into `work.keep` or else into scratch pages.

        Args:
            work: the request.
            scratch: Scratch pages of this thread.
            place: Index of the request in the pass, which selects its scratch pages.
        """
        tokens = work.prompt.tokens
        parts: list[PromptKV] = []
        start = work.cached.num_tokens if work.cached else 0
        if work.cached:
            parts.append(PromptKV(self.arena, work.cached.runs, start))
        if work.keep:
            complete = PromptKV(self.arena, work.keep, len(tokens))
            self.generator.encode(tokens[start:], parts, complete, start)
            parts = [complete]
        elif start < len(tokens):
            own = PromptKV(
                scratch,
                (PageRun(place * self._scratch_pages, self._scratch_pages),),
                len(tokens) - start,
            )
            self.generator.encode(tokens[start:], parts, own)
            parts.append(own)
        return ItemSearch(
            work.trie,
            work.tables,
            work.prompt.tokens,
            parts,
            work.options,
            work.num_items,
            work.allow,
        )

    async def warm_up(
        self, trie: Trie, tables: Tables, lengths: Sequence[int], widths: Sequence[int]
    ) -> CostModel:
        """Run every shape twice, time the second run, and fit the cost model to the times.

        The candidates of the cost model are beams. Also sets `split_from_tokens` to the shortest
        length at which two attention stages are faster than one, with the widest beam.

        Args:
            trie: A catalogue with at least one item.
            tables: The same trie on this device.
            lengths: Numbers of prompt tokens to run.
            widths: Widths of beams to run, each with every length.
        """
        random = np.random.default_rng(0)
        items = trie.leaf_item[random.integers(0, trie.num_items, max(lengths))]

        def work(n: int, width: int) -> GeneratePass:
            prompt = make_prompt(trie, items, n)
            options = SearchOptions(width=width)
            return GeneratePass(
                trie=trie, tables=tables, prompt=prompt, options=options, num_items=width
            )

        async def split_from(scratch: KVArena) -> int:
            for n in lengths:
                each = work(n, max(widths))
                tokens = each.prompt.tokens
                part = PromptKV(scratch, (PageRun(0, scratch.num_pages),), len(each.prompt))
                await self.scheduler.call(
                    partial(self.generator.encode, tokens, [], part), _FAR, warmup_order()
                )
                searched_s = []
                for self.generator.split_from_tokens in (0, n + 1):  # two stages, one
                    search_once = partial(
                        self.generator.generate,
                        trie,
                        tables,
                        tokens,
                        [part],
                        each.options,
                        each.num_items,
                    )
                    searched_s.append(min([await self.timed(search_once) for _ in range(_TRIES)]))
                if searched_s[0] < searched_s[1]:
                    return n
            return max(lengths) + 1

        scratch = self._scratch.get_nowait()  # no other code uses this engine yet
        try:
            self.generator.split_from_tokens = await split_from(scratch)
        finally:
            self._scratch.put(scratch)
        shapes = [(work(n, width), width) for n in lengths for width in widths]
        samples = [
            (len(each.prompt), width, await self.timed(partial(self.run_batch, [each])))
            for each, width in shapes
        ]
        self.cost = fit(samples)
        return self.cost


_TRIES = 3
_FAR = float("inf")
