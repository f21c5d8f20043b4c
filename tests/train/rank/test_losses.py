"""The next-item softmax is the plain one, and sampled items represent the catalogue."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from npu_gr.model.hstu import HSTU
from npu_gr.train.data import Batch, InteractionLog, batches, build_log, windows
from npu_gr.train.rank.fit import new_model
from npu_gr.train.rank.forward import EncodedHistories, HistoryBatch
from npu_gr.train.rank.inputs import LogInputs
from npu_gr.train.rank.losses import Retrieved, batch_loss, draw_candidates, retrieve
from npu_gr.train.rank.options import LIKE, NEXT, TrainOptions, make_labels
from npu_gr.train.rank.shown import position_biases
from tests.train.synthetic import NUM_ITEMS, planted

OPTIONS = TrainOptions(
    dim=16, qk_dim=8, v_dim=8, head_dim=16, dropout=0.0, vector_dropout=0.0, click_ratio=0.3
)
LARGE = msgspec.structs.replace(OPTIONS, max_softmax_items=1, num_negatives=20)
SHARES = torch.arange(1, NUM_ITEMS + 1, dtype=torch.float64)  # some items are drawn more often
SHARES /= SHARES.sum()


@pytest.fixture(scope="module")
def log() -> InteractionLog:
    return build_log(planted(), [], "leave-one-out")


@pytest.fixture(scope="module")
def batch(log: InteractionLog) -> Batch:
    """Windows of two lengths, so that there is padding."""
    return list(batches(log, windows(log, 12, np.random.default_rng(0))[:8], 96))[-1]


@pytest.fixture(scope="module")
def model(log: InteractionLog) -> HSTU:
    torch.manual_seed(0)
    made = new_model(log, [], (NEXT, LIKE), OPTIONS)
    with torch.no_grad():
        made.vector.weight.mul_(3)  # so that the softmax is not flat
    return made


def following(model: HSTU, batch: Batch) -> torch.Tensor:
    """Final rows of NEXT."""
    encoded = EncodedHistories(
        model, HistoryBatch(items=batch.items, actions=batch.actions, times=batch.times)
    )
    return encoded.rows(torch.full_like(batch.items, NUM_ITEMS)[..., None])[:, :, 0]


def others(batch: Batch, user: int, place: int) -> list[int]:
    """Return the items of the softmax without the event's own and the earlier ones."""
    had = batch.items[user, : place + 1].tolist()
    return [item for item in range(NUM_ITEMS) if item not in had]


def test_the_partition_and_its_gradient_are_the_plain_ones(model: HSTU, batch: Batch) -> None:
    rows = following(model, batch).detach()
    found = retrieve(model, rows, batch, OPTIONS, SHARES)
    weights = torch.randn(len(found.partition), generator=torch.Generator().manual_seed(1))
    parameters = [model.item.weight, model.vector.weight, model.norm_next.weight]
    got = torch.autograd.grad((found.partition * weights).sum(), parameters)

    u = model.user_vectors(rows)
    logits = u @ model.item.weight.T
    plain = [
        torch.logsumexp(logits[user, place, others(batch, user, place)], 0)
        for user, place in batch.valid.nonzero().tolist()
    ]
    torch.testing.assert_close(found.partition, torch.stack(plain))
    want = torch.autograd.grad((torch.stack(plain) * weights).sum(), parameters)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    for row, (user, place) in enumerate(batch.valid.nonzero().tolist()):
        assert found.shares[row].nonzero()[:, 0].tolist() == others(batch, user, place)
    torch.testing.assert_close(found.shares.sum(1), torch.ones(len(found.shares)))


@torch.no_grad()
def test_a_drawn_catalogue_stands_for_the_whole(model: HSTU, batch: Batch) -> None:
    rows = following(model, batch)
    whole = retrieve(model, rows, batch, OPTIONS, SHARES).partition.exp()
    torch.manual_seed(0)
    drawn = torch.stack(
        [retrieve(model, rows, batch, LARGE, SHARES).partition.exp() for _ in range(1500)]
    )
    assert len(retrieve(model, rows, batch, LARGE, SHARES).items) < NUM_ITEMS
    torch.testing.assert_close(drawn.mean(0), whole, rtol=0.05, atol=0)


