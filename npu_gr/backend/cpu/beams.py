"""The native kernels of generation: beam attention, and xBeam's selection.

Attention reads the prefix and each beam's own tokens as they are stored, in one softmax
(`ops/cpu/beam.h`); the workspace holds one KV head's prefix in fp32. Selection takes one pass over
the logits, or computes only the valid ones (`ops/cpu/topk.h`, `head.h`). Workspaces are reused and
grow; results are small new tensors.
"""

from __future__ import annotations

import threading
from ctypes import byref, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from npu_gr.backend.calls import BeamCall, Choices, Continuations, TopkCall
from npu_gr.backend.cpu.library import ELEMENT, BeamJob, HeadJob, Native, TopkJob


class _Reused(threading.local):
    """Memory that calls of one thread reuse."""

    def __init__(self) -> None:
        self.workspace = torch.empty(0, dtype=torch.uint8)
        self.values = torch.empty(0)


class NativeBeams:
    """Computes `Backend.beam_attention` for fp32 and bf16. Thread-safe."""

    def __init__(self, native: Native) -> None:
        self._kernels = native.kernels
        self._reused = _Reused()

    @staticmethod
    def takes(call: BeamCall) -> bool:
        """Return whether the kernel supports the dtypes and layout: one dtype, contiguous."""
        planes = [*(plane for slab in call.shared for plane in slab), *call.unshared]
        same = call.q.dtype in ELEMENT and all(plane.dtype == call.q.dtype for plane in planes)
        return same and all(plane.is_contiguous() for plane in planes)

    def __call__(self, call: BeamCall) -> Tensor:
        q = call.q.contiguous()
        shared = call.shared
        out = torch.empty(q.shape, dtype=q.dtype)
        ancestry = None if call.ancestry is None else call.ancestry.contiguous()
        keys, values = (
            (c_void_p * len(shared))(*(slab[i].data_ptr() for slab in shared)) for i in (0, 1)
        )
        own_k, own_v = call.unshared
        job = BeamJob(
            q=q.data_ptr(),
            element=ELEMENT[q.dtype],
            num_rows=len(q),
            num_heads=q.shape[1],
            num_kv_heads=own_k.shape[2],
            head_dim=q.shape[2],
            scale=call.scale,
            num_slabs=len(shared),
            slab_keys=keys,
            slab_values=values,
            slab_tokens=(c_int64 * len(shared))(*(len(slab[0]) for slab in shared)),
            num_slots=call.num_slots,
            own_keys=own_k.data_ptr(),
            own_values=own_v.data_ptr(),
            own_row_stride=own_k.stride(0),
            ancestry=None if ancestry is None else ancestry.data_ptr(),
            ancestry_stride=0 if ancestry is None else ancestry.stride(0),
            out=out.data_ptr(),
        )
        need = self._kernels.beam_attention_bytes(byref(job))
        if need > len(self._reused.workspace):
            self._reused.workspace = torch.empty(need + need // 4, dtype=torch.uint8)
        job.workspace = self._reused.workspace.data_ptr()
        self._kernels.beam_attention(byref(job))
        return out


class NativeTopk:
    """Computes `Backend.beam_topk` and `gathered_topk` for fp32 and bf16. Thread-safe."""

    def __init__(self, native: Native) -> None:
        self._kernels = native.kernels
        self._reused = _Reused()

    @staticmethod
    def takes(scores: Tensor, acc: Tensor, follow: Continuations) -> bool:
        """Return whether the kernels support the dtypes; fp64 is for tests only."""
        return (
            scores.dtype in ELEMENT
            and acc.dtype == torch.float32
            and follow.code.dtype == torch.int32
        )

    def beam_topk(self, call: TopkCall, norm: Tensor | None = None) -> Choices:
        """Select; writes the log-sum-exp of visited rows to `norm`, fp32 [rows], if given."""
        logits = call.logits if call.logits.stride(1) == 1 else call.logits.contiguous()
        rows, columns = logits.shape
        first, end, _ = (call.codes or slice(None)).indices(columns)
        return self._select(
            call.follow,
            call.width,
            call.acc,
            columns,
            logits=logits.data_ptr(),
            element=ELEMENT[logits.dtype],
            row_stride=logits.stride(0),
            num_rows=rows,
            first_column=first,
            num_codes=end - first,
            over_valid=call.over == "valid",
            scale=call.scale,
            norm=None if norm is None else norm.data_ptr(),
        )

    def gathered_topk(
        self,
        hidden: Tensor,
        weight: Tensor,
        acc: Tensor,
        follow: Continuations,
        width: int,
        scale: float,
    ) -> Choices:
        hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
        assert weight.stride(1) == 1
        assert weight.dtype == hidden.dtype
        ends = follow.degree.cumsum(0)
        starts = ends - follow.degree
        total = int(ends[-1]) if len(ends) else 0
        if total > len(self._reused.values):
            self._reused.values = torch.empty(total)
        lo = follow.lo.contiguous()
        degree = follow.degree.contiguous()
        shared = {"lo": lo.data_ptr(), "degree": degree.data_ptr(), "code": follow.code.data_ptr()}
        values = {"values": self._reused.values.data_ptr(), "value_start": starts.data_ptr()}
        head = HeadJob(
            hidden=hidden.data_ptr(),
            weight=weight.data_ptr(),
            element=ELEMENT[hidden.dtype],
            hidden_stride=hidden.stride(0),
            weight_stride=weight.stride(0),
            num_rows=len(hidden),
            dim=hidden.shape[1],
            scale=scale,
            **shared,
            **values,
        )
        self._kernels.gathered_head(head)
        return self._select(
            follow,
            width,
            acc,
            len(weight),
            num_rows=len(hidden),
            num_codes=len(weight),
            over_valid=1,
            **values,
        )

    def _select(
        self, follow: Continuations, width: int, acc: Tensor, columns: int, **job: Any
    ) -> Choices:
        lo = follow.lo.contiguous()
        degree = follow.degree.contiguous()
        acc = acc.contiguous()
        need = self._kernels.beam_topk_bytes(job["num_rows"], columns, width)
        if need > len(self._reused.workspace):
            self._reused.workspace = torch.empty(need, dtype=torch.uint8)
        score = torch.empty(width)
        parent, edge = torch.empty(2, width, dtype=torch.int64)
        found: int = self._kernels.beam_topk(
            TopkJob(
                num_columns=columns,
                acc=acc.data_ptr(),
                lo=lo.data_ptr(),
                degree=degree.data_ptr(),
                code=follow.code.data_ptr(),
                allowed=None if follow.allowed is None else follow.allowed.data_ptr(),
                width=width,
                workspace=self._reused.workspace.data_ptr(),
                score=score.data_ptr(),
                parent=parent.data_ptr(),
                edge=edge.data_ptr(),
                **job,
            )
        )
        if found < 0:
            raise FloatingPointError("a logit is not a number")
        return Choices(score[:found], parent[:found], edge[:found])
