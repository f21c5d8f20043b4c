"""xBeam's selection, against reading the logits once and against torch's dense way.

Each beam reads its own row. Several matrices are used in turn, together larger than the last-level
cache, so that every row is cold. It takes the best of many runs, in the thread's CPU time, because
other processes on the core would make the kernel look slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from benchmarks.frame import Line, compared
from benchmarks.roofs import cpu_s
from npu_gr.backend.calls import Choices, Continuations, TopkCall
from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.backend.cpu.beams import NativeTopk
from npu_gr.backend.cpu.library import Native
from npu_gr.catalogue.build import build_trie
from npu_gr.catalogue.trie import Codebooks
from npu_gr.engine.beam_search import Tables

WIDTHS = (128, 256, 512)
NUM_CODES = 8192
NUM_LEVELS = 3
CHILDREN = 1134  # children of a first code with 10 M evenly spread items
CATALOGUES = (10_000, 1_000_000, 10_000_000)
COLD_BYTES = 128 << 20
WITHIN = 2.0
FASTER = 15.0
CATALOGUE_WITHIN = 2.0
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True, eq=False)
class LevelStep:
    """A beam's step over one level of the trie."""

    logits: list[Tensor]  # several, so that each is cold
    acc: Tensor
    follow: Continuations
    width: int

    def dense(self, logits: Tensor) -> Choices:
        """Select in torch: a mask over the codebook, log_softmax, topk over all beams."""
        row = torch.repeat_interleave(torch.arange(len(logits)), self.follow.degree)
        first = self.follow.degree.cumsum(0) - self.follow.degree
        edge = torch.arange(len(row)) + torch.repeat_interleave(
            self.follow.lo - first, self.follow.degree
        )
        mask = torch.full_like(logits, -torch.inf)
        mask[row, self.follow.code[edge].long()] = 0.0
        flat = (logits.log_softmax(1) + mask + self.acc[:, None]).flatten()
        score, at = flat.topk(min(self.width, len(edge)))
        return Choices(score, at // logits.shape[1], at % logits.shape[1])


def lines(native: Native, seed: int, repeats: int) -> Iterator[Line]:
    """Measure all cases; a wrong result is an AssertionError, before it is timed."""
    random = torch.Generator().manual_seed(seed)
    ours = NativeTopk(native)
    for width in WIDTHS:
        case = made(random, width, CHILDREN)
        check(ours, case)
        took_s, read_s, dense_s = timed(native, ours, case, repeats, with_dense=True)
        name = f"beam_topk BW={width} V={NUM_CODES} children={CHILDREN} {native.isa}"
        yield _line(name, took_s, "reading the logits once", read_s, 1 / WITHIN, floor_s=read_s)
        yield _line(name, took_s, "torch: dense mask, log_softmax, topk", dense_s, FASTER)
    yield from over_catalogues(native, random, repeats, CATALOGUES)


def over_catalogues(
    native: Native, random: torch.Generator, repeats: int, sizes: tuple[int, ...]
) -> Iterator[Line]:
    """Measure the last two levels of several catalogues, with 512 beams, against the smallest."""
    ours = NativeTopk(native)
    smallest_s = dict[int, float]()
    for size in sizes:
        generator = np.random.default_rng(0)
        sids = generator.integers(0, NUM_CODES, (size, NUM_LEVELS))
        trie = build_trie(
            sids, np.arange(size), Codebooks((NUM_CODES,) * NUM_LEVELS, (0,) * NUM_LEVELS)
        )
        tables = Tables.upload(trie, torch.device("cpu"))
        for level in (1, 2):
            states = torch.from_numpy(
                generator.choice(len(trie.indptr[level]) - 1, 512, replace=False)
            )
            case = made(random, 512, 0)
            case = LevelStep(case.logits, case.acc, tables.follow(level, states, None), 512)
            check(ours, case)
            took_s, read_s, _ = timed(native, ours, case, repeats)
            base_s = smallest_s.setdefault(level, took_s)
            name = f"beam_topk BW=512 V={NUM_CODES} level={level + 1} items={size} {native.isa}"
            yield _line(
                name, took_s, f"{sizes[0]} items", base_s, 1 / CATALOGUE_WITHIN, floor_s=read_s
            )


def made(random: torch.Generator, width: int, children: int) -> LevelStep:
    """Draw logits like a model's; the beams are the best of a previous step, in random order."""
    count = max(2, COLD_BYTES // (width * NUM_CODES * 4))
    logits = [torch.randn(width, NUM_CODES, generator=random) * 2 for _ in range(count)]
    before = (torch.randn(NUM_CODES, generator=random) * 2).log_softmax(0)
    acc = before.topk(width).values[torch.randperm(width, generator=random)].contiguous()
    rows = [
        torch.randperm(NUM_CODES, generator=random)[:children].sort().values for _ in range(width)
    ]
    degree = torch.full((width,), children)
    return LevelStep(
        logits,
        acc,
        Continuations(torch.arange(width) * children, degree, torch.cat(rows).int()),
        width,
    )


def check(ours: NativeTopk, case: LevelStep) -> None:
    """Compare with the results of the torch ops."""
    call = TopkCall(case.logits[0], case.acc, case.follow, case.width)
    got = ours.beam_topk(call)
    want = CPUBackend("off").beam_topk(call)
    assert got.score.shape == want.score.shape
    drift = float((got.score - want.score).abs().max())
    assert drift <= TOLERANCE, f"beam_topk differs by {drift:.1e}"


def timed(
    native: Native, ours: NativeTopk, case: LevelStep, repeats: int, with_dense: bool = False
) -> tuple[float, float, float]:
    """Time our step, reading its logits once, and the dense step, in turn; return the seconds."""
    took_s = read_s = dense_s = float("inf")
    turn = cycle(case.logits)
    for _ in range(repeats):
        for _ in case.logits:
            data = next(turn)
            read_s = min(
                read_s,
                cpu_s(lambda d=data: native.kernels.probe_read(d.data_ptr(), d.numel()), 1),  # type: ignore[misc]
            )
        for _ in case.logits:
            data = next(turn)
            call = TopkCall(data, case.acc, case.follow, case.width)
            took_s = min(took_s, cpu_s(lambda c=call: ours.beam_topk(c), 1))  # type: ignore[misc]
        if with_dense:
            dense_s = min(dense_s, cpu_s(lambda d=data: case.dense(d), 1))  # type: ignore[misc]
    return took_s, read_s, dense_s


def _line(
    case: str,
    ours_s: float,
    baseline: str,
    baseline_s: float,
    target: float,
    floor_s: float | None = None,
) -> Line:
    return compared(
        "kernels",
        f"{case} vs {baseline}",
        ours_s * 1e3,
        "ms",
        baseline,
        baseline_s * 1e3,
        baseline_s / ours_s,
        target,
        floor=None if floor_s is None else floor_s * 1e3,
        of_floor=None if floor_s is None else floor_s / ours_s,
    )