@pytest.mark.parametrize("options", [OPTIONS, LARGE])
@torch.no_grad()
def test_draws_stand_for_every_other_unseen_item(
    model: HSTU, batch: Batch, options: TrainOptions
) -> None:
    """The draws, each as many times as it counts, add up to what they stand for, on average."""
    torch.manual_seed(0)
    rows = following(model, batch)
    some = torch.tensor([[1, 4, 9]]).expand(len(batch.items), -1)
    counts = torch.zeros(*some.shape, NUM_ITEMS)
    runs = 1500
    for _ in range(runs):
        found = retrieve(model, rows, batch, options, SHARES)
        drawn, log_weight = draw_candidates(model, found, batch, some, 4)
        counts.scatter_add_(2, drawn, log_weight.exp() / runs)
    for user, column in batch.valid.gather(1, some).nonzero().tolist():
        want = torch.zeros(NUM_ITEMS)
        want[others(batch, user, int(some[user, column]))] = 1
        assert (counts[user, column][want == 0] == 0).all()
        if options is OPTIONS:  # a drawn partition is right on average; its inverse is not
            assert (counts[user, column] - want).abs().max() < 0.2
        torch.testing.assert_close(counts[user, column].sum(), want.sum(), rtol=0.1, atol=0)


@torch.no_grad()
def test_a_window_that_had_every_item_has_a_finite_loss(
    model: HSTU, log: InteractionLog, batch: Batch
) -> None:
    items = torch.arange(NUM_ITEMS).repeat(2)[None]
    blank = torch.zeros_like(items)
    full = Batch(items=items, actions=blank, times=blank, valid=blank == 0, events=blank)
    found: Retrieved = retrieve(model, following(model, full), full, OPTIONS, SHARES)
    assert torch.isfinite(found.partition).all()
    labels = make_labels(log, (NEXT, LIKE))
    auxiliary = nn.Linear(16, labels.auxiliary.shape[1])
    for options in (OPTIONS, LARGE):
        assert math.isfinite(
            batch_loss(
                model,
                auxiliary,
                position_biases(),
                LogInputs(log, model),
                full,
                labels,
                options,
                with_click=True,
            )
        )


def test_padding_changes_no_loss(model: HSTU, log: InteractionLog, batch: Batch) -> None:
    labels = make_labels(log, (NEXT, LIKE))
    auxiliary = nn.Linear(16, labels.auxiliary.shape[1])
    row = int(batch.valid.sum(1).argmin())
    length = int(batch.valid[row].sum())
    names = [name for name in Batch.__slots__ if name != "counted"]
    one = {name: getattr(batch, name)[row : row + 1] for name in names}
    padded = Batch(**one)
    bare = Batch(**{name: tensor[:, :length] for name, tensor in one.items()})
    assert length < batch.items.shape[1]
    losses = [
        batch_loss(
            model,
            auxiliary,
            position_biases(),
            LogInputs(log, model),
            part,
            labels,
            OPTIONS,
            with_click=False,
        )
        for part in (padded, bare)
    ]
    torch.testing.assert_close(*losses)


def test_a_ranker_without_values_learns_the_next_item_alone(log: InteractionLog) -> None:
    alone = replace(log, actions=np.zeros_like(log.actions), action_values=(1.0,))
    model = new_model(alone, [], (NEXT,), OPTIONS)
    labels = make_labels(alone, (NEXT,))
    part = batches(alone, windows(alone, 12, np.random.default_rng(0)), 96)[0]
    loss = batch_loss(
        model,
        nn.Linear(16, 1),
        position_biases(),
        LogInputs(alone, model),
        part,
        labels,
        OPTIONS,
        with_click=True,
    )
    loss.backward()
    assert model.next_item.grad is not None
    assert model.next_item.grad.abs().sum() > 0
