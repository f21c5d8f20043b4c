"""The collector looks at little: what imports made is frozen, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import gc, sys, npu_gr.service.app
from npu_gr.core.process import THRESHOLDS, freeze_imports
gc.set_threshold(1, 1, 1)
before = len(gc.get_objects())
freeze_imports()
assert gc.get_threshold() == THRESHOLDS
print(before, len(gc.get_objects()), gc.get_freeze_count())
"""


def test_imports_are_frozen() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    before, after, frozen = map(int, done.stdout.split())
    assert after < before / 50
    assert frozen > 0.9 * before
