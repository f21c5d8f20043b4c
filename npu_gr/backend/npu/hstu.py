"""Huawei's paged HSTU attention, `mxrec::hstu_paged`, for the layers that it can run: those without a relative bias.

It computes SiLU(alpha q k^T) * silu_scale over a paged history and the rows' own targets. HSTU has no softmax, so the
output over several slabs is the sum over each, and a call a slab serves any cut of the history.

Source: Ascend/RecSDK, the operator's schema and test; limits as documented there. Not yet run on an NPU by us: a call
on a few rows is compared with the plain definition before the operator is used at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from npu_gr.backend.calls import BiasTables, HstuCall
from npu_gr.backend.tiles import Slab
from npu_gr.backend.torch_ops import TorchOps

PAGE_TOKENS = 128  # the operator knows 32, 128 and 256
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_TOKENS = 20_480  # history and targets together
MAX_HEADS = 16
MAX_DIM = 512
MAX_TARGETS = 512
ARGUMENTS = {"k_cache", "v_cache", "page_offsets", "last_page_len", "num_target", "alpha"}
ALIGNED = 8  # a list of numbers begins at a multiple of 64 bytes
CAUSAL = 0  # mask_type: history rows causal, a target sees the history and itself


class PagedHstu:
    """The operator behind the two calls of `Backend`."""

    def __init__(self, op: Any, upload: Callable[[np.ndarray[Any, np.dtype[Any]]], Tensor]) -> None:
        self._op = op
        self._upload = upload
        # bias table -> whether it is zero everywhere; keyed by identity: a reload reuses addresses
        self._is_zero = WeakIdKeyDictionary()

    @classmethod
    def find(cls, upload: Callable[[np.ndarray[Any, np.dtype[Any]]], Tensor]) -> PagedHstu | None:
        """The operator, if some package has registered one that takes keys and values in separate planes.

        `upload` copies host numbers to the device without a wait.
        """
        try:
            op = torch.ops.mxrec.hstu_paged.default
        except AttributeError:
            return None
        return cls(op, upload) if {a.name for a in op._schema.arguments} >= ARGUMENTS else None

    def agrees(self, device: torch.device) -> bool:
        """Compare the operator with the plain definition on a few rows."""
        generator = torch.Generator().manual_seed(0)
        plain = TorchOps()
        q, k, v = (torch.randn(5, 2, 32, generator=generator).to(device) for _ in range(3))
        past_k, past_v = (torch.randn(PAGE_TOKENS + 3, 2, 32, generator=generator).to(device) for _ in range(2))
        times = torch.zeros(PAGE_TOKENS + 8, dtype=torch.int64, device=device)
        zero = torch.zeros(2, 64, device=device)
        past = [(past_k, past_v)]
        call = HstuCall(q, k, v, past, times, BiasTables(zero, zero), 0.2)
        for got, want in (
            (self.causal(q, k, v, past, 0.2), plain.hstu_causal(call)),
            (self.targets(q, k, v, past, 0.2), plain.hstu_targets(call._replace(times=times[5:]))),
        ):
            if not torch.allclose(got, want, rtol=1e-3, atol=1e-3):
                return False
        return True

    def takes(self, q: Tensor, v: Tensor, bias: BiasTables, num_tokens: int) -> bool:
        """Tell whether a call is within the limits; reads a layer's bias tables only at the first call with them."""
        rows, heads, width = q.shape
        if not (q.dtype in DTYPES and width == v.shape[2] <= MAX_DIM and width % 16 == 0 and heads <= MAX_HEADS):
            return False
        if not 0 < rows <= MAX_TARGETS or num_tokens + rows > MAX_TOKENS:
            return False
        for table in bias:
            if table not in self._is_zero:
                self._is_zero[table] = not bool(table.any())
        return all(self._is_zero[table] for table in bias)

    def causal(self, q: Tensor, k: Tensor, v: Tensor, past: Sequence[Slab], alpha: float) -> Tensor:
        """Compute `Backend.hstu_causal` without a bias: attend to the past as targets do, then among the new rows."""
        nothing = torch.zeros_like(v)  # as targets, the rows would count themselves twice
        out = self._call(q, k, v, (k, v), 0, alpha)
        for slab in past:
            out += self._call(q, k, nothing, slab, len(q), alpha)
        return out

    def targets(self, q: Tensor, k: Tensor, v: Tensor, history: Sequence[Slab], alpha: float) -> Tensor:
        """Compute `Backend.hstu_targets` without a bias; needs at least one slab."""
        out = self._call(q, k, v, history[0], len(q), alpha)
        nothing = torch.zeros_like(v)
        for slab in history[1:]:
            out += self._call(q, k, nothing, slab, len(q), alpha)
        return out

    def _call(self, q: Tensor, k: Tensor, v: Tensor, slab: Slab, num_targets: int, alpha: float) -> Tensor:
        tokens = len(slab[0])
        pages = -(-tokens // PAGE_TOKENS)
        k_cache, v_cache = (_pages(plane, pages) for plane in slab)
        ends, ends_k, ends_t, ends_of_pages, page_ids, last_page, counts = self._uploaded(
            (0, len(q)),
            (0, tokens + num_targets),
            (0, num_targets),
            (0, pages),
            range(pages),
            (tokens - (pages - 1) * PAGE_TOKENS,),
            (num_targets,),
        )
        out: Tensor = self._op(
            q,
            k,
            v,
            k_cache=k_cache,
            v_cache=v_cache,
            mask_type=CAUSAL,
            max_seq_len=len(q),
            max_seq_len_k=tokens + num_targets,
            silu_scale=1.0,
            seq_offset=ends,
            seq_offset_k=ends_k,
            seq_offset_t=ends_t,
            page_offsets=ends_of_pages,
            page_ids=page_ids,
            last_page_len=last_page,
            num_target=counts,
            target_group_size=1,
            alpha=alpha,
        )
        return out

    def _uploaded(self, *lists: Sequence[int]) -> list[Tensor]:
        """Int64 on the device, by one copy for all."""
        flat = list[int]()
        starts = list[int]()
        for numbers in lists:
            starts.append(len(flat))
            flat.extend(numbers)
            flat.extend([0] * (-len(flat) % ALIGNED))
        whole = self._upload(np.array(flat))
        return [whole[start : start + len(numbers)] for start, numbers in zip(starts, lists, strict=True)]


def _pages(plane: Tensor, num_pages: int) -> Tensor:
    """[num_pages, PAGE_TOKENS, H, D] of a slab's rows [m, H, D]: a view where its memory goes on long enough."""
    shape = (num_pages, PAGE_TOKENS, *plane.shape[1:])
    end = plane.storage_offset() + shape[0] * shape[1] * shape[2] * shape[3]
    if plane.is_contiguous() and end * plane.element_size() <= plane.untyped_storage().nbytes():
        row = plane.stride(0)
        return plane.as_strided(shape, (PAGE_TOKENS * row, row, plane.stride(1), 1))
    missing = num_pages * PAGE_TOKENS - len(plane)
    return torch.nn.functional.pad(plane, (0, 0, 0, 0, 0, missing)).view(shape)
