"""Fixed inputs for every Ascend op; the mutants of ops/ascendc/mutate.py must fall to them.

`python -m tests.ops.fixed LIBRARY OP ...` runs them on a library of the emulator; exit status 1 at
the first wrong answer.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from tests.ops import hstu_fixed
from tests.ops.ascend_emulator import F32, Emulator, Machine
from tests.ops.far import FarFork, FarTopk
from tests.ops.oracle import BeamFork, Case, Cost, CsrGatherTopk, MaskedTopk

ODD = (np.nan, np.inf, -np.inf, 0.0, -0.0, 3.4e38, -3.4e38, 1e-45)


def spread(seed: int, shape: tuple[int, ...], palette: list[float]) -> F32:
    """Of a palette where there is one, else all different."""
    random = np.random.default_rng(seed)
    if palette:
        return random.choice(np.array(palette, np.float32), shape)
    return random.normal(size=shape).astype(np.float32)


def _masked(
    seed: int, rows: int, n: int, k: int, palette: list[float], keep: float, **more: object
) -> MaskedTopk:
    values, mask = (
        spread(seed, (rows, n), palette),
        np.random.default_rng(seed).random((rows, n)) < keep,
    )
    known = {"bias": None, "dtype": "float32", "on": Machine(3)} | more
    return MaskedTopk(values=values, mask=mask, k=k, **known)  # type: ignore[arg-type]


def _csr(
    seed: int, rows: int, codes: int, degree: int, k: int, palette: list[float], **more: object
) -> CsrGatherTopk:
    random = np.random.default_rng(seed)
    degrees = random.integers(degree // 2, degree + 1, rows).astype(np.int32)
    if more.pop("exact", False):
        degrees[:] = degree
    degrees[rows // 2] = degrees[rows // 2] if rows == 1 else 0
    lo = (degrees.cumsum() - degrees + 2).astype(np.int32)
    code = np.zeros(int(degrees.sum()) + 4, np.int32)
    for first, count in zip(lo, degrees, strict=True):
        code[first : first + count] = np.sort(random.choice(codes, count, replace=False))
    acc, norm = spread(seed + 1, (rows,), [0.0, -1.0, -2.5]), spread(seed + 2, (rows,), [1.0, -2.0])
    if rows > 4:
        acc[1], norm[2] = -np.inf, -np.inf
    known = {"norm": norm, "allowed": None, "dtype": "float32", "on": Machine(4)} | more
    if known["allowed"] is True:
        known["allowed"] = (random.random(len(code)) < 0.6).astype(np.uint8)
    values = spread(seed, (rows, codes), palette)
    return CsrGatherTopk(values=values, acc=acc, lo=lo, degree=degrees, code=code, k=k, **known)  # type: ignore[arg-type]


def _fork(
    seed: int, layers: int, held: int, rows: int, width: int, slots: int, **more: object
) -> BeamFork:
    random = np.random.default_rng(seed)
    keys, values = random.integers(0, 65536, (2, layers, held, 3, width)).astype(np.uint16)
    known = {"parent": random.integers(-1, held, rows).astype(np.int32), "on": Machine(5)} | more
    return BeamFork(keys=keys, values=values, num_slots=slots, **known)  # type: ignore[arg-type]


def _stopped(values: F32, k: int, groups: int) -> Cost:
    """Make a row of which the filter lets exactly `groups` groups of 32 pass, in tiles of 256."""
    mask = np.ones((1, len(values)), bool)
    return Cost(
        MaskedTopk(values[None], mask, k, None, "float32", Machine(1, tile=256)),
        "sort32_groups",
        groups,
    )


TIES = [0.0, 1.0, 2.0, 3.0]
FIXED: dict[str, list[Case]] = {
    "masked_topk": [
        _masked(1, 4, 1500, 40, [], 0.5),
        _masked(2, 3, 1999, 100, TIES, 0.7, on=Machine(2, tile=256)),
        _masked(3, 2, 2100, 33, TIES, 0.9, on=Machine(5, tile=256, splits=4)),
        _masked(4, 5, 77, 100, list(ODD), 0.8),
        _masked(5, 3, 900, 64, [], 0.6, dtype="float16", on=Machine(2, tile=256)),
        _masked(6, 3, 901, 64, [], 0.6, dtype="bfloat16", on=Machine(2, tile=512)),
        _masked(7, 2, 600, 5, [], 0.5, bias=np.array([0.25, -3.0], np.float32), on=Machine(1)),
        _masked(8, 2, 300, 5, [], 0.0),
        _masked(9, 1, 3000, 300, [], 1.0, on=Machine(8, tile=512, splits=3)),
        _masked(10, 1, 4096, 1, [], 1.0, on=Machine(1, tile=2048)),
        _masked(11, 2, 4096, 2048, TIES, 1.0, on=Machine(2, tile=256)),
        _masked(12, 4, 0, 3, [], 1.0, on=Machine(1)),
        # nine tiles in parts of two: the last one is ragged, and so is its tile
        _masked(18, 1, 2304, 40, [], 1.0, on=Machine(5, tile=256, splits=5)),
        _masked(19, 2, 2199, 33, TIES, 1.0, dtype="float16", on=Machine(4, tile=256, splits=4)),
        _masked(15, 3, 1300, 20, TIES, 0.9, on=Machine(1, tile=256, splits=3)),
        _masked(16, 4, 192, 250, [], 1.0, on=Machine(1, tile=256)),
        _masked(13, 60, 40, 4, [], 0.9, on=Machine(48)),
        _masked(14, 2, 3000, 20, [1.0], 1.0, dtype="bfloat16", on=Machine(1, tile=256)),
        _masked(17, 1, 600, 32, [], 1.0, on=Machine(1, ub_bytes=20_200)),
        FarTopk((1 << 26) + 3, biased=True),
        _stopped(np.zeros(3000, np.float32), 40, 8),
        _stopped(
            np.concatenate([np.ones(40), np.zeros(216), np.full(500, 0.5)]).astype(np.float32),
            40,
            8,
        ),
        MaskedTopk(
            np.arange(5000, dtype=np.float32)[None],
            np.ones((1, 5000), bool),
            50,
            None,
            "float32",
            Machine(1),
        ),
    ],
    "csr_gather_topk": [
        _csr(1, 20, 300, 30, 64, []),
        _csr(2, 20, 300, 60, 64, TIES, on=Machine(4, tile=256, groups=3)),
        _csr(3, 1, 2500, 2400, 128, TIES, on=Machine(4, tile=512, pieces=3)),
        _csr(4, 7, 64, 40, 500, TIES, allowed=True),
        _csr(5, 9, 500, 400, 40, [], norm=None, on=Machine(3, tile=256)),
        _csr(6, 9, 90, 70, 40, [], norm=None, allowed=True),
        _csr(7, 6, 33, 20, 30, [], dtype="float16"),
        _csr(8, 6, 500, 301, 30, [], dtype="bfloat16", on=Machine(2, tile=256, groups=2)),
        _csr(9, 50, 40, 9, 33, list(ODD), on=Machine(48, groups=7, pieces=2)),
        _csr(10, 3, 1, 1, 8, []),
        _csr(12, 16, 300, 40, 32, [], norm=None, on=Machine(1, groups=1)),
        _csr(13, 24, 300, 40, 32, [-210.0, -200.0, -201.5], norm=None, on=Machine(1)),
        _csr(14, 1, 512, 512, 32, [0.0, -1.0], norm=None, exact=True, on=Machine(1, tile=256)),
        _csr(15, 9, 60, 40, 64, TIES, norm=None, allowed=np.zeros(400, np.uint8), on=Machine(2)),
        _csr(11, 12, 700, 500, 32, TIES, allowed=True, on=Machine(5, tile=256, groups=5)),
    ],
    "beam_fork": [
        _fork(1, 3, 20, 20, 10, 2),
        _fork(2, 2, 33, 30, 70, 3, on=Machine(6, chunk=64)),
        _fork(3, 1, 8, 8, 5, 1, parent=np.array([0, 1, 2, 3, 4, 5, 6, 7], np.int32)),
        _fork(
            4,
            4,
            16,
            16,
            33,
            2,
            parent=np.sort(np.random.default_rng(4).integers(0, 16, 16)).astype(np.int32),
        ),
        _fork(5, 2, 9, 5, 40, 3, parent=np.array([8, 8, 9, -1, 0], np.int32), on=Machine(1)),
        _fork(6, 1, 300, 300, 100, 3, on=Machine(2)),
        _fork(7, 2, 12, 12, 16, 0),
        FarFork((1 << 30) + 96, 100, np.array([1, 0, 3, 1, 4], np.int32), Machine(3, chunk=64)),
        BeamFork(
            np.arange(9 * 63).astype(np.uint8).reshape(1, 9, 3, 21),
            np.arange(9 * 63, 2 * 9 * 63).astype(np.uint8).reshape(1, 9, 3, 21),
            _fork(8, 1, 9, 9, 1, 1).parent,
            3,
            Machine(2, chunk=32),
        ),
    ],
    "hstu_rows": list(hstu_fixed.ROWS),
    "hstu_scores": list(hstu_fixed.SCORES),
    "hstu_finish": list(hstu_fixed.FINISH),
}


def main(arguments: list[str]) -> None:
    """See the module."""
    emulator = Emulator(Path(arguments[0]))
    for op in arguments[1:]:
        for case in FIXED[op]:
            case.check(emulator)


if __name__ == "__main__":
    main(sys.argv[1:])
