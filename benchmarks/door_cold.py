"""The same ranker without the service: what the peers of `benchmarks door` call, and what its answers must equal.

Every call is a full inference by the same kernels: no prefix is cached, no pass is shared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from npu_gr.backend.calls import HstuIds
from npu_gr.backend.choose import choose
from npu_gr.backend.names import BackendName
from npu_gr.core.history import Events
from npu_gr.model.history_tokens import ItemVocabulary, tokenize
from npu_gr.model.segment import HostTokens, Segment
from npu_gr.model.weights import load


class ColdRanker:
    """One checkpoint on one backend. Threads may call it at once."""

    def __init__(self, checkpoint: Path, backend: BackendName = "cpu") -> None:
        torch.set_num_threads(1)
        self._backend = choose(backend)
        found = load(checkpoint)
        self._model = found.model.to(self._backend.device).eval()
        self._model.freeze_items()
        self._vocabulary = ItemVocabulary(found.item_ids)

    def scores(self, body: dict[str, Any]) -> dict[str, list[float]]:
        """Score the candidates of a rank's body, which brings its history and its timestamp."""
        history = body["history"]
        tokens = tokenize(
            Events.make(history["items"], history["actions"], history["timestamps"]),
            self._vocabulary,
            len(self._model.config.actions),
            max_tokens=self._model.config.max_history_tokens,
            cut_step_tokens=256,
            refuse_unknown=True,
        )
        upload = self._backend.upload
        candidates = self._vocabulary.rows(np.array(body["candidates"], np.int64))
        ids = HstuIds(tokens.rows, tokens.events.actions, candidates)
        segment = Segment(
            items=upload(tokens.rows),
            actions=upload(tokens.events.actions.astype(np.int64)),
            times=upload(tokens.events.timestamps),
            candidates=upload(candidates),
            candidate_time=body["timestamp"],
            host=HostTokens(tokens.events.timestamps, None, ids),  # the same kernels as ours: one native call
        )
        with torch.inference_mode():
            logits = self._model(self._backend, [segment])[0].to("cpu", torch.float32)
        return {task: logits[:, index].tolist() for index, task in enumerate(self._model.config.tasks)}
