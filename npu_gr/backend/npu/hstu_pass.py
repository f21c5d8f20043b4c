"""An HSTU pass by the fused kernels of `ops/ascendc`.

A layer is five launches for any batch of requests, history chunks and candidates: `hstu_rows`, a
product, `hstu_scores`, a product, `hstu_finish`; the last four once for each block of the scores
if they do not fit their workspace. The host computes all numbers of a pass once, from times
and page ids, and uploads them in one copy. Shapes are rounded up to slots (`hstu_slots.py`), so
that each set of slots is one device graph; the kernels read the used sizes from memory.

`hstu_rows` copies keys and values from their pages into a workspace, head by head, padded with
zeros; the scores are in another, [B, H, row slots, key slots]. The bias tables, and the scale of
the last kernel, are negated: see hstu_scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from npu_gr.backend.calls import HstuLayerCall, HstuPassCall, HstuSegment, PagedKV
from npu_gr.backend.graphs import Graphs
from npu_gr.backend.npu.hstu_batch import (
    I32,
    BatchTimes,
    Entry,
    LayerTables,
    batch_times,
    layer_tables,
    relative,
)
from npu_gr.backend.npu.hstu_slots import (
    PAGE_IDS,
    PassSlots,
    ScoreBlock,
    block_arrays,
    graph_slots,
    row_slots,
    score_blocks,
    tight_slots,
)
from npu_gr.backend.npu.limits import Slots, hstu_limit

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _page_ids(pages: PagedKV, num_tokens: int, page_tokens: int) -> I32:
    runs = [np.arange(first, first + count, dtype=np.int32) for first, count in pages.runs]
    return np.concatenate([*runs, np.zeros(0, np.int32)])[: -(-num_tokens // page_tokens)]


class PassMaker:
    """Makes the passes of one backend, and caches the arranged tables of its layers."""

    def __init__(
        self, upload: Callable[[np.ndarray[Any, np.dtype[Any]]], Tensor], graphs: Graphs | None
    ) -> None:
        self.upload = upload
        self.graphs = graphs
        # keyed by identity, because addresses are reused
        self._tables: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._norms: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def tables(self, call: HstuLayerCall) -> LayerTables:
        """Return a layer's bias tables, arranged for the kernels."""
        if call.bias.position not in self._tables:
            self._tables[call.bias.position] = layer_tables(call.bias)
        found: LayerTables = self._tables[call.bias.position]
        return found

    def norm(self, layer: nn.LayerNorm) -> Tensor:
        """Return a norm's weight and bias, fp32 [2, group]."""
        if layer not in self._norms:
            self._norms[layer] = torch.stack([layer.weight, layer.bias]).detach().float()
        found: Tensor = self._norms[layer]
        return found

    def begin(self, call: HstuPassCall) -> KernelPass | str:
        """Prepare a pass; a string is the reason why the kernels do not support it."""
        if call.dtype not in DTYPES:
            return f"a model in {call.dtype}"
        pages = [s.pages for s in call.segments if s.pages is not None]
        planes = pages[0].planes(0) if pages else None
        if planes is not None:
            if any(p.planes(0)[0].data_ptr() != planes[0].data_ptr() for p in pages):
                return "pages of several arenas"
            if planes[0].dtype != call.dtype:
                return f"pages in {planes[0].dtype} under a model in {call.dtype}"
        if any(s.pages is None and (s.keeps or s.num_cached) for s in call.segments):
            return "a past that is not in pages"
        page_tokens = 1 if planes is None else planes[0].shape[1]
        times = [relative(s.times, s.query_time, s.num_candidates) for s in call.segments]
        known = [t for t in times if t is not None]
        if len(known) < len(times):
            return "a history that spans 2^31 seconds"
        width = call.num_heads * call.v_dim
        group = call.v_dim if call.norm_over == "head" else width
        sizes = _sizes(call)
        choices = [tight_slots(*sizes)]
        if self.graphs is not None:
            is_rank = any(s.num_candidates for s in call.segments)
            choices.insert(0, graph_slots(*sizes, has_candidates=is_rank))
        limit = ""
        for padded in choices:
            made = KernelPass(self, call, known, page_tokens, padded)
            found = hstu_limit(made.slots, page_tokens, made.num_page_ids, group, call.is_joined)
            if found is None:
                return made
            limit = found
        return limit


def _sizes(call: HstuPassCall) -> tuple[int, int, int]:
    """Return the number of requests, and the most rows and keys of one."""
    return (
        len(call.segments),
        max(s.num_new + s.num_candidates for s in call.segments),
        max(s.num_cached + s.num_new + s.num_candidates for s in call.segments),
    )


