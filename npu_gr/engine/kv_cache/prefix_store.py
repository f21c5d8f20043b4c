"""A pool of prefix KV that outlives its instance: the interface to it, and the format of a value.

A value is one prefix of one user, in whole pages as they lie in an arena:

    checksum (xxh3, 16 bytes) | length of the header (4 bytes) | header (msgpack) | pages

The newest prefix of a user, model version and page layout is kept. The bytes come from outside, so
nothing of a value is used before its checksum, key, age and length are right.

Source of the idea: Mooncake Store (arXiv:2407.00079).
"""

from __future__ import annotations

from hashlib import blake2b
from hmac import compare_digest
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import torch
import xxhash

from npu_gr.core.errors import NpuGrError
from npu_gr.core.history import UserKey
from npu_gr.core.request import Fetched
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import KVLayout, PageRun
from npu_gr.engine.kv_cache.tier import PrefixKey

_CHECKSUM_BYTES = 16
_HEAD_BYTES = _CHECKSUM_BYTES + 4
_MOST_HEADER_BYTES = 4096
_SEAL_BYTES = 32


class PoolFailed(NpuGrError):
    """The pool did not do what it was asked for."""

    title = "prefix pool failed"
    status = 503


class PoolMiss(Exception):
    """A value cannot be used; `reason` says why."""

    def __init__(self, reason: Fetched) -> None:
        super().__init__(reason.value)
        self.reason = reason


class PrefixStore(Protocol):
    """An engine that keeps values. Its methods block, and are called by several threads.

    They raise `PoolFailed`. Names are text without spaces; a name of a user's value begins with the
    user's own name and a slash.
    """

    def get(self, name: str) -> bytes | None:
        """Return a value; None = there is none."""
        ...

    def put(self, name: str, value: bytes, ttl_s: float) -> None:
        """Keep a value in the place of an earlier one; after `ttl_s` it may be dropped."""
        ...

    def erase(self, user_name: str) -> None:
        """Remove all values of a user, also while others read them."""
        ...


class SealedStore:
    """A store that others can write to: its values begin with a code that needs the key.

    A key says nothing about `erase`, and hides nothing.
    """

    def __init__(self, store: PrefixStore, key: str) -> None:
        """Seal the values of a store; `key`: text of any length."""
        self._store = store
        self._key = blake2b(key.encode(), digest_size=_SEAL_BYTES).digest()

    def _seal(self, value: bytes) -> bytes:
        return blake2b(value, digest_size=_SEAL_BYTES, key=self._key).digest()

    def get(self, name: str) -> bytes | None:
        """Return a value.

        Raises:
            PoolMiss: it was not put with the key.
        """
        if (sealed := self._store.get(name)) is None:
            return None
        value = sealed[_SEAL_BYTES:]
        if not compare_digest(self._seal(value), sealed[:_SEAL_BYTES]):
            raise PoolMiss(Fetched.FORGED)
        return value

    def put(self, name: str, value: bytes, ttl_s: float) -> None:
        """Keep a value, which names its user, model and age itself."""
        self._store.put(name, self._seal(value) + value, ttl_s)

    def erase(self, user_name: str) -> None:
        """Remove all values of a user."""
        self._store.erase(user_name)


class StoredPrefix(NamedTuple):
    """A value that was checked."""

    fingerprint: str
    num_tokens: int
    pages: memoryview


class _Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    name: str  # of the value, so that one value is never taken for another
    fingerprint: str
    num_tokens: int
    expires_at: float  # unix seconds


def user_name(user: UserKey) -> str:
    """Return the name of a user in the pool, which does not show the user."""
    return blake2b(msgspec.msgpack.encode(user), digest_size=16).hexdigest()


def value_name(user: UserKey, model_version: str, layout_id: str) -> str:
    """Return the name of the value of a user, model version and page layout."""
    model = blake2b(msgspec.msgpack.encode((model_version, layout_id)), digest_size=16)
    return f"{user_name(user)}/{model.hexdigest()}"


def pack(
    arena: KVArena, runs: tuple[PageRun, ...], key: PrefixKey, num_tokens: int, expires_at: float
) -> bytes:
    """Make the value of a prefix that lies in host pages, which must not change meanwhile."""
    count = arena.layout.pages(num_tokens)
    together = KVArena(arena.layout, count, torch.device("cpu"))
    together.copy_tokens_from(arena, runs, (PageRun(0, count),), num_tokens)
    name = value_name(key.user, key.model_version, key.layout_id)
    header = msgspec.msgpack.encode(_Header(name, key.fingerprint, num_tokens, expires_at))
    planes = (plane.tobytes() for plane in _planes(together))
    body = b"".join((len(header).to_bytes(4, "little"), header, *planes))
    return xxhash.xxh3_128_digest(body) + body


def unpack(value: bytes, name: str, layout: KVLayout, now: float) -> StoredPrefix:
    """Check a value.

    Args:
        value: What the pool returned.
        name: The name that was asked for.
        layout: The layout of the pages.
        now: Unix seconds.

    Raises:
        PoolMiss: it cannot be used.
    """
    view = memoryview(value)
    if (
        len(view) < _HEAD_BYTES
        or xxhash.xxh3_128_digest(view[_CHECKSUM_BYTES:]) != view[:_CHECKSUM_BYTES]
    ):
        raise PoolMiss(Fetched.TORN)
    length = int.from_bytes(view[_CHECKSUM_BYTES:_HEAD_BYTES], "little")
    if length > _MOST_HEADER_BYTES:
        raise PoolMiss(Fetched.TORN)
    try:
        header = msgspec.msgpack.decode(view[_HEAD_BYTES : _HEAD_BYTES + length], type=_Header)
    except msgspec.MsgspecError:
        raise PoolMiss(Fetched.TORN) from None
    if header.name != name:
        raise PoolMiss(Fetched.FOREIGN)
    if not header.expires_at > now:  # also if it is no number
        raise PoolMiss(Fetched.EXPIRED)
    pages = view[_HEAD_BYTES + length :]
    if header.num_tokens < 1 or layout.bytes(header.num_tokens) != len(pages):
        raise PoolMiss(Fetched.TORN)
    return StoredPrefix(header.fingerprint, header.num_tokens, pages)


def write(stored: StoredPrefix, arena: KVArena, runs: tuple[PageRun, ...]) -> None:
    """Write the pages of a checked value into host pages of the same layout."""
    count = arena.layout.pages(stored.num_tokens)
    together = KVArena(arena.layout, count, torch.device("cpu"))
    start = 0
    for plane in _planes(together):
        plane[:] = np.frombuffer(stored.pages[start : start + len(plane)], np.uint8)
        start += len(plane)
    arena.copy_tokens_from(together, (PageRun(0, count),), runs, stored.num_tokens)


def _planes(arena: KVArena) -> list[np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    """Return views of the bytes of all pages of an arena of one chunk: keys, then values."""
    every = (PageRun(0, arena.num_pages),)
    return [part.flatten().view(torch.uint8).numpy() for part in arena._parts(every)]
