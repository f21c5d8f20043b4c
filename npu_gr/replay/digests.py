"""Digests of answers: two answers are equal if and only if their digests are (up to collisions of xxh3-64)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

TaskScores = Mapping[str, Sequence[float | None] | npt.NDArray[np.float32]]


def digest(scores: TaskScores, items: Sequence[int] | npt.NDArray[np.int64] = ()) -> str:
    """Hash an answer.

    Args:
        scores: task -> float32 scores; null and NaN are equal. The order of the tasks does not matter.
        items: the items that the answer chose, where it chose them; their order matters.

    Returns:
        16 hex digits (xxh3-64).
    """
    state = xxhash.xxh3_64(np.asarray(items, "<i8").tobytes())
    for task in sorted(scores):
        state.update(f"{task}\0{len(scores[task])}\0".encode())
        state.update(raw(scores[task]))
    return state.hexdigest()


def raw(values: Sequence[float | None] | npt.NDArray[np.float32]) -> bytes:
    """Little-endian float32. Every NaN and every null becomes the same bytes."""
    row = np.array(values, "<f4")
    row[np.isnan(row)] = np.nan
    return row.tobytes()
