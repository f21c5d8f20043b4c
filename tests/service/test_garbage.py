"""A model that was swapped out is gone at once, also in a process whose imports are frozen."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

from npu_gr.core.garbage import freeze_imports
from tests.service.test_reload import File, gone
from tests.serving import serving


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
