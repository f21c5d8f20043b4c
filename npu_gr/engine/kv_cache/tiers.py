"""Opens the two memory tiers of one model's prefixes, for the service and the simulator."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from npu_gr.backend.base import Backend
from npu_gr.core.errors import ConfigError
from npu_gr.core.history import UserKey
from npu_gr.core.memory import size_text
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.config import KVConfig
from npu_gr.engine.kv_cache.pages import KVLayout
from npu_gr.engine.kv_cache.prefix_pool import PrefixPool
from npu_gr.engine.kv_cache.tier import DramStore

log = logging.getLogger(__name__)

# Share of the free device memory that `hbm_bytes: auto` takes. The rest is for the activations and
# graphs of passes, and for the weights of the next version while a reload prepares it.
AUTO_RATIO = 0.8
# that of a ranker whose instance has a generator too, which is loaded after it
AUTO_RATIO_OF_TWO = 0.4


class Tiers(NamedTuple):
    """The tiers that hold the prefixes of one page layout.

    Several model versions may share them, since a prefix key includes the version.
    """

    pool: PrefixPool  # HBM
    dram: DramStore | None  # None = no second tier

    def knows(self, user: UserKey) -> bool:
        """Return whether a tier has entries of a user, also ones being written."""
        return self.pool.knows(user) or (self.dram is not None and self.dram.knows(user))

    def weigh(self, tenant_weights: Mapping[str, float]) -> None:
        """Set the weights of the tenants' shares; a tenant without one has weight 1."""
        self.pool.shares.weights = tenant_weights
        if self.dram is not None:
            self.dram.shares.weights = tenant_weights

    def erase_all(self) -> None:
        """Drop all entries of all users in both tiers."""
        users = self.pool.users() + ([] if self.dram is None else self.dram.users())
        for user in users:
            self.erase_user(user)

    def erase_user(self, user: UserKey) -> None:
        """Drop all entries of a user in both tiers."""
        self.pool.erase_user(user)
        if self.dram is not None:
            self.dram.erase_user(user)


def open_tiers(
    config: KVConfig,
    layout: KVLayout,
    backend: Backend | None,
    *,
    t_life_s: float,
    clock: Callable[[], float],
    section: str = "kv_cache",
    auto_ratio: float = AUTO_RATIO,
    least_pages: int = 1,
    seed: int = 0,
) -> Tiers:
    """Allocate both tiers and touch every page.

    Args:
        config: Sizes of the tiers, and the TTL of the DRAM tier. There is a DRAM tier if
            `dram_bytes` holds one page.
        layout: Shape of a page, in both tiers.
        backend: Backend of the device that holds the HBM tier; it packs tiles and pins host memory.
            None = pages without memory, on torch's `meta` device, for a simulation.
        t_life_s: Seconds that a published prefix waits for its rank.
        clock: Monotonic clock of both tiers, in seconds.
        section: Section of the configuration, for error messages.
        auto_ratio: Share of the free device memory that `hbm_bytes: auto` takes.
        least_pages: Least number of pages of the HBM tier.
        seed: Seed of the jitter of the DRAM tier's TTLs.

    Raises:
        ConfigError: `hbm_bytes` holds fewer than `least_pages` pages, the device has less, or it is
            auto where the device has no memory of its own.
    """
    free = None if backend is None else backend.free_bytes()
    hbm_bytes = _hbm_bytes(config, layout, free, section, auto_ratio)
    pages = hbm_bytes // layout.page_bytes
    if pages < least_pages:
        raise ConfigError(
            f"{section}.hbm_bytes: {hbm_bytes} holds {pages} pages of {layout.page_bytes} "
            f"bytes, the least is {least_pages}"
        )
    if free is not None and hbm_bytes > free:
        raise ConfigError(
            f"{section}.hbm_bytes: {size_text(hbm_bytes)}, but the device has "
            f"{size_text(free)} next to the weights"
        )
    arena = _arena(layout, pages, backend)
    pool = PrefixPool(arena, hbm_bytes, t_life_s, clock)
    dram_pages = config.dram_bytes // layout.page_bytes
    if not dram_pages:
        return Tiers(pool, None)
    dram = DramStore(
        _host_arena(layout, dram_pages, backend),
        ttl_s=config.dram_ttl_s,
        ttl_jitter_ratio=config.dram_ttl_jitter_ratio,
        seed=seed,
        clock=clock,
    )
    return Tiers(pool, dram)


def _hbm_bytes(
    config: KVConfig, layout: KVLayout, free: int | None, section: str, ratio: float
) -> int:
    """Resolve `hbm_bytes: auto`, and say in the log what it is."""
    if config.hbm_bytes != "auto":
        return config.hbm_bytes
    if free is None:
        raise ConfigError(
            f"{section}.hbm_bytes: auto is for devices with memory of their own; give the bytes"
        )
    pages = int(free * ratio) // layout.page_bytes
    log.info(
        "%s.hbm_bytes: auto is %s, %.0f %% of the %s that the device has next to the weights: "
        "%d tokens",
        *(section, size_text(pages * layout.page_bytes), ratio * 100, size_text(free)),
        pages * layout.page_tokens,
    )
    return pages * layout.page_bytes


def _arena(layout: KVLayout, num_pages: int, backend: Backend | None) -> KVArena:
    if backend is None:
        return KVArena(layout, num_pages, torch.device("meta"))
    arena = KVArena(layout, num_pages, backend.device, pack=backend.pack_kv)
    # Wait for the zeros: device threads write prefixes on streams of their own.
    backend.synchronize()
    return arena


def _host_arena(layout: KVLayout, num_pages: int, backend: Backend | None) -> KVArena:
    if backend is None:
        return KVArena(layout, num_pages, torch.device("meta"))
    return KVArena(layout, num_pages, torch.device("cpu"), pinned=backend.pins_host_memory)
