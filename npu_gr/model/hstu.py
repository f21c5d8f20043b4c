"""The HSTU ranker: one forward pass for prefill, append, cached rank and full inference.

A *segment* is one request's rows: new history tokens after p cached ones, then candidates. A batch
is a list of segments. Prefill is a segment without candidates, full inference one without a past,
so cold and cached scores come from the same lines of code. `hstu_layer.py` runs the layers op by
op; `FusedForwardCalls` runs them with the backend's fused kernels, if it has any. `hstu_input.py`
has the weights, and the input rows of segments.

A model with `retrieval` also predicts the next item. NEXT is a candidate without an item: item row
`num_items`, one past the last. Its final row becomes the user vector u, and the retrieval score of
item i is u . e_i, where e_i is the item's input embedding.

Source: HSTU and M-FALCON, arXiv:2402.17152; exactness rules E1 to E9 of `docs/exactness.md`.
Invariants: history rows never depend on candidates or on later history; candidates never see each
other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from npu_gr.backend.base import Affine, Backend, HstuPass
from npu_gr.backend.calls import (
    FusedForwardCall,
    HstuFindCall,
    HstuFound,
    HstuHead,
    HstuLayerCall,
    HstuLayerWeights,
    HstuPassCall,
    HstuSegment,
    HstuWeights,
)
from npu_gr.backend.torch_ops import TorchOps
from npu_gr.core.arrays import F32
from npu_gr.model.config import HSTUConfig
from npu_gr.model.hstu_input import HSTUWeights, InputRows
from npu_gr.model.hstu_layer import HSTULayer, Segment, run_by_segments, window_of

_TORCH = TorchOps()  # differentiable, for training


class HSTU(HSTUWeights):
    """The ranker's weights and its forward pass."""

    def __init__(self, config: HSTUConfig, *, has_item_rows: bool = True) -> None:
        super().__init__(config, has_item_rows=has_item_rows)
        self._rows = InputRows(self)
        self.fused = FusedForwardCalls(self, self._rows, self._answer)

    @torch.inference_mode()
    def forward(self, backend: Backend, segments: Sequence[Segment]) -> list[Tensor]:
        """Score every segment's candidates; pass every segment's new keys and values to its sink.

        Returns:
            Per segment [c, tasks] logits in fp32 (fp64 for an fp64 model), in candidate order; for
            a NEXT segment u [1, dim].
        """
        if self.config.head == "dot":
            return self._dot_products(backend, segments)
        return self._through_layers(backend, segments)

    def _dot_products(self, backend: Backend, segments: Sequence[Segment]) -> list[Tensor]:
        """Multiply each last event's final row with the candidates' rows.

        Without an event every product is 0.
        """
        known = [s.queried_by_last_event() for s in segments if len(s.items)]
        found = iter(self._through_layers(backend, known) if known else [])
        answers = []
        for s in segments:
            nothing = self.action.weight.new_zeros(1, self.config.dim, dtype=self.residual_dtype)
            u = next(found) if len(s.items) else nothing
            if not s.is_next:
                items = self.items.rows(s.candidates)
                u = (self.items.compared(items) * u).sum(1, keepdim=True)
            answers.append(u)
        return answers

    def _through_layers(self, backend: Backend, segments: Sequence[Segment]) -> list[Tensor]:
        batch = batch_on_host(self.config, segments)
        if batch is not None:
            kinds = {s.is_next for s in segments}
            is_next = None if len(kinds) > 1 else kinds == {True}
            if (answers := self.fused.run(backend, batch, is_next, lambda: segments)) is not None:
                return [torch.from_numpy(own) for own in answers]
        x = self._rows.of(segments, backend)
        kernels = None
        if batch is not None:
            kernels = fused_layers(self.config, self.attention_scale, self.dtype, backend, batch)
        if kernels is not None:
            rows = kernels.run(
                self, partial(run_fused_layers, self.each_layer(), self.config.dim, backend), x
            )
            parts = rows.split([len(s.candidates) for s in segments])
            return [self._answer(s, own, backend) for s, own in zip(segments, parts, strict=True)]
        rows_of = run_by_segments(
            self.each_layer(), self.config, self.attention_scale, backend, segments, x
        )
        return [self._answer(s, own, backend) for s, own in zip(segments, rows_of, strict=True)]

    def _answer(self, segment: Segment, own: Tensor, backend: Backend) -> Tensor:
        if segment.is_next:
            return self.user_vectors(own, backend)
        if self.config.head_periods:
            own = self.clock(own, torch.full_like(segment.candidates, segment.candidate_time))
        candidate_rows = (
            self.candidate(segment.candidates).to(own.dtype)
            if self.config.head == "product"
            else None
        )
        return self.task_logits(own, backend, candidate_rows)

    def task_logits(
        self, x: Tensor, ops: Affine = _TORCH, candidate_rows: Tensor | None = None
    ) -> Tensor:
        """Compute logits by the MLP.

        Args:
            x: [..., dim] final candidate rows, with the request's time mixed in.
            ops: Computes the linear layers.
            candidate_rows: [..., dim] factors of a model with head `product`.

        Returns:
            [..., tasks], fp32 or fp64.
        """
        hidden, middle, out = self.head
        assert isinstance(hidden, nn.Linear)
        assert isinstance(out, nn.Linear)
        is_silu = self.config.head_activation == "silu"
        normed = self.norm_head(x)
        if candidate_rows is not None:
            normed = normed * candidate_rows
        wide = ops.affine(normed, hidden, 0, hidden.out_features, is_silu)
        logits = ops.affine(wide if is_silu else middle(wide), out, 0, out.out_features, False)
        return logits if self.config.head_scale == 1.0 else logits * self.config.head_scale

    def user_vectors(self, x: Tensor, ops: Affine = _TORCH) -> Tensor:
        """Compute u of final rows: [..., dim] -> [..., dim], fp32 or fp64. Only with `retrieval`.

        The rows are those of NEXT, or of the last events with head `dot`.
        """
        if self.config.head == "dot":
            scaled: Tensor = self.norm_head(x) * self.config.head_scale
            return scaled
        return ops.affine(self.norm_next(x), self.vector, 0, self.config.dim, False)


