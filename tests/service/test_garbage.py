"""A model that was swapped out is gone at once, also in a process whose imports are frozen."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path

from npu_gr.core.process import freeze_imports
from tests.service.test_reload import File, gone
from tests.serving import serving

CODE = """
import asyncio, gc, sys
from pathlib import Path
import npu_gr.service.app
from npu_gr.core.process import freeze_imports
from tests.service.test_reload import File
from tests.serving import serving

async def work():
    folder = Path(sys.argv[1])
    file = File(folder)
    file.add("a", 1)
    file.use("a")
    freeze_imports()
    async with serving(folder, read=file.read, **file.sections):
        print(len(gc.get_objects()), gc.get_freeze_count())

asyncio.run(work())
"""


def test_of_an_instance_that_is_ready_the_collector_looks_at_little(tmp_path: Path) -> None:
    """No large module is imported after start: 130,000 objects take 65 ms per full collection."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, tmp_path], capture_output=True, text=True, check=True
    )
    looked_at, frozen = map(int, done.stdout.split())
    assert looked_at < 30_000
    assert frozen > 100_000


async def test_old_weights_are_freed_by_the_swap(tmp_path: Path) -> None:
    thresholds = gc.get_threshold()
    file = File(tmp_path)
    file.add("a", 1)
    file.add("b", 2)
    file.use("a")
    freeze_imports()
    try:
        gc.set_threshold(0)  # nothing is collected by itself
        async with serving(tmp_path, read=file.read, **file.sections) as (client, service):
            frozen = gc.get_freeze_count()
            for name in ("b", "a"):
                old: list[weakref.ref[object]] = [
                    weakref.ref(service.versions.ranker().engine),
                    weakref.ref(service.versions.ranker().relay),
                ]
                file.use(name)
                async with client.post("/v1/models/reload") as response:
                    assert response.status == 200
                await gone(client)
                assert [one() for one in old] == [None, None]
            assert gc.get_freeze_count() <= frozen  # a frozen version would stay for ever
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
