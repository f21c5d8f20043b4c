"""Compares the native operators of ops/ascendc with their definitions, including ties, -inf, NaN.

Inputs are multiples of 1/4, so that scores are exact in fp32 and the choices must be equal. If the
device takes a logarithm itself, the scores have a tolerance and the choices are not compared. The
HSTU operators have a tolerance because of the exponential.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from npu_gr.backend.calls import BiasTables
from npu_gr.backend.npu import ops as ascend_ops
from npu_gr.backend.npu.hstu_batch import Entry, batch_times, layer_tables, relative

LOG_TOLERANCE = 1e-4  # nats
# Relative to the largest result: the device's exponential, division and root may be a few units in
# the last place off, which may change the rounding to 16 bits.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
HEADS = 4
DIM = 64
PAGE_TOKENS = 64
KEYS = 1024
ROWS = 64
# a chunk, a rank on a prefix, both in one, a first chunk
ENTRIES = (
    Entry(64, 964, 900, 0, 0, 0, 0, 1),
    Entry(50, 650, 600, 50, 16, 64, 64, 0),
    Entry(40, 340, 300, 15, 26, 114, 114, 1),
    Entry(33, 33, 0, 0, 32, 154, 154, 1),
)


def disagreements(device: torch.device, ops: Any = None) -> Iterator[tuple[str, str]]:
    """Yield each operator's name and its first difference, in words; "" = there is none.

    Args:
        device: Device on which the operators run.
        ops: Object with the operators as attributes; None = `torch.ops.npu_gr`.
    """
    ascend_ops.register()
    ops = ops or torch.ops.npu_gr
    for schema in ascend_ops.SCHEMAS:
        name = schema.split("(")[0]
        wrong = [
            why for arguments in cases(name) if (why := difference(name, arguments, device, ops))
        ]
        yield name, wrong[0] if wrong else ""


def difference(name: str, arguments: list[Any], device: torch.device, ops: Any = None) -> str:
    """Return how an operator's results differ from its definition's, in words; "" = they agree.

    Args:
        name: Name of the operator.
        arguments: Arguments, with tensors on the host.
        device: Device on which the operator runs.
        ops: Object with the operators as attributes; None = `torch.ops.npu_gr`.
    """
    ops = ops or torch.ops.npu_gr
    want = _results(name, ascend_ops.definition(name), arguments, torch.device("cpu"))
    got = _results(name, getattr(ops, name), arguments, device)
    takes_log = name == "csr_gather_topk" and arguments[1] is None
    shapes = (f"{x.dtype} {tuple(x.shape)}" for x in arguments if isinstance(x, Tensor))
    about = f"inputs {', '.join(shapes)}"
    for number, (mine, its) in enumerate(zip(want, got, strict=True)):
        if takes_log:
            is_same = number > 0 or torch.allclose(its, mine, rtol=0.0, atol=LOG_TOLERANCE)
        elif name.startswith("hstu_"):
            atol = TOLERANCE[mine.dtype] * float(mine.abs().max())
            is_same = torch.allclose(its.float(), mine.float(), rtol=0.0, atol=atol)
        else:
            is_same = torch.equal(its, mine)
        if not is_same:
            return f"result {number} differs, {about}"
    return ""


def _results(
    name: str, run: Callable[..., Any], arguments: list[Any], device: torch.device
) -> list[Tensor]:
    """Run an operator; return its results, or the tensors that it writes in place, on the host."""
    moved = [x.to(device, copy=True) if isinstance(x, Tensor) else x for x in arguments]
    made = run(*moved)
    schema = getattr(torch.ops.npu_gr, name).default._schema
    written = [
        x
        for a, x in zip(schema.arguments, moved, strict=True)
        if a.alias_info and a.alias_info.is_write
    ]
    results = written if made is None else [made] if isinstance(made, Tensor) else made
    return [x.cpu() for x in results]


def cases(name: str) -> Iterator[list[Any]]:
    """Yield arguments of an operator, with tensors on the host."""
    if name.startswith("hstu_"):
        yield from hstu_cases(name)
        return
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randint(-40, 40, shape, generator=generator) / 4.0

    def ints(end: int, *shape: int) -> Tensor:
        return torch.randint(0, end, shape, generator=generator, dtype=torch.int32)

    if name == "masked_topk":
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for rows, columns, k in ((3, 5000, 128), (60, 257, 300), (2, 1, 1)):
                logits = numbers(rows, columns)
                logits[0, ::7] = float("nan")
                logits[-1, ::11] = float("-inf")
                mask = ascend_ops.pack_mask(ints(10, rows, columns) < 7)
                yield [logits.to(dtype), mask, k, numbers(rows)]
    elif name == "csr_gather_topk":
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            # the last case fills the buffer
            for rows, codes, k in ((1, 4096, 128), (128, 300, 512), (4, 9000, 512)):
                degree = ints(codes // 2, rows)
                lo = (degree + 3).cumsum(0).int() - degree - 3
                code = torch.cat(
                    [
                        torch.randperm(codes, generator=generator)[: d + 3].sort().values
                        for d in degree
                    ]
                )
                allowed = ints(10, len(code)) < 7
                logits = numbers(rows, codes).to(dtype)
                acc = numbers(rows)
                for norm in (numbers(rows), None):
                    yield [logits, norm, acc, lo, degree, code.int(), allowed, k]
    else:
        for dtype in (torch.float32, torch.bfloat16):
            planes = [numbers(4, 130, 3, 2, 20).to(dtype) for _ in range(2)]
            yield [*planes, ints(130, 128), 2]


def hstu_cases(name: str) -> Iterator[list[Any]]:
    """Yield arguments of `hstu_rows`, `hstu_scores` or `hstu_finish`."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    meta = torch.tensor(ENTRIES, dtype=torch.int32)
    batch = len(ENTRIES)
    queries = sum(e.rows for e in ENTRIES)
    width = HEADS * DIM
    for dtype in TOLERANCE:
        if name == "hstu_rows":
            planes = [numbers(40, PAGE_TOKENS, HEADS, DIM).to(dtype) for _ in range(2)]
            ids = torch.randperm(40, generator=generator)[:33].int()
            made = [
                torch.zeros(batch, HEADS, slots, DIM, dtype=dtype) for slots in (ROWS, KEYS, KEYS)
            ]
            mixed = numbers(queries, 4 * width).to(dtype)
            yield [
                mixed,
                meta,
                ids,
                *planes,
                *made,
                torch.zeros(queries, width, dtype=dtype),
                -0.125,
                True,
            ]
        elif name == "hstu_scores":
            random = np.random.default_rng(0)
            times = []
            for e in ENTRIES:
                history = random.integers(0, 90_000, e.keys - e.targets).cumsum()
                found = relative(history, int(history[-1]) + 7, e.targets)
                assert found is not None
                times.append(found)
            laid = batch_times(ENTRIES, times, ROWS, KEYS)
            tables = layer_tables(BiasTables(numbers(HEADS, 256), numbers(HEADS, 64)))
            arrays = [torch.from_numpy(x) for x in (laid.bounds, laid.rows, laid.keys)]
            scores = (numbers(batch, HEADS, ROWS, KEYS) * 3).to(dtype)
            yield [scores, meta, *arrays, tables.times, tables.near, -0.3]
        else:
            attention = numbers(batch, HEADS, ROWS, DIM).to(dtype)
            u = numbers(queries, width).to(dtype)
            for group, parts in ((DIM, 3), (width, 1)):
                yield [
                    attention,
                    u,
                    numbers(2, group),
                    meta,
                    torch.zeros(queries, parts, width, dtype=dtype),
                    -0.1,
                    1e-6,
                ]


