"""The native shedder of `ops/door`: find the library, declare its functions.

The library is built by `pip install` where there is a C++ compiler (`setup.py`) and loaded by ctypes, with calls that
keep the GIL: they take less time than to get it back, and the shedder's own thread needs none. The structures mirror
`ops/door/shed_call.h`, field by field.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

ABI = 3  # NPU_GR_SHED_ABI of ops/door/shed_call.h
LIBRARY = Path(__file__).with_name("_shed.abi3.so")
MOST_PATTERNS = 16  # as there
UP_BYTES = 0  # why a connection goes up: UP_* of shed_call.h
UP_CLOSED = 1
UP_UNSENT = 2
UP_RETRIES = 3
UP_SILENT = 4


class Pattern(ctypes.Structure):
    """Mirror `struct Pattern`."""

    _fields_ = [
        ("number", c_int64),
        ("key", c_char_p),
        ("key_bytes", c_int64),
        ("quota", c_int64),
    ]


class PatternCounts(ctypes.Structure):
    """Mirror `struct PatternCounts`."""

    _fields_ = [("refused", c_int64), ("abandoned", c_int64)]


class Up(ctypes.Structure):
    """Mirror `struct Up`."""

    _fields_ = [
        ("fd", c_int64),
        ("lent_as", c_int64),
        ("came_to", c_int64),
        ("why", c_int64),
        ("pattern", c_int64),
        ("offset", c_int64),
        ("num_bytes", c_int64),
        ("came_at", c_double),
    ]


@cache
def load(library: Path = LIBRARY) -> ctypes.PyDLL | None:
    """Load the shedder; None: it was not built, or from other sources, so every refusal is Python's."""
    if not library.exists():
        return None
    try:
        found = ctypes.PyDLL(str(library))
        abi = found.npu_gr_shed_abi
    except (OSError, AttributeError):
        return None
    abi.restype = c_int64
    if abi() != ABI:
        return None
    for name, result, arguments in (
        ("new", c_void_p, [c_char_p, c_char_p, POINTER(c_int64), c_int64, c_int64, c_int64, c_int64]),
        ("free", None, [c_void_p]),
        ("done", c_int, [c_void_p]),
        ("buffer", c_void_p, [c_void_p]),
        ("lend", c_int64, [c_void_p, c_int64, c_double]),
        ("resume", None, [c_void_p, c_int64, c_int64]),
        ("stop", None, [c_void_p, c_int64, c_int64]),
        ("times", None, [c_void_p, c_int64, POINTER(c_double), POINTER(c_double)]),
        ("key", c_int64, [c_void_p, c_char_p, c_int64, c_char_p]),
        ("accept", c_int64, [c_void_p, c_int64, c_int64]),
        ("accept_no_more", None, [c_void_p, c_int64]),
        ("newcomers", c_int64, [c_void_p]),
        ("take", c_int64, [c_void_p, POINTER(Up), POINTER(PatternCounts)]),
        ("turn", None, [c_void_p, POINTER(Pattern), c_double, c_int64, POINTER(PatternCounts)]),
    ):
        function = getattr(found, f"npu_gr_shed_{name}")
        function.restype = result
        function.argtypes = arguments
    return found
