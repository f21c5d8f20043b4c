"""The batched training forward computes, at every moment of every user, exactly what the server computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from npu_gr.model.hstu import Segment
from npu_gr.train.rank.forward import HistoryBatch, Moments, encode
from tests.models import CPU, Request, tiny_model

LENGTHS = (57, 1, 40)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation": "u", "residual": "concat", "norm": "group"},
        {"positions": "start", "num_layers": 1},
    ],
)
def test_training_and_serving_are_one_function(changes: dict[str, Any]) -> None:
    model = tiny_model(torch.float64, **changes)
    users = [Request(length, 0, seed) for seed, length in enumerate(LENGTHS)]

    def padded(name: str) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([getattr(user, name) for user in users], batch_first=True)

    histories = HistoryBatch(items=padded("items"), actions=padded("actions"), times=padded("times"))
    random = torch.Generator().manual_seed(0)
    groups = [
        Moments(
            at=torch.stack([torch.randint(0, length, (moments,), generator=random) for length in LENGTHS]),
            candidates=torch.randint(0, 300, (len(users), moments, candidates), generator=random),
        )
        for moments, candidates in ((9, 1), (4, 6))
    ]

    for moments, rows in zip(groups, encode(model, histories, groups), strict=True):
        logits = model.task_logits(rows)
        for b, user in enumerate(users):
            for t, event in enumerate(moments.at[b].tolist()):
                segment = Segment(
                    items=user.items[:event],
                    actions=user.actions[:event],
                    times=user.times[:event],
                    candidates=moments.candidates[b, t],
                    candidate_time=int(user.times[event]),
                )
                torch.testing.assert_close(logits[b, t], model(CPU, [segment])[0], atol=1e-10, rtol=0)


def test_later_events_and_padding_do_not_reach_a_moment() -> None:
    model = tiny_model(torch.float64)
    user = Request(30, 0)
    moments = Moments(at=torch.tensor([[12]]), candidates=torch.arange(5)[None, None])

    def rows(length: int) -> torch.Tensor:
        events = {name: getattr(user, name)[None, :length] for name in ("items", "actions", "times")}
        return encode(model, HistoryBatch(**events), [moments])[0]

    torch.testing.assert_close(rows(30), rows(13), atol=1e-12, rtol=0)


def test_dropout_changes_rows_and_gradients_flow_everywhere() -> None:
    model = tiny_model()
    user = Request(20, 0)
    histories = HistoryBatch(items=user.items[None], actions=user.actions[None], times=user.times[None])
    moments = [Moments(at=torch.arange(20)[None], candidates=user.items[None, :, None])]
    rows = encode(model, histories, moments, dropout_ratio=0.3)[0]
    assert not torch.equal(rows, encode(model, histories, moments)[0])
    model.task_logits(rows).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
