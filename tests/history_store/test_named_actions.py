"""A store keeps the names of its action numbers: a list that only grows at its end."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.core.errors import ConfigError, StoreFailed
from npu_gr.core.names import difference, key_fingerprint
from npu_gr.core.secret import SecretUrl
from npu_gr.history_store.embedded import EmbeddedStore
from npu_gr.history_store.embedded_check import repair
from npu_gr.history_store.open import open_store
from npu_gr.history_store.store import HistoryConfig, HistoryStore, check_item_key
from tests.history_store.redis_server import redis_path


@pytest.fixture(params=["embedded", "redis"])
async def named_store(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[HistoryStore]:
    if request.param == "embedded":
        store = EmbeddedStore(HistoryConfig(path=str(tmp_path / "h.db")))
        yield store
        await store.close()
        return
    with redis_path(tmp_path) as path:
        opened = await open_store(
            HistoryConfig(kind="redis", url=SecretUrl(f"unix://{path}"), timeout_s=30.0)
        )
        assert opened is not None
        yield opened
        await opened.close()


async def test_the_list_grows_at_its_end_and_nowhere_else(named_store: HistoryStore) -> None:
    assert await named_store.actions() == ()
    for names, kept in (
        (["view"], ["view"]),
        (["view", "Käufe", "x\udc00"], ["view", "Käufe", "x\udc00"]),
        (["view"], ["view", "Käufe", "x\udc00"]),
        (["view", "buy", "x", "y"], ["view", "Käufe", "x\udc00"]),
        ([], ["view", "Käufe", "x\udc00"]),
        (["view", "Käufe", "x\udc00", "4.5"], ["view", "Käufe", "x\udc00", "4.5"]),
    ):
        assert await named_store.name_actions(names) == tuple(kept)
        assert await named_store.actions() == tuple(kept)


async def test_of_two_who_name_at_once_one_decides(named_store: HistoryStore) -> None:
    lists = [["a", "b"], ["a", "c"], ["b"], ["a", "b", "d"]] * 5
    answers = await asyncio.gather(*(named_store.name_actions(names) for names in lists))
    kept = await named_store.actions()
    for names, answer in zip(lists, answers, strict=True):
        assert difference(answer, kept) == ""  # the list had only grown since then
        # it has our names, or others
        assert not difference(names, answer) or difference(answer, names)


async def test_the_embedded_list_outlives_the_process_and_a_repair(tmp_path: Path) -> None:
    store = EmbeddedStore(HistoryConfig(path=str(tmp_path / "h.db")))
    await store.name_actions(["view", "buy"])
    await store.close()
    repair(tmp_path / "h.db", tmp_path / "new.db")
    for name in ("h.db", "new.db"):
        store = EmbeddedStore(HistoryConfig(path=str(tmp_path / name)))
        assert await store.actions() == ("view", "buy")
        await store.close()


async def test_damage_is_found(tmp_path: Path) -> None:
    store = EmbeddedStore(HistoryConfig(path=str(tmp_path / "h.db")))
    await store.name_actions(["view", "buy"])
    await store.close()
    db = sqlite3.connect(tmp_path / "h.db")
    db.execute("UPDATE actions SET name = ? WHERE number = 1", (b"bury",))
    db.commit()
    db.close()
    store = EmbeddedStore(HistoryConfig(path=str(tmp_path / "h.db")))
    with pytest.raises(StoreFailed, match="damaged names of actions"):
        await store.actions()
    await store.close()


@settings(derandomize=True, deadline=None)
@given(st.text("ab", max_size=4), st.text("ab", max_size=4))
def test_no_difference_is_a_beginning(kept: str, names: str) -> None:
    assert (difference(kept, names) == "") == names.startswith(kept)


async def test_a_new_store_takes_the_key_of_the_items(named_store: HistoryStore) -> None:
    key = b"k" * 16
    await check_item_key(named_store, b"")
    await check_item_key(named_store, key)
    await named_store.name_actions(["view"])
    await check_item_key(named_store, key)
    assert await named_store.actions() == ("view",)
    theirs, ours = key_fingerprint(key), key_fingerprint(b"o" * 16)
    words = f"items have the key {theirs}, those of the models have "
    with pytest.raises(ConfigError, match=f"{words}the key {ours}"):
        await check_item_key(named_store, b"o" * 16)
    with pytest.raises(ConfigError, match=f"{words}no key"):
        await check_item_key(named_store, b"")


async def test_a_store_of_an_older_version_has_no_key(named_store: HistoryStore) -> None:
    await named_store.name_actions(["view"])
    await check_item_key(named_store, b"")
    with pytest.raises(ConfigError, match=r"items have no key, .*--like the older one"):
        await check_item_key(named_store, b"k" * 16)
    await check_item_key(named_store, b"")
