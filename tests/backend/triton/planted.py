"""Run small cases of the Triton kernels with a changed text, each change in its own process.

`python -m tests.backend.triton.planted` reads [[file, right, wrong], ..] from its input, and writes
a line of JSON for each: "survived", or "fell: " and why. The processes are forks of one that has
everything imported but the kernels.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton.language  # noqa: F401  (before the forks)

from npu_gr.backend.base import TIME_BUCKETS
from npu_gr.backend.calls import BeamCall, BiasTables, Continuations, HstuCall, Over, TopkCall
from npu_gr.backend.reference import ReferenceBackend

PACKAGE = "npu_gr.backend.triton"
KERNELS = Path(__file__).parents[3] / "npu_gr" / "backend" / "triton"
HANGS_S = 60.0  # of the processor: all cases take a second
REFERENCE = ReferenceBackend()


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)


def hstu() -> None:
    """Steps of one, two and more buckets; slabs that end inside a step; spans beyond int32."""
    kernels: Any = importlib.import_module(f"{PACKAGE}.hstu")
    kernels.ROWS = kernels.KEYS = 16
    kernels.MIN_STEPS = 1
    attention = kernels.Attention()
    random = torch.Generator().manual_seed(5)
    bias = BiasTables(*(torch.randn(1, width, generator=random) for width in (9, TIME_BUCKETS)))
    q, k, v = torch.randn(3, 90, 1, 4, generator=random)
    slabs = [(k[:21], v[:21]), (k[21:70], v[21:70])]
    token = torch.arange(90)
    times = token
    near_border = 100 + token % 3
    for times in (
        token * 3600,  # mostly two buckets
        torch.where(token < 70, near_border, 100 + 2**20),
        torch.where(token < 70, near_border, 97 + 2**26),  # where fp32 rounds up to the border
        torch.randint(0, 3 * 2**30, (90,), generator=random),
    ):
        call = HstuCall(q[70:], k[70:], v[70:], slabs, times, bias, 0.3)
        close(attention.causal(call, call.cached), REFERENCE.hstu_causal(call))
    shown = HstuCall(
        q[70:], k[70:], v[70:], slabs, times[:70], bias, 0.3, int(times[:70].max()) + 5
    )
    close(attention.targets(shown, shown.cached), REFERENCE.hstu_targets(shown))
    rounded = shown._replace(stored=torch.int8)
    stored = rounded.as_stored(is_causal=False)
    close(attention.targets(stored, stored.cached), REFERENCE.hstu_targets(rounded))
    bias.position.add_(1.0)
    close(attention.targets(shown, shown.cached), REFERENCE.hstu_targets(shown))


def beams() -> None:
    """Three spans in two slabs, groups of heads, ancestors, and sharp scores."""
    kernels: Any = importlib.import_module(f"{PACKAGE}.beams")
    kernels.ROWS, kernels.SPAN = 16, 32
    random = torch.Generator().manual_seed(6)
    k, v = torch.randn(2, 71, 2, 3, generator=random)
    own_k, own_v = torch.randn(2, 9, 3, 2, 3, generator=random)
    q = torch.randn(9, 4, 3, generator=random)
    ancestry = torch.randint(0, 9, (3, 9), generator=random)
    shared = [(k[:70], v[:70]), (k[70:], v[70:])]
    for table in (None, ancestry):
        call = BeamCall(q, shared, (own_k, own_v), 2, table, 2.5)
        close(kernels.attend(call), REFERENCE.beam_attention(call))


def topk() -> None:
    """Blocks of 16 of rows of any degree, a filter, a margin of codes; ties, zeros of two signs."""
    kernels: Any = importlib.import_module(f"{PACKAGE}.topk")
    kernels.EDGES, kernels.BLOCKS, kernels.COLUMNS = 16, 4, 64
    random = torch.Generator().manual_seed(7)
    degree = torch.tensor([70, 0, 33, 70])
    lo = torch.tensor([0, 70, 70, 103])
    code = torch.cat([torch.randperm(70, generator=random)[:n].sort().values for n in degree])
    allowed = torch.rand(len(code), generator=random) < 0.6
    follow = Continuations(lo, degree, code.int(), allowed)
    logits = torch.randn(4, 76, generator=random)
    acc = torch.randn(4, generator=random)
    for over in get_args(Over):
        call = TopkCall(logits, acc, follow, 40, over, slice(3, 73), 0.8)
        got, want = kernels.beam_topk(call), REFERENCE.beam_topk(call)
        close(got.score, want.score)
        assert torch.equal(got.edge, want.edge)
        assert torch.equal(got.parent, want.parent)
    every = torch.arange(64).int().repeat(4)
    equal = Continuations(torch.arange(4) * 64, torch.full((4,), 64), every)
    call = TopkCall(torch.zeros(4, 64), torch.tensor([0.0, 1.0, 0.0, 1.0]), equal, 40)
    assert torch.equal(kernels.beam_topk(call).edge, REFERENCE.beam_topk(call).edge)
    code = torch.zeros(2, dtype=torch.int32)
    one = Continuations(torch.tensor([0, 1]), torch.tensor([1, 1]), code)
    call = TopkCall(torch.tensor([[-0.0], [0.0]]), torch.tensor([-0.0, 0.0]), one, 1)
    assert kernels.beam_topk(call).parent.tolist() == [0]


def fork() -> None:
    """Parents in any order; rows and slots behind the valid ones stay."""
    kernels: Any = importlib.import_module(f"{PACKAGE}.fork")
    random = torch.Generator().manual_seed(8)
    plane = torch.randn(2, 12, 3, 2, 5, generator=random)
    parent = torch.randint(0, 12, (10,), generator=random)
    want, got = plane.clone(), plane.clone()
    want[:, :10, :2] = plane[:, parent, :2]
    kernels.fork(got, parent, 2)
    assert torch.equal(got, want)


CASES: dict[str, Callable[[], None]] = {
    "hstu.py": hstu, "beams.py": beams, "topk.py": topk, "fork.py": fork,
}  # fmt: skip


def verdict(file: str, right: str, wrong: str) -> str:
    """Run the cases of a file with a change of its text; "" for "" = none."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.close(reads)
        signal.setitimer(signal.ITIMER_PROF, HANGS_S)
        try:
            _plant(file, right, wrong)
            CASES[file]()
        except BaseException as error:  # noqa: BLE001  (whatever it is, the fault fell)
            os.write(writes, f"{type(error).__name__}: {error}".encode()[:300])
            os._exit(1)
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, errors="replace") as pipe:
        error_text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return "survived" if status == 0 else "fell: " + (error_text or f"signal {-status}")[:120]


def _plant(file: str, right: str, wrong: str) -> None:
    text = (KERNELS / file).read_text()
    if right:
        assert text.count(right) == 1, f"{file}: {text.count(right)} times {right!r}"
    changed = Path(tempfile.mkdtemp(prefix="npu_gr-planted-")) / file
    changed.write_text(text.replace(right, wrong) if right else text)
    name = f"{PACKAGE}.{changed.stem}"
    found = importlib.util.spec_from_file_location(name, changed)
    assert found is not None
    assert found.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)


def _verdicts() -> Iterator[str]:
    for file, right, wrong in json.load(sys.stdin):
        yield verdict(file, right, wrong)


if __name__ == "__main__":
    importlib.import_module(PACKAGE)
    for each in _verdicts():
        sys.stdout.write(json.dumps(each) + "\n")
        sys.stdout.flush()
