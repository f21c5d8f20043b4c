"""Build the Ascend C kernels of ops/ascendc against the CPU emulator, and call them by ctypes.

For tests and for `python -m benchmarks emulator`; no request ever runs here. It needs the source
tree and g++. A build is kept under its sources' hash, so it is made once.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from npu_gr.backend.npu.versions import LEAST_CANN, number
from npu_gr.core.errors import ConfigError

SOURCES = Path(__file__).parents[2] / "ops" / "ascendc"
BUILDS = Path(__file__).parents[2] / "build" / "ascend-emulator"
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-pthread", f"-DNPU_GR_CANN={number(LEAST_CANN)}")
SANITIZED_FLAGS = (
    *FLAGS,
    "-O0",
    "-g1",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
)
KINDS = (  # of vector instructions, in the order of `VectorKind` there
    *(
        "with_scalar",
        "with_tensor",
        "exp",
        "div",
        "compare",
        "select",
        "widen",
        "narrow",
        "gather",
        "compact",
    ),
)
COUNTERS = (  # the order of ops/ascendc/emulator/core.h
    "vector_instructions",
    "vector_repeats",
    "gathered",
    "sort32_groups",
    "merged_pairs",
    "barriers",
    "flags",
    "mte2_instructions",
    "mte2_blocks",
    "mte2_bytes",
    "mte2_long_bytes",
    "mte3_instructions",
    "mte3_blocks",
    "mte3_bytes",
    "scalar_accesses",
    *(f"{kind}_{what}" for kind in KINDS for what in ("instructions", "elements")),
)
DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2}

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]


class EmulatorError(Exception):
    """The emulator's complaint: a kernel did what the hardware would not have done right."""


class NoPlanError(ValueError):
    """No plan exists for these sizes; `NPUBackend` runs torch ops instead of the real operator."""


class EmulatorReport(NamedTuple):
    """The counters of one call of an op, and the plan that it ran by."""

    total: dict[str, int]  # of all cores
    critical: dict[str, int]  # of each counter the busiest core, summed over launches
    launches: int
    ub_bytes: int  # of one core's Unified Buffer, the most of any launch
    blocks: int  # cores of the first launch
    # elements; bytes of a column for beam_fork; queries, or tokens of a page, for the HSTU kernels
    tile: int
    parts: int  # lists that were merged across cores, or rows of a step


