"""The HSTU ranker: one forward pass for prefill, append, cached rank and full inference.

A *segment* is one request's rows: new history tokens after p cached ones, then candidates. A batch
is a list of segments. Prefill is a segment without candidates, full inference one without a past,
so cold and cached scores come from the same lines of code. `hstu_layer.py` runs the layers; where
the backend has kernels of whole passes or of whole layers, `FusedForwardCalls` describes the model
to them. `hstu_input.py` has the weights, and the rows of segments.

A model with `retrieval` also answers what comes next. NEXT is a candidate without an item: item row
`num_items`, one past the last. Its final row becomes the user vector u, and the retrieval score of
item i is u . e_i with the items' input embeddings e.

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
from npu_gr.model.hstu_layer import HSTULayer, Segment, run_by_segments

_TORCH = TorchOps()  # differentiable, for training


class HSTU(HSTUWeights):
    """The ranker's weights and its forward pass."""

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__(config)
        self._rows = InputRows(self)
        self.whole = FusedForwardCalls(self, self._rows, self._answer)

    @torch.inference_mode()
    def forward(self, backend: Backend, segments: Sequence[Segment]) -> list[Tensor]:
        """Score every segment's candidates; hand every segment's new keys and values to its sink.

        Returns:
            Per segment [c, tasks] logits in fp32 (fp64 for an fp64 model), in candidate order; for
            a NEXT segment u [1, dim].
        """
        if self.config.head == "dot":
            return self._by_last(backend, segments)
        return self._through_layers(backend, segments)

    def _by_last(self, backend: Backend, segments: Sequence[Segment]) -> list[Tensor]:
        """Multiply each last behaviour's row with the candidates' rows.

        Without a behaviour every product is 0.
        """
        known = [s.asking_by_last() for s in segments if len(s.items)]
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
        told = told_in_numbers(self.config, segments)
        if told is not None:
            kinds = {s.is_next for s in segments}
            is_next = None if len(kinds) > 1 else kinds == {True}
            if (answers := self.whole.run(backend, told, is_next, lambda: segments)) is not None:
                return [torch.from_numpy(own) for own in answers]
        x = self._rows.of(segments, backend)
        whole = None
        if told is not None:
            whole = whole_pass(self.config, self.attention_scale, self.dtype, backend, told)
        if whole is not None:
            rows = whole.run(
                self, partial(run_whole_layers, self.each_layer(), self.config.dim, backend), x
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
        beside = (
            self.candidate(segment.candidates).to(own.dtype)
            if self.config.head == "product"
            else None
        )
        return self.task_logits(own, backend, beside)

    def task_logits(self, x: Tensor, ops: Affine = _TORCH, beside: Tensor | None = None) -> Tensor:
        """Compute logits by the MLP.

        Args:
            x: [..., dim] final candidate rows; clocks are mixed in.
            ops: computes the linear layers.
            beside: [..., dim] rows of the candidates' own, of a model with head `product`.

        Returns:
            [..., tasks], fp32 or fp64.
        """
        hidden, middle, out = self.head
        assert isinstance(hidden, nn.Linear)
        assert isinstance(out, nn.Linear)
        is_silu = self.config.head_activation == "silu"
        normed = self.norm_head(x)
        wide = ops.affine(
            normed if beside is None else normed * beside, hidden, 0, hidden.out_features, is_silu
        )
        logits = ops.affine(wide if is_silu else middle(wide), out, 0, out.out_features, False)
        return logits if self.config.head_scale == 1.0 else logits * self.config.head_scale

    def user_vectors(self, x: Tensor, ops: Affine = _TORCH) -> Tensor:
        """[..., dim] final rows of NEXT, or of last behaviours -> [..., dim] u, fp32 or fp64.

        Only with `retrieval`.
        """
        if self.config.head == "dot":
            scaled: Tensor = self.norm_head(x) * self.config.head_scale
            return scaled
        return ops.affine(self.norm_next(x), self.vector, 0, self.config.dim, False)


def told_in_numbers(config: HSTUConfig, segments: Sequence[Segment]) -> list[HstuSegment] | None:
    """Describe a batch to kernels of whole layers; None = the model, or what its host knows, is not for them."""
    if not config.has_plain_passes:
        return None
    told = []
    for s in segments:
        if s.host is None:
            return None
        times, pages, ids = s.host
        new = s.times.shape[0]  # len() of a tensor takes ten times as long
        own = s.candidates.shape[0]
        cached = len(times) - new
        told.append(
            HstuSegment(cached, new, own, times, s.candidate_time, pages, s.sink is not None, ids)
        )
    return told


def weights_of(
    layers: Sequence[HSTULayer], heads: Mapping[str, HstuHead], config: HSTUConfig, scale: float
) -> HstuWeights:
    """Name what kernels of a whole pass read of a model with plain passes."""
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
    )


