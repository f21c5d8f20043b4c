"""`npu-gr` with a device that hangs or spoils its KV while a file says so.

    python -m tests.chaos.hurt serve --config FILE

Files in the folder of the variable HURT: `hang` holds every pass, `spoil` changes the cached KV
that a pass reads, `disk` holds every write of the history store.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from npu_gr.cli.main import main
from npu_gr.core.process import set_up_process


def patch(folder: Path) -> None:
    """Let the files in a folder hurt the passes of every ranker."""
    from npu_gr.engine.rank_engine import RankEngine, RankPass
    from npu_gr.history_store.embedded import GroupWriter

    forward = RankEngine.forward

    def hurt(engine: RankEngine, passes: Sequence[RankPass]) -> Any:
        while (folder / "hang").exists():
            time.sleep(0.01)
        if (folder / "spoil").exists():
            keys = engine.arena._keys[0]
            for one in passes:
                for first, num in () if one.cached is None else one.cached.runs:
                    keys[:, first : first + num] *= 1.5
        return forward(engine, passes)

    RankEngine.forward = hurt  # type: ignore[method-assign,assignment]
    commit = GroupWriter._commit

    def hangs(writer: GroupWriter, group: Sequence[Any]) -> None:
        while (folder / "disk").exists():
            time.sleep(0.01)
        commit(writer, group)

    GroupWriter._commit = hangs  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    set_up_process()
    patch(Path(os.environ["HURT"]))
    main()
