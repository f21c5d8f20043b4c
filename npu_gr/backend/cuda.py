"""NVIDIA devices: Triton kernels where triton is installed, else torch ops; a stream a thread. Not yet run by us.

A device thread has a compute stream of its own, copies between tiers have another: a copy follows what its thread
queued before, and only who needs the bytes waits for it. What lies between two attentions of a decode step is a
graph for each bucket of rows; the attentions read slabs at addresses that no graph can know, and are launched.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from npu_gr.backend.base import BiasTables, Choices, Continuations, Over, Slab
from npu_gr.backend.graphs import Graphs
from npu_gr.backend.tiles import Tiles, natural
from npu_gr.backend.torch_ops import TorchOps
from npu_gr.core.errors import ConfigError

log = logging.getLogger(__name__)

_KERNELS = "npu_gr.backend.triton"


class CUDABackend(TorchOps):
    """`backend: cuda`."""

    name = "cuda"
    pins_host_memory = True

    def __init__(self, cuda: Any = torch.cuda) -> None:
        """`cuda`: the part of torch that knows the device; a test has one that only records."""
        super().__init__()
        if not cuda.is_available():
            raise ConfigError("backend 'cuda' is configured but cannot be loaded: torch sees no CUDA device")
        self._cuda = cuda
        self.device = torch.device("cuda", cuda.current_device()) if cuda is torch.cuda else cuda.device
        self._triton = _triton_ops()
        self.kernels = "triton" if self._triton else "torch"
        self._copies = cuda.Stream()
        self._graphs = Graphs(cuda, cuda.CUDAGraph, self.fell_back)
        self.ops = dict.fromkeys(("hstu_attention", "softmax_attention", "beam_topk", "beam_fork"), self.kernels)
        self.ops |= {"graphs": "cuda_graph"}

    @contextmanager
    def stream(self) -> Iterator[None]:
        """See `Backend.stream`. What was queued before, on any stream, is done when it begins."""
        self._cuda.synchronize()
        with self._cuda.stream(self._cuda.Stream()):
            yield

    def copy(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `Backend.copy`."""
        after = self._cuda.Event()
        self._copies.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(self._copies):
            work()
            after.record(self._copies)
        wait: Callable[[], None] = after.synchronize
        return wait

    def synchronize(self) -> None:
        """See `Backend.synchronize`."""
        self._cuda.current_stream().synchronize()

    def row_wise(
        self,
        owner: nn.Module,
        what: Hashable,
        work: Callable[..., tuple[Tensor, ...]],
        rows: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """See `Backend.row_wise`."""
        return self._graphs.row_wise(owner, what, work, rows)

    def hstu_causal(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        past: Sequence[Slab | Tiles],
        times: Tensor,
        bias: BiasTables,
        alpha: float,
    ) -> Tensor:
        """See `Backend.hstu_causal`."""
        if self._triton and self._triton.hstu.takes(q, slabs := natural(past)):
            out: Tensor = self._triton.hstu.causal(q, k, v, slabs, times, bias, alpha)
            return out
        return super().hstu_causal(q, k, v, past, times, bias, alpha)

    def hstu_targets(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        history: Sequence[Slab | Tiles],
        times: Tensor,
        query_time: int,
        bias: BiasTables,
        alpha: float,
    ) -> Tensor:
        """See `Backend.hstu_targets`."""
        if self._triton and self._triton.hstu.takes(q, slabs := natural(history)):
            out: Tensor = self._triton.hstu.targets(q, k, v, slabs, times, query_time, bias, alpha)
            return out
        return super().hstu_targets(q, k, v, history, times, query_time, bias, alpha)

    def beam_attention(
        self,
        q: Tensor,
        shared: Sequence[Slab],
        unshared: Slab,
        num_slots: int,
        ancestry: Tensor | None,
        scale: float,
    ) -> Tensor:
        """See `Backend.beam_attention`."""
        if self._triton and self._triton.beams.takes(q, shared, unshared):
            out: Tensor = self._triton.beams.attend(q, shared, unshared, num_slots, ancestry, scale)
            return out
        return super().beam_attention(q, shared, unshared, num_slots, ancestry, scale)

    def beam_topk(
        self,
        logits: Tensor,
        acc: Tensor,
        follow: Continuations,
        width: int,
        over: Over = "row",
        codes: slice | None = None,
        scale: float = 1.0,
    ) -> Choices:
        """See `Backend.beam_topk`."""
        if self._triton and self._triton.topk.takes(logits, acc):
            made: Choices = self._triton.topk.beam_topk(logits, acc, follow, width, over, codes, scale)
            return made
        return super().beam_topk(logits, acc, follow, width, over, codes, scale)

    def beam_fork_(self, keys: Tensor, values: Tensor, parent: Tensor, num_slots: int) -> None:
        """See `Backend.beam_fork_`."""
        if self._triton and len(parent) <= self._triton.fork.MAX_BEAMS:
            for plane in (keys, values):
                self._triton.fork.fork(plane, parent, num_slots)
        else:
            super().beam_fork_(keys, values, parent, num_slots)


def _triton_ops() -> ModuleType | None:
    """The package of the kernels with all its parts, if triton is installed."""
    try:
        for part in ("beams", "fork", "hstu", "topk"):
            importlib.import_module(f"{_KERNELS}.{part}")
    except ImportError as error:
        log.warning("the Triton kernels are not there, torch ops run instead: %s", error)
        return None
    return importlib.import_module(_KERNELS)
