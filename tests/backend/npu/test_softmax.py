"""The fused softmax attention by a stand-in: prompts, beams, slabs, groups.

One that disagrees or is older is not used.

And the products of torch ops: half numbers as they are stored, where the device answers in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from npu_gr.backend.calls import BeamCall
from npu_gr.backend.npu.backend import NPUBackend
from npu_gr.backend.reference import ReferenceBackend
from npu_gr.backend.torch_ops import Products, TorchOps
from tests.backend.npu.fake_device import FakeRuntime
from tests.backend.npu.placement import Recorder

REFERENCE = ReferenceBackend()
SCHEMA = (
    "npu_fused_infer_attention_score(Tensor query, Tensor key, Tensor value, *, Tensor? "
    "pse_shift=None, "
    "Tensor? atten_mask=None, int num_heads=1, float scale=1.0, str input_layout='BSH', int "
    "num_key_value_heads=0, "
    "int sparse_mode=0, bool softmax_lse_flag=False) -> (Tensor, Tensor)"
)


def fused(query: Tensor, key: Tensor, value: Tensor, **a: Any) -> tuple[Tensor, Tensor]:
    """As documented: BSND, grouped heads, rightDownCausal, mask 2048 x 2048, lse [B, N, S, 1]."""
    assert query.is_contiguous()
    assert key.is_contiguous()
    assert value.is_contiguous()
    assert query.dtype in (torch.bfloat16, torch.float16)
    assert (a["input_layout"], a["softmax_lse_flag"]) == ("BSND", True)
    assert (a["num_heads"], a["num_key_value_heads"]) == (query.shape[2], key.shape[2])
    q, k, v = query[0].float(), key[0].float(), value[0].float()
    group = q.shape[1] // k.shape[1]
    scale: float = a["scale"] if "scale" in a else a["scale_value"]
    scores = torch.einsum("rhd,mhd->hrm", q, k.repeat_interleave(group, 1)) * scale
    if a.get("sparse_mode"):
        assert a["sparse_mode"] == 3
        assert torch.equal(a["atten_mask"], torch.ones(2048, 2048).triu(1).bool())
        rows, keys = scores.shape[1:]
        scores = scores.masked_fill(torch.ones(rows, keys).triu(keys - rows + 1).bool(), -torch.inf)
    out = torch.einsum("hrm,mhd->rhd", scores.softmax(2), v.repeat_interleave(group, 1))
    return out[None].to(query.dtype), scores.logsumexp(2)[None, :, :, None]


@pytest.fixture
def npu() -> Iterator[FakeRuntime]:
    made = FakeRuntime()
    with made.recording():
        yield made


def backend(
    npu: FakeRuntime, monkeypatch: pytest.MonkeyPatch, schema: str = SCHEMA, wrong: float = 0.0
) -> NPUBackend:
    with torch.library._scoped_library("npu_gr_fused", "FRAGMENT") as library:
        library.define(schema)

        def run(*tensors: Tensor, **a: Any) -> tuple[Tensor, Tensor]:
            out, lse = fused(*tensors, **a)
            return out, lse + wrong

        library.impl("npu_fused_infer_attention_score", run, "CompositeExplicitAutograd")
        monkeypatch.setattr(torch.ops, "npu", torch.ops.npu_gr_fused)
        made = NPUBackend("off", npu.as_npu())
        if made._fused is not None:
            made._fused._op = run  # the operator itself goes with the library
        return made


def close(got: Tensor, want: Tensor) -> None:
    assert got.dtype == torch.bfloat16
    assert float((got.double() - want).abs().max()) <= 2e-2 * max(1.0, float(want.abs().max()))


def double(call: BeamCall) -> BeamCall:
    shared = [(k.double(), v.double()) for k, v in call.shared]
    own_k, own_v = call.unshared
    return call._replace(
        q=call.q.double(), shared=shared, unshared=(own_k.double(), own_v.double())
    )


@settings(
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the device is the same for all
)
@given(
    data=st.data(),
    past=st.integers(0, 90),
    new=st.integers(1, 40),
    group=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 99),
)
def test_prompts_and_beams(
    npu: FakeRuntime, data: st.DataObject, past: int, new: int, group: int, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        it = backend(npu, patch)
    assert it.ops["softmax_attention"] == "npu_fused_infer_attention_score"
    random = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).bfloat16()

    k, v = some(past + new, 2, 16), some(past + new, 2, 16)
    ends = sorted({0, past, *data.draw(st.lists(st.integers(0, past), max_size=2))})
    slabs = [(k[a:b], v[a:b]) for a, b in pairwise(ends)]
    rows = data.draw(st.integers(1, new))
    q = some(rows, 2 * group, 16)
    wide = [(a.double(), b.double()) for a, b in slabs]
    want = REFERENCE.causal_attention(q.double(), k[past:].double(), v[past:].double(), wide, 0.3)
    close(it.causal_attention(q, k[past:], v[past:], slabs, 0.3), want)
    num_slots = data.draw(st.integers(0 if past else 1, 3))
    call = BeamCall(
        q, slabs, (some(rows + 1, 3, 2, 16), some(rows + 1, 3, 2, 16)), num_slots, None, 0.3
    )
    want = REFERENCE.beam_attention(double(call))
    close(it.beam_attention(call), want)
    close(it.beam_attention(call._replace(is_split=False)), want)


def test_shared_keys_are_not_copied(npu: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """No number of the prefix is read but by the operator."""
    it = backend(npu, monkeypatch)
    prefix = torch.randn(64, 2, 16).bfloat16()
    q, own = torch.randn(8, 4, 16).bfloat16(), torch.randn(8, 2, 2, 16).bfloat16()
    recorder = Recorder()
    op = it._fused._op  # type: ignore[union-attr]
    seen: list[Tensor] = []

    def noted(query: Tensor, key: Tensor, value: Tensor, **a: Any) -> tuple[Tensor, Tensor]:
        seen.append(key)
        with torch.utils._python_dispatch._disable_current_modes():
            out: tuple[Tensor, Tensor] = op(query, key, value, **a)
        return out

    it._fused._op = noted  # type: ignore[union-attr]
    with recorder:
        it.beam_attention(BeamCall(q, [(prefix, prefix)], (own, own), 2, None, 0.3))
    assert [key.data_ptr() for key in seen] == [prefix.data_ptr()]
    assert not recorder.off_the_ai_core()


@pytest.mark.parametrize(
    ("dtype", "heads", "dim"),
    [(torch.float32, 4, 16), (torch.bfloat16, 4, 24), (torch.bfloat16, 130, 16)],
)
def test_what_the_operator_does_not_take_runs_as_torch_ops(
    npu: FakeRuntime, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, heads: int, dim: int
) -> None:
    it = backend(npu, monkeypatch)
    q, k = torch.randn(3, heads, dim).to(dtype), torch.randn(3, 2, dim).to(dtype)
    call = BeamCall(q, [(k, k)], (k[:, None], k[:, None]), 1, None, 0.2)
    torch.testing.assert_close(it.beam_attention(call), TorchOps().beam_attention(call))
    torch.testing.assert_close(
        it.causal_attention(q, k, k, [(k, k)], 0.2),
        TorchOps().causal_attention(q, k, k, [(k, k)], 0.2),
    )


def test_an_operator_that_disagrees_or_is_older_is_not_used(
    npu: FakeRuntime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert backend(npu, monkeypatch, wrong=0.5).ops["softmax_attention"] == "torch"
    assert "disagrees" in caplog.text
    older = SCHEMA.replace(", bool softmax_lse_flag=False", "")
    assert backend(npu, monkeypatch, older).ops["softmax_attention"] == "torch"
    named = SCHEMA.replace("float scale=", "float scale_value=")
    assert (
        backend(npu, monkeypatch, named).ops["softmax_attention"]
        == "npu_fused_infer_attention_score"
    )


# ---- torch ops


def test_half_keys_are_multiplied_as_they_are_where_the_device_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device whose products of half numbers answer in fp32: nothing of the prefix is widened."""
    bmm, seen = torch.bmm, list[torch.dtype]()

    def wide_bmm(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        assert a.dtype == b.dtype
        seen.append(b.dtype)
        return bmm(a, b) if out_dtype is None else bmm(a.to(out_dtype), b.to(out_dtype))

    monkeypatch.setattr(torch, "bmm", wide_bmm)
    monkeypatch.setattr("npu_gr.backend.torch_ops._gives_fp32", lambda _device: True)
    ops = TorchOps()
    random = torch.Generator().manual_seed(0)
    q, k, own = (
        torch.randn(*s, generator=random).bfloat16()
        for s in ((9, 4, 16), (70, 2, 16), (9, 2, 2, 16))
    )
    call = BeamCall(q, [(k, k.flip(0))], (own, own), 2, None, 0.3)
    want = REFERENCE.beam_attention(double(call))
    assert ops.products._reads_half
    seen.clear()
    close(ops.beam_attention(call), want)
    close(ops.beam_attention(call._replace(is_split=False)), want)
    assert seen == [torch.bfloat16] * 4


def test_a_cpu_widens(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Products(torch.device("cpu"))._reads_half
