"""A history in, items out: cold equals cached, filters hold, what does not fit is refused in words."""

from __future__ import annotations

import numpy as np
import pytest

from npu_gr.backend.cpu import CPUBackend
from npu_gr.catalog.build import build_trie
from npu_gr.catalog.filters import allow_items
from npu_gr.catalog.trie import Codebooks, Trie
from npu_gr.engine.beam_search import SearchOptions, Tables
from npu_gr.engine.generate import Generated, Generator, Status, layout_of, prompt_tokens
from npu_gr.errors import Unprocessable
from npu_gr.kv.arena import KVArena
from npu_gr.kv.layout import Run
from tests.engine.test_beam_search import model

CPU = CPUBackend()
RUNS = (Run(4, 2), Run(0, 3))  # pages out of order


def catalogue(num_items: int = 60) -> Trie:
    random = np.random.default_rng(0)
    sids = random.integers(0, 5, (num_items, 3))
    return build_trie(sids, np.arange(num_items) * 7, Codebooks.stacked([5] * 3))


def generator() -> Generator:
    decoder = model(20)
    layout = layout_of(decoder, page_tokens=4)
    return Generator(decoder, CPU, KVArena(layout, 8, CPU.device), max_beams=20, num_levels=3)


def run(
    made: Generator, trie: Trie, history: list[int], num_items: int = 10, parts: int = 1, **how: object
) -> Generated:
    tokens = prompt_tokens(trie, np.array(history), 18).tokens
    for part in range(parts):
        end = len(tokens) * (part + 1) // parts
        made.prefill(tokens[:end], RUNS, len(tokens) * part // parts)
    tables = Tables.upload(trie, CPU.device)
    return made.generate(trie, tables, tokens, RUNS, SearchOptions(width=made.beams.max_beams), num_items, **how)  # type: ignore[arg-type]


def test_history_to_tokens() -> None:
    trie = catalogue()
    sids = trie.sid_of(trie.find(np.array([7, 14])))
    got = prompt_tokens(trie, np.array([7, 8, 14]), 100)
    assert got.tokens.tolist() == [code + 5 * level for sid in sids.tolist() for level, code in enumerate(sid)]
    assert got.unknown_items == 1
    assert prompt_tokens(trie, np.array([7, 14]), 5).tokens.tolist() == got.tokens.tolist()[3:]
    assert not len(prompt_tokens(trie, np.array([1, 2]), 5).tokens)


def test_a_prompt_encoded_before_or_in_parts_gives_what_a_cold_one_gives() -> None:
    trie, history = catalogue(), [0, 7, 21, 70, 7]
    cold = run(generator(), trie, history)
    made = generator()
    run(made, trie, [14, 28, 35, 0, 77])  # another request, whose KV and beams are left behind
    for parts in (1, 2, 4):
        got = run(made, trie, history, parts=parts)
        assert np.array_equal(got.item_ids, cold.item_ids)
        np.testing.assert_allclose(got.scores, cold.scores, rtol=1e-6)
    assert (np.diff(cold.scores) <= 0).all()
    assert cold.status is Status.COMPLETE
    assert np.array_equal(trie.sid_of(trie.find(cold.item_ids)), cold.sids)


def test_items_of_one_semantic_id_come_together() -> None:
    trie = build_trie(np.array([[1, 2], [1, 2], [0, 3]]), np.array([9, 4, 5]), Codebooks.stacked([5, 5]))
    decoder = model(10)
    made = Generator(decoder, CPU, KVArena(layout_of(decoder, 4), 8, CPU.device), max_beams=8, num_levels=2)
    got = run(made, trie, [5], num_items=8)
    assert sorted(got.item_ids.tolist()) == [4, 5, 9]
    at = got.item_ids.tolist().index(4)
    assert got.item_ids[at + 1] == 9
    assert got.scores[at] == got.scores[at + 1]
    assert got.status is Status.EXHAUSTED


def test_a_filter_leaves_what_it_allows() -> None:
    trie = catalogue()
    wanted = np.array([7, 14, 21, 700])
    got = run(generator(), trie, [0, 7], allow=allow_items(trie, wanted))
    assert sorted(got.item_ids.tolist()) == [7, 14, 21]
    assert got.status is Status.EXHAUSTED
    nothing = run(generator(), trie, [0, 7], allow=allow_items(trie, np.array([1])))
    assert (len(nothing.item_ids), nothing.sids.shape, nothing.status) == (0, (0, 3), Status.EXHAUSTED)


def test_what_does_not_fit_is_refused() -> None:
    trie, made = catalogue(), generator()
    tables = Tables.upload(trie, CPU.device)
    with pytest.raises(Unprocessable, match="beam_width: 21, the limit is 20"):
        made.generate(trie, tables, np.array([1]), RUNS, SearchOptions(width=21), 5)
    with pytest.raises(Unprocessable, match="history: 0 tokens, the model takes 1 to 62"):
        made.generate(trie, tables, np.empty(0, np.int64), RUNS, SearchOptions(width=8), 5)
    with pytest.raises(Unprocessable, match="history: 63 tokens"):
        made.generate(trie, tables, np.ones(63, np.int64), RUNS, SearchOptions(width=8), 5)
