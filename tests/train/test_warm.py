"""A model that is trained on begins where the one before ended, and keeps what names stand for."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest
import torch

from npu_gr.catalogue.trie import Codebooks
from npu_gr.history_store.interactions import Interactions
from npu_gr.model.weights import Checkpoint
from npu_gr.train.data import build_log
from npu_gr.train.generate.codes import ItemCodes, item_vectors, residual_codes
from npu_gr.train.generate.nodes import nodes_of
from npu_gr.train.generate.train import _new_model as new_generator
from npu_gr.train.generate.train import train_generator
from npu_gr.train.generate.warm import (
    GeneratorStart,
    GeneratorStarts,
    KnownItems,
    kept_codes,
)
from npu_gr.train.rank.fit import new_model
from npu_gr.train.rank.options import LIKE, NEXT, Task
from npu_gr.train.rank.train import RankerCodes, train_rank
from npu_gr.train.rank.warm import RankerStart, start_at
from tests.train.generate.test_train import TINY as GENERATOR
from tests.train.rank.test_train import TINY as RANKER
from tests.train.synthetic import planted

LOG = planted(num_users=24, num_events=10)
OLD_ACTIONS, NEW_ACTIONS = ("view", "buy"), ("view", "buy", "cart")
TASKS = (NEXT, Task(name="buy", actions=("buy",)))


def of_actions(names: tuple[str, ...]) -> Interactions:
    return dataclasses.replace(LOG, values=LOG.values // 4, action_names=names)


def with_new_items(log: Interactions) -> Interactions:
    """The log in which a tenth of the events have items that nobody had before."""
    items = log.items.copy()
    items[::10] = 5 + items[::10]
    return dataclasses.replace(log, items=items)


def codes_of(num_items: int, seed: int) -> ItemCodes:
    random = np.random.default_rng(seed)
    vectors = random.standard_normal((num_items, 4)).astype(np.float32)
    return residual_codes(vectors, (16, 16), np.ones(num_items, np.int64), seed)


def test_a_ranker_starts_with_the_rows_of_the_same_names() -> None:
    before = build_log(of_actions(OLD_ACTIONS), [], "leave-one-out")
    after = build_log(with_new_items(of_actions(NEW_ACTIONS)), [], "leave-one-out")
    old = new_model(before, [], TASKS, RANKER, codes=codes_of(before.num_items, 0))
    torch.manual_seed(1)
    new = new_model(after, [], TASKS, RANKER, codes=codes_of(after.num_items, 1))
    for weight in (*old.parameters(), *new.parameters()):
        torch.nn.init.normal_(weight)
    own = new.action.weight[2].clone()
    start_at(new, after.item_ids, Checkpoint(model=old, item_ids=before.item_ids, name="old"))
    rows = {item: row for row, item in enumerate(before.item_ids.tolist())}
    for row, item in enumerate(after.item_ids.tolist()):
        want = old.item.weight[rows[item]] if item in rows else torch.zeros(RANKER.dim)
        assert torch.equal(new.item.weight[row], want)
    assert len(after.item_ids) > len(before.item_ids)
    assert torch.equal(new.action.weight[[0, 1, 3]], old.action.weight)
    assert torch.equal(new.action.weight[2], own), "an action that the earlier ranker lacks"
    mapped = ("item.weight", "action.weight")
    weights = dict(old.named_parameters())
    for name, weight in new.named_parameters():
        assert name in mapped or torch.equal(weight, weights[name]), name


def test_a_task_of_another_name_is_not_taken_over() -> None:
    log = build_log(of_actions(OLD_ACTIONS), [], "leave-one-out")
    old = new_model(log, [], TASKS, RANKER)
    new = new_model(log, [], (NEXT, Task(name="view", actions=("view",))), RANKER)
    last = dict(old.named_parameters())["head.2.weight"]
    torch.nn.init.normal_(last)
    start_at(new, log.item_ids, Checkpoint(model=old, item_ids=log.item_ids, name="old"))
    assert not torch.equal(dict(new.named_parameters())["head.2.weight"], last)
    assert torch.equal(new.item.weight, old.item.weight)


def test_known_items_keep_their_codes_and_new_ones_get_free_ones() -> None:
    log = build_log(with_new_items(LOG), [], "leave-one-out")
    vectors = item_vectors(log, [], 8, 5, 0)
    old = log.item_ids[log.item_ids % 10 == 0]
    known = KnownItems(old[::-1], codes_of(len(old), 0).sids[::-1])
    codes = kept_codes(known, log.item_ids, vectors, (16, 16))
    assert codes is not None
    where = np.searchsorted(log.item_ids, known.item_ids)
    assert np.array_equal(codes.sids[where], known.sids)
    assert len(np.unique(codes.sids, axis=0)) == log.num_items > len(old)
    assert kept_codes(known, log.item_ids, vectors, (8, 8)) is None
    assert kept_codes(known, log.item_ids, vectors, (16, 16, 16)) is None
    assert kept_codes(known, log.item_ids + 1, vectors, (16, 16)) is None


@pytest.mark.parametrize(
    ("before", "tokens"), [("codes", "codes"), ("nodes", "nodes"), ("codes", "nodes")]
)
def test_a_generator_starts_at_the_rows_of_its_items(before: str, tokens: str) -> None:
    """Items keep their semantic IDs, and new nodes get numbers that are free."""
    log = build_log(LOG, [], "leave-one-out")
    options = msgspec.structs.replace(GENERATOR, epochs=1, learning_rate=1e-12, refit=False)
    options = msgspec.structs.replace(options, code_count=(16, 16), own_tokens=tokens)
    codes = codes_of(log.num_items, 0)
    of_tokens = nodes_of(codes) if before == "nodes" else codes
    decoder = new_generator(log, of_tokens, options)
    known = KnownItems(log.item_ids, codes.sids)
    nodes = of_tokens.sids if before == "nodes" else None
    start = GeneratorStart(known, nodes, of_tokens.code_count, decoder)
    options = msgspec.structs.replace(options, seed=9)
    found = train_generator(with_new_items(LOG), [], options, start=GeneratorStarts(start, start))
    now = found.codes.given or found.codes
    assert found.codes.given is None if tokens == "codes" else found.codes.given is not None
    at = np.searchsorted(found.log.item_ids, log.item_ids)
    assert len(found.log.item_ids) > len(at)
    assert np.array_equal(now.sids[at], codes.sids)
    assert np.array_equal(found.codes.sids[at], of_tokens.sids) == (before == tokens)
    for level in range(2):
        base = Codebooks.stacked(found.codes.code_count).vocab_base[level]
        base_before = Codebooks.stacked(of_tokens.code_count).vocab_base[level]
        rows = found.model.embedding.weight[base + found.codes.sids[at, level]]
        want = decoder.embedding.weight[base_before + of_tokens.sids[:, level]]
        assert torch.allclose(rows, want, atol=1e-6)
    weights = dict(decoder.named_parameters())
    for name, weight in found.model.named_parameters():
        is_table = name == "embedding.weight"
        assert is_table or torch.allclose(weight, weights[name], atol=1e-6), name


@pytest.mark.parametrize("refit", [True, False])
def test_a_ranker_is_trained_on(refit: bool) -> None:
    """Steps that hardly move leave the earlier rankers: the evaluated one, and the served one."""
    options = msgspec.structs.replace(RANKER, refit=refit, learning_rate=1e-12, seed=9)
    log = build_log(LOG, [], "leave-one-out")
    codes = RankerCodes(codes_of(log.num_items, 0), codes_of(log.num_items, 0))
    evaluated, served = (
        Checkpoint(
            model=new_model(log, [], (NEXT, LIKE), options, codes=codes.served),
            item_ids=log.item_ids,
            name="old",
        )
        for _ in range(2)
    )
    starts = RankerStart(evaluated, served)
    found, _ = train_rank(LOG, [], options, codes=codes, start=starts)
    want = dict((served if refit else evaluated).model.named_parameters())
    for name, weight in found.model.named_parameters():
        assert torch.allclose(weight, want[name], atol=1e-6), name