class _Out(ctypes.Structure):
    _fields_ = (
        ("error", ctypes.c_char * 512),
        ("total", ctypes.c_uint64 * len(COUNTERS)),
        ("critical", ctypes.c_uint64 * len(COUNTERS)),
        ("launches", ctypes.c_uint32),
        ("ub_bytes", ctypes.c_uint32),
        ("blocks", ctypes.c_uint32),
        ("tile", ctypes.c_uint32),
        ("parts", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


def _hash(source: Path, flags: Sequence[str]) -> str:
    digest = hashlib.sha256(" ".join(flags).encode())
    for path in sorted(source.rglob("*.h")) + sorted(source.rglob("*.cpp")):
        digest.update(path.relative_to(source).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def build(
    source: Path = SOURCES,
    folder: Path = BUILDS,
    flags: Sequence[str] = FLAGS,
    file: str = "emulator/library.cpp",
) -> Path:
    """The shared library (or program) of `file`, compiled if its sources or flags are new.

    Raises:
        ConfigError: no sources here, no g++, or they do not compile.
    """
    if not (source / file).is_file():
        raise ConfigError(
            f"the Ascend C sources are not at {source}: run from a checkout or the sdist"
        )
    compiler = shutil.which("g++")
    if compiler is None:
        raise ConfigError("the CPU emulator needs g++ in PATH")
    target = folder / f"{Path(file).stem}-{_hash(source, flags)}"
    folder.mkdir(parents=True, exist_ok=True)
    # who wants the same library waits for it, and leaves no file of a lock
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_file():
            _compile([compiler, *flags, str(source / file)], target)
    finally:
        os.close(lock)
    return target


def _compile(command: Sequence[str], target: Path) -> None:
    handle, half_made = tempfile.mkstemp(dir=target.parent, prefix=target.name)
    os.close(handle)
    done = subprocess.run([*command, "-o", half_made], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        Path(half_made).unlink()
        raise ConfigError(f"the CPU emulator does not compile: {done.stderr[:2000]}")
    Path(half_made).chmod(0o755)
    Path(half_made).replace(target)  # at once: what was interrupted leaves no half of it


def _address(array: Array | None) -> int | None:
    if array is None:
        return None
    assert array.flags.c_contiguous
    return array.ctypes.data


def packed(mask: npt.NDArray[np.bool_]) -> U8:
    """Pack a mask [rows, n] into bits [rows, ceil(n / 8)]: 1 = allowed, lowest bit first."""
    return np.packbits(mask, axis=1, bitorder="little")


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that the emulator imitates, and what it overrides of a plan.

    cores: vector cores, 1 to 48 or so. ub_bytes: of one core's Unified Buffer; 0 = of the 910B.
    tile, splits, groups, pieces, chunk: overrides of the plan; 0 = the plan chooses.
    """

    cores: int = 48
    ub_bytes: int = 0
    tile: int = 0
    splits: int = 0
    groups: int = 0
    pieces: int = 0
    chunk: int = 0


class Emulator:
    """The ops, on numpy arrays. bfloat16 travels as uint16; say so with `dtype`."""

    def __init__(self, library: Path | None = None) -> None:
        """`library`: of `build`; None builds it."""
        self._library = ctypes.CDLL(str(library or build()))
        found = self._library.emulator_counters()
        if found != len(COUNTERS):
            raise ConfigError(f"the emulator has {found} counters, {len(COUNTERS)} are known here")

    def call(
        self, name: str, knobs: Sequence[int], *arguments: Array | int | None
    ) -> EmulatorReport:
        """Run a function of ops/ascendc/emulator/library.cpp with its knobs, arrays and numbers."""
        out = _Out()
        raw = [
            # every number is an uint32
            ctypes.c_uint32(a) if isinstance(a, int) else ctypes.c_void_p(_address(a))
            for a in arguments
        ]
        status = getattr(self._library, name)(
            (ctypes.c_uint32 * 5)(*knobs), *raw, ctypes.byref(out)
        )
        if status:
            text = bytes(out.error).decode()
            raise NoPlanError(text) if status == 1 else EmulatorError(text)
        total, critical = (
            dict(zip(COUNTERS, column, strict=True)) for column in (out.total, out.critical)
        )
        return EmulatorReport(
            total, critical, out.launches, out.ub_bytes, out.blocks, out.tile, out.parts
        )

    def cores(self) -> list[dict[str, int]]:
        """Return the counters of each core in this thread's last launch."""
        number = self._library.emulator_cores(None, 0)
        found = np.zeros((number, len(COUNTERS)), np.uint64)
        self._library.emulator_cores(ctypes.c_void_p(found.ctypes.data), ctypes.c_uint32(number))
        return [dict(zip(COUNTERS, row, strict=True)) for row in found.tolist()]

    def exp(self, x: F32) -> F32:
        """Exp as the emulator's vector unit computes it."""
        y = np.empty_like(x)
        self._library.emulator_exp(
            ctypes.c_void_p(_address(x)), ctypes.c_void_p(_address(y)), ctypes.c_uint32(x.size)
        )
        return y

    def masked_topk(
        self,
        logits: Array,
        bits: U8,
        k: int,
        bias: F32 | None = None,
        *,
        on: Machine = Machine(),
        dtype: str = "float32",
    ) -> tuple[F32, I32, EmulatorReport]:
        """Values and indices [rows, k] of logits [rows, n].

        See ops/ascendc/kernels/masked_topk.h.
        """
        rows, n = logits.shape
        value = np.full((rows, k), 7, np.float32)
        index = np.full((rows, k), 7, np.int32)
        report = self.call(
            "emulator_masked_topk",
            (on.cores, on.ub_bytes, on.tile, on.splits),
            *(DTYPES[dtype], logits, bits, bias, value, index, rows, n, k, bits.shape[1]),
        )
        return value, index, report

    def csr_gather_topk(
        self,
        logits: Array,
        norm: F32 | None,
        acc: F32,
        lo: I32,
        degree: I32,
        code: I32,
        allowed: U8 | None,
        k: int,
        *,
        on: Machine = Machine(),
        dtype: str = "float32",
    ) -> tuple[F32, I32, I32, F32, EmulatorReport]:
        """Score, parent, edge [k] and the norm [rows].

        See ops/ascendc/kernels/csr_gather_topk.h.
        """
        rows, codes = logits.shape
        out = np.full(k, 7, np.float32), np.full(k, 7, np.int32), np.full(k, 7, np.int32)
        used = np.full(rows, 7, np.float32) if norm is None else norm
        report = self.call(
            "emulator_csr_gather_topk",
            (on.cores, on.ub_bytes, on.tile, on.groups, on.pieces),
            *(DTYPES[dtype], logits, used, acc, lo, degree, code, allowed),
            *(*out, rows, codes, len(code), k, int(norm is not None)),
        )
        return *out, used, report

    def beam_fork(
        self, keys: Array, values: Array, parent: I32, num_slots: int, *, on: Machine = Machine()
    ) -> EmulatorReport:
        """Copy the parents' first slots to rows [layers, held, slots, ...] of K and V, in place."""
        layers, held, slots, *rest = keys.shape
        slot_bytes = int(np.prod(rest, dtype=np.int64)) * keys.itemsize
        sizes = layers, held, len(parent), slots * slot_bytes, num_slots * slot_bytes
        return self.call(
            "emulator_beam_fork", (on.cores, on.ub_bytes, on.chunk), keys, values, parent, *sizes
        )
