"""Types of the arrays that requests, answers and models share, and what every request asks of its own.

A request's arrays are short, and numpy's reductions take 2 us to begin: the place of the largest
value takes a tenth of `max`, and what stands there is the same number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
I16 = npt.NDArray[np.int16]
F32 = npt.NDArray[np.float32]


def largest(values: npt.NDArray[np.integer[Any]]) -> int:
    """Return the largest of [n] integers, n > 0."""
    return int(values[values.argmax()])


def smallest(values: npt.NDArray[np.integer[Any]]) -> int:
    """Return the smallest of [n] integers, n > 0."""
    return int(values[values.argmin()])


def holds_any(mask: npt.NDArray[np.bool_]) -> bool:
    """Whether one of [n] is true."""
    return len(mask) > 0 and bool(mask[mask.argmax()])
