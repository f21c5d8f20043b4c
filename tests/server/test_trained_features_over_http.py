"""Rows that were trained on, sent over HTTP, give the trainer's logits, with a window too.

So does every kind of feature, sent or computed.
"""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from npu_gr.model.weights import Checkpoint, save
from npu_gr.train.data import InteractionLog, batches, build_log, windows
from npu_gr.train.rank.forward import EncodedHistories
from npu_gr.train.rank.inputs import LogInputs
from tests.serving import serving
from tests.train.rank.test_features import GENRES, OPTIONS, model_of, with_columns
from tests.train.synthetic import planted


def plain(value: Any) -> Any:
    return None if value != value else value


def body(log: InteractionLog, event: int) -> dict[str, Any]:
    """What a caller sends just before an event: names and numbers, and nothing that is computed."""
    user = int(log.users[event])
    history = slice(int(log.starts[user]), event)
    columns = {
        of: {column.name: column.values for column in log.columns if column.of == of}
        for of in ("user", "event", "request", "cross")
    }
    return {
        "user_id": f"user {user}",
        "tenant": f"event {event}",
        "candidates": b64encode(
            log.item_ids[log.items[event : event + 1]].astype("<i8").tobytes()
        ).decode(),
        "timestamp": int(log.times[event]),
        "history": {
            "items": b64encode(log.item_ids[log.items[history]].astype("<i8").tobytes()).decode(),
            "actions": [log.names_of_actions[action] for action in log.actions[history].tolist()],
            "timestamps": log.times[history].tolist(),
            "features": {
                name: list(map(plain, values[history].tolist()))
                for name, values in columns["event"].items()
            },
        },
        "features": {
            "user": {name: plain(values[user]) for name, values in columns["user"].items()},
            "request": {name: plain(values[event]) for name, values in columns["request"].items()},
            "cross": {name: [plain(values[event])] for name, values in columns["cross"].items()},
        },
    }


async def test_what_was_trained_on_is_answered_with_the_trainers_logits(tmp_path: Path) -> None:
    log = build_log(with_columns(planted(3, 12)), GENRES, "leave-one-out").all_trained()
    # semi-local: histories are longer than the window
    window = {"attention_window_tokens": 4, "attention_first_tokens": 2}
    model = model_of(log, msgspec.structs.replace(OPTIONS, **window))
    inputs = LogInputs(log, model)
    want = np.zeros((len(log.items), 2), np.float32)
    with torch.no_grad():
        for batch in batches(log, windows(log, 64, np.random.default_rng(0)), 64):
            encoded = EncodedHistories(model, inputs.histories(batch))
            known = inputs.request(batch.events), inputs.cross(batch.events)
            logits = model.task_logits(encoded.rows(batch.items[..., None], None, *known))[:, :, 0]
            want[batch.events[batch.valid].numpy()] = logits[batch.valid].numpy()
    checkpoint = Checkpoint(
        model=model, item_ids=log.item_ids, name="x", action_values=log.action_values
    )
    save(checkpoint, tmp_path / "checkpoint")
    assert want.std() > 0.1
    async with serving(tmp_path) as (client, _):
        for event in range(len(log.items)):
            answer = await client.post("/v1/rank", json=body(log, event))
            told = await answer.json()
            assert answer.status == 200, told
            got = [told["scores"][task][0] for task in model.config.tasks]
            assert got == pytest.approx(want[event].tolist(), abs=1e-5), event
            assert "cross.events" not in told["missing_features"], (
                "what is computed is never missing"
            )
        sent = body(log, 5)
        for features in (
            {"cross": {"events": [1.0]}},
            {"cross": {"events": b64encode(bytes(4)).decode()}},
        ):
            answer = await client.post("/v1/rank", json={**sent, "features": features})
            assert answer.status == 422
            assert ("features.cross.events: the service computes this feature (events)") in (
                await answer.json()
            )["detail"]
        given = {**sent, "features": {"request": {"hour": 3}}}
        answer = await client.post("/v1/rank", json=given)
        assert ("features.request.hour: the service computes this feature (hour)") in (
            await answer.json()
        )["detail"]