def _entries(call: HstuPassCall, page_tokens: int, is_last: bool) -> list[Entry]:
    """Describe the requests; in the last layer only candidates are queries."""
    entries: list[Entry] = []
    page = row = query = 0
    for s in call.segments:
        rows = s.num_candidates if is_last else s.num_new + s.num_candidates
        keys = s.num_cached + s.num_new + s.num_candidates
        entries.append(
            Entry(rows, keys, s.num_cached, s.num_candidates, page, row, query, int(s.keeps))
        )
        page += -(-_held(s) // page_tokens)
        row += s.num_new + s.num_candidates
        query += rows
    return entries


def _held(segment: HstuSegment) -> int:
    """Return the number of tokens whose pages the kernels read or write."""
    return segment.num_cached + (segment.num_new if segment.keeps else 0)


def _candidate_rows(segments: Sequence[HstuSegment], slots: int) -> I32:
    """Return the indices of the candidates among all rows, padded with 0."""
    found = np.zeros(slots, np.int32)
    first = done = 0
    for s in segments:
        first += s.num_new
        found[done : done + s.num_candidates] = np.arange(first, first + s.num_candidates)
        first += s.num_candidates
        done += s.num_candidates
    return found


class KernelPass:
    """Implements `HstuPass` of `base.py`."""

    def __init__(
        self,
        maker: PassMaker,
        call: HstuPassCall,
        times: Sequence[I32],
        page_tokens: int,
        padded: PassSlots,
    ) -> None:
        segments = call.segments
        self._maker = maker
        self._call = call
        self._planes = next((s.pages.planes for s in segments if s.pages is not None), None)
        self._num_candidates = sum(s.num_candidates for s in segments)
        self._is_graph = padded.is_graph and maker.graphs is not None
        requests, keys = padded.requests, padded.keys
        held = [_page_ids(s.pages, _held(s), page_tokens) for s in segments if s.pages is not None]
        ids = np.concatenate([*held, np.zeros(0, np.int32)])
        most = len(ids)
        if self._is_graph and self._planes is not None:
            most = requests * -(-keys // page_tokens)
        self.num_page_ids = -(-most // PAGE_IDS) * PAGE_IDS
        self._arrays: dict[str, I32] = {"page_ids": np.pad(ids, (0, self.num_page_ids - len(ids)))}
        # two entries: all layers but the last, and the last
        self._row_slots = list[int]()  # per request
        self._query_slots = list[int]()  # of all requests together
        self._used_scores = list[int]()
        self._blocks = list[list[ScoreBlock]]()
        self.slots = Slots(
            requests, padded.rows, keys, call.num_heads, call.qk_dim, call.v_dim, call.dtype
        )
        missing = requests - len(segments)
        for is_last in (False, True):
            entries = _entries(call, page_tokens, is_last)
            self._used_scores.append(sum(e.rows * e.keys for e in entries))
            rows = padded.rows if self._is_graph else row_slots(max(e.rows for e in entries))
            queries = row_slots(sum(e.rows for e in entries))
            laid = batch_times(entries, times, rows, keys)
            laid = BatchTimes(*(_extended(array, missing) for array in laid))
            entries += [Entry(*[0] * len(Entry._fields))] * missing
            asking = [rows] * requests if self._is_graph else [e.rows for e in entries]
            blocks = score_blocks(self.slots._replace(rows=rows), asking)
            self._row_slots.append(rows)
            self._query_slots.append(requests * rows if self._is_graph else queries)
            self._blocks.append(blocks)
            self._arrays |= {
                f"meta{is_last:d}": np.array(entries, np.int32),
                "key_times": laid.keys,
            }
            for number, block in enumerate(blocks):
                arrays = block_arrays(block, entries, laid, rows)
                self._arrays |= {f"{name}{is_last:d}.{number}": a for name, a in arrays.items()}
        self._arrays["candidates"] = _candidate_rows(segments, self._query_slots[1])
        self._numbers: dict[str, Tensor] = {}
        self._memory: dict[tuple[str, int, tuple[int, ...]], Tensor] = {}

    @property
    def is_all_candidates(self) -> bool:
        """Whether there are no new history rows."""
        return not any(s.num_new for s in self._call.segments)

    def run(
        self, owner: nn.Module, work: Callable[[KernelPass, Tensor], Tensor], x: Tensor
    ) -> Tensor:
        arrays = self._arrays.values()
        joined = self._maker.upload(np.concatenate([array.ravel() for array in arrays]))

        def launches(rows: Tensor, numbers: Tensor) -> tuple[Tensor]:
            parts = numbers.split([array.size for array in arrays])
            cut = zip(self._arrays.items(), parts, strict=True)
            self._numbers = {name: part.view(array.shape) for (name, array), part in cut}
            self._memory = {}
            return (work(self, rows),)

        graphs = self._maker.graphs
        if graphs is None or not self._is_graph:
            if graphs is not None:
                graphs.counted("launched")
            return launches(x, joined)[0][: self._num_candidates]
        slots = self.slots
        graphs.padded("scores", self._used_scores[0], slots.requests * slots.rows * slots.keys)
        padded = x.new_zeros(self._query_slots[0], x.shape[1])
        padded[: len(x)] = x
        pages = None if self._planes is None else self._planes(0)[0].data_ptr()
        shapes = tuple(array.shape for array in arrays)
        key = (
            "hstu_pass",
            shapes,
            slots,
            bool(self._num_candidates),
            pages,
        )
        return graphs.run(owner, key, launches, [padded, joined])[0][: self._num_candidates].clone()

    def candidates(self, x: Tensor) -> Tensor:
        if self.is_all_candidates and not self._is_graph:
            return x
        return x.index_select(0, self._numbers["candidates"])

    def mix(self, layer: HstuLayerCall) -> Tensor | None:
        call = self._call
        stage = int(layer.is_last)
        slots = self.slots._replace(rows=self._row_slots[stage])
        batch, rows, keys, heads = slots[:4]
        width = heads * slots.v_dim
        q = self._empty("q", stage, batch, heads, rows, slots.qk_dim)
        k = self._empty("k", 0, batch, heads, keys, slots.qk_dim)
        v = self._empty("v", 0, batch, heads, keys, slots.v_dim)
        u = self._zeros("u", stage, self._query_slots[stage], width)
        if self._planes is None:
            planes = k.new_empty(0, 1, heads, slots.qk_dim), v.new_empty(0, 1, heads, slots.v_dim)
        else:
            planes = self._planes(layer.number)
        # a power of two is exact on the queries, another factor would round them a second time
        is_exact = math.frexp(call.alpha)[0] == 0.5
        q_scale, alpha = (-call.alpha, 1.0) if is_exact else (1.0, -call.alpha)
        ops = torch.ops.npu_gr
        meta = self._numbers[f"meta{stage}"]
        ops.hstu_rows(
            layer.mixed,
            meta,
            self._numbers["page_ids"],
            *planes,
            q,
            k,
            v,
            u,
            q_scale,
            call.silu_all,
        )
        if layer.is_last and not self._num_candidates:
            return None
        tables = self._maker.tables(layer)
        norm = self._maker.norm(layer.norm)
        out = self._zeros("out", stage, self._query_slots[stage], 3 if call.is_joined else 1, width)
        for number, (first, end, row, end_row) in enumerate(self._blocks[stage]):
            meta, bounds, row_times = (
                self._numbers[f"{name}{stage}.{number}"] for name in ("meta", "bounds", "row_times")
            )
            size = end - first, heads, end_row - row
            scores = self._empty("scores", stage, *size, keys)
            attention = self._empty("attention", stage, *size, slots.v_dim)
            asking = q[first:end, :, row:end_row].flatten(0, 1)
            all_k, all_v = k[first:end].flatten(0, 1), v[first:end].flatten(0, 1)
            torch.bmm(asking, all_k.transpose(1, 2), out=scores.flatten(0, 1))
            times = bounds, row_times, self._numbers["key_times"][first:end]
            ops.hstu_scores(scores, meta, *times, tables.times, tables.near, alpha)
            torch.bmm(scores.flatten(0, 1), all_v, out=attention.flatten(0, 1))
            ops.hstu_finish(attention, u, norm, meta, out, -call.scale, layer.norm.eps)
        return out.flatten(1)

    # ---- workspaces, shared by all layers: each is read before it is written again

    def _empty(self, name: str, stage: int, *shape: int) -> Tensor:
        return self._kept(name, stage, torch.empty, shape)

    def _zeros(self, name: str, stage: int, *shape: int) -> Tensor:
        """Zeros, because the next layer also computes on the rows behind the last query."""
        return self._kept(name, stage, torch.zeros, shape)

    def _kept(
        self, name: str, stage: int, make: Callable[..., Tensor], shape: tuple[int, ...]
    ) -> Tensor:
        key = name, stage, shape
        if key not in self._memory:
            device = self._numbers["page_ids"].device
            self._memory[key] = make(shape, dtype=self._call.dtype, device=device)
        return self._memory[key]


def _extended(array: I32, missing: int) -> I32:
    """Append empty requests."""
    return np.pad(array, ((0, missing), *((0, 0) for _ in array.shape[1:])))
