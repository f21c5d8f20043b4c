"""A real instance on a tiny checkpoint, for tests that talk HTTP to it.

While it serves, blockbuster watches: a blocking call of ours on the event loop fails the test that
made it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp.test_utils import TestClient, TestServer
from aiohttp.web import Application, BaseRunner
from blockbuster import blockbuster_ctx

from npu_gr.core.history import Events
from npu_gr.core.kinds import KINDS
from npu_gr.handlers.service import Service
from npu_gr.model.blend import ScoreBlend
from npu_gr.model.weights import Checkpoint, save
from npu_gr.relay.relay import Relay
from npu_gr.server.config import ServerConfig
from npu_gr.server.grpc.server import RPC
from npu_gr.server.run import make_runner
from npu_gr.service.app import instance
from npu_gr.service.config import Config, from_table
from tests.models import tiny_model

FIRST_ID = 1000  # external ids are rows + this
FIRST_ACTION = 1  # names of actions are indices + this


def write_checkpoint(folder: Path, order: ScoreBlend | None = None, **changes: object) -> str:
    model = tiny_model(**changes)  # type: ignore[arg-type]
    ids = np.arange(model.config.num_items, dtype=np.int64) + FIRST_ID
    made = Checkpoint(
        model=model, item_ids=ids, name="tiny", action_values=(1.0, 2.0, 3.0), order=order
    )
    return save(made, folder)


def make_config(folder: Path, **sections: Any) -> Config:
    table: dict[str, Any] = {
        "checkpoint": str(folder / "checkpoint"),
        "kv_cache": {"hbm_bytes": 8_000_000, "dram_bytes": 8_000_000},
        # a busy machine
        "history_store": {
            "path": str(folder / "history.db"),
            "read_timeout_s": 5.0,
            "timeout_s": 10.0,
        },
        "trigger": {"min_prefix_tokens": 4, "policy": "always"},
        "server": {"port": 0, "admin_port": 0, "drain_grace_s": 0.1, "default_budget_s": 10.0},
        # nobody is rejected because another test has the processor
        "slo": {f"{kind}_s": 5.0 for kind in KINDS},
    }
    for name, section in sections.items():
        table[name] = (
            {**table[name], **section} if isinstance(section, dict) and name in table else section
        )
    return from_table(table)


class InstanceServer(TestServer):
    """A test server with the runner of a real process."""

    def __init__(self, app: Application, config: ServerConfig | None = None, **kwargs: Any) -> None:
        super().__init__(app, **kwargs)
        self._config = config or ServerConfig()

    async def _make_runner(self, **kwargs: Any) -> BaseRunner:
        return make_runner(self.app, self._config)


@asynccontextmanager
async def serving(
    folder: Path, *, watched: bool = True, read: Callable[[], Config] | None = None, **sections: Any
) -> AsyncIterator[tuple[TestClient[Any, Any], Service]]:
    if not (folder / "checkpoint").exists():
        write_checkpoint(folder / "checkpoint")
    async with instance(make_config(folder, **sections), read) as (app, service):
        server = InstanceServer(app, service.parts.settings.config.server)
        async with TestClient(server) as client:
            rpc = app.get(RPC)
            if rpc is not None:
                await rpc.listen()
            try:
                with blockbuster_ctx("npu_gr") if watched else nullcontext():
                    yield client, service
            finally:
                if rpc is not None:
                    await rpc.stop()


def columns(history: Events) -> dict[str, list[int]]:
    return {
        "items": (history.items + FIRST_ID).tolist(),
        "actions": (history.actions + FIRST_ACTION).tolist(),
        "timestamps": history.timestamps.tolist(),
    }


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110  (what is awaited has no event)
            await asyncio.sleep(0.01)


async def encoded(relay: Relay[Any]) -> None:
    """The prefill of a signal is done: a rank is a hit."""
    await until(lambda: len(relay.tiers[0]) > 0)
