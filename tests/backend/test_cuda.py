"""The CUDA backend's streams on a fake device: copies follow their thread's work, without waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from npu_gr.backend.cuda import CUDABackend
from npu_gr.core.errors import ConfigError


class Recorder:
    """What of torch.cuda the backend uses; every call is noted with the stream that was current."""

    device = torch.device("cpu")

    def __init__(self, is_there: bool = True) -> None:
        self.calls: list[tuple[str, str]] = []
        self.current, self._is_there, self._made = "default", is_there, 0

    def is_available(self) -> bool:
        return self._is_there

    CUDAGraph = None

    def graph_pool_handle(self) -> int:
        return 0

    def set_device(self, device: torch.device) -> None:
        assert device is self.device

    def current_stream(self) -> Any:
        return _Stream(self, self.current)

    def Stream(self) -> Any:  # noqa: N802
        self._made += 1
        return _Stream(self, f"stream {self._made}")

    def Event(self) -> Any:  # noqa: N802
        return _Event(self)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before


class _Stream:
    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self.name = recorder, name

    def wait_event(self, event: _Event) -> None:
        self._recorder.calls.append((f"{self.name} waits for {event.on}", self._recorder.current))

    def synchronize(self) -> None:
        self._recorder.calls.append((f"host waits for {self.name}", self._recorder.current))


class _Event:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def record(self, stream: _Stream) -> None:
        self.on = stream.name
        self._recorder.calls.append((f"event on {stream.name}", self._recorder.current))

    def synchronize(self) -> None:
        self._recorder.calls.append(("host waits for the event", self._recorder.current))


def test_a_copy_runs_in_parallel_with_kernels_and_after_what_it_reads() -> None:
    cuda = Recorder()
    backend = CUDABackend(cuda)
    with backend.stream():
        cuda.calls.append(("compute", cuda.current))
        wait = backend.copy(lambda: cuda.calls.append(("copy", cuda.current)))
        assert cuda.current == "stream 2"
        backend.synchronize()
    wait()
    assert cuda.calls == [
        ("event on default", "default"),
        ("stream 2 waits for default", "default"),  # the weights are there before a thread computes
        ("compute", "stream 2"),
        ("event on stream 2", "stream 2"),
        ("stream 1 waits for stream 2", "stream 2"),
        ("copy", "stream 1"),
        ("event on stream 1", "stream 2"),
        ("host waits for stream 2", "stream 2"),
        ("host waits for the event", "default"),
    ]


def test_without_a_device_it_says_so() -> None:
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        CUDABackend(Recorder(is_there=False))
