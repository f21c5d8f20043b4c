"""Nodes have the tree of the given codes, and are trained and served among siblings."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st

from npu_gr.catalogue.build import build_trie
from npu_gr.catalogue.records import read_items
from npu_gr.catalogue.trie import Codebooks
from npu_gr.core.errors import DataError
from npu_gr.model.decoder import Decoder
from npu_gr.service.app import instance
from npu_gr.service.config import load
from npu_gr.train.data import Window, batches, build_log
from npu_gr.train.generate.codes import ItemCodes, item_vectors, read_codes
from npu_gr.train.generate.nodes import (
    NodeDecoder,
    SiblingLoss,
    encode,
    next_logits,
    node_count,
    nodes_of,
)
from npu_gr.train.generate.publish import GIVEN_CODES, publish, start_at
from npu_gr.train.generate.train import (
    COOCCURRENCE_WINDOW,
    GeneratorEvaluator,
    TrainedGenerator,
    _new_model,
    train_generator,
)
from tests.train.generate.test_train import ONE, TINY
from tests.train.synthetic import NUM_ITEMS, planted

GIVEN = [[item % 3, item % 2, item // 6] for item in range(NUM_ITEMS)]
HISTORY = {"items": [30, 240, 210], "actions": [1, 1, 1], "timestamps": [1, 2, 3]}


def written(folder: Path) -> Path:
    """Write the given codes as a user does."""
    path = folder / "index.json"
    path.write_text(json.dumps({str(item * 10): codes for item, codes in enumerate(GIVEN)}))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedGenerator:
    return train_generator(planted(), [], TINY, written(tmp_path_factory.mktemp("given")))


@given(
    st.integers(1, 4).flatmap(
        lambda levels: st.lists(
            st.tuples(*[st.integers(0, 4)] * levels), min_size=1, max_size=30, unique=True
        )
    )
)
def test_two_items_share_a_node_if_and_only_if_their_codes_begin_alike(
    rows: list[tuple[int, ...]],
) -> None:
    """Nodes are numbered in the order of the codes, so the catalogue keeps its paths."""
    sids = np.array(rows, np.int32)
    codes = ItemCodes(sids, tuple(int(level.max()) + 1 for level in sids.T))
    nodes = nodes_of(codes)
    assert nodes.given is codes
    assert nodes.code_count == node_count(codes.code_count, len(sids))
    for level, count in enumerate(codes.num_prefixes()):
        assert count <= nodes.code_count[level] < 2 * len(sids)
        beginnings, want = np.unique(sids[:, : level + 1], axis=0, return_inverse=True)
        assert len(beginnings) == count
        assert np.array_equal(nodes.sids[:, level], want.ravel())


def siblings(codes: ItemCodes, sid: list[int], level: int) -> list[int]:
    """List the nodes that stand below the same beginning, by comparing every item."""
    return sorted({other[level] for other in codes.sids.tolist() if other[:level] == sid[:level]})


def chance(
    model: Decoder, codes: ItemCodes, row: torch.Tensor, sid: list[int], level: int
) -> float:
    """Compute a node's log-probability among its siblings, without the batched code."""
    base = Codebooks.stacked(codes.code_count).vocab_base[level]
    among = siblings(codes, sid, level)
    chances = next_logits(model, row)[[base + node for node in among]].log_softmax(0)
    return float(chances[among.index(sid[level])])


def test_the_loss_is_the_surprise_among_siblings(trained: TrainedGenerator) -> None:
    """Sequence by sequence, without padding, node by node.

    Certain nodes and a window's first one count nothing.
    """
    log, codes, model = trained.log, trained.codes, trained.model
    bases = np.array(Codebooks.stacked(codes.code_count).vocab_base)
    nodes = NodeDecoder(model, codes, torch.Generator().manual_seed(1))
    model = nodes.folded()
    parts = [Window(int(log.starts[user]), length) for user, length in enumerate((3, 1, 7, 5))]
    (batch,) = batches(log, parts, 100)
    surprise = 0.0
    for start, length in parts:
        sids = codes.sids[log.items[start : start + length]]
        rows = encode(model, torch.from_numpy(sids + bases).flatten()[None, :-1])[0]
        for place in range(1, sids.size):
            item, level = divmod(place, 3)
            surprise -= chance(model, codes, rows[place - 1], sids[item].tolist(), level)
    assert SiblingLoss(codes)(nodes, batch, 0.0).item() == pytest.approx(surprise / 16, rel=1e-5)


def test_nodes_keep_their_numbers_and_new_ones_get_free_ones() -> None:
    rows = np.array([[0, 1], [0, 3], [2, 0], [3, 3]], np.int32)
    kept = np.array([[1, 3], [1, 0], [-1, -1], [0, 2]], np.int32)
    nodes = nodes_of(ItemCodes(rows, (4, 4)), kept)
    assert nodes.code_count == (4, 4)
    assert nodes.sids.tolist() == [[1, 3], [1, 0], [2, 1], [0, 2]]
    too_large = nodes_of(ItemCodes(rows, (4, 4)), kept + np.int32(3))
    assert too_large.sids.tolist() == [[0, 0], [0, 1], [1, 2], [2, 3]], "numbered anew"


