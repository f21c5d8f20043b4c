"""Check that the native operators of ops/ascendc compute what their definitions say; ties, -inf and NaN included.

Inputs are multiples of a quarter: the scores are exact in fp32, so the choices must be equal. Where the device takes a
logarithm itself, the scores have a tolerance and the choices are not compared. Those of HSTU have one, for its
exponential.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from npu_gr.backend.npu import hstu_check
from npu_gr.backend.npu import ops as ascend_ops

LOG_TOLERANCE = 1e-4  # nats


def disagreements(device: torch.device, ops: Any = None) -> Iterator[tuple[str, str]]:
    """Yield each operator's name and, in words, what it got wrong; "" = it computes what is defined.

    Args:
        device: the device on which the operators run.
        ops: an object with the operators as attributes; None = `torch.ops.npu_gr`.
    """
    ascend_ops.register()
    ops = ops or torch.ops.npu_gr
    for schema in ascend_ops.SCHEMAS:
        name = schema.split("(")[0]
        wrong = [why for arguments in _cases(name) if (why := difference(name, arguments, device, ops))]
        yield name, wrong[0] if wrong else ""


def difference(name: str, arguments: list[Any], device: torch.device, ops: Any = None) -> str:
    """Say in words what an operator's results have that its definition's have not; "" = they are the same.

    Args:
        name: of the operator.
        arguments: on the host.
        device: where the operator runs.
        ops: as in `disagreements`.
    """
    ops = ops or torch.ops.npu_gr
    want = _results(name, ascend_ops.definition(name), arguments, torch.device("cpu"))
    got = _results(name, getattr(ops, name), arguments, device)
    takes_log = name == "csr_gather_topk" and arguments[1] is None
    about = f"inputs {', '.join(f'{x.dtype} {tuple(x.shape)}' for x in arguments if isinstance(x, Tensor))}"
    for number, (mine, its) in enumerate(zip(want, got, strict=True)):
        if takes_log:
            is_same = number > 0 or torch.allclose(its, mine, rtol=0.0, atol=LOG_TOLERANCE)
        elif name.startswith("hstu_"):
            atol = hstu_check.TOLERANCE[mine.dtype] * float(mine.abs().max())
            is_same = torch.allclose(its.float(), mine.float(), rtol=0.0, atol=atol)
        else:
            is_same = torch.equal(its, mine)
        if not is_same:
            return f"result {number} differs, {about}"
    return ""


def _results(name: str, run: Callable[..., Any], arguments: list[Any], device: torch.device) -> list[Tensor]:
    """Run and return the results on the host; a tensor that is written in place is a result."""
    moved = [x.to(device, copy=True) if isinstance(x, Tensor) else x for x in arguments]
    made = run(*moved)
    schema = getattr(torch.ops.npu_gr, name).default._schema
    written = [x for a, x in zip(schema.arguments, moved, strict=True) if a.alias_info and a.alias_info.is_write]
    results = written if made is None else [made] if isinstance(made, Tensor) else made
    return [x.cpu() for x in results]


def _cases(name: str) -> Iterator[list[Any]]:
    if name.startswith("hstu_"):
        yield from hstu_check.cases(name)
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
            for rows, codes, k in ((1, 4096, 128), (128, 300, 512), (4, 9000, 512)):  # the last fills the buffer
                degree = ints(codes // 2, rows)
                lo = (degree + 3).cumsum(0).int() - degree - 3
                code = torch.cat([torch.randperm(codes, generator=generator)[: d + 3].sort().values for d in degree])
                allowed = ints(10, len(code)) < 7
                logits = numbers(rows, codes).to(dtype)
                acc = numbers(rows)
                for norm in (numbers(rows), None):
                    yield [logits, norm, acc, lo, degree, code.int(), allowed, k]
    else:
        for dtype in (torch.float32, torch.bfloat16):
            planes = [numbers(4, 130, 3, 2, 20).to(dtype) for _ in range(2)]
            yield [*planes, ints(130, 128), 2]


def service_calls(name: str, quick: bool = False) -> Iterator[tuple[str, list[Any]]]:
    """Yield calls as a service at its limits makes them, in bf16: what they are in words, and the arguments.

    Args:
        name: of the operator.
        quick: a tenth of the size.
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
        code = torch.cat([torch.randperm(codes, generator=generator)[:d].sort().values for d in degree.tolist()]).int()
        logits = numbers(beams, codes).bfloat16()
        shared = [numbers(beams), lo, degree, code]
        yield f"{beams} beams x {codes} bf16, k {k}", [logits, numbers(beams), *shared, None, k]
        allowed = torch.rand(len(code), generator=generator) < 0.9
        yield f"{beams} beams x {codes} bf16, k {k}, filter", [logits, None, *shared, allowed, k]
    elif name == "beam_fork_":
        planes = [numbers(8, beams, 3, 2, 64).bfloat16() for _ in range(2)]
        parent = torch.randint(0, beams, (beams,), generator=generator, dtype=torch.int32)
        yield f"8 layers x {beams} beams bf16", [*planes, parent, 2]
    else:  # its cases for the parity have a service's shapes already
        for number, arguments in enumerate(_cases(name)):
            yield f"case {number}", arguments
