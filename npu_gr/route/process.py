"""`npu-gr route`: writes HAProxy's files, runs `haproxy -W` as a child, and keeps it up to date.

    the settings, the list of instances,      new files, `haproxy -c`, and a reload that loses no connection;
    keys or certificates change               what HAProxy rejects changes nothing, and the log says why
    SIGHUP                                    the same, at once
    SIGTERM, SIGINT                           unready for `drain_grace_s`, then no new connections, then the end
    HAProxy ends                              so does the router: whoever started it starts it again

Each set of files is a folder of its own, and `current` points to the one in force, so that HAProxy
never reads half of one. An instance that is new in the list is put in once it has been ready, so
that nobody waits for its start.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

from aiohttp import web

from npu_gr.core.errors import ConfigError
from npu_gr.core.lifetime import running
from npu_gr.core.process import stop_signals
from npu_gr.route import haproxy
from npu_gr.route.config import InstanceConfig, RouterConfig, load
from npu_gr.route.discovery import addresses, find
from npu_gr.route.fan_out import Way, fan_out_app
from npu_gr.server.auth.keys import KeyEntry, read_keys

log = logging.getLogger(__name__)
PROGRAM = "haproxy"
START_S = 10.0  # for HAProxy to start, and for a reload
# A process younger than this does not hand its stick table on: it still waits for one before it
# (PEER_RESYNC_TIMEOUT).
TEACHES_S = 11.0
_PDEATHSIG = 1  # of prctl


class Proxy:
    """HAProxy, and the folder of its files."""

    def __init__(self, folder: Path) -> None:
        """Nothing runs yet.

        Args:
            folder: private, for the files and the sockets.
        """
        self.folder = folder
        self._number = 0  # of the set of files
        self._process: asyncio.subprocess.Process | None = None
        self._words: asyncio.Task[None] | None = None  # copies what it says into the log

    async def put(self, made: dict[str, str]) -> None:
        """Put a set of files in force for the next start or reload.

        Raises:
            ConfigError: HAProxy rejects it; the one before stays.
        """
        before = self.folder / str(self._number)
        self._number += 1
        folder = self.folder / str(self._number)
        await asyncio.to_thread(_write, folder, made)
        try:
            await check(folder / haproxy.CONFIG)
        except ConfigError:
            self._number -= 1
            await asyncio.to_thread(shutil.rmtree, folder)
            raise
        await asyncio.to_thread(_put_in_force, folder, before)

    async def start(self) -> None:
        """Start HAProxy with what was put.

        Raises:
            ConfigError: it does not start, as where an address is in use.
        """
        path = self.folder / "current" / haproxy.CONFIG
        self._process = await asyncio.create_subprocess_exec(
            *(await asyncio.to_thread(_program), "-W", "-f", str(path)),
            stderr=asyncio.subprocess.PIPE,
            preexec_fn=_die_with_parent,
        )
        assert self._process.stderr is not None
        self._words = asyncio.create_task(_log_words(self._process.stderr))
        await self._until(lambda pid: True)

    async def reload(self) -> None:
        """Let a new process serve with what was put; the old one finishes what it has."""
        assert self._process is not None
        before = await self._pid()
        self._process.send_signal(signal.SIGUSR2)
        await self._until(lambda pid: pid != before)

    async def drain(self) -> None:
        """Answer /readyz with 503 from now on, and serve as before."""
        await self.command("set var proc.draining bool(true)")

    async def stop(self, timeout_s: float) -> None:
        """Take no new connection, finish the requests in flight, and end."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    process.wait(), timeout_s if number is signal.SIGUSR1 else 2.0
                )
                return

    async def ended(self) -> int:
        """Wait until HAProxy has ended by itself."""
        assert self._process is not None
        return await self._process.wait()

    async def command(self, text: str) -> str:
        """Ask the runtime API of the process that serves."""
        reader, writer = await asyncio.open_unix_connection(str(self.folder / haproxy.STATS))
        try:
            writer.write(f"{text}\n".encode())
            return (await reader.read()).decode()
        finally:
            writer.close()

    async def _pid(self) -> str:
        lines = (await self.command("show info")).splitlines()
        return next(line.partition(": ")[2] for line in lines if line.startswith("Pid:"))

    async def _until(self, claim: Callable[[str], bool]) -> None:
        assert self._process is not None
        give_up_at = time.monotonic() + START_S
        while time.monotonic() < give_up_at and self._process.returncode is None:
            with contextlib.suppress(OSError, StopIteration):
                if claim(await self._pid()):
                    return
            await asyncio.sleep(0.02)
        raise ConfigError("haproxy: it does not start; its own lines in the log say why")


