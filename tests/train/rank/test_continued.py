"""A ranker that was trained on: what changes, what it learns, and the delta that leads to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from npu_gr.core.errors import ConfigError, DataError
from npu_gr.history_store.interactions import Interactions
from npu_gr.model.delta import apply, read_delta
from npu_gr.model.delta_log import write_next
from npu_gr.model.weights import RESIDUALS, Checkpoint, load, read_weights, save
from npu_gr.train.data import build_log
from npu_gr.train.rank.continued import continue_ranker, new_windows
from npu_gr.train.rank.inputs import LogInputs
from npu_gr.train.rank.losses import next_item_likelihood
from npu_gr.train.rank.train import train_rank
from tests.train.rank.test_train import GENRES, TINY
from tests.train.synthetic import NUM_ITEMS, planted

LOG = planted(num_events=12)
NOON = int(np.quantile(LOG.timestamps, 0.8))


@pytest.fixture(scope="module")
def old() -> Checkpoint:
    """A ranker of the events before `NOON`, whose rule is the other one."""
    before = LOG[LOG.timestamps < NOON]
    made, _ = train_rank(before, GENRES, msgspec.structs.replace(TINY, epochs=2))
    return made


def some(log: Interactions) -> Interactions:
    """Of the new events, those of a few items."""
    return log[(log.timestamps < NOON) | np.isin(log.items, [0, 30, 50])]


@pytest.mark.parametrize("only_items", [True, False])
def test_only_rows_of_items_with_new_events_change_and_a_delta_leads_there(
    old: Checkpoint, tmp_path: Path, only_items: bool
) -> None:
    was = {name: tensor.clone() for name, tensor in old.model.state_dict().items()}
    found = continue_ranker(old, some(LOG), NOON, TINY, only_items=only_items)
    again = continue_ranker(old, some(LOG), NOON, TINY, only_items=only_items)
    now = found.checkpoint.model.state_dict()
    assert all(torch.equal(tensor, old.model.state_dict()[name]) for name, tensor in was.items())
    assert all(
        torch.equal(tensor, again.checkpoint.model.state_dict()[name])
        for name, tensor in now.items()
    )
    rows = (was[RESIDUALS] != now[RESIDUALS]).any(1).nonzero().flatten().tolist()
    assert rows == np.searchsorted(old.item_ids, [0, 30, 50]).tolist()
    assert found.num_items == 3
    others = {name for name, tensor in now.items() if not torch.equal(tensor, was[name])}
    assert (others == {RESIDUALS}) is only_items
    save(old, tmp_path / "old")
    version = save(found.checkpoint, tmp_path / "new")
    path, made = write_next(tmp_path / "deltas", tmp_path / "old", tmp_path / "new")
    assert made.changes[RESIDUALS].rows is not None
    tensors = {n: t.clone() for n, t in read_weights(tmp_path / "old").tensors.items()}
    apply(read_delta(path), tensors)
    want = read_weights(tmp_path / "new").tensors
    assert all(torch.equal(tensor, want[name]) for name, tensor in tensors.items())
    assert load(tmp_path / "new").version == version


def test_it_learns_from_the_new_events_alone(old: Checkpoint) -> None:
    """The new events follow another rule, which what was trained on knows better."""
    new = LOG.timestamps >= NOON
    other = replace(LOG, items=np.where(new, LOG.items * 11 % (10 * NUM_ITEMS), LOG.items))
    options = msgspec.structs.replace(TINY, epochs=8, learning_rate=1e-2, dropout=0.0)
    found = continue_ranker(old, other, NOON, options)
    log = build_log(other, GENRES, "leave-one-out")
    targets = log.next_items()

    def likelihood(one: Checkpoint) -> float:
        made = next_item_likelihood(LogInputs(log, one.model), one.model, targets)
        return float(made.log_probabilities.mean())

    assert likelihood(found.checkpoint) > likelihood(old) + 0.2
    # older events are read, and not trained on
    with pytest.raises(DataError, match="no event of a known item"):
        continue_ranker(old, other, NOON + 1_000_000, options)


def test_every_new_event_ends_in_a_window_behind_older_ones() -> None:
    log = build_log(LOG, [], "leave-one-out").all_trained()
    is_new = log.times >= NOON - 6 * 3600
    found = new_windows(log, is_new, 4)
    assert found[:, 1].max() == 4
    covered = np.zeros(len(is_new), np.int64)
    for first, count in found.tolist():
        assert len(set(log.users[first : first + count].tolist())) == 1
        assert is_new[first + count - 1]
        covered[first : first + count] += 1
    assert (covered[is_new] >= 1).all()
    assert covered.max() <= 2


def test_what_a_delta_cannot_say_is_left_out_or_refused(old: Checkpoint) -> None:
    unknown = replace(LOG, items=np.where(LOG.items == 50, 7777, LOG.items))
    new = (LOG.timestamps >= NOON) & (LOG.items == 50)
    assert continue_ranker(old, unknown, NOON, TINY).num_unknown == new.sum() > 0
    named = replace(LOG, values=np.zeros(len(LOG)), action_names=("view",))
    with pytest.raises(DataError, match="the checkpoint knows 1, 5"):
        continue_ranker(old, named, NOON, TINY)
    likes = replace(LOG, values=np.where(LOG.values == 5, 5.0, 5.0))
    with pytest.raises(ConfigError, match="the checkpoint has next, like"):
        continue_ranker(old, likes, NOON, TINY)
