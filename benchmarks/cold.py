"""The ranker without the service: the FastAPI baseline of `benchmarks door`, and its check.

Every call is a full inference by the same kernels, without a prefix cache or batching.

    python -m benchmarks.cold CHECKPOINT PORT BACKEND

serves it by FastAPI and uvicorn in their usual form: a typed body and a plain handler.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from npu_gr.backend.calls import HstuIds
from npu_gr.backend.choose import choose
from npu_gr.backend.names import BackendName
from npu_gr.core.history import Events
from npu_gr.core.process import set_up_process
from npu_gr.model.history_tokenizer import ItemVocabulary, tokenize
from npu_gr.model.hstu_layer import HostTokens, Segment
from npu_gr.model.weights import load


class ColdRanker:
    """One checkpoint on one backend. Thread-safe."""

    def __init__(self, checkpoint: Path, backend: BackendName = "cpu") -> None:
        torch.set_num_threads(1)
        self._backend = choose(backend)
        found = load(checkpoint)
        self._model = found.model.to(self._backend.device).eval()
        self._model.items.freeze()
        self._vocabulary = ItemVocabulary(found.item_ids)

    def scores(self, body: dict[str, Any]) -> dict[str, list[float]]:
        """Score the candidates of a rank's body, which includes history and timestamp."""
        history = body["history"]
        tokens = tokenize(
            Events.make(history["items"], history["actions"], history["timestamps"]),
            self._vocabulary,
            len(self._model.config.actions),
            max_tokens=self._model.config.max_history_tokens,
            cut_step_tokens=256,
            reject_unknown=True,
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
            # the same kernels as the service: one native call
            host=HostTokens(tokens.events.timestamps, None, ids),
        )
        with torch.inference_mode():
            logits = self._model(self._backend, [segment])[0].to("cpu", torch.float32)
        return {
            task: logits[:, index].tolist() for index, task in enumerate(self._model.config.tasks)
        }


def main(checkpoint: Path, port: int, backend: BackendName = "cpu") -> None:
    """Serve with FastAPI until the process is terminated."""
    import uvicorn
    from fastapi import FastAPI
    from pydantic import create_model

    ids = (list[int], ...)
    history = create_model("RankedHistory", items=ids, actions=ids, timestamps=ids)
    body = create_model(
        "RankedBody",
        user_id=(str, ...),
        tenant=(str, ""),
        history=(history, ...),
        candidates=(list[int], ...),
        timestamp=(int, ...),
    )
    ranker = ColdRanker(checkpoint, backend)
    app = FastAPI()

    def rank(given: Any) -> dict[str, dict[str, list[float]]]:
        return {"scores": ranker.scores(given.model_dump())}

    rank.__annotations__["given"] = body
    app.post("/v1/rank")(rank)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    set_up_process()
    main(Path(sys.argv[1]), int(sys.argv[2]), cast("BackendName", sys.argv[3]))