async def _log_words(words: asyncio.StreamReader) -> None:
    """Log HAProxy's lines: its own writes would wait for whoever reads our standard error, and our log does not."""
    async for line in words:
        is_bad = line.startswith((b"[ALERT]", b"[WARNING]"))
        log.log(
            logging.WARNING if is_bad else logging.INFO,
            "%s",
            line.decode(errors="replace").rstrip(),
        )


def _write(folder: Path, made: dict[str, str]) -> None:
    folder.mkdir(mode=0o700)
    for name, text in made.items():
        path = folder / name
        path.touch(mode=0o600)
        path.write_text(placed(text, folder.parent, folder))


def placed(text: str, folder: Path, here: Path) -> str:
    """Fill in the folders: of the sockets, and of the set of files."""
    return text.replace(haproxy.FOLDER, str(folder)).replace(haproxy.HERE, str(here))


def _put_in_force(folder: Path, before: Path) -> None:
    link = folder.parent / "next"
    link.symlink_to(folder.name)
    link.replace(folder.parent / "current")
    shutil.rmtree(before, ignore_errors=True)


async def check(path: Path) -> None:
    """Let HAProxy check a file.

    Raises:
        ConfigError: it is rejected, or there is no HAProxy.
    """
    process = await asyncio.create_subprocess_exec(
        await asyncio.to_thread(_program),
        "-c",
        "-f",
        str(path),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    if process.returncode:
        lines = [
            line for line in errors.decode(errors="replace").splitlines() if "NOTICE" not in line
        ]
        raise ConfigError(f"haproxy rejects what was written: {'; '.join(lines)[:2000]}")


def _program() -> str:
    found = shutil.which(PROGRAM) or shutil.which(PROGRAM, path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise ConfigError(
            "haproxy is not installed: version 2.6 or later, e.g. apt-get install haproxy"
        )
    return found


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGTERM)


class Route:
    """One router: what it knows, and the files that follow from it."""

    def __init__(self, read: Callable[[], RouterConfig], proxy: Proxy) -> None:
        """Read the settings.

        Args:
            read: the settings, again at each look.
            proxy: gets the files.

        Raises:
            ConfigError: they cannot be read.
        """
        self._read = read
        self._proxy = proxy
        self.config = read()
        self.listed: list[InstanceConfig] = []  # all
        self.addresses: dict[str, str] = {}  # of those whose host can be looked up, by name
        # names of those that have been ready, or were there at the start
        self._admitted: set[str] = set()
        self._files: dict[str, str] = {}  # in force
        self.way = self._way(self.config)
        self._peer_port = _free_port()

    async def begin(self) -> None:
        """Put the first files, with every instance in them.

        Raises:
            ConfigError: there are none.
        """
        self._files = await self.made_now()
        await self._proxy.put(self._files)

    async def made_now(self) -> dict[str, str]:
        """Make the files with every instance in them.

        Raises:
            ConfigError: the list, keys or certificates cannot be read.
        """
        self.listed = await find(self.config.discovery)
        self.addresses = await addresses(self.listed, {})
        self._admitted = {one.name for one in self.listed}
        return await asyncio.to_thread(self._made, self.config)

    async def look(self) -> None:
        """Read everything again, and reload HAProxy where something has changed.

        Raises:
            ConfigError: something cannot be used; what is in force stays.
        """
        config = await asyncio.to_thread(self._read)
        self.way = await asyncio.to_thread(self._way, config)
        listed = await find(config.discovery)
        self.listed = listed
        self.addresses = await addresses(listed, self.addresses)
        names = {one.name for one in listed}
        self._admitted &= names
        newcomers = [one for one in listed if one.name not in self._admitted]
        if newcomers:
            self._admitted |= await self.way.ready(newcomers, config.health.timeout_s)
        made = await asyncio.to_thread(self._made, config)
        if made != self._files:
            await self._proxy.put(made)
            self._files = made
            self.config = config
            await self._proxy.reload()
            log.info("reloaded: %d of %d instances", len(self._admitted), len(listed))

    def _made(self, config: RouterConfig) -> dict[str, str]:
        """Make the files.

        Raises:
            ConfigError: keys or certificates cannot be read.
        """
        certificates = {}
        if config.tls is not None:
            certificates["listen.pem"] = _pem(config.tls.certificate, config.tls.key)
        if (
            config.instances_tls is not None
            and config.instances_tls.certificate
            and config.instances_tls.key
        ):
            certificates["call.pem"] = _pem(
                config.instances_tls.certificate, config.instances_tls.key
            )
        material = haproxy.Material(
            instances=[
                one
                for one in self.listed
                if one.name in self._admitted and one.name in self.addresses
            ],
            addresses=self.addresses,
            keys=in_force(Path(config.api_keys_file)) if config.api_keys_file else [],
            peer_port=self._peer_port,
        )
        return haproxy.files(config, material) | certificates

    def _way(self, config: RouterConfig) -> Way:
        try:
            return Way(config)
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(f"instances_tls: {error}") from error


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def in_force(path: Path) -> list[KeyEntry]:
    """Read the keys that have not expired.

    Raises:
        ConfigError: the file cannot be used.
    """
    now_at = time.time()
    return [
        key
        for key in read_keys(path).keys
        if key.expires is None or key.expires.timestamp() > now_at
    ]


def _pem(certificate: str, key: str) -> str:
    """Join a certificate and its key into the one file that HAProxy reads."""
    try:
        return f"{Path(certificate).read_text()}\n{Path(key).read_text()}"
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{certificate}, {key}: {getattr(error, 'strerror', None) or 'not PEM'}"
        ) from error


