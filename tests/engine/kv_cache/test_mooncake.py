"""The pool on a real Mooncake Store: what a killed instance put is read, and erased at once.

`.ci/packages` runs it with the package; elsewhere it is skipped where the package is missing.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from npu_gr.core.errors import ConfigError
from npu_gr.engine.kv_cache.mooncake import open_pool
from npu_gr.engine.kv_cache.prefix_store import PoolFailed
from tests.engine.kv_cache.mooncake_nodes import (
    NEEDS,
    MooncakeNodes,
    ended,
    mooncake,
    started,
)
from tests.ports import free_port

MOST_BYTES = 1 << 24

# an instance that puts a value, and waits to be killed
WRITER = """
import sys, time
from npu_gr.engine.kv_cache.mooncake import open_pool
store = open_pool(sys.argv[1], 1 << 24)
store.put("user/model", b"first", 60.0)
store.put("user/model", b"second" * 1000, 60.0)
store.put("user2/model", b"kept", 60.0)
print(0, flush=True)
time.sleep(60)
"""


def needs_mooncake() -> None:
    """Skip also where the package lacks a library that it links to."""
    pytest.importorskip("mooncake.store", reason=NEEDS, exc_type=ImportError)


@pytest.fixture(scope="module")
def nodes() -> Iterator[MooncakeNodes]:
    needs_mooncake()
    with mooncake(64 << 20) as found:
        yield found


def test_what_a_killed_instance_put_is_read_and_can_be_erased_at_once(
    nodes: MooncakeNodes,
) -> None:
    writer = started(sys.executable, "-c", WRITER, nodes.url)
    ended(writer)
    store = open_pool(nodes.url, MOST_BYTES)
    assert store is not None
    assert store.get("user/model") == b"second" * 1000  # the newest, under a lease from now on
    assert store.get("user/other") is None
    store.erase("user")
    assert store.get("user/model") is None
    assert store.get("user2/model") == b"kept"
    store.erase("user")  # nothing is left
    with pytest.raises(PoolFailed, match="put failed"):
        store.put("user/model", bytes(MOST_BYTES + 1), 60.0)


@pytest.mark.parametrize("frozen", ["master", "node"])
def test_a_frozen_store_holds_no_other_thread(nodes: MooncakeNodes, frozen: str) -> None:
    """The event loop's, above all: a call that kept the interpreter would never be woken here."""
    store = open_pool(nodes.url, MOST_BYTES)
    assert store is not None
    value = bytes(range(256)) * 4000
    store.put(f"{frozen}/model", value, 60.0)
    process = getattr(nodes, frozen)
    with ThreadPoolExecutor() as threads:
        process.send_signal(signal.SIGSTOP)
        try:
            got = threads.submit(store.get, f"{frozen}/model")
            put = threads.submit(store.put, f"{frozen}/other", value, 60.0)
            with pytest.raises(TimeoutError):
                got.result(0.3)
            assert not put.done()
        finally:
            process.send_signal(signal.SIGCONT)
        assert got.result(30) == value
        put.result(30)


def test_an_instance_starts_without_its_pool() -> None:
    needs_mooncake()
    assert open_pool(f"mooncake://127.0.0.1:{free_port()}", MOST_BYTES) is None


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1", "mooncake://host", "mooncake://h:1/x", ""])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache\.pool"):
        open_pool(url, MOST_BYTES)
