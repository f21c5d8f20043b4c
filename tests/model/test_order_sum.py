"""The sum by a kernel of the host is that of the definition: any history, candidates, tables.

New items and none.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from npu_gr.backend.calls import BlendCall, BlendTables
from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.backend.cpu.items import NativeOrder
from npu_gr.backend.cpu.library import supported
from npu_gr.backend.reference import ReferenceBackend
from npu_gr.model.blend import DECAY, LAST_ALONE, LINEAR, SCALE, WEIGHTS, BlendSum, ScoreBlend
from npu_gr.model.item_similarity import Neighbours
from tests.models import tiny_order

ISAS = [pytest.param(isa, id=isa) for isa in supported()]
ULPS = 4e-6  # of the largest term: two dozen roundings of fp32


def table(random: np.random.Generator, num_items: int, width: int) -> np.ndarray:
    """Ascending rows, padding before them."""
    rows = np.full((num_items, width), -1, np.int32)
    for own in rows:
        count = int(random.integers(0, width + 1))
        own[width - count :] = np.sort(random.choice(num_items, count, replace=False))
    return rows


def order(seed: int) -> ScoreBlend:
    random = np.random.default_rng(seed)
    num_items = int(random.integers(1, 60))
    width = int(random.integers(0, min(num_items, 12) + 1))
    successors, similar = table(random, num_items, width), table(random, num_items, width)
    log_prob = np.where(
        successors >= 0, np.log(random.uniform(0.001, 0.08, successors.shape)), -np.inf
    )
    similarity = np.where(similar >= 0, random.uniform(0.01, 2, similar.shape), 0)
    is_linear = seed % 3 > 1
    if is_linear:
        similarity *= random.choice([-1, 1], similar.shape)
    return ScoreBlend(
        task="like",
        weights=dict(zip(WEIGHTS, random.normal(size=len(WEIGHTS)).tolist(), strict=True)),
        successors=successors,
        log_prob=log_prob.astype(np.float32),
        popularity=np.log(random.dirichlet(np.ones(num_items))).astype(np.float32),
        neighbours=Neighbours(
            similar,
            similarity.astype(np.float32),
            int(random.integers(1, 12)),
            seed % 3 > 0,
            is_linear,
        )
        if seed % 5
        else None,
        decay=LAST_ALONE if seed % 7 == 3 else DECAY,
    )


def scale_of(one: ScoreBlend, terms: list[np.ndarray]) -> float:
    weights = [*(one.weights[name] for name in WEIGHTS[:5]), 1.0]
    named = zip(weights, terms, strict=True)
    return max(1.0, *(abs(weight) * float(np.abs(term).max(initial=0)) for weight, term in named))


@pytest.mark.parametrize("isa", ISAS)
def test_the_kernel_is_the_definition(isa: str) -> None:
    backend = CPUBackend(isa=isa)
    for seed in range(300):
        random = np.random.default_rng([seed, 1])
        one = order(seed)
        known = one.num_items + int(random.integers(0, 3))  # the last ones are new
        history = random.integers(0, known, int(random.integers(0, 16)))
        candidates = random.integers(0, known, int(random.integers(0, 40)))  # some are there twice
        if seed % 2:
            candidates = np.unique(candidates)
        retrieval, click, seen = random.normal(size=(3, len(candidates))).astype(np.float32)
        counted = (
            one.transitions(history, candidates),
            one.alike(history, candidates),
            one.popular(candidates),
        )
        terms = [retrieval, click, *counted, seen]
        want = BlendSum(one)(history, candidates, retrieval, click, seen)
        np.testing.assert_array_equal(want, one.scores(*terms))
        got = BlendSum(one, backend)(history, candidates, retrieval, click, seen)
        np.testing.assert_allclose(
            got, want, rtol=0, atol=ULPS * scale_of(one, terms), err_msg=str(seed)
        )
        column = np.stack([click, click], 1)[:, 0]  # as the logits of a rank lie
        again = BlendSum(one, backend)(history, candidates, retrieval, column, seen)
        assert again.tobytes() == got.tobytes()


@pytest.mark.parametrize("isa", ISAS)
def test_the_nearest_are_those_of_the_definition(isa: str) -> None:
    backend, num_by_kernel = CPUBackend(isa=isa), 0
    for seed in range(300):
        random = np.random.default_rng([seed, 2])
        one = order(seed)
        history = random.integers(0, one.num_items + 2, int(random.integers(0, 16)))  # new ones too
        num_by_kernel += one.neighbours is not None and one.neighbours.are_many(history)
        native = BlendSum(one, backend)
        for k in (0, 1, 4, 100):
            assert native.nearest(history, k).tolist() == one.nearest(history, k).tolist(), seed
    assert 100 < num_by_kernel < 240


@pytest.mark.parametrize("isa", ISAS)
def test_a_sum_depends_on_no_other_known_candidate(isa: str) -> None:
    one, history, rows = BlendSum(tiny_order(), CPUBackend(isa=isa)), np.arange(7), np.arange(300)
    click = np.linspace(-1, 1, 300, dtype=np.float32)
    every = one(history, rows, None, click, None)
    for part in (slice(5), slice(3, 250), slice(250, 251)):
        assert one(history, rows[part], None, click[part], None).tobytes() == every[part].tobytes()


@pytest.mark.parametrize(("is_summed", "scale"), [(False, SCALE), (True, SCALE), (True, LINEAR)])
@pytest.mark.parametrize("isa", ISAS)
def test_the_size_of_the_catalogue_changes_no_sum(isa: str, is_summed: bool, scale: float) -> None:
    """Few items have a sum each; among many the candidates are looked up.

    To the last bit it is the same.
    """
    random = np.random.default_rng(7)
    num_items, num_others, num_liked = 700, 80_000, 500
    similar, successors = table(random, num_items, 100), table(random, num_items, 100)
    similarity = np.where(similar >= 0, random.uniform(0.01, 2, similar.shape), 0).astype(
        np.float32
    )
    log_prob = np.where(successors >= 0, -random.uniform(3, 9, successors.shape), -np.inf).astype(
        np.float32
    )
    rest, shares = (
        random.uniform(0.1, 1, num_items).astype(np.float32),
        -random.uniform(3, 9, num_items),
    )
    recent = random.integers(0, num_items, num_liked)
    candidates = random.integers(0, num_items, 200)  # some are there twice
    kernels = []
    for more in (0, num_others):  # items without neighbours
        padding = np.full((more, 100), -1, np.int32)
        of_others = np.zeros((more, 100), np.float32)
        tables = BlendTables(
            np.concatenate([successors, padding]),
            np.concatenate([log_prob, of_others - np.inf]),
            np.concatenate([rest, np.ones(more + 1)]).astype(np.float32),
            np.concatenate([shares, np.zeros(more + 1)]).astype(np.float32),
            np.concatenate([similar, padding]),
            np.concatenate([similarity, of_others]),
            DECAY,
            scale,
            is_summed,
            (1.0,) * 6,
        )
        kernel = CPUBackend(isa=isa).blend_sums(tables)
        assert kernel is not None
        kernels.append(kernel)
    assert num_liked * 100 < num_others
    every = BlendCall(recent, 5, num_liked, candidates, None, None, None)
    few, many = [kernel(every) for kernel in kernels]
    assert few.tobytes() == many.tobytes()
    neighbours = Neighbours(similar, similarity, num_liked)
    alike = (neighbours.sums if is_summed else neighbours.means)(recent, candidates)
    assert np.count_nonzero(alike) > 150
    only = few - kernels[0](every._replace(num_liked=0))
    want = np.log1p(SCALE * alike) if scale else alike
    np.testing.assert_allclose(only, want, rtol=0, atol=ULPS * 20 * max(1, want.max() / 20))


@pytest.mark.parametrize(
    "backend", [None, ReferenceBackend(), CPUBackend()], ids=["numpy", "reference", "cpu"]
)
def test_what_is_not_there_counts_as_nothing(backend: CPUBackend | None) -> None:
    one = BlendSum(tiny_order(), backend)
    history, rows, click = np.arange(9), np.arange(40), np.arange(40, dtype=np.float32)
    nothing = np.zeros(40, np.float32)
    without = one(history, rows, None, click, None)
    np.testing.assert_array_equal(without, one(history, rows, nothing, click, nothing))
    assert not np.array_equal(without, one(history, rows, nothing + 1, click, nothing))
    older = BlendSum(replace(tiny_order(), neighbours=None), backend)
    assert not np.allclose(older(history, rows, None, click, None), without)


@pytest.mark.skipif(not supported(), reason="no kernels")
def test_rows_of_nothing_and_terms_of_other_candidates_are_no_memory_errors() -> None:
    one = BlendSum(tiny_order(), CPUBackend())
    assert isinstance(one._kernel, NativeOrder)
    rows = np.array([-1, 5, 1 << 40])
    assert np.isfinite(
        one(np.array([1 << 41, -7, 3]), rows, None, np.zeros(3, np.float32), None)
    ).all()
    with pytest.raises(ValueError, match=r"shape \(2,\), there are 3"):
        one._kernel(BlendCall(rows, 3, 3, rows, np.zeros(2, np.float32), None, None))
    with pytest.raises(ValueError, match="more than the 3 events"):
        one._kernel(BlendCall(rows, 4, 3, rows, None, None, None))
