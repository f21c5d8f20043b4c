"""Softmax attention by Huawei's fused operator `npu_fused_infer_attention_score`, bf16 and fp16.

A call returns its output and the log-sum-exp of its scores, which is an attention stage: stages
over slabs, and over a beam's own tokens, are merged in fp32. Cached keys are therefore read without
a copy, and only the merge is in fp32.

Source: the documentation of torch_npu for Atlas A2 and A3. Not yet run on an NPU by us: before the
operator is used, its results on a few rows are compared with the plain definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from npu_gr.backend.calls import BeamCall
from npu_gr.backend.tiles import Slab
from npu_gr.backend.torch_ops import AttentionStage, TorchOps, merged_with_own, unfold_rows

ARGUMENTS = {
    "atten_mask",
    "num_heads",
    "input_layout",
    "num_key_value_heads",
    "sparse_mode",
    "softmax_lse_flag",
}
DTYPES = (torch.bfloat16, torch.float16)
MAX_DIM = 256
MAX_GROUP = 64  # query heads per KV head
RIGHT_DOWN_CAUSAL = 3  # sparse_mode: the last row sees every key, each row before it one less
MASK = 2048  # side of the mask that this mode requires, for any lengths
TOLERANCE = 3e-2  # relative to the largest result


class FusedAttention:
    """Computes `Backend.causal_attention` and `beam_attention` by the operator."""

    def __init__(self, op: Any, device: torch.device) -> None:
        self._op = op
        names = {a.name for a in op._schema.arguments}
        self._scale = "scale" if "scale" in names else "scale_value"  # the older name
        self._mask = torch.ones(MASK, MASK, dtype=torch.bool, device=device).triu_(1)

    @classmethod
    def find(cls, device: torch.device) -> FusedAttention | None:
        """Return the operator; None = torch_npu lacks it, or an argument that we use."""
        try:
            op = torch.ops.npu.npu_fused_infer_attention_score.default
        except AttributeError:
            return None
        names = {a.name for a in op._schema.arguments}
        return cls(op, device) if names >= ARGUMENTS and names & {"scale", "scale_value"} else None

    def agrees(self, device: torch.device) -> bool:
        """Compare the operator with the plain definition on a few rows."""
        generator = torch.Generator().manual_seed(0)
        plain = TorchOps()
        for past_tokens, rows in ((0, 19), (131, 40), (131, 1)):
            q, k, past, own = (
                torch.randn(shape, generator=generator).to(device, torch.bfloat16)
                for shape in ((rows, 4, 32), (rows, 2, 32), (past_tokens, 2, 32), (rows, 2, 2, 32))
            )
            slabs = [(past, past.flip(0))] if past_tokens else []
            pairs = [
                (
                    self.causal(q, k, k.flip(0), slabs, 0.2),
                    plain.causal_attention(q, k, k.flip(0), slabs, 0.2),
                )
            ]
            if slabs:
                call = BeamCall(q, slabs, (own, own), 2, None, 0.2)
                pairs.append((self.beams(call), plain.beam_attention(call)))
            for got, want in pairs:
                worst = float((got.float() - want.float()).abs().max() / want.float().abs().max())
                if not worst <= TOLERANCE:
                    return False
        return True

    def takes(self, q: Tensor, num_kv_heads: int) -> bool:
        """Return whether the operator supports queries [r, Hq, D] and this number of KV heads."""
        _, heads, dim = q.shape
        return (
            q.dtype in DTYPES
            and dim % 16 == 0
            and dim <= MAX_DIM
            and heads <= MAX_GROUP * num_kv_heads
        )

    def causal(self, q: Tensor, k: Tensor, v: Tensor, past: Sequence[Slab], scale: float) -> Tensor:
        """Compute `Backend.causal_attention`."""
        done = self._stage(q, (k, v), scale, is_causal=True)
        for slab in [slab for slab in past if len(slab[0])]:
            done = done.merge(self._stage(q, slab, scale))
        return unfold_rows(done.output / done.total, len(q)).to(q.dtype)

    def beams(self, call: BeamCall) -> Tensor:
        """Compute `Backend.beam_attention`; the prefix must not be empty."""
        stages = [self._stage(call.q, slab, call.scale) for slab in call.shared if len(slab[0])]
        done = stages[0]
        for stage in stages[1:]:
            done = done.merge(stage)
        return merged_with_own(call, done)

    def _stage(
        self, q: Tensor, slab: Slab, scale: float, is_causal: bool = False
    ) -> AttentionStage:
        k, v = slab
        kv_heads = k.shape[1]
        is_masked = is_causal and len(q) > 1  # a single row sees all keys
        out, lse = self._op(
            q[None].contiguous(),
            k[None].contiguous(),
            v[None].contiguous(),
            atten_mask=self._mask if is_masked else None,
            num_heads=q.shape[1],
            input_layout="BSND",
            num_key_value_heads=kv_heads,
            sparse_mode=RIGHT_DOWN_CAUSAL if is_masked else 0,
            softmax_lse_flag=True,
            **{self._scale: scale},
        )
        # [1, Hq, rows, 1]: the query heads of a KV head are adjacent
        peak = lse.float().reshape(kv_heads, -1, 1)
        output = out[0].float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
        return AttentionStage(peak, torch.ones_like(peak), output)
