"""`python -m tests.ops.sanitized LIBRARY`: fixed cases and Hypothesis's on a sanitized emulator.

Prints `clean`.

Run with the sanitizers' libraries in LD_PRELOAD: numpy's arrays then have red zones around them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import given, settings

from tests.ops.ascend_emulator import Emulator
from tests.ops.cases import STRATEGIES
from tests.ops.fixed import FIXED
from tests.ops.oracle import Case


def main(library: Path) -> None:
    """A finding ends the process."""
    emulator = Emulator(library)
    for op, strategy in STRATEGIES.items():
        for case in FIXED[op]:
            case.check(emulator)

        # a case of a whole batch takes as long as three of the others
        examples = 8 if op.startswith("hstu") else 25

        @settings(deadline=None, derandomize=True, max_examples=examples, database=None)
        @given(case=strategy)
        def check(case: Case) -> None:
            case.check(emulator)

        check()
    sys.stdout.write("clean\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
