"""Every Ascend C kernel, unchanged, equals the reference bit for bit on the CPU emulator."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from tests.ops.ascend_emulator import Emulator, EmulatorError, Machine, NoPlanError, packed
from tests.ops.cases import STRATEGIES
from tests.ops.fixed import FIXED
from tests.ops.oracle import Case

PROPERTY = settings(
    deadline=None,
    derandomize=True,
    max_examples=120,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.mark.parametrize("op", FIXED)
def test_fixed(emulator: Emulator, op: str) -> None:
    for case in FIXED[op]:
        case.check(emulator)


@PROPERTY
@given(case=STRATEGIES["masked_topk"])
def test_masked_topk(emulator: Emulator, case: Case) -> None:
    case.check(emulator)


@PROPERTY
@given(case=STRATEGIES["csr_gather_topk"])
def test_csr_gather_topk(emulator: Emulator, case: Case) -> None:
    case.check(emulator)


@PROPERTY
@given(case=STRATEGIES["beam_fork"])
def test_beam_fork(emulator: Emulator, case: Case) -> None:
    case.check(emulator)


HSTU = settings(PROPERTY, max_examples=40)


@HSTU
@given(case=STRATEGIES["hstu_rows"])
def test_hstu_rows(emulator: Emulator, case: Case) -> None:
    case.check(emulator)


@HSTU
@given(case=STRATEGIES["hstu_scores"])
def test_hstu_scores(emulator: Emulator, case: Case) -> None:
    case.check(emulator)


@HSTU
@given(case=STRATEGIES["hstu_finish"])
def test_hstu_finish(emulator: Emulator, case: Case) -> None:
    case.check(emulator)


def test_more_cores_move_no_more_bytes(emulator: Emulator) -> None:
    """Rows go to cores; none is split while there are enough of them."""
    random = np.random.default_rng(0)
    logits, bits = (
        random.normal(size=(96, 1024)).astype(np.float32),
        np.full((96, 128), 255, np.uint8),
    )
    one, many = (emulator.masked_topk(logits, bits, 16, on=Machine(cores))[2] for cores in (1, 48))
    assert (one.blocks, many.blocks, many.parts) == (1, 48, 1)
    assert one.total["mte2_bytes"] == many.total["mte2_bytes"] == 96 * (1024 * 4 + 128)
    assert many.critical["mte2_bytes"] * 48 == many.total["mte2_bytes"]


def test_few_long_rows_use_many_cores(emulator: Emulator) -> None:
    logits, bits = np.zeros((1, 131_072), np.float32), np.full((1, 16_384), 255, np.uint8)
    report = emulator.masked_topk(logits, bits, 32, on=Machine(48))[2]
    assert report.parts > 4
    assert report.blocks == report.parts
    assert report.launches == 2


def test_fork_moves_nothing_that_stays(emulator: Emulator) -> None:
    keys = np.zeros((2, 64, 2, 64), np.float32)
    report = emulator.beam_fork(keys, keys.copy(), np.arange(64, dtype=np.int32), 2, on=Machine(4))
    assert report.total["mte3_bytes"] == 0
    assert report.total["mte2_bytes"] == report.blocks * 64 * 4, "the parents, once a core"


@pytest.mark.parametrize(
    ("k", "on", "reason"),
    [
        (0, Machine(), "k must be 1 to 2048"),
        (2049, Machine(), "k must be 1 to 2048"),
        (2048, Machine(ub_bytes=65_536), "no tile fits"),
        (8, Machine(tile=16_384), "no tile fits"),
    ],
)
def test_no_plan_comes_with_a_reason(emulator: Emulator, k: int, on: Machine, reason: str) -> None:
    with pytest.raises(NoPlanError, match=reason):
        emulator.masked_topk(np.zeros((1, 8), np.float32), np.zeros((1, 1), np.uint8), k, on=on)


def test_a_row_of_logits_must_fit(emulator: Emulator) -> None:
    empty = np.zeros(1, np.int32)
    logits, row = np.zeros((1, 40_000), np.float32), np.zeros(1, np.float32)
    with pytest.raises(NoPlanError, match="do not fit the buffer"):
        emulator.csr_gather_topk(logits, row, row, empty, empty, empty, None, 8)


def test_a_child_outside_the_codebook_is_the_emulators_complaint(emulator: Emulator) -> None:
    row, code = np.zeros(1, np.float32), np.array([0, 9], np.int32)
    lo, degree = np.array([0], np.int32), np.array([2], np.int32)
    with pytest.raises(EmulatorError, match="behind the tensor"):
        emulator.csr_gather_topk(np.zeros((1, 8), np.float32), row, row, lo, degree, code, None, 4)


@pytest.mark.parametrize("k", [1, 31, 32, 33, 512, 2048])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_planned_buffers_are_the_ones_in_use(emulator: Emulator, k: int, dtype: str) -> None:
    """tiling.h's sum is what the kernel allocates, so a plan that fits does fit."""
    stored = np.zeros((2, 5000), np.float32 if dtype == "float32" else np.uint16)
    report = emulator.masked_topk(
        stored, packed(np.ones((2, 5000), bool)), k, dtype=dtype, on=Machine(2, splits=1)
    )[2]
    tile, padded, size = report.tile, -(-k // 32) * 32, stored.itemsize
    mask = -(-(tile // 8) // 256) * 256
    planned = 2 * (tile * size + mask) + (4 * tile if size == 2 else 0) + 4 * tile + 32 + 8 * padded
    planned += mask + 2 * 4 * tile + 2 * 8 * tile + 2 * 16 * padded
    assert report.ub_bytes == planned