def batch_on_host(config: HSTUConfig, segments: Sequence[Segment]) -> list[HstuSegment] | None:
    """Describe a batch to fused kernels; None = they do not support the model or a segment.

    The kernels need the tokens' times and pages on the host.
    """
    if not config.has_plain_passes:
        return None
    batch = []
    for s in segments:
        if s.host is None:
            return None
        times, pages, ids = s.host
        new = s.times.shape[0]  # len() of a tensor takes ten times as long
        own = s.candidates.shape[0]
        cached = len(times) - new
        keeps, gap = s.sink is not None, (s.gap_at, s.gap)
        batch.append(
            HstuSegment(
                cached, new, own, times, s.candidate_time, pages, keeps, ids, *gap, s.stored
            )
        )
    return batch


def weights_of(
    layers: Sequence[HSTULayer], heads: Mapping[str, HstuHead], config: HSTUConfig, scale: float
) -> HstuWeights:
    """Collect the weights that fused kernels read, of a model with plain passes."""
    read = []
    for layer in layers:
        assert isinstance(layer.norm_attention, nn.LayerNorm)
        read.append(
            HstuLayerWeights(layer.norm_in, layer.uvqk, layer.bias, layer.norm_attention, layer.out)
        )
    return HstuWeights(
        read,
        heads,
        config.num_heads,
        config.qk_dim,
        config.v_dim,
        config.attention_alpha,
        scale,
        config.activation == "uvqk",
        config.residual == "concat",
        window_of(config),
    )


def fused_layers(
    config: HSTUConfig,
    scale_of: Callable[[int], float],
    dtype: torch.dtype,
    backend: Backend,
    rows: Sequence[HstuSegment],
) -> HstuPass | None:
    """Ask the backend for fused kernels of whole layers; None = run the layers op by op."""
    scales = {scale_of(len(row.times)) for row in rows}
    if len(scales) != 1 or config.attention_window_tokens or rows[0].stored:
        return None
    return backend.hstu_pass(
        HstuPassCall(
            rows,
            config.num_heads,
            config.qk_dim,
            config.v_dim,
            dtype,
            config.attention_alpha,
            scales.pop(),
            config.activation == "uvqk",
            "head" if config.norm == "group" else "row",
            config.residual == "concat",
        )
    )


def run_fused_layers(
    layers: Sequence[HSTULayer], dim: int, backend: Backend, kernels: HstuPass, x: Tensor
) -> Tensor:
    """Run all layers: [rows, dim] of all segments -> [c, dim] of all candidates, then padding."""
    for index, layer in enumerate(layers):
        is_last = index == len(layers) - 1
        assert isinstance(layer.norm_attention, nn.LayerNorm)
        mixed = backend.affine(layer.norm_in(x), layer.uvqk, 0, sum(layer.widths), False)
        gated = kernels.mix(HstuLayerCall(index, mixed, layer.bias, layer.norm_attention, is_last))
        if gated is None:
            return x[:0]
        x = kernels.candidates(x) if is_last else x
        out = backend.affine(gated[: len(x)], layer.out, 0, dim, False)
        x = x + out  # in the wider dtype, in one launch
    return x


