"""The batched forward pass of training equals the server's at every event."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from npu_gr.model.hstu import HSTU
from npu_gr.model.hstu_layer import Segment
from npu_gr.train.rank.forward import EncodedHistories, HistoryBatch, _look_up, dropout
from tests.models import CPU, Request, tiny_model

LENGTHS = (57, 1, 40)
NEXT = 300  # one past the last item
VARIANTS: list[dict[str, Any]] = [
    {},
    {"activation": "u", "residual": "concat", "norm": "group"},
    {"positions": "start", "num_layers": 1},
    {"relative_bias": "none"},
    {"attention_window_tokens": 7, "attention_first_tokens": 3},
]


def users_of(lengths: tuple[int, ...]) -> tuple[list[Request], HistoryBatch]:
    users = [Request(length, 0, seed) for seed, length in enumerate(lengths)]

    def padded(name: str) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(
            [getattr(user, name) for user in users], batch_first=True
        )

    return users, HistoryBatch(
        items=padded("items"), actions=padded("actions"), times=padded("times")
    )


def served(
    model: HSTU, user: Request, event: int, candidates: Tensor, *, is_next: bool = False
) -> Tensor:
    """What the server answers just before an event of the user."""
    segment = Segment(
        items=user.items[:event],
        actions=user.actions[:event],
        times=user.times[:event],
        candidates=candidates,
        candidate_time=int(user.times[event]),
        is_next=is_next,
    )
    answer: Tensor = model(CPU, [segment])[0]
    return answer


@pytest.mark.parametrize("changes", VARIANTS)
def test_training_and_serving_are_one_function(changes: dict[str, Any]) -> None:
    model = tiny_model(torch.float64, **changes)
    users, histories = users_of(LENGTHS)
    encoded = EncodedHistories(model, histories)
    random = torch.Generator().manual_seed(0)
    for moments, width in ((9, 1), (4, 6)):
        at = torch.stack(
            [torch.randint(0, length, (moments,), generator=random) for length in LENGTHS]
        )
        candidates = torch.randint(0, 300, (len(users), moments, width), generator=random)
        logits = model.task_logits(encoded.rows(candidates, at))
        for b, user in enumerate(users):
            for t, event in enumerate(at[b].tolist()):
                want = served(model, user, event, candidates[b, t])
                torch.testing.assert_close(logits[b, t], want, atol=1e-10, rtol=0)


@pytest.mark.parametrize("changes", VARIANTS)
def test_every_event_with_next_after_its_own_item_is_what_is_served(
    changes: dict[str, Any],
) -> None:
    model = tiny_model(torch.float64, retrieval=True, **changes)
    users, histories = users_of((21, 1, 14))
    candidates = torch.stack([histories.items, torch.full_like(histories.items, NEXT)], dim=-1)
    rows = EncodedHistories(model, histories).rows(candidates)
    logits, u = model.task_logits(rows[:, :, 0]), model.user_vectors(rows[:, :, 1])
    for b, user in enumerate(users):
        for event in range(len(user.items)):
            own = served(model, user, event, user.items[event : event + 1])[0]
            following = served(model, user, event, torch.tensor([NEXT]), is_next=True)[0]
            torch.testing.assert_close(logits[b, event], own, atol=1e-10, rtol=0)
            torch.testing.assert_close(u[b, event], following, atol=1e-10, rtol=0)


def test_in_single_precision_both_differ_by_rounding_alone() -> None:
    model = tiny_model(retrieval=True)
    users, histories = users_of(LENGTHS)
    rows = EncodedHistories(model, histories).rows(
        torch.full_like(histories.items, NEXT)[..., None]
    )
    u = model.user_vectors(rows[:, :, 0])
    want = torch.stack(
        [
            served(model, users[0], event, torch.tensor([NEXT]), is_next=True)[0]
            for event in range(57)
        ]
    )
    assert ((u[0] - want).square().mean().sqrt() / want.std()).item() < 2e-6


def test_the_history_never_sees_candidates() -> None:
    model = tiny_model(torch.float64, retrieval=True)
    _, histories = users_of(LENGTHS)
    encoded = EncodedHistories(model, histories)
    alone = encoded.rows(histories.items[..., None])
    encoded.rows(torch.randint(0, 300, (3, 57, 5)))
    together = encoded.rows(
        torch.stack([histories.items, torch.full_like(histories.items, NEXT)], dim=-1)
    )
    torch.testing.assert_close(together[:, :, :1], alone, atol=1e-12, rtol=0)


def test_later_events_and_padding_do_not_reach_a_moment() -> None:
    model = tiny_model(torch.float64)
    user = Request(30, 0)

    def rows(length: int) -> Tensor:
        events = {
            name: getattr(user, name)[None, :length] for name in ("items", "actions", "times")
        }
        return EncodedHistories(model, HistoryBatch(**events)).rows(
            torch.arange(5)[None, None], torch.tensor([[12]])
        )

    torch.testing.assert_close(rows(30), rows(13), atol=1e-12, rtol=0)


def test_dropout_changes_rows_and_gradients_flow_everywhere() -> None:
    model = tiny_model(retrieval=True)
    user = Request(20, 0)
    histories = HistoryBatch(
        items=user.items[None], actions=user.actions[None], times=user.times[None]
    )
    candidates = torch.stack([user.items, torch.full_like(user.items, NEXT)], dim=-1)[None]
    rows = EncodedHistories(model, histories, dropout_ratio=0.3).rows(candidates)
    assert not torch.equal(rows, EncodedHistories(model, histories).rows(candidates))
    (
        model.task_logits(rows[:, :, 0]).square().sum()
        + model.user_vectors(rows[:, :, 1]).square().sum()
    ).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_the_gradient_of_a_look_up_is_autograds() -> None:
    random = torch.Generator().manual_seed(0)
    table = torch.randn(2, 9, dtype=torch.float64, generator=random, requires_grad=True)
    columns = torch.randint(0, 8, (50,), generator=random)
    weights = torch.randn(2, 50, dtype=torch.float64, generator=random)
    got, want = (
        torch.autograd.grad((rows * weights).sum(), table)[0]
        for rows in (_look_up(table, columns), table[:, columns])
    )
    torch.testing.assert_close(got, want)


def test_dropout_keeps_the_mean_and_drops_its_share() -> None:
    torch.manual_seed(0)
    x = torch.ones(999, 101)
    dropped = dropout(x, 0.3)
    assert ((dropped == 0).double().mean() - 0.3).abs() < 0.01
    assert (dropped.double().mean() - 1).abs() < 0.01
    assert dropout(x, 0.0) is x
