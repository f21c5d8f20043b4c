"""Services of the demo: each runs in a process of its own, and is asked over HTTP."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from npu_gr.core.errors import ConfigError, Unavailable
from npu_gr.history_store.interactions import Interactions
from npu_gr.history_store.load import load_interactions
from npu_gr.history_store.open import open_store
from npu_gr.model.weights import load as load_checkpoint
from npu_gr.service.config import Config, load

START_TIMEOUT_S = 300.0  # on a busy machine; a process that has ended is noticed at once


@dataclass(frozen=True, slots=True)
class Instance:
    """One service: what it is started with, and where its log goes."""

    config_path: Path
    overrides: Sequence[str]
    log: Path

    @property
    def config(self) -> Config:
        """The configuration with the overrides."""
        return load(self.config_path, self.overrides)

    @property
    def admin_url(self) -> str:
        """Base URL of the admin address."""
        server = self.config.server
        return f"http://{server.admin_host}:{server.admin_port}"


async def fill(config: Config, events: Interactions) -> None:
    """Load events into the history store of a configuration."""
    store = await open_store(config.history_store)
    if store is None:
        raise ConfigError("history_store.kind: the demo needs a history store")
    checkpoint = load_checkpoint(Path(str(config.checkpoint)))
    try:
        await load_interactions(store, events, checkpoint.action_names)
    finally:
        await store.close()


def clear_store(path: Path) -> None:
    """Delete an embedded history store."""
    for old in path.parent.glob(f"{path.name}*"):
        old.unlink()


@asynccontextmanager
async def served(instance: Instance, *more: str) -> AsyncIterator[str]:
    """Run a service in a process of its own; yields its URL.

    At the end of the block it drains and stops.

    Args:
        instance: The service.
        more: Further overrides, `section.key=value`.

    Raises:
        Unavailable: it did not start, or did not stop cleanly.
    """
    config = instance.config
    process = await _serve(instance, more)
    try:
        yield f"http://{config.server.host}:{config.server.port}"
    finally:
        await _stop(process)


def free_port() -> int:
    """Find a port on loopback that no process listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def _serve(instance: Instance, more: Sequence[str]) -> asyncio.subprocess.Process:
    settings = [word for override in (*instance.overrides, *more) for word in ("--set", override)]
    command = [
        sys.executable,
        "-m",
        "npu_gr",
        "serve",
        "--config",
        str(instance.config_path),
        *settings,
    ]
    server = instance.config.server
    return await started(
        "the service", command, f"http://{server.host}:{server.port}/readyz", instance.log
    )


async def started(
    name: str, command: Sequence[str], url: str, log: Path
) -> asyncio.subprocess.Process:
    """Start a process, and wait until it answers 200 at a URL.

    Raises:
        Unavailable: it did not.
    """
    with await asyncio.to_thread(log.open, "wb") as file:
        process = await asyncio.create_subprocess_exec(*command, stdout=file, stderr=file)
    ends_at = time.monotonic() + START_TIMEOUT_S
    async with aiohttp.ClientSession() as http:
        while time.monotonic() < ends_at and process.returncode is None:
            with suppress(aiohttp.ClientError):
                async with http.get(url) as answer:
                    if answer.status == 200:
                        return process
            await asyncio.sleep(0.1)
    await _end(process)
    said = (await asyncio.to_thread(log.read_text, errors="replace")).strip()
    last = said.rpartition("\n")[2] or f"it said nothing in {START_TIMEOUT_S:.0f} s"
    raise Unavailable(f"{name} did not start; its log: {log}, which ends with: {last}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Let the service drain, and check that it ends well."""
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
    try:
        code = await asyncio.wait_for(process.wait(), 30.0)
    except TimeoutError as error:
        await _end(process)
        raise Unavailable("the service did not stop within 30 s of SIGTERM") from error
    if code:
        raise Unavailable(f"the service ended with code {code}")


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