class FusedForwardCalls:
    """Runs a forward pass as one call of the backend, if it has a kernel of the whole pass."""

    def __init__(
        self,
        model: HSTUWeights,
        rows: InputRows,
        answer: Callable[[Segment, Tensor, Backend], Tensor],
    ) -> None:
        """Prepare the calls of one model.

        Args:
            model: Weights of the model.
            rows: Input rows for a kernel that cannot embed tokens.
            answer: Function from a segment's final rows to its logits or u, for a kernel that
                cannot compute them.
        """
        self._model = model
        self._rows = rows
        self._answer = answer
        config = model.config
        self._has_one_scale = config.scaling == "constant"  # the same for all requests
        self._has_plain_head = config.has_plain_head
        self._has_plain_tokens = config.has_plain_tokens

    def run(
        self,
        backend: Backend,
        batch: Sequence[HstuSegment],
        is_next: bool | None,
        segments: Callable[[], Sequence[Segment]],
    ) -> list[F32] | None:
        """Run `forward` as one call of the backend. Requires `config.has_plain_passes`.

        Args:
            backend: Backend with the kernel.
            batch: The batch, described on the host.
            is_next: True: every segment is NEXT; False: none is; None: some are.
            segments: Function that makes the same batch as tensors, for a kernel that supports
                only a part of the pass; most passes do not call it.

        Returns:
            The results of `forward`, on the host; None = the backend has no such kernel for this
            model.
        """
        if not self._has_one_scale:
            return None
        answer = (
            "next" if is_next else "logits" if is_next is False and self._has_plain_head else "rows"
        )
        found = backend.fused_forward(self._call(backend, batch, segments, answer))
        if found is None:
            return None
        ends = itertools.accumulate(s.num_candidates for s in batch)
        parts = [found[end - s.num_candidates : end] for s, end in zip(batch, ends, strict=True)]
        if answer == "rows":
            with torch.inference_mode():
                rows = [torch.from_numpy(own) for own in parts]
                return [
                    self._answer(s, own, backend).float().numpy()
                    for s, own in zip(segments(), rows, strict=True)
                ]
        return parts

    def find(
        self,
        backend: Backend,
        batch: Sequence[HstuSegment],
        segments: Callable[[], Sequence[Segment]],
        search: Callable[[FusedForwardCall], HstuFindCall],
    ) -> HstuFound | None:
        """Retrieve items and score the requested ones, as one call of the backend.

        Args:
            backend, batch, segments: See `run`; every segment is NEXT.
            search: Extends the call of the NEXT pass by the retrieval.

        Returns:
            The items and scores; None = the backend has no such kernel for this model.
        """
        if not (self._has_plain_tokens and self._has_plain_head and self._has_one_scale):
            return None
        return backend.hstu_find(search(self._call(backend, batch, segments, "next")))

    def _call(
        self,
        backend: Backend,
        batch: Sequence[HstuSegment],
        segments: Callable[[], Sequence[Segment]],
        answer: str,
    ) -> FusedForwardCall:
        model = self._model
        table = model.items.table
        return FusedForwardCall(
            model,
            self._pass_weights,
            model.dtype if table is None else table.dtype,
            batch,
            None if table is None or not self._has_plain_tokens else (table, model.action.weight),
            partial(self._embedded, segments, backend),
            answer,
        )

    @torch.inference_mode()
    def _embedded(self, segments: Callable[[], Sequence[Segment]], ops: Affine) -> Tensor:
        return self._rows.of(segments(), ops)

    def _pass_weights(self) -> HstuWeights:
        model = self._model
        config = model.config
        heads = {}
        if config.has_plain_head:
            hidden, _, out = model.head
            assert isinstance(hidden, nn.Linear)
            assert isinstance(out, nn.Linear)
            assert isinstance(model.norm_head, nn.LayerNorm)
            heads["logits"] = HstuHead(model.norm_head, hidden, out)
        if config.has_next:
            heads["next"] = HstuHead(model.norm_next, None, model.vector)
        return weights_of(model.each_layer(), heads, config, model.attention_scale(0))
