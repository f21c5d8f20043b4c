"""Where the public sources of CANN run an op on a 910B, and how many kernels they make of it.

AI_CORE comes from the lists of dtypes in `op_api` of hicann/ops-math and hicann/ops-nn (August
2026, the branches for DAV_2201): an op with another dtype goes to the AI CPU, some hundred times
slower, and one that is not there at all to the host. What is not in the table is rejected: look it
up before adding it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

F = frozenset({torch.float32, torch.float16, torch.bfloat16})
I32 = frozenset({torch.int32})
I64 = frozenset({torch.int64})
B = frozenset({torch.bool})
U8 = frozenset({torch.uint8})
ANY = F | I32 | I64 | B | U8

# op -> dtypes of its first tensor (of its result, where it takes none) that run on the AI core
AI_CORE: dict[str, frozenset[torch.dtype]] = {
    **dict.fromkeys(("add", "add_", "sub", "sub_", "mul", "mul_"), ANY),
    **dict.fromkeys(
        (
            "div",
            "exp",
            "exp_",
            "rsqrt",
            "reciprocal",
            "cos",
            "sin",
            "silu",
            "silu_",
            "sigmoid",
            "neg",
        ),
        F,
    ),
    **dict.fromkeys(
        ("isnan", "logsumexp", "mean", "log", "native_layer_norm", "gelu", "_softmax"), F
    ),
    "relu": F,  # activation/relu: with bf16 from the 910B on
    **dict.fromkeys(("pow", "square"), F),  # math/pow: FLOAT, FLOAT16, and bf16 by way of fp32
    **dict.fromkeys(("mm", "bmm", "linear", "addmm", "baddbmm", "matmul"), F),
    **dict.fromkeys(("scaled_dot_product_attention", "npu_fused_infer_attention_score"), F),
    # math/sort, math/topk: integers go to the AI CPU
    **dict.fromkeys(("sort", "argsort", "topk"), F),
    **dict.fromkeys(("lt", "le", "gt", "ge"), F | I32 | I64 | U8),
    **dict.fromkeys(("eq", "ne"), F | I32 | I64 | B | U8),
    **dict.fromkeys(("amax", "amin", "max", "min"), F | I32 | I64),
    **dict.fromkeys(("maximum", "minimum"), F | I32 | I64),
    **dict.fromkeys(("clamp", "clamp_", "clamp_min", "clamp_max"), F | I32 | I64),
    "sum": F | I32 | I64,
    "cumsum": F | I32,
    "remainder": F | I32 | I64,
    "floor_divide": F | I32,
    **dict.fromkeys(("any", "all", "__or__", "logical_or", "bitwise_or"), B),
    # conversion/masked_fill: no INT64
    **dict.fromkeys(("masked_fill", "masked_fill_"), F | I32 | B),
    "flip": F,  # of a layer's tables, when they are first used
    **dict.fromkeys(("tril", "tril_"), F | B | I32),
    **dict.fromkeys(("index", "index_select", "embedding", "gather"), ANY - B),
    "index_put_": F | I32 | B,  # index/index_put_v2: DTYPE_910B_SUPPORT_ATOMIC
    **dict.fromkeys(("cat", "stack", "copy_", "clone", "constant_pad_nd"), ANY),
    "_to_copy": ANY,  # math/cast: every pair of these
    **dict.fromkeys(
        (
            "zeros",
            "ones",
            "full",
            "fill_",
            "zero_",
            "new_zeros",
            "ones_like",
            "zeros_like",
            "full_like",
            "arange",
        ),
        ANY,
    ),
}
# ops of one kernel each, but for these
KERNELS = {
    "baddbmm": 4,  # BMM, Muls(beta), Axpy, Cast with a bias that is broadcast
    "npu_gr::csr_gather_topk": 3,  # norm, select, merge
    "npu_gr::masked_topk": 2,  # select, merge
}
NO_KERNEL = {
    "empty",
    "new_empty",
    "empty_like",
    "new_empty_strided",
    "empty_strided",
    "detach",
    "detach_",
    "item",
}
NO_KERNEL |= {"_local_scalar_dense", "lift_fresh", "_unsafe_view"}
WHOLE = {
    "linear",
    "scaled_dot_product_attention",
    "square",
}  # composites of torch that torch_npu has a kernel of its own for
PRODUCTS = {"bmm", "mm", "addmm", "baddbmm"}


class Kernel(NamedTuple):
    """An op as the device got it."""

    op: str  # npu_gr's with their namespace
    dtype: torch.dtype
    copies: int  # operands of a product that `l0op::Contiguous` copies first

    @property
    def kernels(self) -> int:
        return KERNELS.get(self.op, 1) + self.copies

    @property
    def is_on_ai_core(self) -> bool:
        return "::" in self.op or self.dtype in AI_CORE.get(self.op, frozenset())


class Recorder(TorchDispatchMode):
    """Records kernels; views and allocations are none, composites are taken apart."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Kernel] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace, name = func._schema.name.split("::")
        if name not in WHOLE and namespace == "aten":
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        if name not in NO_KERNEL and not _is_view(func):
            tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
            op = name if namespace in ("aten", "npu") else f"{namespace}::{name}"
            copies = (
                sum(_is_copied(x) for x in args[:3] if isinstance(x, torch.Tensor))
                if name in PRODUCTS
                else 0
            )
            if tensors:
                self.seen.append(Kernel(op, tensors[0].dtype, copies))
        return out

    @property
    def num_kernels(self) -> int:
        return sum(each.kernels for each in self.seen)

    @property
    def num_launches(self) -> int:
        """As they are dispatched, whatever becomes of them."""
        return len(self.seen)

    def off_the_ai_core(self) -> Counter[tuple[str, str]]:
        """Ops with their dtypes that the table does not send to the AI core."""
        return Counter(
            (x.op, str(x.dtype).removeprefix("torch.")) for x in self.seen if not x.is_on_ai_core
        )


def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _is_copied(x: torch.Tensor) -> bool:
    """Accept dense rows, or dense rows of the transpose with batches that follow each other."""
    if x.is_contiguous() or x.ndim < 2:
        return False
    return not x.transpose(-1, -2).is_contiguous()