def service_calls(name: str, quick: bool = False) -> Iterator[tuple[str, list[Any]]]:
    """Yield calls with the largest shapes of a service, in bf16: a description, the arguments.

    Args:
        name: Name of the operator.
        quick: Use a tenth of the size.
    """
    generator = torch.Generator().manual_seed(1)
    beams, codes, k, catalogue = (48, 800, 48, 10_000) if quick else (512, 8192, 512, 100_000)

    def numbers(*shape: int) -> Tensor:
        return torch.randint(-40, 40, shape, generator=generator) / 4.0

    if name == "masked_topk":
        mask = ascend_ops.pack_mask(torch.rand(8, catalogue, generator=generator) < 0.9)
        yield f"8 x {catalogue} bf16, k {k}", [numbers(8, catalogue).bfloat16(), mask, k, None]
    elif name == "csr_gather_topk":
        degree = torch.randint(0, codes // 16, (beams,), generator=generator, dtype=torch.int32)
        lo = degree.cumsum(0).int() - degree
        code = torch.cat(
            [torch.randperm(codes, generator=generator)[:d].sort().values for d in degree.tolist()]
        ).int()
        logits = numbers(beams, codes).bfloat16()
        shared = [numbers(beams), lo, degree, code]
        yield f"{beams} beams x {codes} bf16, k {k}", [logits, numbers(beams), *shared, None, k]
        allowed = torch.rand(len(code), generator=generator) < 0.9
        yield f"{beams} beams x {codes} bf16, k {k}, filter", [logits, None, *shared, allowed, k]
    elif name == "beam_fork_":
        planes = [numbers(8, beams, 3, 2, 64).bfloat16() for _ in range(2)]
        parent = torch.randint(0, beams, (beams,), generator=generator, dtype=torch.int32)
        yield f"8 layers x {beams} beams bf16", [*planes, parent, 2]
    else:  # the cases of `disagreements` already have such shapes
        for number, arguments in enumerate(cases(name)):
            yield f"case {number}", arguments
