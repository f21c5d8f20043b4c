"""A mixture of experts gives each row what its own experts give, however the rows are grouped."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from npu_gr.backend.torch_ops import TorchOps
from npu_gr.model import decoder as experts
from npu_gr.model.decoder import Experts, ExpertsConfig

OPS = TorchOps()


def layer(dtype: torch.dtype = torch.float32, **changes: object) -> Experts:
    fields = {"num_experts": 5, "num_per_token": 2, "mlp_dim": 16, "normalises": True, **changes}
    torch.manual_seed(0)
    made = Experts(8, ExpertsConfig(**fields))  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.5)
    return made.to(dtype).requires_grad_(False)


def one_row(made: Experts, row: Tensor) -> Tensor:
    """The definition: sum the MLPs of the router's best experts, weighted by its probabilities."""
    likes = (made.router.weight @ row).softmax(-1)
    best = likes.argsort(descending=True)[: made.config.num_per_token]
    weights = likes[best] / (likes[best].sum() if made.config.normalises else 1.0)
    total = torch.zeros_like(row)
    for weight, expert in zip(weights, best.tolist(), strict=True):
        gate, up = (made.gate_up[expert] @ row).chunk(2)
        total += weight * (made.down[expert] @ (silu(gate) * up))
    return total


@pytest.mark.parametrize("normalises", [True, False])
@pytest.mark.parametrize("num_rows", [0, 1, 33])
def test_each_row_has_its_own_experts(num_rows: int, normalises: bool) -> None:
    made, x = layer(normalises=normalises), torch.randn(num_rows, 8)
    want = torch.stack([one_row(made, row) for row in x]) if num_rows else x
    assert torch.allclose(made(x, OPS), want, atol=1e-5)


@pytest.mark.parametrize("mlp_dim", [16, 3])  # 3: rows that no vector load may begin at
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gathered_and_grouped_are_one(
    dtype: torch.dtype, mlp_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, x = layer(dtype, mlp_dim=mlp_dim), torch.randn(17, 8).to(dtype)
    first = made(x, OPS)
    monkeypatch.setattr(experts, "_has_grouped", lambda x, weight: False)
    assert torch.allclose(
        made(x, OPS).double(), first.double(), atol=1e-5 if dtype.itemsize > 2 else 0.1
    )


def test_an_expert_that_no_row_chooses_and_one_that_all_choose() -> None:
    made, x = layer(num_per_token=1), torch.randn(9, 8).abs()
    made.router.weight.zero_()
    made.router.weight[3] = 1.0
    assert torch.allclose(made(x, OPS), torch.stack([one_row(made, row) for row in x]), atol=1e-5)


def test_more_experts_a_row_than_there_are_is_rejected() -> None:
    with pytest.raises(ValueError, match="num_per_token: 6 is more than num_experts 5"):
        layer(num_per_token=6)
