"""Inputs for every Ascend op: Hypothesis draws sizes, values, machines.

Small palettes of values make ties the rule.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.ops import hstu_fixed
from tests.ops.ascend_emulator import Machine
from tests.ops.fixed import ODD, spread
from tests.ops.hstu_oracle import Batch, Finish, Request, Rows, Scores
from tests.ops.oracle import BeamFork, Case, CsrGatherTopk, MaskedTopk

DTYPES = ("float32", "float16", "bfloat16")


numbers = st.one_of(st.sampled_from(ODD), st.floats(width=32), st.integers(-3, 3).map(float))
palettes = st.lists(numbers, max_size=6)
finite = st.lists(st.integers(-4, 4).map(float), max_size=6)
seeds = st.integers(0, 2**30)
cores = st.one_of(st.integers(1, 8), st.sampled_from([24, 40, 48]))
kept = st.sampled_from([0.0, 0.03, 0.3, 1.0])


@st.composite
def masked_topk(draw: st.DrawFn) -> MaskedTopk:
    rows, seed = draw(st.integers(0, 5)), draw(seeds)
    n = draw(st.one_of(st.integers(0, 70), st.integers(0, 3000)))
    tile = draw(st.sampled_from([0, 256, 512]))
    bias = spread(seed + 1, (rows,), draw(palettes)) if draw(st.booleans()) else None
    return MaskedTopk(
        values=spread(seed, (rows, n), draw(palettes)),
        mask=np.random.default_rng(seed + 2).random((rows, n)) < draw(kept),
        k=draw(st.one_of(st.integers(1, 40), st.integers(1, 700))),
        bias=bias,
        dtype=draw(st.sampled_from(DTYPES)),
        on=Machine(draw(cores), tile=tile, splits=draw(st.integers(0, 12)) if tile else 0),
    )


@st.composite
def csr_gather_topk(draw: st.DrawFn) -> CsrGatherTopk:
    rows, codes, seed = draw(st.integers(1, 40)), draw(st.integers(1, 600)), draw(seeds)
    random = np.random.default_rng(seed)
    most = draw(st.sampled_from([0, 1, 5, 40, 600]))
    degree = random.integers(0, min(most, codes) + 1, rows).astype(np.int32)
    lo = (degree.cumsum() - degree + draw(st.integers(0, 3))).astype(np.int32)
    edges = int(degree.sum()) + 3
    code = np.zeros(edges, np.int32)
    for first, count in zip(lo, degree, strict=True):
        code[first : first + count] = np.sort(random.choice(codes, count, replace=False))
    valid = draw(st.booleans())  # a norm of its own: the logits must then be numbers
    return CsrGatherTopk(
        values=spread(seed, (rows, codes), draw(finite if valid else palettes)),
        norm=None if valid else spread(seed + 1, (rows,), draw(st.one_of(finite, palettes))),
        acc=spread(seed + 2, (rows,), draw(st.one_of(finite, palettes))),
        lo=lo,
        degree=degree,
        code=code,
        allowed=(random.random(edges) < draw(kept)).astype(np.uint8)
        if draw(st.booleans())
        else None,
        k=draw(st.one_of(st.integers(1, 40), st.integers(1, 700))),
        dtype=draw(st.sampled_from(DTYPES)),
        on=Machine(
            draw(cores),
            tile=draw(st.sampled_from([0, 256])),
            groups=draw(st.integers(0, 6)),
            pieces=draw(st.integers(0, 4)),
        ),
    )


@st.composite
def beam_fork(draw: st.DrawFn) -> BeamFork:
    layers, held, slots = draw(st.integers(0, 4)), draw(st.integers(1, 48)), draw(st.integers(1, 3))
    width, rows = draw(st.integers(1, 150)), draw(st.integers(0, held))
    random = np.random.default_rng(draw(seeds))
    shape = (layers, held, slots, width)
    parent = random.integers(0, held, rows).astype(np.int32)
    return BeamFork(
        keys=random.integers(0, 65536, shape).astype(np.uint16),
        values=random.integers(0, 65536, shape).astype(np.uint16),
        parent=np.sort(parent) if draw(st.booleans()) else parent - draw(st.integers(0, 1)),
        num_slots=draw(st.integers(0, slots)),
        on=Machine(draw(cores), chunk=draw(st.sampled_from([0, 32, 96]))),
    )


@st.composite
def _request(draw: st.DrawFn) -> Request:
    cached = draw(st.one_of(st.just(0), st.integers(0, 600)))
    history, targets = draw(st.integers(0, 70)), draw(st.integers(0, 70))
    history += cached + history + targets == 0
    rows = draw(st.sampled_from([history + targets, targets]))
    return Request(rows, cached + history + targets, cached, targets, draw(st.booleans()))


@st.composite
def _batch(draw: st.DrawFn) -> Batch:
    dtype = draw(st.sampled_from(DTYPES))
    unit = 8 if dtype == "float32" else 16
    more: dict[str, Any] = {
        "heads": draw(st.integers(1, 4)), "qk_dim": unit * draw(st.integers(1, 3)), "dtype": dtype,
        "v_dim": unit * draw(st.integers(1, 5)), "page_tokens": draw(st.sampled_from([1, 7, 16,
        64])),
    }  # fmt: skip
    return hstu_fixed.batch(
        draw(seeds), *draw(st.lists(_request(), min_size=1, max_size=8)), cores=draw(cores), **more
    )


@st.composite
def hstu_rows(draw: st.DrawFn) -> Rows:
    made = draw(_batch())
    on = Machine(
        made.on.cores,
        tile=draw(st.sampled_from([0, 3, 16])),
        splits=draw(st.sampled_from([0, 1, 5])),
    )
    return Rows(made._replace(on=on), draw(st.booleans()), draw(st.sampled_from([1.0, -0.25, 0.3])))


@st.composite
def hstu_scores(draw: st.DrawFn) -> Scores:
    made = draw(_batch())
    gaps = draw(
        st.lists(st.sampled_from([0, 1, 2, 50, 3600, 10**6, 10**8]), min_size=1, max_size=4)
    )
    return Scores(
        made._replace(on=Machine(made.on.cores, tile=draw(st.sampled_from([0, 8, 16])))),
        draw(st.sampled_from([1, 2, 16, 256, 300])),
        tuple(gaps),
        draw(st.sampled_from([1.0, -0.37])),
        draw(st.booleans()),
        draw(st.booleans()),
    )


@st.composite
def hstu_finish(draw: st.DrawFn) -> Finish:
    made = draw(_batch())
    made = made._replace(on=Machine(made.on.cores, tile=draw(st.sampled_from([0, 3]))))
    return Finish(
        made, draw(st.booleans()), draw(st.booleans()), draw(st.sampled_from([-0.125, 3.0]))
    )


STRATEGIES: dict[str, st.SearchStrategy[Case]] = {
    "masked_topk": masked_topk(),
    "csr_gather_topk": csr_gather_topk(),
    "beam_fork": beam_fork(),
    "hstu_rows": hstu_rows(),
    "hstu_scores": hstu_scores(),
    "hstu_finish": hstu_finish(),
}
