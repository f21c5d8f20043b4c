"""Reference for the HSTU kernels; `check` compares the emulator's result with it bit for bit.

No torch here: the sanitised run imports this file. The tables that a host makes are made here
again, from what they stand for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tests.ops.ascend_emulator import (
    F32,
    I32,
    Emulator,
    EmulatorReport,
    Machine,
    NoPlanError,
)
from tests.ops.far import untouched
from tests.ops.hstu_emulator import HstuSizes, hstu_finish, hstu_rows, hstu_scores

Array = npt.NDArray[Any]
KINDS: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def narrow(values: F32, dtype: str) -> Array:
    """Round to nearest even."""
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return values.astype(KINDS[dtype])
    wide = np.ascontiguousarray(values).view(np.uint32)
    rounded = (wide + 0x7FFF + (wide >> 16 & 1)) >> 16
    return np.where(np.isnan(values), wide >> 16 | 0x40, rounded).astype(np.uint16)


def widen(stored: Array) -> F32:
    """Undo `narrow`, exactly."""
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def equal(got: Array, want: Array, what: str) -> None:
    """Bit for bit; one NaN is as good as another."""
    assert got.shape == want.shape, what
    assert got.dtype == want.dtype, what
    unsigned = np.uint32 if got.itemsize == 4 else np.uint16
    both = np.isnan(widen(got)) & np.isnan(widen(want))
    wrong = np.argwhere((got.view(unsigned) != want.view(unsigned)) & ~both)
    assert not len(wrong), (
        f"{what}: {len(wrong)} differ, first at {wrong[0]}: {widen(got)[tuple(wrong[0])]}, want "
        + str(widen(want)[tuple(wrong[0])])
    )


class Request(NamedTuple):
    """One request of a batch: the numbers of its queries, keys, cached keys and candidates."""

    rows: int
    keys: int
    cached: int
    targets: int
    keeps: bool = False


class Batch(NamedTuple):
    requests: list[Request]
    heads: int
    qk_dim: int
    v_dim: int
    dtype: str
    row_slots: int
    key_slots: int
    page_tokens: int
    seed: int
    on: Machine

    @property
    def sizes(self) -> HstuSizes:
        return HstuSizes(
            len(self.requests),
            self.row_slots,
            self.key_slots,
            self.heads,
            self.qk_dim,
            self.v_dim,
            self.dtype,
        )

    @property
    def num_queries(self) -> int:
        return sum(r.rows for r in self.requests)

    @property
    def num_rows(self) -> int:
        return sum(r.keys - r.cached for r in self.requests)

    def pages(self, request: Request) -> int:
        held = request.keys - request.targets if request.keeps else request.cached
        return -(-held // self.page_tokens)

    def meta(self) -> I32:
        page = row = query = 0
        numbers = []
        for r in self.requests:
            numbers.append([r.rows, r.keys, r.cached, r.targets, page, row, query, int(r.keeps)])
            page += self.pages(r)
            row += r.keys - r.cached
            query += r.rows
        return np.array(numbers, np.int32)

    def numbers(self, seed: int, *shape: int, odd: bool = False) -> Array:
        random = np.random.default_rng(self.seed + seed)
        values = (random.normal(size=shape) * 2).astype(np.float32)
        if odd and values.size:
            at = random.integers(0, values.size, max(1, values.size // 50))
            values.ravel()[at] = random.choice(
                np.array([np.inf, -np.inf, 0.0, -0.0, 1e30, -1e30, 90.0, -90.0, 1e-40], np.float32),
                len(at),
            )
        return narrow(values, self.dtype)


def silu(x: F32, exp: Callable[[F32], F32]) -> F32:
    """Compute x / fl(1 + exp(-x))."""
    with np.errstate(over="ignore", invalid="ignore"):
        return x / (np.float32(1.0) + exp(np.ascontiguousarray(-x)))


class Rows(NamedTuple):
    batch: Batch
    silu_all: bool = False
    q_scale: float = 1.0
    first_page: int = 0  # pages before those of the batch, which nothing touches

    def check(self, emulator: Emulator) -> EmulatorReport:
        b = self.batch
        uv, qk = b.heads * b.v_dim, b.heads * b.qk_dim
        mixed = b.numbers(1, b.num_rows, 2 * (uv + qk))
        num_pages = sum(map(b.pages, b.requests))
        ids = np.random.default_rng(b.seed).permutation(num_pages + 3)[:num_pages].astype(np.int32)
        planes = tuple(
            b.numbers(2 + i, num_pages + 3, b.page_tokens, b.heads, (b.qk_dim, b.v_dim)[i])
            for i in range(2)
        )
        written = self._written(planes[0]), self._written(planes[1])
        n = len(b.requests)
        slots = (
            (n, b.heads, b.row_slots, b.qk_dim),
            (n, b.heads, b.key_slots, b.qk_dim),
            (n, b.heads, b.key_slots, b.v_dim),
        )
        q, k, v = (np.full(shape, 7, mixed.dtype) for shape in slots)
        u = np.full((b.num_queries, uv), 7, mixed.dtype)
        want = [x.copy() for x in (q, k, v, u)]
        report = hstu_rows(
            emulator, b.sizes, mixed, b.meta(), ids + np.int32(self.first_page), written,
            (q, k, v, u), q_scale=self.q_scale,
            silu_all=self.silu_all,
            on=b.on,
        )  # fmt: skip
        kept = [plane.copy() for plane in planes]
        self._define(want, kept, mixed, ids, planes, emulator)
        for name, got, right in zip("qkvu", (q, k, v, u), want, strict=True):
            equal(got, right, name)
        for got, right in zip(written, kept, strict=True):
            equal(got[self.first_page :], right, "pages")
        return report

    def _written(self, plane: Array) -> Array:
        if not self.first_page:
            return plane.copy()
        pages = untouched(self.first_page + len(plane), *plane.shape[1:], dtype=plane.dtype.type)
        pages[self.first_page :] = plane
        return pages

    def _define(
        self,
        want: list[Array],
        kept: list[Array],
        mixed: Array,
        ids: I32,
        planes: tuple[Array, ...],
        emulator: Emulator,
    ) -> None:
        b = self.batch
        q, k, v, u = want
        uv, qk = b.heads * b.v_dim, b.heads * b.qk_dim
        for n, (rows, keys, cached, targets, page, first_row, query, keeps) in enumerate(
            b.meta().tolist()
        ):
            new = keys - cached
            parts = np.split(mixed[first_row : first_row + new], [uv, 2 * uv, 2 * uv + qk], axis=1)
            wide = [widen(part) for part in parts]
            active = [
                silu(x, emulator.exp) if i == 0 or self.silu_all else x for i, x in enumerate(wide)
            ]
            with np.errstate(invalid="ignore", over="ignore"):
                active[2] = active[2] * np.float32(self.q_scale)
            gate, values, queries, own = (narrow(x, b.dtype) for x in active)
            if rows:
                u[query : query + rows] = gate[new - rows :]
                q[n, :, :rows] = (
                    queries[new - rows :].reshape(rows, b.heads, b.qk_dim).transpose(1, 0, 2)
                )
                for into, plane, added in ((k, planes[0], own), (v, planes[1], values)):
                    into[n] = 0
                    for token in range(cached):
                        into[n, :, token] = plane[
                            ids[page + token // b.page_tokens], token % b.page_tokens
                        ]
                    into[n, :, cached:keys] = added.reshape(new, b.heads, -1).transpose(1, 0, 2)
            for row in range(new - targets if keeps else 0):
                at = ids[page + (cached + row) // b.page_tokens], (cached + row) % b.page_tokens
                kept[0][at] = own[row].reshape(b.heads, -1)
                kept[1][at] = values[row].reshape(b.heads, -1)


class Scores(NamedTuple):
    batch: Batch
    positions: int
    gaps_s: tuple[int, ...]  # between neighbours; picked at random
    alpha: float = 1.0
    odd: bool = False
    skew: bool = False  # times in no order
    jump_s: int = 0  # between the first 256 tokens and the others
    # more elements than a machine has memory for: rows without a query are not looked at
    is_far: bool = False

    def times(self) -> tuple[list[I32], I32, I32, I32]:
        """Key times of each request, then row times, key times and bounds in slots."""
        b = self.batch
        random = np.random.default_rng(b.seed + 7)
        row_times = np.zeros((len(b.requests), b.row_slots), np.int32)
        key_times = np.zeros((len(b.requests), b.key_slots), np.int32)
        keys = []
        for n, r in enumerate(b.requests):
            times = random.choice(np.array(self.gaps_s, np.int64), r.keys).cumsum()
            times[256:] += self.jump_s
            if self.skew:
                times = random.permutation(times)
            times = np.minimum(times - times.min() if r.keys else times, 2**31 - 3)
            times[r.keys - r.targets :] = times.max() if r.keys else 0
            keys.append(times.astype(np.int32))
            key_times[n, : r.keys] = times
            row_times[n, : r.rows] = times[r.keys - r.rows :]
        return keys, row_times, key_times, self._bounds(row_times, key_times)

    def _bounds(self, row_times: I32, key_times: I32) -> I32:
        b = self.batch
        found = np.zeros((len(b.requests), b.row_slots // 32 + b.key_slots // 256, 2), np.int32)
        for n, r in enumerate(b.requests):
            for first, times, used, block in (
                (0, row_times[n], r.rows, 32),
                (b.row_slots // 32, key_times[n], r.keys, 256),
            ):
                for i in range(-(-used // block)):
                    part = times[i * block : min(used, (i + 1) * block)]
                    found[n, first + i] = part.min(), part.max()
        return found

    def check(self, emulator: Emulator) -> EmulatorReport:
        b = self.batch
        random = np.random.default_rng(b.seed + 9)
        position = random.normal(size=(b.heads, self.positions)).astype(np.float32)
        time = random.normal(size=(b.heads, 64)).astype(np.float32)
        _, row_times, key_times, bounds = self.times()
        tables = np.stack([time, time + position[:, -1:]], axis=1)
        width = self.positions + 576
        near = np.empty((b.heads, 8, width), np.float32)
        for shift in range(8):
            distance = 287 + self.positions - shift - np.arange(width)
            near[:, 7 - shift] = position[:, np.clip(distance, 0, self.positions - 1)]
        shape = len(b.requests), b.heads, b.row_slots, b.key_slots
        if self.is_far:
            got = untouched(*shape, dtype=KINDS[b.dtype])
            for n, r in enumerate(b.requests):
                got[n, :, : r.rows] = b.numbers(5 + n, b.heads, r.rows, b.key_slots)
        else:
            got = b.numbers(5, *shape, odd=self.odd)
        stored = [
            got[n, :, : r.rows if self.is_far else None].copy() for n, r in enumerate(b.requests)
        ]
        report = hstu_scores(
            emulator,
            b.sizes,
            got,
            b.meta(),
            bounds,
            row_times,
            key_times,
            tables,
            near,
            alpha=self.alpha,
            on=b.on,
        )
        for n, r in enumerate(b.requests):
            want = stored[n].copy()
            for i in range(r.rows):
                seen, bias = self._row(r, i, row_times[n, i], key_times[n], position, time)
                with np.errstate(invalid="ignore", over="ignore"):
                    y = np.float32(self.alpha) * widen(stored[n][:, i]) + bias
                    weights = y / (np.float32(1.0) + emulator.exp(np.ascontiguousarray(y)))
                want[:, i] = np.where(seen, narrow(weights, b.dtype), np.zeros((), KINDS[b.dtype]))
            equal(got[n, :, : want.shape[1]], want, f"scores of request {n}")
        return report

    def _row(
        self, r: Request, i: int, row_time: np.int32, key_times: I32, position: F32, time: F32
    ) -> tuple[npt.NDArray[np.bool_], F32]:
        """What query i sees of all key slots, and its bias [heads, key slots]."""
        own = r.keys - r.rows + i
        at = min(own, r.keys - r.targets)
        keys = np.arange(len(key_times))
        delta = np.clip(np.int64(row_time) - key_times.astype(np.int64), 0, 2**31 - 2)
        bucket = ((delta + 1).astype(np.float32).view(np.int32) >> 22) - 254
        distance = np.clip(at - keys, 0, self.positions - 1)
        return (keys < at) | (keys == own), time[:, bucket] + position[:, distance]


class Finish(NamedTuple):
    batch: Batch
    over_row: bool  # one norm a row, not one a head
    joined: bool
    scale: float = -0.125
    eps: float = 1e-6
    is_far: bool = False  # more elements than a machine has memory for, as in Scores

    def check(self, emulator: Emulator) -> EmulatorReport:
        b = self.batch
        width = b.heads * b.v_dim
        group = width if self.over_row else b.v_dim
        shape = len(b.requests), b.heads, b.row_slots, b.v_dim
        if self.is_far:
            attention = untouched(*shape, dtype=KINDS[b.dtype])
            for n, r in enumerate(b.requests):
                attention[n, :, : r.rows] = b.numbers(4 + n, b.heads, r.rows, b.v_dim)
        else:
            attention = b.numbers(1, *shape)
        u = b.numbers(2, b.num_queries, width)
        norm = np.random.default_rng(b.seed).normal(size=(2, group)).astype(np.float32)
        got = np.full((b.num_queries, 3 if self.joined else 1, width), 7, u.dtype)
        want = got.copy()
        report = hstu_finish(
            emulator,
            b.sizes,
            attention,
            u,
            norm,
            b.meta(),
            got,
            scale=self.scale,
            eps=self.eps,
            on=b.on,
        )
        for n, (rows, _, _, _, _, _, query, _) in enumerate(b.meta().tolist()):
            a = widen(attention[n, :, :rows]).transpose(1, 0, 2).reshape(rows, width) * np.float32(
                self.scale
            )
            y = self._norm(a.reshape(-1, group), norm).reshape(rows, width)
            mine = u[query : query + rows]
            gated = narrow(widen(mine) * y, b.dtype)
            parts = [mine, narrow(a, b.dtype), gated] if self.joined else [gated]
            want[query : query + rows] = np.stack(parts, axis=1)
        equal(got, want, "finish")
        return report

    def _norm(self, a: F32, norm: F32) -> F32:
        share = np.float32(1.0) / np.float32(a.shape[1])
        deviation = a - (_sums(a) * share)[:, None]
        spread = np.sqrt(_sums(deviation * deviation) * share + np.float32(self.eps))
        y: F32 = deviation / spread[:, None] * norm[0] + norm[1]
        assert y.dtype == np.float32
        return y


class Tight(NamedTuple):
    """A case, and again on a buffer a block smaller: a plan that forgets bytes overflows it."""

    case: Rows | Scores | Finish

    def check(self, emulator: Emulator) -> EmulatorReport:
        report = self.case.check(emulator)
        batch = self.case.batch
        on = replace(batch.on, ub_bytes=report.ub_bytes - 32)
        with suppress(NoPlanError):
            self.case._replace(batch=batch._replace(on=on)).check(emulator)
        return report


def _sums(x: F32) -> F32:
    """Of each row: 64 numbers as a tree of neighbours, then the sums of 64 in order."""
    total = None
    for at in range(0, x.shape[1], 64):
        part = np.zeros((len(x), 64), np.float32)
        part[:, : x.shape[1] - at] = x[:, at : at + 64]
        while part.shape[1] > 1:
            part = part[:, ::2] + part[:, 1::2]
        total = part[:, 0] if total is None else total + part[:, 0]
    assert total is not None
    return total
