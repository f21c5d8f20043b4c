"""Linear layers through the kernels equal torch's, and never use weights of before."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.backend.cpu.library import Native

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def exact(x: Tensor, layer: nn.Linear, first: int, last: int, is_silu: bool) -> Tensor:
    y = linear(
        x.to(layer.weight.dtype).double(),
        layer.weight[first:last].double(),
        layer.bias[first:last].double(),
    )
    return silu(y) if is_silu else y


def assert_near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert (got.shape, got.dtype) == (want.shape, dtype)
    if want.numel():
        assert float((got - want).abs().max()) <= TOLERANCE[dtype] * max(
            float(want.abs().max()), 0.1
        )


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    data=st.data(), rows=st.integers(0, 130), num_in=st.integers(1, 70), num_out=st.integers(1, 200)
)
def test_any_shape(
    native: Native, data: st.DataObject, rows: int, num_in: int, num_out: int
) -> None:
    torch.manual_seed(rows)
    dtypes = st.sampled_from(list(TOLERANCE))
    layer = nn.Linear(num_in, num_out).to(data.draw(dtypes)).requires_grad_(False)
    first = data.draw(st.integers(0, num_out))
    last, is_silu = data.draw(st.integers(first, num_out)), data.draw(st.booleans())
    wide = 3 * torch.randn(rows, num_in + 3).to(data.draw(dtypes))  # rows of a wider matrix
    backend = CPUBackend(isa=native.isa)
    for x in (wide[:, 2:-1], wide[:, 2:-1].unflatten(0, (1, rows))):
        got = backend.affine(x, layer, first, last, is_silu)
        assert_near(got, exact(x, layer, first, last, is_silu), layer.weight.dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_changed_weights_are_packed_again(native: Native, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    backend, x = CPUBackend(isa=native.isa), torch.randn(5, 16)
    layer = nn.Linear(16, 8).to(dtype).requires_grad_(False)
    for change in (
        lambda: layer.weight.mul_(-2),
        lambda: layer.bias.add_(3),
        lambda: layer.load_state_dict(nn.Linear(16, 8).state_dict()),
        lambda: setattr(
            layer, "weight", nn.Parameter(torch.randn(8, 16).to(dtype), requires_grad=False)
        ),
    ):
        assert_near(backend.affine(x, layer, 0, 8, False), exact(x, layer, 0, 8, False), dtype)
        change()
    assert_near(backend.affine(x, layer, 0, 8, False), exact(x, layer, 0, 8, False), dtype)
    assert_near(
        backend.affine(x, layer.double(), 0, 8, True).float(),
        exact(x, layer, 0, 8, True),
        torch.float32,
    )
