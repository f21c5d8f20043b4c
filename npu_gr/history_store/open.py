"""Opens the history store that the configuration names."""

from __future__ import annotations

import asyncio

from npu_gr.history_store.store import HistoryConfig, HistoryStore


async def open_store(config: HistoryConfig, *, may_be_away: bool = False) -> HistoryStore | None:
    """Open the configured store; None for kind "none".

    Args:
        config: The store.
        may_be_away: Open it also if its server does not answer now.

    Raises:
        ConfigError: the store's file, package or server cannot be used.
    """
    match config.kind:
        case "embedded":
            from npu_gr.history_store.embedded import EmbeddedStore

            return await asyncio.to_thread(EmbeddedStore, config)  # may have a long log to recover
        case "redis":
            from npu_gr.history_store.redis import RedisStore

            return await RedisStore.connect(config, may_be_away=may_be_away)
        case "none":
            return None
