"""Near-duplicates are pairs by their definition.

What a user owns hides them, and tests leave them out.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from npu_gr.train.evaluate import Graph, HeldOut, unique_edges
from npu_gr.train.match import domains
from npu_gr.train.match.domains import (
    are_near_duplicates,
    find_near_duplicates,
    owned_near_duplicates,
    read_domains,
    split,
)


def random_graph(num_items: int, seed: int) -> Graph:
    random = np.random.default_rng(seed)
    return unique_edges(
        random.integers(0, 12, 60), random.integers(0, num_items, 60), 12, num_items
    )


@pytest.mark.parametrize("block", [1, 40, 10**6])
def test_pairs_are_the_definition(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(domains, "BLOCK_PAIRS", block)
    source, target = random_graph(11, 0), random_graph(9, 1)
    users = [
        {item: set(graph.users[graph.items == item].tolist()) for item in range(graph.num_items)}
        for graph in (source, target)
    ]
    want = []
    for one, owners in users[0].items():
        for other, buyers in users[1].items():
            both, either = len(owners & buyers), len(owners | buyers)
            if both >= 2 and both / (either - 1) >= 0.5:
                want.append((one, other))
    found = find_near_duplicates(source, target)
    assert list(zip(*(part.tolist() for part in found), strict=True)) == want
    assert want
    owned = owned_near_duplicates(source, target, found)
    edges = set(zip(source.users.tolist(), source.items.tolist(), strict=True))
    have = {(user, other) for user in range(12) for one, other in want if (user, one) in edges}
    assert set(zip(owned.users.tolist(), owned.items.tolist(), strict=True)) == have
    asked = HeldOut(np.arange(12), np.arange(12) % 9)
    assert are_near_duplicates(asked, owned).tolist() == [
        (user, user % 9) in have for user in range(12)
    ]


def test_a_product_listed_twice_is_warned_of_and_not_tested(tmp_path: Path) -> None:
    """Item 1 of the source is item 101 of the target; user u0 has it in the source alone."""
    source = [(f"u{user}", 1) for user in range(6)] + [
        (f"u{user}", 2 + user % 3) for user in range(12)
    ]
    target = [(f"u{user}", 101) for user in range(1, 6)] + [
        (f"u{user}", 102 + user % 4) for user in range(12)
    ]
    paths = [tmp_path / name for name in ("source.tsv", "target.tsv", "test.tsv")]
    tested = [("u0", 101), ("u7", 101), ("u8", 103)]
    for path, edges in zip(paths, (source, target, tested), strict=True):
        path.write_text("".join(f"{user}\t{item}\t1\n" for user, item in edges))
    both = read_domains(*paths)
    words = both.about_near_duplicates()
    assert words is not None
    assert words.startswith("WARNING: 1 pairs")
    assert "1 of 3 tested edges (33.3%)" in words
    assert len(both.evaluator_with_near_duplicates().held_out.users) == 3
    evaluator = both.evaluator()
    assert [both.users[user].user for user in evaluator.held_out.users] == ["u7", "u8"]
    # no other user is tested on it: nothing is hidden from u7 and u8 but what they have
    assert len(evaluator.hidden_items) == 2
    data = split(both, 1.0, 100, 0)
    hidden = both.owned_near_duplicates
    asked = set(
        zip(
            data.evaluator().held_out.users.tolist(),
            data.evaluator().held_out.items.tolist(),
            strict=True,
        )
    )
    assert not asked & set(zip(hidden.users.tolist(), hidden.items.tolist(), strict=True))
