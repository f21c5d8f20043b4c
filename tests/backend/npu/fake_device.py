"""A fake of `torch.npu` and `torch.cuda` over CPU tensors; it records calls and checks their order.

Every launch stands in the stream that is current on its thread. A launch comes after another if the
stream, an event or a wait of the host orders them; `races` are launches on one storage, one of them
a write, that nothing orders. `host_waits` are the calls that would stop the host until the device
is done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from npu_gr.backend.npu.device import Npu

Cell = tuple[int, int]  # storage, number
Clock = dict[int, int]  # stream -> how many of its launches have come before

WAITING_METHODS = {
    "item",
    "tolist",
    "numpy",
    "cpu",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
}
WAITING_OPS = {"_local_scalar_dense", "nonzero", "masked_select", "repeat_interleave", "_unique2"}


def merged(*clocks: Clock) -> Clock:
    return {s: max(c.get(s, 0) for c in clocks) for clock in clocks for s in clock}


class Launch(NamedTuple):
    name: str
    stream: int
    at: int
    thread: int


class FakeStream:
    def __init__(self, npu: FakeRuntime) -> None:
        self.npu, self.index = npu, len(npu.streams)
        self.clock: Clock = {self.index: 0}
        npu.streams.append(self)

    def wait_event(self, event: FakeEvent) -> None:
        self.npu.calls.append(("wait_event", self.index))
        self.clock = merged(self.clock, event.clock)

    def wait_stream(self, other: FakeStream) -> None:
        self.npu.calls.append(("wait_stream", self.index))
        self.clock = merged(self.clock, other.clock)

    def synchronize(self) -> None:
        self.npu.calls.append(("stream.synchronize", self.index))
        self.npu.host_waited("stream.synchronize", self.clock)


class FakeEvent:
    def __init__(self, npu: FakeRuntime) -> None:
        self.npu, self.clock = npu, Clock()

    def record(self, stream: FakeStream) -> None:
        self.npu.calls.append(("record", stream.index))
        self.clock = dict(stream.clock)

    def synchronize(self) -> None:
        self.npu.calls.append(("event.synchronize", -1))
        self.npu.host_waited("event.synchronize", self.clock)


class FakeGraph:
    """Replay the captured launches, and overwrite what other graphs of the pool have written."""

    def __init__(self, npu: FakeRuntime) -> None:
        self.npu = npu
        self.launches: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.memory: dict[int, torch.UntypedStorage] = {}

    def add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self.launches.append((func, args, kwargs, out))
        given, made = _storages((args, kwargs)), _storages(out)
        self.memory |= {key: storage for key, storage in made.items() if key not in given}

    def replay(self) -> None:
        self.npu.calls.append(("replay", self.npu.current_stream().index))
        for other in self.npu.graphs[threading.get_ident()]:
            if other is not self:
                for storage in other.memory.values():
                    cast("Any", storage).fill_(255)  # NaN, -1
        for func, args, kwargs, out in self.launches:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class FakeRuntime:
    """`torch.npu` and `torch.cuda`, as much of them as is used."""

    device = torch.device("cpu")

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self.streams: list[FakeStream] = []
        self.calls: list[tuple[str, int]] = []
        self.races: list[tuple[Launch, Launch]] = []
        self.host_waits: list[str] = []
        self.graphs: dict[int, list[FakeGraph]] = {}  # of each pool
        self.uploads: list[bool] = []  # was the host side page-locked
        self.pinned_bytes = 0  # allocated page-locked
        self.capture_fails = self.capture_lies = False
        self._host = Clock()
        self._touched: dict[Cell, list[tuple[Launch, bool]]] = {}
        self._watched: dict[int, np.ndarray[Any, np.dtype[np.int64]]] = {}
        self._local, self._lock = threading.local(), threading.RLock()
        self.default = FakeStream(self)

    def as_npu(self, soc: str = "Ascend910B1") -> Npu:
        # its Stream is a method, a module's is a class
        return Npu(cast("Any", self), torch.device("cpu"), soc, "0.0")

    # ---- what torch.npu and torch.cuda have

    def Stream(self) -> FakeStream:  # noqa: N802
        return FakeStream(self)

    def Event(self) -> FakeEvent:  # noqa: N802
        return FakeEvent(self)

    def NPUGraph(self) -> FakeGraph:  # noqa: N802
        return FakeGraph(self)

    CUDAGraph = NPUGraph

    def graph_pool_handle(self) -> int:
        return threading.get_ident()

    def synchronize(self) -> None:
        self.calls.append(("synchronize", -1))
        self.host_waited("synchronize", merged(*(stream.clock for stream in self.streams)))

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 1 << 36, 1 << 36

    def memory_allocated(self, device: torch.device) -> int:
        return 0

    memory_reserved = memory_allocated

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def current_device(self) -> int:
        return 0

    def set_device(self, device: torch.device) -> None:
        self._local.has_device = True

    def get_device_name(self, device: int) -> str:
        return "Ascend910B1"

    def current_stream(self) -> FakeStream:
        return getattr(self._local, "stream", self.default)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream()
        self._local.stream = stream
        with ExitStack() as modes:
            if not getattr(self._local, "is_recording", False):
                modes.enter_context(self.recording())
            yield
        self._local.stream = before

    @contextmanager
    def graph(
        self, graph: FakeGraph, pool: int, stream: FakeStream, capture_error_mode: str
    ) -> Iterator[None]:
        assert pool == threading.get_ident(), "a thread's graphs share its own memory"
        assert stream is self.current_stream()
        if self.capture_fails:
            raise RuntimeError("error 107030")
        self.graphs.setdefault(pool, []).append(graph)
        self._local.capturing = graph
        try:
            yield
        finally:
            self._local.capturing = None
            if self.capture_lies:
                graph.launches.clear()
                graph.launches.append((_spoil, tuple(self.last_outputs), {}, None))

    # ---- recording

    @contextmanager
    def recording(self) -> Iterator[None]:
        """This thread's calls are seen."""
        self._local.is_recording = True
        try:
            with _Calls(self), _Launches(self):
                yield
        finally:
            self._local.is_recording = False

    def host_waited(self, what: str, clock: Clock) -> None:
        with self._lock:
            self.host_waits.append(what)
            self._host = merged(self._host, clock)

    def launched(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.split("::")[1]
        if name in WAITING_OPS:
            self.host_waited(name, self.current_stream().clock)
        out = func(*args, **kwargs)
        graph = getattr(self._local, "capturing", None)
        if graph is not None:
            graph.add(func, args, kwargs, out)
            self.last_outputs = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if isinstance(value, torch.Tensor)
            and argument.alias_info is not None
            and argument.alias_info.is_write
        ]
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        with self._lock:
            stream = self.current_stream()
            stream.clock = merged(stream.clock, self._host)
            stream.clock[stream.index] += 1
            launch = Launch(name, stream.index, stream.clock[stream.index], threading.get_ident())
            if written or not _is_view(func):
                changed = {cell for x in written for cell in self._cells(x)}
                for cell in changed.union(*(self._cells(x) for x in read)):
                    self._order(launch, cell, cell in changed, stream.clock)
        return out

    def watch(self, plane: torch.Tensor, cell_numbers: int) -> None:
        """Check the order of accesses to this tensor, which streams share, cell by cell."""
        self._watched[plane.untyped_storage()._cdata] = np.arange(plane.numel()) // cell_numbers

    def _cells(self, x: torch.Tensor) -> set[Cell]:
        storage = x.untyped_storage()._cdata
        if storage not in self._watched:
            return set()
        cells = self._watched[storage][x.storage_offset() :]
        strides = [stride * cells.itemsize for stride in x.stride()]
        return {
            (storage, int(cell)) for cell in np.unique(as_strided(cells, tuple(x.shape), strides))
        }

    def _order(self, launch: Launch, cell: Cell, is_write: bool, clock: Clock) -> None:
        seen = self._touched.setdefault(cell, [])
        for before, was_write in seen:
            if (is_write or was_write) and clock.get(before.stream, 0) < before.at:
                self.races.append((before, launch))
        seen.append((launch, is_write))


