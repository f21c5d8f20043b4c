"""The CPU backend: native kernels of `ops/cpu` for the calls that they support, else torch ops."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from npu_gr.backend.base import Arrangement
from npu_gr.backend.best_items import Best, Hidden
from npu_gr.backend.calls import (
    BeamCall,
    BlendSums,
    BlendTables,
    Choices,
    Continuations,
    FusedForwardCall,
    HstuCall,
    HstuFindCall,
    HstuFound,
    TopkCall,
)
from npu_gr.backend.cpu.beams import NativeBeams, NativeTopk
from npu_gr.backend.cpu.hstu import AffineKernel, HstuKernels
from npu_gr.backend.cpu.hstu_pass import HstuFindKernel, HstuPassKernel
from npu_gr.backend.cpu.items import NativeItems, NativeOrder
from npu_gr.backend.cpu.library import ELEMENT, TILE_ELEMENT, Native, NativeError, load
from npu_gr.backend.names import NativeMode
from npu_gr.backend.tiles import TILE_TOKENS, Tiles
from npu_gr.backend.torch_ops import TorchOps
from npu_gr.core.errors import ConfigError

log = logging.getLogger(__name__)


class CPUBackend(TorchOps):
    """Runs native kernels if they are built and support the call, else torch ops."""

    name = "cpu"

    def __init__(self, mode: NativeMode = "auto", isa: str = "") -> None:
        """Load the kernels.

        Args:
            mode: "auto" uses the kernels if they are built and warns if not, "require" raises if
                they are not, "off" uses torch ops only.
            isa: A lower instruction set than the CPU's best, for tests and measurements.

        Raises:
            ConfigError: The kernels are required and cannot be used.
        """
        super().__init__()
        self.native: Native | None = None
        self.kernels = "torch"
        try:
            self.native = None if mode == "off" else load(isa)
        except NativeError as error:
            if mode == "require" or isa:
                raise ConfigError(f"native: the CPU kernels are required, but {error}") from error
            log.warning(
                "the CPU kernels are missing, torch ops run instead, several times slower: %s",
                error,
            )
        self._hstu: HstuKernels | None = None
        if self.native:
            self.kernels = self.native.isa
            self._topk = NativeTopk(self.native)
            self._beams = NativeBeams(self.native)
            self._hstu = HstuKernels(self.native)
            self._affine = AffineKernel(self.native, self._hstu)
            self._pass = HstuPassKernel(self.native, self._hstu, self._affine)
            self._items = NativeItems(self.native)
            self._find = HstuFindKernel(self.native, self._hstu, self._pass)
        self.ops = dict.fromkeys(("hstu_attention", "softmax_attention", "beam_topk"), self.kernels)

    def beam_topk(self, call: TopkCall) -> Choices:
        if self.native and self._topk.takes(call.logits, call.acc, call.follow):
            return self._topk.beam_topk(call)
        return super().beam_topk(call)

    def gathered_topk(
        self,
        hidden: Tensor,
        weight: Tensor,
        acc: Tensor,
        follow: Continuations,
        width: int,
        scale: float = 1.0,
    ) -> Choices:
        if self.native and self._topk.takes(hidden, acc, follow):
            return self._topk.gathered_topk(hidden, weight, acc, follow, width, scale)
        return super().gathered_topk(hidden, weight, acc, follow, width, scale)

    def best_items(self, queries: Tensor, items: Tensor, k: int, hidden: Hidden | None) -> Best:
        if self.native and len(queries):
            return self._items(queries, items, k, hidden)
        return super().best_items(queries, items, k, hidden)

    def item_products(self, query: Tensor, items: Tensor, rows: Tensor) -> Tensor:
        if self.native:
            return self._items.products(query, items, rows)
        return super().item_products(query, items, rows)

    def blend_sums(self, tables: BlendTables) -> BlendSums | None:
        """Sum by the native kernel."""
        return NativeOrder(self.native, tables) if self.native else None

    def beam_attention(self, call: BeamCall) -> Tensor:
        """Attend; the kernel ignores `is_split`, because it reads the prefix once for all beams."""
        if self.native and self._beams.takes(call):
            return self._beams(call)
        return super().beam_attention(call)

    def arrangement(self, dtype: torch.dtype, page_tokens: int) -> Arrangement:
        fits = self._hstu and dtype in TILE_ELEMENT and page_tokens % TILE_TOKENS == 0
        return "tiles" if fits else "natural"

    def pack_kv(self, into: Tiles, first_token: int, k: Tensor, v: Tensor) -> None:
        if self._hstu and k.dtype in ELEMENT:
            self._hstu.pack(into, first_token, k, v)
        else:
            super().pack_kv(into, first_token, k, v)

    def affine(self, x: Tensor, layer: nn.Linear, first: int, last: int, is_silu: bool) -> Tensor:
        # a weight made under inference_mode has no version counter, so that a write to it could not
        # be detected and its packed copy would be stale
        if (
            self._hstu
            and {x.dtype, layer.weight.dtype} <= set(ELEMENT)
            and not layer.weight.is_inference()
        ):
            return self._affine(x, layer, first, last, is_silu)
        return super().affine(x, layer, first, last, is_silu)

    def fused_forward(self, call: FusedForwardCall) -> np.ndarray[Any, np.dtype[np.float32]] | None:
        """Compute a pass in one call; pages, if there are any, must hold tiles of its dtype."""
        return self._pass(call) if self._hstu and call.dtype in ELEMENT else None

    def hstu_find(self, call: HstuFindCall) -> HstuFound | None:
        return self._find(call) if self._hstu and call.next.dtype in ELEMENT else None

    def hstu_causal(self, call: HstuCall) -> Tensor:
        if self._hstu and self._hstu.takes(call):
            return self._hstu.causal(call)
        return super().hstu_causal(call)

    def hstu_targets(self, call: HstuCall) -> Tensor:
        if self._hstu and self._hstu.takes(call):
            return self._hstu.targets(call)
        return super().hstu_targets(call)
