"""The ranker without the service: the baselines of `benchmarks door` and `device`, and their check.

Every call is a full inference by the same kernels, without a prefix cache or batching; or by plain
torch (`dense_logits`), as a user would write the model for `torch.compile`.

    python -m benchmarks.cold CHECKPOINT PORT BACKEND

serves it by FastAPI and uvicorn in their usual form: a typed body and a plain handler.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

from npu_gr.backend.base import bias_bucket
from npu_gr.backend.calls import HstuIds
from npu_gr.backend.choose import choose
from npu_gr.backend.names import BackendName
from npu_gr.core.history import Events
from npu_gr.core.process import set_up_process
from npu_gr.model.history_tokenizer import ItemVocabulary, tokenize
from npu_gr.model.hstu import HSTU
from npu_gr.model.hstu_layer import HostTokens, Segment
from npu_gr.model.weights import load

# (model, item rows, actions, times, candidate rows, time of the request) -> logits [c, tasks]
Forward = Callable[[HSTU, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def dense_logits(
    model: HSTU, items: Tensor, actions: Tensor, times: Tensor, candidates: Tensor, at: Tensor
) -> Tensor:
    """Score candidates in plain torch, with a dense matrix [heads, rows, rows] a layer.

    Args:
        model: A ranker whose only inputs are items, actions and times, without positions.
        items, actions, times: int64 [n] of the history.
        candidates: int64 [c] item rows.
        at: int64 [1] unix seconds of the request.

    Returns:
        Logits [c, tasks].
    """
    config, n, c = model.config, len(items), len(candidates)
    assert config.has_plain_tokens
    asking = torch.full_like(candidates, len(config.actions))
    x = model.items.rows(torch.cat([items, candidates]))
    x = (x + model.action(torch.cat([actions, asking]))).to(model.residual_dtype)
    row = torch.arange(n + c, device=x.device)
    place = row.clamp(max=n)  # all candidates stand behind the history
    seen = (place[:, None] > place) | (row[:, None] == row)
    distance = (place[:, None] - place).clamp(0, config.position_buckets - 1)
    seconds = torch.cat([times, at.expand(c)])
    elapsed_s = seconds[:, None] - seconds
    for layer in model.each_layer():
        u, v, q, k = layer.project(x)
        bucket = bias_bucket(layer.time_edges, elapsed_s).long()
        scores = torch.einsum("ihd,jhd->hij", q, k) * config.attention_alpha
        scores = scores + layer.position_bias[:, distance] + layer.time_bias[:, bucket]
        attention = torch.einsum("hij,jhd->ihd", silu(scores) * seen, v)
        x = layer.finish(x, u, attention * model.attention_scale(n))
    return model.task_logits(x[n:])


class ColdRanker:
    """One checkpoint on one backend. Thread-safe."""

    def __init__(
        self, checkpoint: Path, backend: BackendName = "cpu", forward: Forward | None = None
    ) -> None:
        """Load the checkpoint.

        Args:
            checkpoint: The ranker's folder.
            backend: Where it runs.
            forward: Computes the logits, e.g. `dense_logits`; None = the backend's kernels.
        """
        torch.set_num_threads(1)
        self._forward = forward
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
            if self._forward is None:
                (logits,) = self._model(self._backend, [segment])
            else:
                at = upload(np.array([body["timestamp"]], np.int64))
                given = segment.items, segment.actions, segment.times, segment.candidates
                logits = self._forward(self._model, *given, at)
            logits = logits.to("cpu", torch.float32)
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
