"""The npu_gr operators: their definitions give what the product's own selection and fork give."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.backend.best_items import select
from npu_gr.backend.calls import Continuations
from npu_gr.backend.npu import ops as ascend_ops
from npu_gr.backend.npu.check import hstu_cases
from npu_gr.core.errors import ConfigError
from npu_gr.engine.kv_cache.arena import BeamArena
from tests.ops.oracle import best

ops = torch.ops.npu_gr
seeds = st.integers(0, 2**30)


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    ascend_ops.register()


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    rows=st.integers(0, 4),
    n=st.integers(0, 40),
    k=st.integers(1, 50),
    ties=st.integers(1, 9),
    seed=seeds,
)
def test_masked_topk(rows: int, n: int, k: int, ties: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    values = random.integers(-ties, ties, (rows, n)).astype(np.float32)
    values[random.random((rows, n)) < 0.1] = np.nan
    mask, bias = random.random((rows, n)) < 0.6, random.integers(-2, 2, rows).astype(np.float32)
    bits = ascend_ops.pack_mask(torch.from_numpy(mask))
    assert torch.equal(bits, torch.from_numpy(np.packbits(mask, axis=1, bitorder="little")))
    value, index = ops.masked_topk(torch.from_numpy(values), bits, k, torch.from_numpy(bias))
    for row in range(rows):
        want = best(np.where(mask[row], values[row], np.float32(-np.inf)) + bias[row], k)
        assert np.array_equal(value[row].numpy(), want[0])
        assert np.array_equal(index[row].numpy(), want[1])


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    rows=st.integers(1, 12),
    codes=st.integers(1, 30),
    k=st.integers(1, 60),
    ties=st.integers(1, 9),
    given_norm=st.booleans(),
    filtered=st.booleans(),
    seed=seeds,
)
def test_csr_gather_topk_is_beam_topk(
    rows: int, codes: int, k: int, ties: int, given_norm: bool, filtered: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    degree = random.integers(0, codes + 1, rows)
    lo = degree.cumsum() - degree
    code = np.concatenate([np.sort(random.choice(codes, d, replace=False)) for d in degree]).astype(
        np.int32
    )
    logits = torch.from_numpy(random.integers(-ties, ties, (rows, codes)).astype(np.float32))
    dead = -np.inf if given_norm else -2.0  # select takes no dead beam that has no child either
    acc = torch.from_numpy(random.choice([0.0, -1.0, dead], rows).astype(np.float32))
    allowed = torch.from_numpy(random.random(len(code)) < 0.7) if filtered else None
    norm = logits.logsumexp(1) if given_norm else None
    follow = Continuations(
        torch.from_numpy(lo), torch.from_numpy(degree), torch.from_numpy(code), allowed
    )
    want = select(logits, norm, acc, follow, k)
    tables = (torch.from_numpy(array.astype(np.int32)) for array in (lo, degree, code))
    score, parent, edge = ops.csr_gather_topk(logits, norm, acc, *tables, allowed, k)
    w = len(want.score)
    assert torch.equal(score[:w], want.score)
    assert torch.equal(parent[:w].long(), want.parent)
    assert torch.equal(edge[:w].long(), want.edge)
    assert torch.equal(score[w:], torch.full((k - w,), float("-inf")))
    assert torch.equal(
        torch.stack([parent[w:], edge[w:]]), torch.full((2, k - w), -1, dtype=torch.int32)
    )


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    layers=st.integers(1, 3),
    held=st.integers(1, 12),
    slots=st.integers(1, 3),
    seed=seeds,
    data=st.data(),
)
def test_beam_fork_is_the_arenas_move(
    layers: int, held: int, slots: int, seed: int, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(seed)
    arena = BeamArena(
        num_layers=layers, num_heads=2, head_dim=3, max_beams=held, num_slots=slots,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    for layer in range(layers):
        for plane in arena.slabs(layer):
            plane.copy_(torch.randn(plane.shape, generator=generator))
    keys, values = (torch.stack([arena.slabs(layer)[i] for layer in range(layers)]) for i in (0, 1))
    parent = torch.tensor(
        sorted(data.draw(st.lists(st.integers(0, held - 1), max_size=held))), dtype=torch.int64
    )
    used = data.draw(st.integers(0, slots))
    arena.move(parent, used)
    ops.beam_fork_(keys, values, parent.to(torch.int32), used)
    for layer in range(layers):
        for got, want in zip((keys, values), arena.slabs(layer), strict=True):
            assert torch.equal(got[layer], want)


def samples() -> list[tuple[str, tuple[object, ...]]]:
    bits, norm = torch.full((3, 2), 255, dtype=torch.uint8), torch.zeros(3)
    ints = torch.tensor([0, 2, 4], dtype=torch.int32)
    edges, allowed = torch.arange(6, dtype=torch.int32), torch.ones(6, dtype=torch.bool)
    return [
        ("masked_topk", (torch.randn(3, 13), bits, 4, None)),
        ("masked_topk", (torch.randn(3, 13).bfloat16(), bits, 20, norm)),
        ("csr_gather_topk", (torch.randn(3, 6), norm, norm, ints, ints // 2, edges, allowed, 3)),
        ("csr_gather_topk", (torch.randn(3, 6), None, norm, ints, ints // 2, edges, None, 9)),
        *(
            (name, tuple(next(hstu_cases(name))))
            for name in ("hstu_rows", "hstu_scores", "hstu_finish")
        ),
        ("beam_fork_", (torch.randn(2, 5, 3, 4), torch.randn(2, 5, 3, 4), ints, 2)),
    ]


@pytest.mark.parametrize(("name", "arguments"), samples(), ids=[name for name, _ in samples()])
def test_opcheck(name: str, arguments: tuple[object, ...]) -> None:
    torch.library.opcheck(getattr(ops, name).default, arguments)


def test_every_op_has_its_definition_and_its_shapes() -> None:
    for schema in ascend_ops.SCHEMAS:
        name = schema.split("(")[0]
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        assert has(f"npu_gr::{name}", "CompositeExplicitAutograd")
        assert not has(f"npu_gr::{name}", "PrivateUse1"), "no native library here"


@pytest.mark.parametrize(
    ("soc", "name"),
    [
        ("Ascend910B1", "ascend910b"),
        ("Ascend910B4-1", "ascend910b"),
        ("Ascend910_9392", "ascend910_93"),
    ],
)
def test_library_of_a_soc(soc: str, name: str, tmp_path: Path) -> None:
    assert ascend_ops.library_path(soc, tmp_path) == tmp_path / f"libnpu_gr_ascend_{name}.so"


@pytest.mark.parametrize("soc", ["Ascend310P3", "Ascend910A", "Ascend910"])
def test_no_library_for_other_socs(soc: str) -> None:
    with pytest.raises(ConfigError, match="no native ops for"):
        ascend_ops.library_path(soc)


def test_load_library_says_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "libnpu_gr_ascend_ascend910b.so"
    with pytest.raises(ConfigError, match=r"no native ops at .*build\.sh"):
        ascend_ops.load_library(path)
    path.write_bytes(b"not a library")
    with pytest.raises(ConfigError, match="does not load"):
        ascend_ops.load_library(path)
    path.with_suffix(".json").write_text(json.dumps({"torch": "1.11.0"}))
    with pytest.raises(ConfigError, match=r"was built for torch 1\.11\.0"):
        ascend_ops.load_library(path)
