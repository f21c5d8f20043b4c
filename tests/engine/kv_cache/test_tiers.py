"""Both tiers come from one configuration, and a user is erased from both."""

from __future__ import annotations

import logging

import msgspec
import pytest
import torch

from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.core.errors import ConfigError
from npu_gr.core.history import UserKey
from npu_gr.engine.kv_cache.config import KVConfig
from npu_gr.engine.kv_cache.pages import KVLayout
from npu_gr.engine.kv_cache.tier import PrefixKey
from npu_gr.engine.kv_cache.tiers import Tiers, open_tiers

LAYOUT = KVLayout(num_layers=1, num_heads=1, qk_dim=1, v_dim=1, page_tokens=32)
PAGE = LAYOUT.page_bytes
CONFIG = KVConfig(page_tokens=32, hbm_bytes=4 * PAGE + 1, dram_bytes=3 * PAGE + 1, dram_ttl_s=7.0)


def tiers(config: KVConfig = CONFIG, *, simulated: bool = False, least_pages: int = 1) -> Tiers:
    backend = None if simulated else CPUBackend()
    return open_tiers(
        config,
        LAYOUT,
        backend,
        t_life_s=5.0,
        clock=lambda: 0.0,
        section="x",
        least_pages=least_pages,
    )


def test_whole_pages_within_the_budgets() -> None:
    pool, dram = tiers()
    assert dram is not None
    assert (pool.budget_bytes, dram.budget_bytes) == (4 * PAGE, 3 * PAGE)
    assert pool.waits.t_life_s == 5.0
    key = PrefixKey(UserKey("", "u"), "v", LAYOUT.layout_id, "f")
    copy = dram.reserve(key, 1)
    dram.commit(copy)
    assert 7.0 * 0.9 <= copy.expires_at <= 7.0 * 1.1


@pytest.mark.parametrize("simulated", [False, True])
def test_a_simulation_has_pages_without_memory(simulated: bool) -> None:
    pool, dram = tiers(simulated=simulated)
    assert dram is not None
    assert {pool.arena.layout, dram.arena.layout} == {LAYOUT}
    for tier in (pool, dram):
        k, _ = tier.arena.views(
            0, tier.reserve(PrefixKey(UserKey("", "u"), "v", "l", "f"), 1).runs, 1
        )[0]
        assert k.device == torch.device("meta" if simulated else "cpu")


def test_a_dram_tier_below_one_page_is_none() -> None:
    assert tiers(msgspec.structs.replace(CONFIG, dram_bytes=PAGE - 1)).dram is None


def test_too_little_hbm_is_rejected_in_the_words_of_its_section() -> None:
    message = rf"x\.hbm_bytes: {4 * PAGE + 1} holds 4 pages of {PAGE} bytes, the least is 5"
    with pytest.raises(ConfigError, match=message):
        tiers(least_pages=5)


@pytest.mark.parametrize("dram_bytes", [0, CONFIG.dram_bytes])
def test_a_user_is_erased_from_both(dram_bytes: int) -> None:
    both = tiers(msgspec.structs.replace(CONFIG, dram_bytes=dram_bytes))
    keys = [PrefixKey(UserKey("", user), "v", LAYOUT.layout_id, "f") for user in "ab"]
    for key in keys:
        both.pool.publish(both.pool.reserve(key, 1))
        if both.dram is not None:
            both.dram.commit(both.dram.reserve(key, 1))
    both.erase_user(UserKey("", "a"))
    for tier in both:
        assert tier is None or [tier.get(key) is None for key in keys] == [True, False]


class WithMemory(CPUBackend):
    """A device with memory of its own, of which so many bytes are free."""

    def free_bytes(self) -> int:
        return 10 * PAGE + 3


def test_auto_is_a_share_of_what_is_free_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    config = msgspec.convert({"page_tokens": 32, "hbm_bytes": "auto"}, KVConfig)
    caplog.set_level(logging.INFO, "npu_gr.engine.kv_cache.tiers")
    for ratio, pages in ((0.8, 8), (0.4, 4)):
        pool, _ = open_tiers(
            config, LAYOUT, WithMemory(), t_life_s=5.0, clock=lambda: 0.0, auto_ratio=ratio
        )
        assert (pool.budget_bytes, pool.arena.num_pages) == (pages * PAGE, pages)
    assert "kv_cache.hbm_bytes: auto is" in caplog.text
    assert "80 % of the" in caplog.text
    assert "256 tokens" in caplog.text


def test_auto_that_holds_no_page_or_has_no_device_is_rejected() -> None:
    auto = msgspec.structs.replace(CONFIG, hbm_bytes="auto")
    with pytest.raises(ConfigError, match=r"x\.hbm_bytes: auto is for devices with memory"):
        tiers(auto)
    with pytest.raises(ConfigError, match=r"x\.hbm_bytes: 0 holds 0 pages"):
        open_tiers(
            auto, LAYOUT, WithMemory(), t_life_s=5.0, clock=lambda: 0.0, section="x", auto_ratio=0.0
        )
