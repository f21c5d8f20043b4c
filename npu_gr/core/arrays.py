"""Types of the arrays that requests, answers and models share."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
I16 = npt.NDArray[np.int16]
F32 = npt.NDArray[np.float32]