def whole_pass(
    config: HSTUConfig,
    scale_of: Callable[[int], float],
    dtype: torch.dtype,
    backend: Backend,
    rows: Sequence[HstuSegment],
) -> HstuPass | None:
    """Ask the backend for kernels of whole layers; None = layers go segment by segment."""
    scales = {scale_of(len(row.times)) for row in rows}
    if len(scales) != 1:
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


def run_whole_layers(
    layers: Sequence[HSTULayer], dim: int, backend: Backend, whole: HstuPass, x: Tensor
) -> Tensor:
    """Run all layers: [rows, dim] of all segments -> [c, dim] of all candidates, and rows that mean nothing."""
    for index, layer in enumerate(layers):
        is_last = index == len(layers) - 1
        assert isinstance(layer.norm_attention, nn.LayerNorm)
        mixed = backend.affine(layer.norm_in(x), layer.uvqk, 0, sum(layer.widths), False)
        gated = whole.mix(HstuLayerCall(index, mixed, layer.bias, layer.norm_attention, is_last))
        if gated is None:
            return x[:0]
        x = whole.candidates(x) if is_last else x
        out = backend.affine(gated[: len(x)], layer.out, 0, dim, False)
        x = x + out  # the sum has the wider dtype, in one launch
    return x


class FusedForwardCalls:
    """Runs a model with plain passes by one call of the backend, where it has kernels of whole passes."""

    def __init__(
        self,
        model: HSTUWeights,
        rows: InputRows,
        answer: Callable[[Segment, Tensor, Backend], Tensor],
    ) -> None:
        """Keep what such a call needs of the model.

        Args:
            model: its weights.
            rows: makes the rows where the backend cannot.
            answer: makes a segment's answer of its final rows where the backend cannot.
        """
        self._model = model
        self._rows = rows
        self._answer = answer
        config = model.config  # which does not change
        self._has_one_scale = config.scaling == "constant"  # for all requests
        self._has_plain_head = config.has_plain_head
        self._has_plain_tokens = config.has_plain_tokens

    def run(
        self,
        backend: Backend,
        told: Sequence[HstuSegment],
        is_next: bool | None,
        segments: Callable[[], Sequence[Segment]],
    ) -> list[F32] | None:
        """Compute what `forward` does by one call of the backend.

        Only where `config.has_plain_passes`.

        Args:
            backend: that computes.
            told: the batch.
            is_next: every segment is NEXT, or none is; None = some are.
            segments: makes the same batch of tensors, for what such a call leaves over; most passes
                need none.

        Returns:
            What `forward` does, on the host. None = the backend has no such kernel, or not for this
            model.
        """
        if not self._has_one_scale:
            return None
        answer = (
            "next" if is_next else "logits" if is_next is False and self._has_plain_head else "rows"
        )
        found = backend.fused_forward(self._whole_call(backend, told, segments, answer))
        if found is None:
            return None
        ends = itertools.accumulate(s.num_candidates for s in told)
        parts = [found[end - s.num_candidates : end] for s, end in zip(told, ends, strict=True)]
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
        told: Sequence[HstuSegment],
        segments: Callable[[], Sequence[Segment]],
        search: Callable[[FusedForwardCall], HstuFindCall],
    ) -> HstuFound | None:
        """Find items, and score what of them is wanted, by one call of the backend.

        Args:
            backend, told, segments: as of `run`; every segment is NEXT.
            search: makes the call of that of NEXT.

        Returns:
            None = the backend has no such kernel, or not for this model.
        """
        if not (self._has_plain_tokens and self._has_plain_head and self._has_one_scale):
            return None
        return backend.hstu_find(search(self._whole_call(backend, told, segments, "next")))

    def _whole_call(
        self,
        backend: Backend,
        told: Sequence[HstuSegment],
        segments: Callable[[], Sequence[Segment]],
        answer: str,
    ) -> FusedForwardCall:
        model = self._model
        table = model.items.table
        return FusedForwardCall(
            model,
            self._pass_weights,
            model.dtype if table is None else table.dtype,
            told,
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
