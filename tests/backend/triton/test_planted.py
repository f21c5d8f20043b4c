"""Mistakes that a person would make in the Triton kernels, planted one at a time: each is noticed.

Each is a change of a kernel's text. A process of its own imports the changed kernels, and runs
small cases of every op against the definitions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.triton

ROOT = Path(__file__).parent.parent.parent.parent
KERNELS = ROOT / "npu_gr" / "backend" / "triton"


class Fault(NamedTuple):
    """A change of one line."""

    file: str
    what: str
    right: str
    wrong: str


FAULTS = (
    Fault(
        "hstu.py",
        "the least seconds of a bucket one more",
        "(border - ((tl.full",
        "(1 + border - ((tl.full",
    ),
    Fault(
        "hstu.py",
        "two buckets where there are three",
        "elif lowest + 1 == highest",
        "elif lowest < highest",
    ),
    Fault(
        "hstu.py",
        "one bucket where there are two",
        "if lowest == highest",
        "if lowest + 1 >= highest",
    ),
    Fault(
        "hstu.py",
        "older and newer swapped",
        "tl.where(is_older, tl.load(by_time + highest), tl.load(by_time + lowest))",
        "tl.where(is_older, tl.load(by_time + lowest), tl.load(by_time + highest))",
    ),
    Fault(
        "hstu.py",
        "the range of the step before",
        "tl.load(bounds + start // keys)",
        "tl.load(bounds + tl.maximum(start // keys - 1, 0))",
    ),
    Fault(
        "hstu.py",
        "the range of a first slab for all",
        "bounds_kernel[(len(made[-1]),)](clock.seconds[first:]",
        "bounds_kernel[(len(made[-1]),)](clock.seconds",
    ),
    Fault(
        "hstu.py",
        "far begins one token early",
        "far = tl.minimum(clear, before - buckets + 2)",
        "far = tl.minimum(clear, before - buckets + 3 + keys)",
    ),
    Fault("hstu.py", "half of a scale", "(low.to(tl.int32) & 255) << 16", "0"),
    Fault("hstu.py", "the scale of the row before", "at + (lane * row + width)", "at + width"),
    Fault("hstu.py", "the diagonal unseen", "(key_at <= row_at)", "(key_at < row_at)"),
    Fault(
        "hstu.py",
        "candidates see their own row in each part",
        "num_rows * (1 - tl.minimum(part, 1))",
        "num_rows",
    ),
    Fault(
        "hstu.py",
        "wide times taken for narrow",
        "tl.load(limits + 1) - earliest > _MAX_SPAN_S",
        "tl.load(limits + 1) - earliest > 2 * _MAX_SPAN_S",
    ),
    Fault(
        "hstu.py",
        "a part of the sums left out",
        "for _ in range(1, num_parts)",
        "for _ in range(2, num_parts)",
    ),
    Fault(
        "hstu.py",
        "tables of before a change",
        "if known is None or known[0] != made_of",
        "if known is None",
    ),
    Fault(
        "beams.py",
        "the sums not shrunk",
        "total = total * shrink + tl.sum(weights, 1)",
        "total = total + tl.sum(weights, 1)",
    ),
    Fault(
        "beams.py",
        "the scale left out",
        "input_precision=precision) * scale\n",
        "input_precision=precision)\n",
    ),
    Fault(
        "beams.py",
        "every span the first",
        "range(part * span, tl.minimum((part + 1) * span, num_keys), keys)",
        "range(0, tl.minimum(span, num_keys), keys)",
    ),
    Fault(
        "beams.py",
        "the row itself for its ancestor",
        "holder = tl.load(ancestry + slot * ancestry_slot + beam, mask=in_rows, other=0)",
        "holder = beam",
    ),
    Fault(
        "beams.py",
        "the group's first head for all",
        "head = kv_head * group + folded // num_rows\n    at_query",
        "head = kv_head * group + folded * 0\n    at_query",
    ),
    Fault(
        "topk.py",
        "ties by the higher index",
        "(rising << 32) | (_LOW - index.to(tl.int64))",
        "(rising << 32) | index.to(tl.int64)",
    ),
    Fault(
        "topk.py",
        "the filter not read",
        "inside = inside & (tl.load(allowed + lo + at, mask=inside, other=0) != 0)",
        "inside = inside",
    ),
    Fault("topk.py", "zeros of two signs differ", "tl.where(score == 0.0, 0.0, score)", "score"),
    Fault(
        "topk.py",
        "the first code forgotten",
        "row_codes = row_logits + first_code",
        "row_codes = row_logits",
    ),
    Fault(
        "topk.py",
        "the best blocks not in order",
        "(_LOW.value - (best & _LOW.value)).sort().values",
        "_LOW.value - (best & _LOW.value)",
    ),
    Fault(
        "fork.py",
        "a number of the last block too few",
        "(at < num_numbers)[None, :]",
        "(at < num_numbers - 1)[None, :]",
    ),
    Fault(
        "fork.py",
        "the parent's parent",
        "held = tl.load(layer + source[:, None] * row_stride",
        "held = tl.load(layer + row[:, None] * row_stride",
    ),
)


def test_each_falls() -> None:
    pytest.importorskip("triton", reason="triton is not installed: pip install 'npu_gr[triton]'")
    untouched = [(file, "", "") for file in sorted({fault.file for fault in FAULTS})]
    changes = [*untouched, *((fault.file, fault.right, fault.wrong) for fault in FAULTS)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.backend.triton.planted"],
        input=json.dumps(changes), capture_output=True, text=True, cwd=ROOT, check=False,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    verdicts = [json.loads(line) for line in done.stdout.splitlines()]
    assert verdicts[: len(untouched)] == ["survived"] * len(untouched)
    found = dict(zip((fault.what for fault in FAULTS), verdicts[len(untouched) :], strict=True))
    assert {what for what, verdict in found.items() if verdict == "survived"} == set(), found
    assert not [verdict for verdict in found.values() if "times '" in verdict], "a text has changed"