def test_the_numbers_of_nodes_make_no_difference(trained: TrainedGenerator) -> None:
    """The same rows under other numbers give the same loss."""
    log, codes = trained.log, trained.codes
    assert codes.given is not None
    random = np.random.default_rng(0)
    numbers = [random.permutation(count).astype(np.int32) for count in codes.code_count]
    kept = np.stack([of[codes.sids[:, level]] for level, of in enumerate(numbers)], axis=1)
    others = nodes_of(codes.given, kept)
    assert np.array_equal(others.sids, kept)
    base = np.array(Codebooks.stacked(codes.code_count).vocab_base)
    other = NodeDecoder(copy.deepcopy(trained.model), others, torch.Generator().manual_seed(1))
    nodes = NodeDecoder(trained.model, codes, torch.Generator().manual_seed(1))
    with torch.no_grad():
        table = other.decoder.embedding.weight
        for level, of in enumerate(numbers):
            table[base[level] + of.astype(np.int64)] = trained.model.embedding.weight[
                base[level] : base[level] + len(of)
            ]
    (batch,) = batches(log, [Window(int(log.starts[user]), 7) for user in range(4)], 100)
    losses = [SiblingLoss(of)(model, batch, 0.0) for of, model in ((codes, nodes), (others, other))]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)


def test_the_folded_table_gives_the_logits_of_the_sums(trained: TrainedGenerator) -> None:
    """A node's embedding is its own row plus that of the item's code, bit for bit."""
    codes, given_codes = trained.codes, trained.codes.given
    assert given_codes is not None
    nodes = NodeDecoder(trained.model, codes, torch.Generator().manual_seed(1))
    folded = nodes.folded()
    assert folded.embedding.weight is not trained.model.embedding.weight
    for level, base in enumerate(Codebooks.stacked(codes.code_count).vocab_base):
        code_base = Codebooks.stacked(given_codes.code_count).vocab_base[level]
        for node, code in zip(
            codes.sids[:, level].tolist(), given_codes.sids[:, level].tolist(), strict=True
        ):
            want = trained.model.embedding.weight[base + node] + nodes.code_rows[code_base + code]
            assert torch.equal(folded.embedding.weight[base + node], want)
    tokens = torch.randint(
        0, sum(codes.code_count), (4, 12), generator=torch.Generator().manual_seed(0)
    )
    rows = encode(nodes.decoder, tokens, table=nodes.table)
    assert torch.equal(encode(folded, tokens), rows)
    assert torch.equal(next_logits(folded, rows), rows @ nodes.table.T)


def test_a_tree_without_branches_below_its_first_level_is_trained() -> None:
    """Without any choice among siblings the loss is 0, and no gradient is NaN."""
    nodes = nodes_of(ItemCodes(np.array([[0, 0], [1, 0]], np.int32), (2, 1)))
    log = build_log(planted(), [], "leave-one-out")
    model = _new_model(log, nodes, ONE)
    (batch,) = batches(log, [Window(0, 3)], 100)
    batch = dataclasses.replace(batch, items=torch.tensor([[0, 1, 1]]))
    trainee = NodeDecoder(model, nodes, torch.Generator().manual_seed(0))
    SiblingLoss(nodes)(trainee, batch, 0.0).backward()
    gradient = model.embedding.weight.grad
    assert gradient is not None
    assert gradient.isfinite().all()
    assert gradient[:2].any()


def test_the_search_ranks_as_brute_force_among_siblings(trained: TrainedGenerator) -> None:
    """By a model that has learnt nothing, for which each measure has an order of its own."""
    log, codes = trained.log, trained.codes
    model = (
        _new_model(log, codes, msgspec.structs.replace(TINY, code_init_norm=1.0))
        .eval()
        .requires_grad_(False)
    )
    tokens = torch.from_numpy(codes.sids + np.array(Codebooks.stacked(codes.code_count).vocab_base))
    users = log.next_items()[:8]
    want = []
    for user, at in users:
        prompt = tokens[log.items[log.starts[user] : at][-TINY.history_items :]].flatten()
        rows = encode(model, torch.cat([prompt.expand(NUM_ITEMS, -1), tokens[:, :-1]], dim=1))[
            :, -3:
        ]
        scores = np.array(
            [sum(chance(model, codes, rows[item, level], sid, level) for level in range(3))
             for item, sid in enumerate(codes.sids.tolist())]
        )  # fmt: skip
        want.append((scores > scores[log.items[at]]).sum())
    evaluate = GeneratorEvaluator(codes, log.item_ids, TINY.history_items, 50)
    assert evaluate.evaluate(model, log, users).ranks.overall.tolist() == want


