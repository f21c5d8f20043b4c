"""The backend of Ascend devices, through torch_npu.

Not yet run on an NPU by us: tested on a pretended device that records its calls.

It has the native operators of `ops/ascendc`, if they are installed; Huawei's `mxrec::hstu_paged`
for rankers without relative bias, if its library is configured; a Triton kernel, if the
configuration selects it; and torch ops. `ops` names the implementation of each op, `hstu_ways` the
choices of a ranker. A call that an implementation does not support (`limits.py`) is counted as a
fallback, and logged the first time.

Invariant: with ascend_c, the host never waits for the device between a request's uploads and its
result.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from npu_gr.backend.base import HSTU, HstuPass, accumulator
from npu_gr.backend.best_items import Best, Hidden
from npu_gr.backend.calls import (
    BeamCall,
    Choices,
    GraphShape,
    HstuCall,
    HstuPassCall,
    HstuShape,
    Over,
    TopkCall,
)
from npu_gr.backend.names import AttentionMode, NativeMode
from npu_gr.backend.npu import hstu_triton
from npu_gr.backend.npu import ops as ascend_ops
from npu_gr.backend.npu.device import Npu, NpuNotFound, find
from npu_gr.backend.npu.hstu_paged import PagedHstu
from npu_gr.backend.npu.hstu_pass import PassMaker
from npu_gr.backend.npu.hstu_slots import graph_shapes
from npu_gr.backend.npu.items import best_items
from npu_gr.backend.npu.limits import fork_limit, items_limit, shape_limit, topk_limit
from npu_gr.backend.npu.softmax import FusedAttention
from npu_gr.backend.streams import StreamedOps
from npu_gr.backend.tiles import Slab, natural
from npu_gr.core.errors import ConfigError

log = logging.getLogger(__name__)

_TRITON_LIMIT = "the Triton kernel supports only keys and values in the model's dtype"
_PAGED_LIMIT = "mxrec::hstu_paged does not support relative bias, or not this shape"


class NPUBackend(StreamedOps):
    """Runs native Ascend operators if they are installed and support the call, else torch ops."""

    name = "npu"
    has_int8 = False  # no kernel here reads the scales

    def __init__(
        self,
        native: NativeMode = "auto",
        npu: Npu | None = None,
        folder: Path | None = None,
        hstu_library: Path | None = None,
        attention: AttentionMode = "auto",
    ) -> None:
        """Find the device and the operators that are installed for it.

        Args:
            native: Use of the library of ops/ascendc: "auto" uses it if it loads and warns if not,
                "require" raises if it does not load, "off" uses torch ops only.
            npu: The device; None = the result of `find`.
            folder: Folder of the library; None = `lib` in this file's folder.
            hstu_library: Path of the library of Huawei's `mxrec::hstu_paged`, for rankers without a
                relative bias; None = do not use it.
            attention: "triton" loads the Triton kernel of HSTU, which is not used otherwise.

        Raises:
            ConfigError: There is no NPU, a required library or Triton does not load, or
                `hstu_library` is not usable.
        """
        try:
            self._npu = npu or find()
        except NpuNotFound as error:
            raise ConfigError(
                f"backend 'npu' is configured but cannot be loaded: {error}"
            ) from error
        runtime = self._npu.runtime
        # only newer versions have graphs
        super().__init__(runtime, self._npu.device, getattr(runtime, "NPUGraph", None))
        ascend_ops.register()
        self._is_native = native != "off" and _loads(self._npu.soc, native == "require", folder)
        # with native operators it would be slower: the host waits, and the AI CPU gathers
        self.gathers_head = not self._is_native
        self._paged = (
            PagedHstu.load(hstu_library, self.device, self.upload) if hstu_library else None
        )
        self._fused = self._find_fused()
        self._passes = PassMaker(self.upload, self._graphs) if self._is_native else None
        self._triton = hstu_triton.load(self.device) if attention == "triton" else None
        own = "ascend_c" if self._is_native else "torch"
        self.kernels = own
        self.ops = {
            "beam_topk": own,
            "beam_fork": own,
            "best_items": own,
            "softmax_attention": "npu_fused_infer_attention_score" if self._fused else "torch",
            "hstu_attention": "triton" if self._triton else own,  # a ranker may choose another
            "graphs": "acl_graph" if self._graphs else "none",
        }

    def _find_fused(self) -> FusedAttention | None:
        fused = FusedAttention.find(self.device)
        if fused is not None and not fused.agrees(self.device):
            log.warning(
                "npu_fused_infer_attention_score disagrees with our definition: torch ops are used "
                "instead"
            )
            return None
        return fused

    # ---- beams

    def beam_fork_(self, keys: Tensor, values: Tensor, parent: Tensor, num_slots: int) -> None:
        """Fork by the native operator, else by a gather; no shape depends on values."""
        parent = parent.int()
        if self._is_native and (limit := fork_limit(keys, parent)):
            self.fell_back("beam_fork", limit)
            ascend_ops.beam_fork_(keys, values, parent, num_slots)
            return
        # if several requests share an arena, only the rows of one layer are contiguous: launch the
        # operator once a layer
        parts = (
            [(keys, values)]
            if keys.is_contiguous()
            else zip(keys.split(1), values.split(1), strict=True)
        )
        for part in parts:
            torch.ops.npu_gr.beam_fork_(*part, parent, num_slots)

    def beam_topk(self, call: TopkCall) -> Choices:
        """Select; the native operator returns `width` choices, padded, and NaN scores for NaN."""
        if not self._is_native:
            return super().beam_topk(call)
        if limit := topk_limit(call):
            self.fell_back("beam_topk", limit)
            return super().beam_topk(call)
        return self._native_topk(call)

    def _native_topk(self, call: TopkCall) -> Choices:
        follow = call.follow
        codes = call.codes
        select = partial(
            _select,
            code=follow.code,
            width=call.width,
            over=call.over,
            codes=codes,
            scale=call.scale,
        )
        inputs = [call.logits, call.acc, follow.lo, follow.degree]
        if follow.allowed is not None:
            inputs.append(follow.allowed)
        # no graph with a filter: each replay would have to copy it
        if self._graphs is None or follow.allowed is not None:
            return Choices(*select(*inputs))
        columns = None if codes is None else (codes.start, codes.stop)
        found = self._graphs.run(
            follow.code, (call.width, call.over, columns, call.scale), select, inputs
        )
        return Choices(*(out.clone() for out in found))

    def order_of(self, numbers: Tensor) -> Tensor:
        """Sort float ranks: the vector cores sort only floats, int64 would go to the AI CPU."""
        smaller = numbers[None, :] < numbers[:, None]
        return torch.argsort(smaller.float().sum(1), stable=True)

    def best_items(self, queries: Tensor, items: Tensor, k: int, hidden: Hidden | None) -> Best:
        """Search by the native `masked_topk`, with a bit mask of the excluded pairs."""
        if not self._is_native or not len(items) or not len(queries):
            return super().best_items(queries, items, k, hidden)
        if limit := items_limit(k):
            self.fell_back("best_items", limit)
            return super().best_items(queries, items, k, hidden)
        return best_items(queries, items, k, hidden, self.upload)

    def causal_attention(
        self, q: Tensor, k: Tensor, v: Tensor, past: Sequence[Slab], scale: float
    ) -> Tensor:
        if self._fused and self._fused.takes(q, k.shape[1]):
            return self._fused.causal(q, k, v, past, scale)
        return super().causal_attention(q, k, v, past, scale)

    def beam_attention(self, call: BeamCall) -> Tensor:
        if self._fused is None:
            return super().beam_attention(call)
        if self._fused.takes(call.q, call.unshared[0].shape[2]) and any(
            len(k) for k, _ in call.shared
        ):
            return self._fused.beams(call)
        return super().beam_attention(call._replace(is_split=True))

    # ---- HSTU

    def hstu_ways(self, shape: HstuShape) -> Sequence[str]:
        """Prefer our kernels: five launches a layer for the whole batch.

        The others need one launch for each slab and request.
        """
        if not shape.has_plain_times:
            return ("torch",)
        heads = shape.num_heads, shape.qk_dim, shape.v_dim, shape.dtype
        takes = {
            "triton": self._triton
            and shape.dtype == shape.kept_dtype
            and self._triton.takes_numbers(shape.dtype),
            "ascend_c": self._passes and shape.has_plain_layers and shape_limit(shape) is None,
            "mxrec": self._paged and not shape.is_biased and self._paged.takes_heads(*heads),
        }
        return (*(way for way, it_does in takes.items() if it_does), "torch")

    def running(self, way: str, op: str = HSTU) -> Self:
        assert op == HSTU, "a generator's ops have one implementation each"
        made = copy.copy(self)
        made.ops = {**self.ops, op: way}
        made._passes = self._passes if way == "ascend_c" else None
        made._paged = self._paged if way == "mxrec" else None
        made._triton = self._triton if way == "triton" else None
        return made

    def graph_shapes(
        self, max_requests: int, max_tokens: int, chunk_tokens: int
    ) -> Sequence[GraphShape]:
        if self._passes is None or self._passes.graphs is None:
            return ()
        return tuple(graph_shapes(max_requests, max_tokens, chunk_tokens))

    def hstu_pass(self, call: HstuPassCall) -> HstuPass | None:
        """Prepare the native fused kernels, if they are loaded and support the pass."""
        if self._passes is None or self._triton:
            return None
        made = self._passes.begin(call)
        if isinstance(made, str):
            self.fell_back("hstu_attention", made)
            return None
        return made

    def hstu_causal(self, call: HstuCall) -> Tensor:
        if self._triton and call.is_plain:
            if self._triton.takes(call.q, slabs := natural(call.cached)):
                found: Tensor = self._triton.causal(call, slabs)
                return found
            self.fell_back("hstu_attention", _TRITON_LIMIT)
        if self._paged:
            if call.is_plain and self._paged.takes(call.q, call.v, call.bias, len(call.times)):
                return self._paged.causal(call.q, call.k, call.v, natural(call.cached), call.alpha)
            self.fell_back("hstu_attention", _PAGED_LIMIT)
        return super().hstu_causal(call)

    def hstu_targets(self, call: HstuCall) -> Tensor:
        if self._triton and call.is_plain:
            if self._triton.takes(call.q, slabs := natural(call.cached)):
                found: Tensor = self._triton.targets(call, slabs)
                return found
            self.fell_back("hstu_attention", _TRITON_LIMIT)
        if self._paged and call.cached:
            if call.is_plain and self._paged.takes(call.q, call.v, call.bias, len(call.times)):
                return self._paged.targets(call.q, call.k, call.v, natural(call.cached), call.alpha)
            self.fell_back("hstu_attention", _PAGED_LIMIT)
        return super().hstu_targets(call)


def _loads(soc: str, is_required: bool, folder: Path | None) -> bool:
    """Load the native operators for a chip; return whether they are there."""
    try:
        ascend_ops.load_library(ascend_ops.library_path(soc, folder))
    except ConfigError as error:
        if is_required:
            raise ConfigError(
                f"native: the Ascend C operators are required, but {error}"
            ) from error
        log.warning("the Ascend C operators are missing, torch ops run instead: %s", error)
        return False
    return True


def _select(
    logits: Tensor,
    acc: Tensor,
    lo: Tensor,
    degree: Tensor,
    allowed: Tensor | None = None,
    *,
    code: Tensor,
    width: int,
    over: Over,
    codes: slice | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise and select; all scores are NaN if a logit is not a number.

    Launches only, so that it can be captured as a graph.
    """
    scaled = logits if scale == 1.0 else logits.to(accumulator(logits.dtype)) * scale
    norm = scaled.float().logsumexp(1) if over == "row" else None
    level = scaled if codes is None else scaled[:, codes]
    score, parent, edge = torch.ops.npu_gr.csr_gather_topk(
        level.contiguous(), norm, acc.float(), lo.int(), degree.int(), code, allowed, width
    )
    peak = logits.amax()
    is_broken = peak.isnan() | (peak == float("inf")) | acc.isnan().any()
    score = score.masked_fill(is_broken, float("nan"))
    return score, parent.clamp(min=0).long(), edge.clamp(min=0).long()
