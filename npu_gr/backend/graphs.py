"""Device graphs, CUDA's and Ascend's alike: many small launches are captured once a shape and replayed by one launch.

A thread captures for itself, on its own stream. Its graphs share the buffers that they read and one
pool of memory, where the scratch of one may be the result of another: a result is good until the
thread's next call, no longer. A new graph is replayed and compared before it is used; one that
cannot be captured, or gives something else, is never tried again. All graphs of an owner go when it
does: its memory, which they know by address, is another's then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

Work = Callable[..., tuple[Tensor, ...]]
Signature = tuple[tuple[tuple[int, ...], torch.dtype], ...]  # of the inputs
MAX_GRAPHS = 512  # of a thread
BUCKETS = (32, 64, 128, 256, 512, 1024)  # rows

_capturing = threading.Lock()  # one capture at a time in a process


class _Captured:
    """A graph and what it writes."""

    def __init__(self, graph: Any, outputs: tuple[Tensor, ...]) -> None:
        self.graph = graph
        self.outputs = outputs


class Graphs(threading.local):
    """The graphs of this thread."""

    def __init__(
        self, runtime: Any, make: Callable[[], Any], fell_back: Callable[[str, str], None]
    ) -> None:
        """Share one memory pool among the graphs of this thread.

        Args:
            runtime: torch.cuda or torch.npu.
            make: makes an empty graph of that runtime.
            fell_back: counts and logs what runs without a graph.
        """
        self._runtime = runtime
        self._make = make
        self._fell_back = fell_back
        self._pool = runtime.graph_pool_handle()
        self._inputs: dict[Signature, tuple[Tensor, ...]] = {}
        # owner -> work and signature -> graph; None = without
        self._of: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def row_wise(
        self, owner: Any, what: Hashable, work: Work, rows: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Replay the graph of the next larger bucket.

        Rows beyond the given ones hold values of an earlier call.
        """
        count = len(rows[0])
        bucket = next((bucket for bucket in BUCKETS if bucket >= count), None)
        if bucket is None:
            return work(*rows)
        return tuple(out[:count] for out in self.run(owner, what, work, rows, bucket))

    def run(
        self,
        owner: Any,
        what: Hashable,
        work: Work,
        inputs: Sequence[Tensor],
        num_rows: int | None = None,
    ) -> tuple[Tensor, ...]:
        """Compute work(*inputs) by its graph, or directly where it cannot be captured.

        Args:
            owner: the object whose memory the work reads beside the inputs; with `what` it names
                the work.
            what: everything else that the launches depend on.
            work: launches only: no wait, no shape that depends on values.
            inputs: all on the device.
            num_rows: of each static input, at least the rows given; None = as many.
        """
        shapes = ((num_rows or len(x), *x.shape[1:]) for x in inputs)
        signature = tuple(zip(shapes, (x.dtype for x in inputs), strict=True))
        known = self._of.setdefault(owner, {})
        key = what, signature
        if key not in known and sum(map(len, self._of.values())) >= MAX_GRAPHS:
            known[key] = None
        if key in known and known[key] is None:
            return work(*inputs)
        with torch.inference_mode():
            static = self._static(signature, inputs)
            if key not in known:
                known[key] = self._capture(work, static)
            if known[key] is None:
                return work(*inputs)
            known[key].graph.replay()
            outputs: tuple[Tensor, ...] = known[key].outputs
            return outputs

    def _static(self, signature: Signature, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if signature not in self._inputs:
            pairs = zip(signature, inputs, strict=True)
            self._inputs[signature] = tuple(x.new_zeros(shape) for (shape, _), x in pairs)
        static = self._inputs[signature]
        for own, given in zip(static, inputs, strict=True):
            own[: len(given)].copy_(given)
        return static

    def _capture(self, work: Work, static: tuple[Tensor, ...]) -> _Captured | None:
        want = work(*static)  # libraries make their workspaces at a first run
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
            self._fell_back("graphs", f"one could not be captured: {error}")
            return None
        graph.replay()
        if not all(map(_agree, outputs, want)):
            self._fell_back("graphs", "one gives something else than its launches")
            return None
        return _Captured(graph, outputs)


def _agree(got: Tensor, want: Tensor) -> bool:
    """Compare: integers exactly, fractions to 1 %, because a library may sum in another order while it is captured."""
    if not want.is_floating_point():
        return torch.equal(got, want)
    largest = float(want.nan_to_num(0.0, 0.0, 0.0).abs().amax()) if want.numel() else 0.0
    return torch.allclose(got, want, rtol=0.0, atol=largest / 100, equal_nan=True)
