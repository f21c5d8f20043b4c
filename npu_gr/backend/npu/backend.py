"""Ascend devices through torch_npu. Not yet run on an NPU by us: tested on a device that records what it is told.

Each device thread has a stream of its own; copies between the tiers have another. The native operators of
`ops/ascendc` and Huawei's `mxrec::hstu_paged` run where they are there and fit, torch ops elsewhere: `ops` says which,
a call that does not fit is counted, and said once in the log.

Invariant: between a request's uploads and its result the host never waits for the device, where `ops` says ascend_c.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from npu_gr.backend.base import BiasTables, Choices, Continuations, Over, Slab, accumulator
from npu_gr.backend.graphs import Graphs
from npu_gr.backend.npu import ops as ascend_ops
from npu_gr.backend.npu.device import NotFound, Npu, find
from npu_gr.backend.npu.hstu import MAX_TARGETS, PagedHstu
from npu_gr.backend.tiles import Tiles, natural
from npu_gr.backend.torch_ops import TorchOps
from npu_gr.core.errors import ConfigError

log = logging.getLogger(__name__)

_REFUSED = "has no such limit"  # how ops/ascendc ends its message when a shape does not fit


class NPUBackend(TorchOps):
    """`backend: npu`."""

    name = "npu"
    pins_host_memory = True

    def __init__(
        self, native: Literal["auto", "require", "off"] = "auto", npu: Npu | None = None, folder: Path | None = None
    ) -> None:
        """Find the device and what is there for it.

        Args:
            native: the library of ops/ascendc: auto: if it is there; require: it must be; off: torch ops alone.
            npu: the device; None = as `find` finds it.
            folder: of the library; None = beside this file.

        Raises:
            ConfigError: there is no NPU, or the library is required and does not load.
        """
        super().__init__()
        try:
            self._npu = npu or find()
        except NotFound as error:
            raise ConfigError(f"backend 'npu' is configured but cannot be loaded: {error}") from error
        self._runtime, self.device = self._npu.runtime, self._npu.device
        self._copies = self._runtime.Stream()
        ascend_ops.register()
        self._is_native = native != "off" and self._load(native == "require", folder)
        self._paged = self._find_paged()
        graph = getattr(self._runtime, "NPUGraph", None)  # newer versions alone have it
        self._graphs = Graphs(self._runtime, graph, self.fell_back) if graph else None
        own = "ascend_c" if self._is_native else "torch"
        self.kernels = own
        self.ops = {
            "beam_topk": own,
            "beam_fork": own,
            "hstu_attention": "mxrec" if self._paged else "torch",
            "graphs": "acl_graph" if self._graphs else "none",
        }

    def _load(self, is_required: bool, folder: Path | None) -> bool:
        try:
            ascend_ops.load_library(ascend_ops.library_path(self._npu.soc, folder))
        except ConfigError as error:
            if is_required:
                raise ConfigError(f"native: the Ascend C operators are required, but {error}") from error
            log.warning("the Ascend C operators are missing, torch ops run instead: %s", error)
            return False
        return True

    def _find_paged(self) -> PagedHstu | None:
        paged = PagedHstu.find(self.upload)
        if paged is not None and not paged.agrees(self.device):
            log.warning("mxrec::hstu_paged disagrees with our definition, torch ops run instead")
            return None
        return paged

    # ---- queues

    @contextmanager
    def stream(self) -> Iterator[None]:
        """See `Backend.stream`."""
        self._runtime.set_device(self.device)
        own, made = self._runtime.Stream(), self._runtime.Event()
        made.record(self._runtime.current_stream())  # weights and pools were written there
        own.wait_event(made)
        with self._runtime.stream(own):
            yield

    def copy(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `Backend.copy`."""
        before, after = self._runtime.Event(), self._runtime.Event()
        before.record(self._runtime.current_stream())
        self._copies.wait_event(before)
        with self._runtime.stream(self._copies):
            work()
        after.record(self._copies)

        def wait() -> None:
            self._runtime.set_device(self.device)  # of the thread that waits
            after.synchronize()

        return wait

    def synchronize(self) -> None:
        """See `Backend.synchronize`."""
        self._runtime.current_stream().synchronize()

    # ---- beams

    def beam_fork_(self, keys: Tensor, values: Tensor, parent: Tensor, num_slots: int) -> None:
        """See `Backend.beam_fork_`; without the native operator a gather, whose shape depends on no value."""
        parent = parent.int()
        # one of several requests that share an arena: its rows of a layer lie together
        parts = [(keys, values)] if keys.is_contiguous() else zip(keys.split(1), values.split(1), strict=True)
        try:
            for part in parts:
                torch.ops.npu_gr.beam_fork_(*part, parent, num_slots)
        except RuntimeError as error:
            if _REFUSED not in str(error):
                raise
            self.fell_back("beam_fork", str(error))  # of the first part as of any: nothing has moved
            ascend_ops.beam_fork_(keys, values, parent, num_slots)

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
        """See `Backend.beam_topk`; the native one gives all places, and NaN scores for a logit that is no number."""
        if not self._is_native:
            return super().beam_topk(logits, acc, follow, width, over, codes, scale)
        if logits.dtype == torch.float64 or follow.code.dtype != torch.int32:
            why = f"logits {logits.dtype} and codes {follow.code.dtype}"
        else:
            try:
                return self._native_topk(logits, acc, follow, width, over, codes, scale)
            except RuntimeError as error:
                if _REFUSED not in str(error):
                    raise
                why = str(error)
        self.fell_back("beam_topk", why)
        return super().beam_topk(logits, acc, follow, width, over, codes, scale)

    def _native_topk(
        self,
        logits: Tensor,
        acc: Tensor,
        follow: Continuations,
        width: int,
        over: Over,
        codes: slice | None,
        scale: float,
    ) -> Choices:
        select = partial(_select, code=follow.code, width=width, over=over, codes=codes, scale=scale)
        inputs = [logits, acc, follow.lo, follow.degree]
        if follow.allowed is not None:
            inputs.append(follow.allowed)
        if self._graphs is None or follow.allowed is not None:  # a request's own filter would be copied to be replayed
            return Choices(*select(*inputs))
        columns = None if codes is None else (codes.start, codes.stop)
        found = self._graphs.run(follow.code, (width, over, columns, scale), select, inputs)
        return Choices(*(out.clone() for out in found))

    def row_wise(
        self,
        owner: nn.Module,
        what: Hashable,
        work: Callable[..., tuple[Tensor, ...]],
        rows: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """See `Backend.row_wise`."""
        return self._graphs.row_wise(owner, what, work, rows) if self._graphs else work(*rows)

    # ---- HSTU

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
        if self._paged:
            if self._paged.takes(q, v, bias, len(times)):
                return self._paged.causal(q, k, v, natural(past), alpha)
            self.fell_back("hstu_attention", "mxrec::hstu_paged knows no relative bias, or not this shape")
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
        if self._paged and history:
            if self._paged.takes(q[:MAX_TARGETS], v, bias, len(times)):
                parts = zip(q.split(MAX_TARGETS), k.split(MAX_TARGETS), v.split(MAX_TARGETS), strict=True)
                return torch.cat([self._paged.targets(*part, natural(history), alpha) for part in parts])
            self.fell_back("hstu_attention", "mxrec::hstu_paged knows no relative bias, or not this shape")
        return super().hstu_targets(q, k, v, history, times, query_time, bias, alpha)


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
    """Launches alone: normalise, select, and mark what is not a number."""
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
