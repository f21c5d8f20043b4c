"""Huawei's paged HSTU attention, `mxrec::hstu_paged`, for layers without a relative bias.

It computes SiLU(alpha q k^T) * silu_scale over a paged history and the rows' own targets. HSTU has
no softmax, so the output over several slabs is the sum of the outputs of one call per slab. The
operator is in no wheel: build it from Ascend/RecSDK (`torch_library/common/build_ops.sh`); the path
of its library is configured.

Source: Ascend/RecSDK, the operator's newest schema and test; limits as documented there. Not yet
run on an NPU by us: before the operator is used, its results on a few rows are compared with the
plain definition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from npu_gr.backend.calls import BiasTables, HstuCall
from npu_gr.backend.tiles import Slab
from npu_gr.backend.torch_ops import TorchOps
from npu_gr.core.errors import ConfigError

PAGE_TOKENS = 128  # the operator supports 32, 128 and 256
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_TOKENS = 20_480  # history and targets together
MAX_HEADS = 16
MAX_DIM = 512
MAX_TARGETS = 512
# arguments that only the newest schema has; older ones have one tensor `kv_cache`
PLANES = ("k_cache", "v_cache")
ARGUMENTS = (
    *PLANES,
    "page_offsets",
    "page_ids",
    "last_page_len",
    "num_target",
    "alpha",
    "deterministic",
)
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
ALIGNED = 8  # numbers: each list begins at a multiple of 64 bytes
CAUSAL = 0  # mask_type: history rows are causal, a target sees the history and itself

Upload = Callable[[np.ndarray[Any, np.dtype[Any]]], Tensor]


class PagedHstu:
    """Computes `Backend.hstu_causal` and `hstu_targets` by the operator."""

    def __init__(self, op: Any, upload: Upload) -> None:
        self._op = op
        self._upload = upload
        # bias table -> whether it is all zero; keyed by identity, because addresses are reused
        self._is_zero = WeakIdKeyDictionary()

    @classmethod
    def load(cls, library: Path, device: torch.device, upload: Upload) -> PagedHstu:
        """Load the operator's library, and compare the operator with the plain definition.

        Args:
            library: Path of RecSDK's `libfbgemm_npu_api.so`.
            device: Device on which the operator runs.
            upload: Copies a host array to the device without a wait.

        Raises:
            ConfigError: The file is missing or does not load, its operator is missing or too old,
                or the results differ from the definition.
        """
        if not library.is_file():
            raise ConfigError(
                f"hstu_library: no file {library}: build it from Ascend/RecSDK, "
                "torch_library/common"
            )
        try:
            torch.ops.load_library(library)
        except OSError as error:
            raise ConfigError(f"hstu_library: {library} does not load: {error}") from error
        made = cls(_operator(library), upload)
        if wrong := made.disagreement(device):
            raise ConfigError(
                f"hstu_library: mxrec::hstu_paged of {library} computes something else: {wrong}"
            )
        return made

    def disagreement(self, device: torch.device) -> str:
        """Return how the operator differs from the plain definition; "" = it does not.

        It is tested in fp32 and bf16, with partly filled pages.
        """
        generator = torch.Generator().manual_seed(0)
        plain = TorchOps()
        zero = torch.zeros(2, 64, device=device)
        for dtype, tolerance in TOLERANCES.items():
            for past_tokens, rows in ((PAGE_TOKENS + 3, 5), (2 * PAGE_TOKENS, 33), (1, 1)):
                q, k, v, past_k, past_v = (
                    torch.randn(count, 2, 32, generator=generator).to(device, dtype)
                    for count in (rows, rows, rows, past_tokens, past_tokens)
                )
                times = torch.zeros(past_tokens + rows, dtype=torch.int64, device=device)
                past = [(past_k, past_v)]
                call = HstuCall(
                    q, k, v, past, times, BiasTables(zero.to(dtype), zero.to(dtype)), 0.2
                )
                shown = call._replace(times=times[rows:])
                for name, got, want in (
                    ("history rows", self.causal(q, k, v, past, 0.2), plain.hstu_causal(call)),
                    (
                        "candidates",
                        self.targets(q, k, v, past, 0.2),
                        plain.hstu_targets(shown),
                    ),
                ):
                    worst = float(
                        (got.float() - want.float()).abs().max() / want.float().abs().max()
                    )
                    if not worst <= tolerance:
                        return (
                            f"{rows} {name} behind {past_tokens} tokens in {dtype} differ by "
                            f"{worst:.1e}"
                        )
        return ""

    @staticmethod
    def takes_heads(heads: int, qk_dim: int, v_dim: int, dtype: torch.dtype) -> bool:
        """Return whether the operator supports these heads."""
        return (
            dtype in DTYPES
            and qk_dim == v_dim <= MAX_DIM
            and qk_dim % 16 == 0
            and heads <= MAX_HEADS
        )

    def takes(self, q: Tensor, v: Tensor, bias: BiasTables, num_tokens: int) -> bool:
        """Return whether the operator supports a call; reads each bias table only once."""
        rows, heads, width = q.shape
        if not self.takes_heads(heads, width, v.shape[2], q.dtype):
            return False
        if not rows or num_tokens + min(rows, MAX_TARGETS) > MAX_TOKENS:
            return False
        for table in bias:
            if table not in self._is_zero:
                self._is_zero[table] = not bool(table.any())
        return all(self._is_zero[table] for table in bias)

    def causal(self, q: Tensor, k: Tensor, v: Tensor, past: Sequence[Slab], alpha: float) -> Tensor:
        """Compute `Backend.hstu_causal` without a bias.

        New rows attend to each other, and as targets to the past. More than `MAX_TARGETS` rows are
        split into parts; the rows of earlier parts are then past.
        """
        parts = []
        for start in range(0, len(q), MAX_TARGETS):
            rows = slice(start, start + MAX_TARGETS)
            own = k[rows], v[rows]
            # zero own values: as targets, the rows would attend to themselves a second time
            nothing = torch.zeros_like(own[1])
            out = self._call(q[rows], *own, own, 0, alpha)
            for slab in [*past, (k[:start], v[:start])] if start else past:
                out += self._call(q[rows], own[0], nothing, slab, len(out), alpha)
            parts.append(out)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def targets(
        self, q: Tensor, k: Tensor, v: Tensor, history: Sequence[Slab], alpha: float
    ) -> Tensor:
        """Compute `Backend.hstu_targets` without a bias; needs at least one slab."""
        parts = []
        for some_q, some_k, some_v in zip(*(x.split(MAX_TARGETS) for x in (q, k, v)), strict=True):
            out = self._call(some_q, some_k, some_v, history[0], len(some_q), alpha)
            for slab in history[1:]:
                out += self._call(
                    some_q, some_k, torch.zeros_like(some_v), slab, len(some_q), alpha
                )
            parts.append(out)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _call(
        self, q: Tensor, k: Tensor, v: Tensor, slab: Slab, num_targets: int, alpha: float
    ) -> Tensor:
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
            deterministic=True,  # else it sums by atomics, and equal requests get different bits
        )
        return out

    def _uploaded(self, *lists: Sequence[int]) -> list[Tensor]:
        """Upload lists of int64 in one copy."""
        flat = list[int]()
        starts = list[int]()
        for numbers in lists:
            starts.append(len(flat))
            flat.extend(numbers)
            flat.extend([0] * (-len(flat) % ALIGNED))
        uploaded = self._upload(np.array(flat))
        return [
            uploaded[start : start + len(numbers)]
            for start, numbers in zip(starts, lists, strict=True)
        ]


def _operator(library: Path) -> Any:
    """Return mxrec::hstu_paged with the newest schema.

    Raises:
        ConfigError: The operator is missing or older.
    """
    try:
        op = torch.ops.mxrec.hstu_paged.default
    except AttributeError:
        raise ConfigError(
            f"hstu_library: {library} registers no operator mxrec::hstu_paged"
        ) from None
    missing = [name for name in ARGUMENTS if name not in {a.name for a in op._schema.arguments}]
    if missing:
        raise ConfigError(
            f"hstu_library: mxrec::hstu_paged of {library} is too old, it has no argument "
            f"{', '.join(missing)}; build a newer Ascend/RecSDK"
        )
    return op


def _pages(plane: Tensor, num_pages: int) -> Tensor:
    """View a slab's rows [m, H, D] as pages [num_pages, PAGE_TOKENS, H, D].

    A padded copy is made if the slab's memory ends within the last page.
    """
    shape = (num_pages, PAGE_TOKENS, *plane.shape[1:])
    end = plane.storage_offset() + shape[0] * shape[1] * shape[2] * shape[3]
    if plane.is_contiguous() and end * plane.element_size() <= plane.untyped_storage().nbytes():
        row = plane.stride(0)
        return plane.as_strided(shape, (PAGE_TOKENS * row, row, plane.stride(1), 1))
    missing = num_pages * PAGE_TOKENS - len(plane)
    return torch.nn.functional.pad(plane, (0, 0, 0, 0, 0, missing)).view(shape)
