"""Plain numpy reference for each Ascend op; `check` compares the emulator's result bit for bit.

No torch here: the sanitised run imports this file.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tests.ops.ascend_emulator import F32, I32, U8, Emulator, EmulatorReport, Machine, packed

Array = npt.NDArray[Any]
NEG_INF = np.float32(-np.inf)


def narrowed(values: F32, dtype: str) -> tuple[Array, F32]:
    """The array that the op gets and the fp32 values that it holds."""
    if dtype == "float32":
        return values, values
    if dtype == "float16":
        with np.errstate(over="ignore"):
            stored = values.astype(np.float16)
        return stored, stored.astype(np.float32)
    stored = (values.view(np.uint32) >> 16).astype(np.uint16)
    return stored, (stored.astype(np.uint32) << 16).view(np.float32)


def best(scores: F32, k: int) -> tuple[F32, I32]:
    """The k best of a list and where they stand: descending, ties by position, no NaN, no -inf.

    Then (-inf, -1).
    """
    usable = np.flatnonzero(scores > NEG_INF)  # False for NaN
    order = usable[np.argsort(-scores[usable], kind="stable")][:k]
    value, index = np.full(k, NEG_INF, np.float32), np.full(k, -1, np.int32)
    value[: len(order)], index[: len(order)] = scores[order], order
    return value, index


def same(got: Array, want: Array, what: str) -> None:
    assert got.shape == want.shape, what
    assert got.dtype == want.dtype, what
    wrong = np.flatnonzero(got.view(np.uint32).ravel() != want.view(np.uint32).ravel())
    assert not len(wrong), (
        f"{what}: at {wrong[:5]} got {got.ravel()[wrong[:5]]}, want {want.ravel()[wrong[:5]]}"
    )


class MaskedTopk(NamedTuple):
    values: F32  # [rows, n]
    mask: npt.NDArray[np.bool_]  # [rows, n]
    k: int
    bias: F32 | None  # [rows]
    dtype: str
    on: Machine

    def check(self, emulator: Emulator) -> EmulatorReport:
        stored, held = narrowed(self.values, self.dtype)
        bits = packed(self.mask)
        if self.mask.shape[1] % 8:  # what stands in the last byte behind the row must not matter
            bits[:, -1] |= np.uint8(0xFF << self.mask.shape[1] % 8 & 0xFF)
        value, index, report = emulator.masked_topk(
            stored, bits, self.k, self.bias, on=self.on, dtype=self.dtype
        )
        for row in range(len(held)):
            scores = np.where(self.mask[row], held[row], NEG_INF)
            if self.bias is not None:
                with np.errstate(invalid="ignore", over="ignore"):
                    scores = scores + self.bias[row]
            want_value, want_index = best(scores, self.k)
            same(value[row], want_value, f"value of row {row}")
            same(index[row], want_index, f"index of row {row}")
        return report


class Cost(NamedTuple):
    """A case that may take no more of a counter: a filter too weak is right but slow."""

    case: MaskedTopk
    counter: str
    most: int

    def check(self, emulator: Emulator) -> None:
        assert self.case.check(emulator).total[self.counter] <= self.most


class CsrGatherTopk(NamedTuple):
    values: F32  # [rows, codes]
    norm: F32 | None  # [rows]
    acc: F32  # [rows]
    lo: I32  # [rows]
    degree: I32  # [rows]
    code: I32  # [edges]
    allowed: U8 | None  # [edges]
    k: int
    dtype: str
    on: Machine

    def check(self, emulator: Emulator) -> None:
        stored, held = narrowed(self.values, self.dtype)
        tables = self.lo, self.degree, self.code, self.allowed
        score, parent, edge, norm, _ = emulator.csr_gather_topk(
            stored, self.norm, self.acc, *tables, self.k, on=self.on, dtype=self.dtype
        )
        if self.norm is None:
            np.testing.assert_allclose(norm, self._norms(held), rtol=1e-5, atol=1e-5)
        scores, rows, edges = self._candidates(held, norm)
        want_score, at = best(scores, self.k)
        same(score, want_score, "score")
        same(parent, np.where(at < 0, -1, np.append(rows, -1)[at]).astype(np.int32), "parent")
        same(edge, np.where(at < 0, -1, np.append(edges, -1)[at]).astype(np.int32), "edge")

    def _children(self, row: int) -> I32:
        edges = np.arange(self.lo[row], self.lo[row] + self.degree[row], dtype=np.int32)
        return edges if self.allowed is None else edges[self.allowed[edges] != 0]

    def _norms(self, held: F32) -> F32:
        with np.errstate(divide="ignore"):
            children = [
                held[row, self.code[self._children(row)]].astype(np.float64)
                for row in range(len(held))
            ]
            return np.array([np.log(np.exp(values).sum()) for values in children], np.float32)

    def _candidates(self, held: F32, norm: F32) -> tuple[F32, I32, I32]:
        scores, rows, edges = (
            [np.empty(0, np.float32)],
            [np.empty(0, np.int32)],
            [np.empty(0, np.int32)],
        )
        for row in range(len(held)):
            if not (norm[row] > NEG_INF and self.acc[row] > NEG_INF):
                continue
            children = self._children(row)
            with np.errstate(invalid="ignore", over="ignore"):
                scores.append((held[row, self.code[children]] - norm[row]) + self.acc[row])
            rows.append(np.full(len(children), row, np.int32))
            edges.append(children)
        return np.concatenate(scores), np.concatenate(rows), np.concatenate(edges)


class BeamFork(NamedTuple):
    keys: Array  # [layers, held, slots, width]
    values: Array
    parent: I32
    num_slots: int
    on: Machine

    def check(self, emulator: Emulator) -> None:
        planes = self.keys.copy(), self.values.copy()
        emulator.beam_fork(*planes, self.parent, self.num_slots, on=self.on)
        for got, before in zip(planes, (self.keys, self.values), strict=True):
            want = before.copy()
            for i, row in enumerate(self.parent):
                if 0 <= row < before.shape[1]:
                    want[:, i, : self.num_slots] = before[:, row, : self.num_slots]
            assert np.array_equal(got, want)


class Case(Protocol):
    """An input of one op, with what it must give."""

    def check(self, emulator: Emulator) -> object:
        """Run it on the emulator; raise where the answer is wrong or the emulator complains."""
        ...
