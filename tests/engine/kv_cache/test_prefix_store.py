"""The format of a value in the pool keeps the bytes of pages, of every layout."""

from __future__ import annotations

import pytest
import torch

from npu_gr.backend.base import Arrangement
from npu_gr.core.history import UserKey
from npu_gr.core.request import Fetched
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import KVLayout, PageRun
from npu_gr.engine.kv_cache.prefix_store import PoolMiss, pack, unpack, value_name, write
from npu_gr.engine.kv_cache.tier import PrefixKey

USER = UserKey("tenant", "user")
SCATTERED = (PageRun(5, 2), PageRun(1, 1), PageRun(9, 2))
ELSEWHERE = (PageRun(0, 4), PageRun(8, 1))


def filled(layout: KVLayout, seed: int) -> KVArena:
    """Pages of random bytes, NaN and infinity among them, as another user leaves them."""
    arena = KVArena(layout, 12, torch.device("cpu"))
    random = torch.Generator().manual_seed(seed)
    for plane in (*arena._keys, *arena._values):
        numbers = plane.view(torch.uint8)
        numbers.copy_(torch.randint(256, numbers.shape, generator=random, dtype=torch.uint8))
    return arena


def of_pages(arena: KVArena, runs: tuple[PageRun, ...]) -> list[bytes]:
    """The bytes of each page, keys and then values."""
    return [
        part[:, at].contiguous().view(torch.uint8).numpy().tobytes()
        for first, count in runs
        for at in range(first, first + count)
        for part in (arena._keys[0], arena._values[0])
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("arrangement", ["natural", "tiles"])
@pytest.mark.parametrize("window", [0, 150])
def test_pages_come_back_with_their_bytes(
    dtype: str, arrangement: Arrangement, window: int
) -> None:
    layout = KVLayout(
        num_layers=2,
        num_heads=3,
        qk_dim=20,
        v_dim=33,
        dtype=dtype,
        arrangement=arrangement,
        window_tokens=window,
        first_tokens=window // 3,
    )
    num_tokens = 1000 if window else 270
    assert layout.pages(num_tokens) == 5
    source, target = filled(layout, 0), filled(layout, 1)
    key = PrefixKey(USER, "version", layout.layout_id, "fingerprint")
    value = pack(source, SCATTERED, key, num_tokens, 100.0)
    name = value_name(USER, "version", layout.layout_id)
    stored = unpack(value, name, layout, 99.0)
    assert (stored.fingerprint, stored.num_tokens) == ("fingerprint", num_tokens)
    before = of_pages(target, (PageRun(4, 4), PageRun(9, 3)))
    write(stored, target, ELSEWHERE)
    assert of_pages(target, ELSEWHERE) == of_pages(source, SCATTERED)
    assert of_pages(target, (PageRun(4, 4), PageRun(9, 3))) == before
    for late, other, reason in ((101.0, name, "EXPIRED"), (99.0, f"{name}x", "FOREIGN")):
        with pytest.raises(PoolMiss) as missed:
            unpack(value, other, layout, late)
        assert missed.value.reason is Fetched[reason]
    for at in (0, 17, len(value) // 2, len(value) - 1):
        torn = bytearray(value)
        torn[at] ^= 1
        with pytest.raises(PoolMiss) as missed:
            unpack(bytes(torn), name, layout, 99.0)
        assert missed.value.reason is Fetched.TORN
