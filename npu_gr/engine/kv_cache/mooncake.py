"""The pool on Mooncake Store: `kv_cache.pool: mooncake://HOST:PORT`, the address of its master.

The instance adds no memory to the store, so what it puts outlives it. The memory is that of store
nodes, which run apart (`mooncake_client`).
"""

from __future__ import annotations

import logging
import socket
from typing import Any
from urllib.parse import urlsplit

from npu_gr.core.errors import ConfigError
from npu_gr.engine.kv_cache.prefix_store import PoolFailed, PrefixStore

log = logging.getLogger(__name__)

_PREFIX = "npu_gr/"
# bytes of the buffer through which values pass
MOST_VALUE_BYTES = 1 << 28
_CONNECT_S = 1.0
_GONE = -704  # OBJECT_NOT_FOUND
_HOW = "write mooncake://HOST:PORT, the address of the master"


class MooncakeStore:
    """A client of Mooncake Store over TCP."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def get(self, name: str) -> bytes | None:
        """Return a value; None also if the store failed, which it does not say."""
        return self._client.get(_PREFIX + name) or None

    def put(self, name: str, value: bytes, ttl_s: float) -> None:
        """Keep a value; the store drops the least recently used ones, and `unpack` the expired."""
        # `put` would keep an earlier value, and say that all is well.
        if status := self._client.upsert(_PREFIX + name, value):
            raise PoolFailed(f"Mooncake Store: put failed with {status}")

    def erase(self, user_name: str) -> None:
        """Remove all values of a user, also those leased by a read within ten seconds."""
        status = self._client.remove_by_regex(f"^{_PREFIX}{user_name}/", True)
        if status < 0 and status != _GONE:
            raise PoolFailed(f"Mooncake Store: erase failed with {status}")


def open_pool(url: str, most_bytes: int) -> PrefixStore | None:
    """Connect to the pool.

    Args:
        url: `kv_cache.pool`.
        most_bytes: Bytes of the buffer through which values pass; a larger value is not kept.

    Returns:
        None if it does not answer: the instance serves without it until its next start.

    Raises:
        ConfigError: the URL is invalid, or the package is missing.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        if (
            host is None
            or port is None
            or parts.scheme != "mooncake"
            or parts.path not in ("", "/")
        ):
            raise ValueError(url)
    except ValueError:
        raise ConfigError(f"kv_cache.pool: {url} is no address of a pool: {_HOW}") from None
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise ConfigError(
            f"kv_cache.pool: {url} needs pip install 'npu_gr[mooncake]', and the libraries that it "
            f"links to: {error}"
        ) from error
    try:
        # Without a master `setup` tries for minutes, and holds the interpreter's lock.
        with socket.create_connection((host, port), _CONNECT_S) as connection:
            own_address = connection.getsockname()[0]
    except OSError as error:
        log.warning("kv_cache.pool: %s does not answer (%s); serving without it", url, error)
        return None
    client = MooncakeDistributedStore()
    master = f"{host}:{port}"
    if status := client.setup(own_address, "P2PHANDSHAKE", 0, most_bytes, "tcp", "", master):
        log.warning(
            "kv_cache.pool: %s rejects the connection with %s; serving without it", url, status
        )
        return None
    return MooncakeStore(client)
