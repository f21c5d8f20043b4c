"""The HSTU ranker: one forward pass for prefill, append, cached rank and full inference.

A *segment* is one request's rows: new history tokens after p cached ones, then candidates. A batch is a list of
segments. Prefill is a segment without candidates, full inference one without a past, so cold and cached scores come
from the same lines of code. `hstu_segments.py` runs the layers; where the backend has kernels of whole passes or of
whole layers, `hstu_whole.py` describes the model to them. `hstu_input.py` has the weights, and the rows of segments.

A model with `retrieval` also answers what comes next. NEXT is a candidate without an item: item row `num_items`, one
past the last. Its final row becomes the user vector u, and the retrieval score of item i is u . e_i with the items'
input embeddings e.

Source: HSTU and M-FALCON, arXiv:2402.17152; exactness rules E1 to E9 of `docs/exactness.md`.
Invariants: history rows never depend on candidates or on later history; candidates never see each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from npu_gr.backend.base import Affine, Backend
from npu_gr.backend.torch_ops import TorchOps
from npu_gr.model.config import HSTUConfig
from npu_gr.model.hstu_input import HSTUWeights, InputRows
from npu_gr.model.hstu_segments import Segment, run_by_segments
from npu_gr.model.hstu_whole import WholeCalls, run_whole_layers, told_in_numbers, whole_pass

_TORCH = TorchOps()  # differentiable, for training


class HSTU(HSTUWeights):
    """The ranker's weights and its forward pass."""

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__(config)
        self._rows = InputRows(self)
        self.whole = WholeCalls(self, self._rows, self._answer)

    @torch.inference_mode()
    def forward(self, backend: Backend, segments: Sequence[Segment]) -> list[Tensor]:
        """Score every segment's candidates; hand every segment's new keys and values to its sink.

        Returns:
            Per segment [c, tasks] logits in fp32 (fp64 for an fp64 model), in candidate order; for a NEXT segment
            u [1, dim].
        """
        if self.config.head == "dot":
            return self._by_last(backend, segments)
        return self._through_layers(backend, segments)

    def _by_last(self, backend: Backend, segments: Sequence[Segment]) -> list[Tensor]:
        """Multiply each last behaviour's row with the candidates' rows; without a behaviour every product is 0."""
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
            rows = whole.run(self, partial(run_whole_layers, self.each_layer(), self.config.dim, backend), x)
            parts = rows.split([len(s.candidates) for s in segments])
            return [self._answer(s, own, backend) for s, own in zip(segments, parts, strict=True)]
        rows_of = run_by_segments(self.each_layer(), self.config, self.attention_scale, backend, segments, x)
        return [self._answer(s, own, backend) for s, own in zip(segments, rows_of, strict=True)]

    def _answer(self, segment: Segment, own: Tensor, backend: Backend) -> Tensor:
        if segment.is_next:
            return self.user_vectors(own, backend)
        if self.config.head_periods:
            own = self.clock(own, torch.full_like(segment.candidates, segment.candidate_time))
        beside = self.candidate(segment.candidates).to(own.dtype) if self.config.head == "product" else None
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
        wide = ops.affine(normed if beside is None else normed * beside, hidden, 0, hidden.out_features, is_silu)
        logits = ops.affine(wide if is_silu else middle(wide), out, 0, out.out_features, False)
        return logits if self.config.head_scale == 1.0 else logits * self.config.head_scale

    def user_vectors(self, x: Tensor, ops: Affine = _TORCH) -> Tensor:
        """[..., dim] final rows of NEXT, or of last behaviours -> [..., dim] u, fp32 or fp64. Only with `retrieval`."""
        if self.config.head == "dot":
            scaled: Tensor = self.norm_head(x) * self.config.head_scale
            return scaled
        return ops.affine(self.norm_next(x), self.vector, 0, self.config.dim, False)