def _storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    found = (x.untyped_storage() for x in tree_leaves(tree) if isinstance(x, torch.Tensor))
    return {storage._cdata: storage for storage in found}


def _spoil(*outputs: torch.Tensor) -> None:
    for out in outputs:
        out.add_(1)


def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


class _Launches(TorchDispatchMode):
    def __init__(self, npu: FakeRuntime) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.npu = npu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.npu.launched(func, args, kwargs or {})


class _Calls(TorchFunctionMode):
    """Python calls that wait, or that pin, before they get as far as a launch."""

    def __init__(self, npu: FakeRuntime) -> None:
        super().__init__()
        self.npu = npu

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name == "pin_memory":
            return _Pinned.of(args[0])
        if name == "to" and isinstance(args[0], _Pinned):
            self.npu.uploads.append(bool(kwargs.get("non_blocking")))
            return args[0].plain.clone()
        if kwargs.pop("pin_memory", False):
            out = func(*args, **kwargs)
            self.npu.pinned_bytes += out.nbytes
            return out
        fetches = name == "to" and any(str(a) == "cpu" for a in (*args[1:], kwargs.get("device")))
        if name in WAITING_METHODS or fetches:
            self.npu.host_waited(name, self.npu.current_stream().clock)
        return func(*args, **kwargs)


class _Pinned(torch.Tensor):
    """What pin_memory gives, until it is uploaded."""

    plain: torch.Tensor

    @classmethod
    def of(cls, plain: torch.Tensor) -> _Pinned:
        made = plain.as_subclass(cls)
        made.plain = plain
        return made
