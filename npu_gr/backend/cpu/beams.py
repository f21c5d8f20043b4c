"""Beam attention by the native kernel: prefix and own tokens read as they are stored, one softmax over both.

Source: `ops/cpu/beam.h`. The workspace holds one KV head's prefix in fp32; it is made once and grows.
"""

from __future__ import annotations

import threading
from ctypes import byref, c_int64, c_void_p

import torch
from torch import Tensor

from npu_gr.backend.calls import BeamCall
from npu_gr.backend.cpu.library import ELEMENT, BeamJob, Native


class _Reused(threading.local):
    """Memory that calls of one thread reuse."""

    def __init__(self) -> None:
        self.workspace = torch.empty(0, dtype=torch.uint8)


class NativeBeams:
    """Compute `Backend.beam_attention` for fp32 and bf16. Any thread may call."""

    def __init__(self, native: Native) -> None:
        self._kernels = native.kernels
        self._reused = _Reused()

    @staticmethod
    def takes(call: BeamCall) -> bool:
        """Tell whether all tensors have one dtype that the kernel reads, and tokens lie one behind the other."""
        planes = [*(plane for slab in call.shared for plane in slab), *call.unshared]
        same = call.q.dtype in ELEMENT and all(plane.dtype == call.q.dtype for plane in planes)
        return same and all(plane.is_contiguous() for plane in planes)

    def __call__(self, call: BeamCall) -> Tensor:
        q = call.q.contiguous()
        shared = call.shared
        out = torch.empty(q.shape, dtype=q.dtype)
        ancestry = None if call.ancestry is None else call.ancestry.contiguous()
        keys, values = ((c_void_p * len(shared))(*(slab[i].data_ptr() for slab in shared)) for i in (0, 1))
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
