"""Device graphs of CUDA and Ascend: many small launches, captured once a shape, become one launch.

Each thread captures its own graphs, on its own stream. They share input buffers and one memory
pool, in which the scratch of one graph may overwrite the result of another: a result is valid until
the thread's next call. A new graph is replayed and compared before it is used; if the capture fails
or the results differ, it is never tried again. When an owner is freed, its graphs are dropped: they
hold addresses of its memory. At `MAX_GRAPHS` the least recently used graph is dropped.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from npu_gr.core.health import compiles

Work = Callable[..., tuple[Tensor, ...]]
Signature = tuple[tuple[tuple[int, ...], torch.dtype], ...]  # shape and dtype of each input
MAX_GRAPHS = 512  # per thread
OUTCOMES = ("replayed", "captured", "launched", "dropped")  # launched: it ran without a graph
BUCKETS = (32, 64, 128, 256, 512, 1024)  # rows

_capturing = threading.Lock()  # one capture at a time in a process


class _Captured:
    """A graph and its output tensors."""

    def __init__(self, graph: Any, outputs: tuple[Tensor, ...]) -> None:
        self.graph = graph
        self.outputs = outputs
        self.used = 0  # number of the thread's call that used it last


class Graphs(threading.local):
    """The graphs of this thread."""

    def __init__(
        self,
        runtime: Any,
        make: Callable[[], Any],
        fell_back: Callable[[str, str], None],
        counted: Callable[[str], None] = lambda _outcome: None,
        padded: Callable[[str, int, int], None] = lambda _of, _used, _size: None,
    ) -> None:
        """Share one memory pool among the graphs of this thread.

        Args:
            runtime: torch.cuda or torch.npu.
            make: Constructor of an empty graph of that runtime.
            fell_back: Callback (op, reason) for work that runs without a graph.
            counted: Callback with the outcome of each call, one of `OUTCOMES`.
            padded: Callback (what, how many, with padding) with the sizes of each padded call:
                "rows", or "scores", which are rows x keys of an HSTU pass.
        """
        self._runtime = runtime
        self._make = make
        self._fell_back = fell_back
        self.counted = counted
        self.padded = padded
        self._calls = itertools.count(1)
        self._pool = runtime.graph_pool_handle()
        self._inputs: dict[Signature, tuple[Tensor, ...]] = {}
        # owner -> (what, signature) -> graph; None = run without a graph
        self._of: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def row_wise(
        self, owner: Any, what: Hashable, work: Work, rows: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Replay the graph of the next larger bucket of rows; padding rows have stale values."""
        count = len(rows[0])
        bucket = next((bucket for bucket in BUCKETS if bucket >= count), None)
        if bucket is None:
            self.counted("launched")
            return work(*rows)
        self.padded("rows", count, bucket)
        return tuple(out[:count] for out in self.run(owner, what, work, rows, bucket))

    def run(
        self,
        owner: Any,
        what: Hashable,
        work: Work,
        inputs: Sequence[Tensor],
        num_rows: int | None = None,
    ) -> tuple[Tensor, ...]:
        """Compute work(*inputs) by its graph, or directly if it cannot be captured.

        Args:
            owner: Object whose memory the work reads in addition to the inputs; part of the key.
            what: Everything else that the launches depend on; part of the key.
            work: Launches only: no wait, no shape that depends on values.
            inputs: Tensors on the device.
            num_rows: Rows of the captured inputs, at least those given; None = as given.
        """
        shapes = ((num_rows or len(x), *x.shape[1:]) for x in inputs)
        signature = tuple(zip(shapes, (x.dtype for x in inputs), strict=True))
        known = self._of.setdefault(owner, {})
        key = what, signature
        if key in known and known[key] is None:
            self.counted("launched")
            return work(*inputs)
        with torch.inference_mode():
            static = self._static(signature, inputs)
            if key in known:
                self.counted("replayed")
            else:
                self._make_room()
                known[key] = self._capture(work, static)
                self.counted("captured" if known[key] else "launched")
            if known[key] is None:
                return work(*inputs)
            known[key].used = next(self._calls)
            known[key].graph.replay()
            outputs: tuple[Tensor, ...] = known[key].outputs
            return outputs

    def _make_room(self) -> None:
        """Drop the least recently used graph if there are as many as may be."""
        held = [
            (graph.used, known, key)
            for known in self._of.values()
            for key, graph in known.items()
            if graph is not None
        ]
        if len(held) >= MAX_GRAPHS:
            _, known, key = min(held, key=lambda each: each[0])
            self._runtime.current_stream().synchronize()  # the device may still replay it
            del known[key]
            self.counted("dropped")

    def _static(self, signature: Signature, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if signature not in self._inputs:
            pairs = zip(signature, inputs, strict=True)
            self._inputs[signature] = tuple(x.new_zeros(shape) for (shape, _), x in pairs)
        static = self._inputs[signature]
        for own, given in zip(static, inputs, strict=True):
            own[: len(given)].copy_(given)
        return static

    def _capture(self, work: Work, static: tuple[Tensor, ...]) -> _Captured | None:
        compiles()
        want = work(*static)  # libraries allocate their workspaces in the first run
        graph = self._make()
        stream = self._runtime.current_stream()
        try:
            with (
                _capturing,
                self._runtime.graph(
                    graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
                ),
            ):
                outputs = work(*static)
        except RuntimeError as error:
            self._fell_back("graphs", f"a graph could not be captured: {error}")
            return None
        graph.replay()
        if not all(map(_agree, outputs, want)):
            self._fell_back("graphs", "a graph's results differ from those of its launches")
            return None
        return _Captured(graph, outputs)


def _agree(got: Tensor, want: Tensor) -> bool:
    """Compare integers exactly, floats to 1 %: in a capture, libraries may sum in another order."""
    if not want.is_floating_point():
        return torch.equal(got, want)
    largest = float(want.nan_to_num(0.0, 0.0, 0.0).abs().amax()) if want.numel() else 0.0
    return torch.allclose(got, want, rtol=0.0, atol=largest / 100, equal_nan=True)
