"""The native beam attention equals the reference at every instruction set, in any layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.backend.calls import BeamCall
from npu_gr.backend.cpu.beams import NativeBeams
from npu_gr.backend.cpu.library import Native
from npu_gr.backend.reference import ReferenceBackend

# of values near 1; sharp scores magnify rounding
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    slabs=st.lists(st.sampled_from([1, 5, 63, 64, 65, 130]), max_size=3),
    rows=st.integers(1, 9),
    group=st.sampled_from([1, 2, 3]),
    dim=st.sampled_from([1, 8, 17, 64, 80]),
    num_slots=st.integers(0, 3),
    is_forked=st.booleans(),
    seed=st.integers(0, 2**30),
)
def test_equals_the_reference(
    native: Native,
    dtype: torch.dtype,
    slabs: list[int],
    rows: int,
    group: int,
    dim: int,
    num_slots: int,
    is_forked: bool,
    seed: int,
) -> None:
    random = torch.Generator().manual_seed(seed)
    num_slots = num_slots if slabs else max(1, num_slots)

    def plane(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, 2, dim, generator=random).to(dtype)

    shared = [(plane(n), plane(n)) for n in slabs]
    own = plane(rows + 2, num_slots + 1), plane(rows + 2, num_slots + 1)
    for tensor in own:
        tensor[:, num_slots:] = torch.nan  # no op may read it
    q = torch.randn(rows, 2 * group, dim, generator=random).to(dtype)
    ancestry = (
        torch.randint(0, rows + 2, (num_slots, rows), generator=random) if is_forked else None
    )
    call = BeamCall(q, shared, own, num_slots, ancestry, dim**-0.5)
    got = NativeBeams(native)(call)
    wide = [(k.double(), v.double()) for k, v in shared]
    exact = ReferenceBackend().beam_attention(
        call._replace(q=q.double(), shared=wide, unshared=(own[0].double(), own[1].double()))
    )
    assert got.dtype == dtype
    assert torch.allclose(got.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_a_value_that_is_not_a_number_shows(native: Native) -> None:
    """It reaches the logits, where it is an error."""
    k, v = torch.zeros(2, 70, 1, 16)
    v[69, 0, 3] = torch.nan
    nothing = torch.empty(2, 1, 0, 1, 16)
    call = BeamCall(torch.zeros(1, 1, 16), [(k, v)], (nothing[0], nothing[1]), 0, None, 1.0)
    got = NativeBeams(native)(call)
    assert got.isnan().nonzero().tolist() == [[0, 0, 3]]
