"""Every collection is counted with its generation, and none after the block."""

from __future__ import annotations

import gc

from npu_gr.metrics.registry.process import noted_pauses


def test_pauses_are_noted_and_handed_over_once() -> None:
    seen: list[tuple[int, float]] = []
    callbacks = len(gc.callbacks)
    with noted_pauses(lambda generation, seconds: seen.append((generation, seconds))) as drain:
        gc.collect(0)
        gc.collect(2)
        assert not seen  # nothing is counted inside a collection
        drain()
        noted = [generation for generation, _ in seen]
        assert noted.count(2) >= 1
        assert noted.count(0) >= 1
        assert all(0 <= seconds < 60 for _, seconds in seen)
        before = len(seen)
        gc.disable()
        try:
            drain()
        finally:
            gc.enable()
    assert len(gc.callbacks) == callbacks
    assert len(seen) - before <= 2  # those that came by themselves
