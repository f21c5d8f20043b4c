"""A cached filter is the filter, a version never gets another's, and the bytes are bounded."""

from __future__ import annotations

import numpy as np
import pytest

from npu_gr.catalogue.filters import Filter
from npu_gr.catalogue.records import Items
from npu_gr.catalogue.trie import Codebooks
from npu_gr.catalogue.versions import Snapshot, make_snapshot, withdraw
from npu_gr.core.arrays import I64
from npu_gr.core.errors import Unprocessable
from npu_gr.handlers.served_catalogue import FilterCache


def ids(*items: int) -> I64:
    return np.array(items, np.int64)


def snapshot() -> Snapshot:
    number = np.arange(30)
    items = Items(
        number.astype(np.int64),
        np.stack([number % 3, number % 5], axis=1).astype(np.int32),
        None,
        {"stock": number % 2 == 0, "size": number % 4},
    )
    return make_snapshot(items, Codebooks.stacked([3, 5]))


def seen(snapshot: Snapshot, found: Filter | None) -> set[int]:
    assert found is not None
    return set(snapshot.trie.leaf_item[found.allowed].tolist())


def test_everything_at_once_is_the_intersection() -> None:
    version, cache = withdraw(snapshot(), ids(4, 8)), FilterCache(1 << 20)
    for _ in range(2):
        found = cache.filter_for(
            version, ids(0, 1, 2, 4, 8, 12, 99), ids(2, 7), {"stock": (True,), "size": (0, 2)}
        )
        assert seen(version, found) == {0, 12}
    assert seen(version, cache.filter_for(version)) == set(range(30)) - {4, 8}
    assert seen(version, cache.filter_for(version, deny=ids(5))) == set(range(30)) - {4, 5, 8}
    assert cache.filter_for(snapshot()) is None
    assert seen(version, cache.filter_for(version, allow=ids())) == set()


def test_a_query_is_worked_out_once_a_version() -> None:
    first, cache = snapshot(), FilterCache(1 << 20)
    found = cache.filter_for(first, query={"stock": (True,), "size": (0, 2)})
    assert cache.filter_for(first, query={"size": (2, 0), "stock": (True,)}) is found
    other = withdraw(first, ids(0))
    assert seen(other, cache.filter_for(other, query={"stock": (True,), "size": (0, 2)})) == seen(
        first, found
    ) - {0}
    with pytest.raises(Unprocessable, match="not of the type"):
        cache.filter_for(first, query={"stock": (1,), "size": (0, 2)})  # 1 is not True


def test_the_least_used_goes_first() -> None:
    version = snapshot()
    one = FilterCache(1 << 20)
    one.filter_for(version, query={"size": (0,)})
    cache = FilterCache(2 * one.bytes_used)
    kept = [cache.filter_for(version, query={"size": (n,)}) for n in (0, 1)]
    assert cache.filter_for(version, query={"size": (0,)}) is kept[0]
    cache.filter_for(version, query={"size": (2,)})
    assert cache.bytes_used <= 2 * one.bytes_used
    assert cache.filter_for(version, query={"size": (0,)}) is kept[0]
    assert cache.filter_for(version, query={"size": (1,)}) is not kept[1]
