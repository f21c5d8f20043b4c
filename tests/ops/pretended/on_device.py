"""`on_device.py LIBRARY KIND:FAULTS ...`: a process on the pretended machine.

Prints as JSON what the operators got wrong.

Run with `Toolkit.environment()`. FAULTS are numbers of mistakes that were planted in the library,
as 0,1,2: each is switched on in its turn; -1 is none of them. KIND is one of `KINDS`.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from npu_gr.backend.npu import ops as ascend_ops
from npu_gr.backend.npu.check import cases, disagreements
from npu_gr.backend.npu.device import find


def bad_calls(device: torch.device) -> dict[str, Callable[[], object]]:
    """Calls that the binding must reject, by the words with which it does."""
    ops = torch.ops.npu_gr

    def of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    plane = of(2, 4, 3, 8)
    apart = of(2, 4, 3, 16)[..., ::2]  # the right shape, not in one piece
    parent = of(4, dtype=torch.int32)
    column = of(6)
    rows = of(6, dtype=torch.int32)
    codes = of(20, dtype=torch.int32)
    logits = of(6, 40)

    def topk(**other: Any) -> object:
        given: dict[str, Any] = {
            "norm": column,
            "acc": column,
            "lo": rows,
            "degree": rows,
            "code": codes,
        }
        given |= {"logits": logits, "allowed": None, "k": 4} | other
        return ops.csr_gather_topk(**given)

    return {
        "beam_fork_: values: must be contiguous": lambda: ops.beam_fork_(plane, apart, parent, 2),
        "beam_fork_: keys: must be contiguous": lambda: ops.beam_fork_(apart, plane, parent, 2),
        "beam_fork_: parent: must be Int": lambda: ops.beam_fork_(
            plane, plane.clone(), parent.long(), 2
        ),
        "with at least num_slots = 4": lambda: ops.beam_fork_(plane, plane.clone(), parent, 4),
        "csr_gather_topk: acc: must be [6], is [5]": lambda: topk(acc=of(5)),
        "csr_gather_topk: lo: must be contiguous": lambda: topk(lo=of(12, dtype=torch.int32)[::2]),
        "csr_gather_topk: degree: must be Int, is Long": lambda: topk(degree=rows.long()),
        "csr_gather_topk: allowed: must be Bool": lambda: topk(allowed=of(20, dtype=torch.uint8)),
        "csr_gather_topk: norm: must be contiguous, on npu": lambda: topk(norm=torch.zeros(6)),
        "csr_gather_topk: logits must be a contiguous matrix": lambda: topk(logits=of(40, 6).t()),
        "csr_gather_topk: logits must be float32, float16 or bfloat16": lambda: topk(
            logits=logits.double()
        ),
        "csr_gather_topk: k must be 1 to 2048": lambda: topk(k=4000),
        "k: -1 does not fit 32 bits": lambda: topk(k=-1),
        "masked_topk: mask_bits: must be [6, 5], is [6, 4]": lambda: ops.masked_topk(
            logits, of(6, 4, dtype=torch.uint8), 3
        ),
    }


def not_rejected(device: torch.device) -> dict[str, str]:
    """The calls that were taken, or rejected in other words."""
    found = {}
    for why, call in bad_calls(device).items():
        try:
            call()
            torch.zeros((), device=device).cpu()
        except RuntimeError as error:
            if why not in str(error):
                found[why] = str(error)[:200]
        else:
            found[why] = "taken"
    return found


def found(device: torch.device) -> dict[str, dict[str, str]]:
    """Run every operator and every bad call."""
    wrong: dict[str, str] = {}
    try:
        wrong = {name: why for name, why in disagreements(device) if why}
    except RuntimeError as error:
        wrong["error"] = str(error)
    return {"wrong": wrong, "not_rejected": not_rejected(device)}


def unnoticed(device: torch.device) -> dict[str, dict[str, str]]:
    """Let each launch of each operator fail in its turn; return those that raise nothing."""
    machine: Any = torch.npu.library  # type: ignore[attr-defined]
    wrong = {}
    for name in ascend_ops.names():
        # the first two cases of a choice: with a norm, and without
        for number, arguments in zip(range(2), cases(name), strict=False):
            launch = -1
            is_last = False
            while not is_last:
                launch += 1
                machine.pretended_fail(launch)
                given = [x.to(device) if isinstance(x, torch.Tensor) else x for x in arguments]
                raised = ""
                try:
                    getattr(torch.ops.npu_gr, name)(*given)
                    torch.zeros((), device=device).cpu()
                except RuntimeError as error:
                    raised = str(error)
                is_last = bool(machine.pretended_armed())  # it has fewer launches
                if launch == 0 and is_last:
                    wrong[f"{name}, case {number}"] = "it has no launch"
                elif not is_last and "error 207001: " not in raised:
                    wrong[f"{name}, case {number}, launch {launch}"] = raised or "nothing is raised"
    machine.pretended_fail(-1)
    return {"wrong": wrong, "not_rejected": {}}


def far(device: torch.device) -> dict[str, dict[str, str]]:
    """Search so many rows that the workspace has more than 2^32 bytes; few of them are touched.

    It takes a machine with more cores than rows: PRETENDED_CORES.
    """
    rows, columns, k = (1 << 17) + 1, 24 * 2048, 2048  # two parts a row, of 16 KiB each
    logits = torch.empty(rows, columns, dtype=torch.float16, device=device)
    mask = torch.empty(rows, columns // 8, dtype=torch.uint8, device=device)
    wrong = {}
    try:
        _, index = torch.ops.npu_gr.masked_topk(logits, mask, k)
        if not bool((index[-1].cpu() == -1).all()):
            wrong["masked_topk"] = "the last row, whose mask is 0, has an element"
    except RuntimeError as error:
        wrong["masked_topk"] = str(error)
    return {"wrong": wrong, "not_rejected": {}}


KINDS = {"results": found, "launches": unnoticed, "far": far}


def main(library: str, *asked: str) -> None:
    """Load the library and run it, with each fault on in its turn."""
    npu = find()
    ascend_ops.load_library(Path(library))
    results = []
    for kind, numbers in (each.split(":") for each in asked):
        for number in map(int, numbers.split(",")):
            ctypes.CDLL(library).npu_gr_mutate(number)
            with npu.runtime.stream(npu.runtime.Stream()):
                results.append(KINDS[kind](npu.device))
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