def test_nodes_start_where_all_of_their_items_stand(trained: TrainedGenerator) -> None:
    log, codes = trained.log, trained.codes
    options = msgspec.structs.replace(TINY, code_init_norm=0.5)
    moved = (
        _new_model(log, codes, options).embedding.weight
        - _new_model(log, codes, TINY).embedding.weight
    )
    vectors = item_vectors(log, [], TINY.vector_dim, COOCCURRENCE_WINDOW, TINY.seed)
    for level, start in enumerate(moved.detach().split(codes.code_count)):
        for node, row in enumerate(start):
            mean = torch.from_numpy(vectors[codes.sids[:, level] == node].mean(0))
            if mean.norm() > 1e-3:
                assert torch.cosine_similarity(row[: TINY.vector_dim], mean, dim=0) > 0.999


def test_the_rule_is_learnt_with_codes_that_know_nothing_of_it(trained: TrainedGenerator) -> None:
    report = trained.report
    popularity, *_ = report.baselines
    assert trained.codes.given is not None
    assert trained.codes.given.sids.tolist() == GIVEN
    assert trained.model.config.vocab_size == sum(trained.codes.code_count)
    assert report.own.hr_at_10 > popularity.hr_at_10 + 0.3
    assert report.own.invalid_ratio == 0
    assert report.made.endswith(
        f"ready-made; a token for each of the {sum(trained.codes.num_prefixes())} prefixes"
    )


def test_two_runs_are_equal_bit_for_bit(tmp_path: Path) -> None:
    options = msgspec.structs.replace(
        ONE, dropout=0.2, skip_ratio=0.1, swap_ratio=0.2, code_init_norm=0.3
    )
    one, other = (
        train_generator(planted(), [], options, written(tmp_path)).model.state_dict()
        for _ in range(2)
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


async def test_a_service_answers_the_given_paths_by_the_measure_of_the_training(
    trained: TrainedGenerator, tmp_path: Path
) -> None:
    folder = tmp_path / "new"
    publish(trained, [], TINY, folder)
    assert trained.codes.given is not None
    assert np.array_equal(
        read_codes(folder / GIVEN_CODES, trained.log.item_ids).sids, trained.codes.given.sids
    )
    sids = read_items(folder / "items.jsonl").sids
    trie = build_trie(sids, trained.log.item_ids, Codebooks.stacked(trained.codes.code_count))
    assert [len(level) for level in trie.token] == trained.codes.num_prefixes()
    overrides = ["server.port=0", "server.drain_grace_s=0.1", "generate.hbm_bytes=4000000"]
    config = load(
        folder / "serve.yaml", [*overrides, f"history_store.path={tmp_path / 'history.db'}"]
    )
    answers: dict[str, Any] = {}
    async with instance(config) as (app, _), TestClient(TestServer(app)) as client:
        for how in ("", "valid", "vocabulary"):
            body = {"user_id": "u", "history": HISTORY, "num_items": 20} | (
                {"normalise": how} if how else {}
            )
            headers = {"X-Request-Timeout-Ms": "30000"}
            async with client.post("/v1/generate", json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
                answers[how] = await response.json()
    for answer in answers.values():
        found = np.array(answer["sids"]).reshape(-1, 3)
        assert len(set(answer["items"])) == 20
        assert np.array_equal(found, trained.codes.sids[np.array(answer["items"]) // 10])
    assert answers[""]["scores"] == answers["valid"]["scores"]
    assert answers[""]["scores"] != answers["vocabulary"]["scores"]
    # a request that names nothing denies what was had, so its siblings share what it had: at most
    # one, then
    assert np.exp(answers[""]["scores"]).sum() <= 1 + 1e-5


@pytest.mark.parametrize("text", ["", "[]", '{"10": [0, 0, 0]}'])
def test_codes_that_are_not_those_of_the_items_are_named(
    trained: TrainedGenerator, tmp_path: Path, text: str
) -> None:
    publish(trained, [], TINY, tmp_path)
    assert trained.codes.given is not None
    start = start_at(tmp_path, trained.codes.given.code_count)
    assert np.array_equal(start.items.sids, trained.codes.given.sids)
    assert start.nodes is not None
    assert np.array_equal(start.nodes, trained.codes.sids)
    (tmp_path / GIVEN_CODES).write_text(text)
    with pytest.raises(DataError, match=r"given_codes\.json: are no codes of the items"):
        start_at(tmp_path, trained.codes.given.code_count)


def test_another_generator_takes_the_given_codes_away(
    trained: TrainedGenerator, tmp_path: Path
) -> None:
    publish(trained, [], TINY, tmp_path)
    assert (tmp_path / GIVEN_CODES).exists()
    publish(trained._replace(codes=trained.codes.given or trained.codes), [], TINY, tmp_path)
    assert not (tmp_path / GIVEN_CODES).exists()