@asynccontextmanager
async def routing(read: Callable[[], RouterConfig]) -> AsyncIterator[tuple[Route, Proxy]]:
    """Run a router while the block runs.

    Args:
        read: the settings, again at each look.

    Yields:
        The router, and its HAProxy.

    Raises:
        ConfigError: it cannot start.
    """
    async with AsyncExitStack() as stack:
        parent = os.environ.get("RUNTIME_DIRECTORY")  # of systemd
        # of mode 0700
        folder = await asyncio.to_thread(tempfile.mkdtemp, prefix="npu_gr", dir=parent)
        stack.push_async_callback(asyncio.to_thread, shutil.rmtree, folder, ignore_errors=True)
        proxy = Proxy(Path(folder))
        route = await asyncio.to_thread(Route, read, proxy)
        await route.begin()
        app = fan_out_app(lambda: route.way, lambda: route.listed, route.config.max_budget_s / 3)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.UnixSite(runner, f"{folder}/{haproxy.FAN_OUT}").start()
        stack.push_async_callback(proxy.stop, route.config.shutdown_timeout_s)
        await proxy.start()
        if route.config.picker is not None:
            picking = _picking()
            await stack.enter_async_context(
                picking(route.config, lambda: (route.way, route.listed, route.addresses))
            )
        yield route, proxy


def _picking() -> Callable[..., AbstractAsyncContextManager[int]]:
    try:
        from npu_gr.route.picker import picking
    except ImportError as error:
        raise ConfigError(
            f"picker needs the extra `picker`: pip install 'npu_gr[picker]' ({error})"
        ) from error
    return picking


async def run(path: Path, overrides: Sequence[str] = ()) -> None:
    """Serve until SIGTERM or SIGINT; then drain. A second signal stops at once.

    Args:
        path: of the settings.
        overrides: of single ones.

    Raises:
        ConfigError: the router cannot start, or HAProxy has ended.
    """
    now = asyncio.Event()
    with stop_signals() as signals:  # before HAProxy answers: whoever sees it answer may stop it
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, now.set)
        async with routing(lambda: load(path, overrides)) as (route, proxy):
            config = route.config
            log.info(
                "listening on %s:%d, admin on %s:%d",
                config.host,
                config.port,
                config.admin_host,
                config.admin_port,
            )
            async with running(_keep_looking(route, now)):
                stopped = asyncio.ensure_future(signals.get())
                ended = asyncio.ensure_future(proxy.ended())
                await asyncio.wait((stopped, ended), return_when=asyncio.FIRST_COMPLETED)
                ended.cancel()
                if not stopped.done():
                    stopped.cancel()
                    raise ConfigError("haproxy has ended; its own lines in the log say why")
            log.info("draining for %.1f s", config.drain_grace_s)
            await proxy.drain()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(signals.get(), config.drain_grace_s)
    log.info("stopped")


async def tried(config: RouterConfig) -> str:
    """Let HAProxy check what would be written, in a folder that is gone afterwards.

    Returns:
        What was found.

    Raises:
        ConfigError: it cannot be made, or HAProxy rejects it.
    """
    with tempfile.TemporaryDirectory(prefix="npu_gr") as folder:
        proxy = Proxy(Path(folder))
        route = Route(lambda: config, proxy)
        await proxy.put(await route.made_now())
        return f"HAProxy takes the file for {len(route.listed)} instances"


async def shown(path: Path, overrides: Sequence[str] = ()) -> str:
    """Make HAProxy's file as it would be written now.

    Raises:
        ConfigError: it cannot be made.
    """
    folder = Path("/run/npu-gr-router")
    route = Route(lambda: load(path, overrides), Proxy(folder))
    return placed((await route.made_now())[haproxy.CONFIG], folder, folder / "current")


async def _keep_looking(route: Route, now: asyncio.Event) -> None:
    """Look every `discovery.period_s`, or when asked; what cannot be used changes nothing."""
    trouble = ""
    await asyncio.sleep(TEACHES_S)
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(now.wait(), route.config.discovery.period_s)
        now.clear()
        try:
            await route.look()
            trouble = ""
        except ConfigError as error:
            if str(error) != trouble:
                log.error("everything stays as it is: %s", error)
            trouble = str(error)
