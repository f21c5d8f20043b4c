"""`npu-gr route`: writes HAProxy's files, runs `haproxy -W` as a child, and keeps it up to date.

    settings, instances, keys or    new files, `haproxy -c`, and a reload without lost connections;
    certificates change             if HAProxy rejects the files, nothing changes and the error is
                                    logged
    SIGHUP                          the same, at once
    SIGTERM, SIGINT                 unready for `drain_grace_s`, then no new connections, then exit
    HAProxy ends                    the router exits too, so that its supervisor restarts it

Each set of files has its own folder, and the link `current` points to the active one, so HAProxy
never reads a mixture of two sets. A new instance is added once it is ready, so that no request
waits for its start.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import shutil
import signal
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
from npu_gr.route.fan_out import InstanceCalls, fan_out_app
from npu_gr.server.auth.keys import KeyEntry, read_keys

log = logging.getLogger(__name__)
PROGRAM = "haproxy"
START_S = 10.0  # time limit of HAProxy's start and of a reload
# A younger HAProxy process does not send its stick table to its successor: it still waits for the
# one of its predecessor (PEER_RESYNC_TIMEOUT).
TEACHES_S = 11.0
_PDEATHSIG = 1  # PR_SET_PDEATHSIG of prctl(2)


class Proxy:
    """A HAProxy process and the folder of its files."""

    def __init__(self, folder: Path) -> None:
        """Prepare; `start` runs HAProxy. `folder` is private, for its files and sockets."""
        self.folder = folder
        self._number = 0  # number of the active set of files
        self._process: asyncio.subprocess.Process | None = None
        self._log_task: asyncio.Task[None] | None = None  # copies HAProxy's stderr to the log

    async def put(self, made: dict[str, str]) -> None:
        """Activate a set of files for the next start or reload.

        Raises:
            ConfigError: HAProxy rejects the files; the old ones stay active.
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
        await asyncio.to_thread(_activate, folder, before)

    async def start(self) -> None:
        """Start HAProxy with the active files.

        Raises:
            ConfigError: HAProxy does not start, e.g. because an address is in use.
        """
        path = self.folder / "current" / haproxy.CONFIG
        self._process = await asyncio.create_subprocess_exec(
            *(await asyncio.to_thread(_program), "-W", "-f", str(path)),
            stderr=asyncio.subprocess.PIPE,
            preexec_fn=_die_with_parent,
        )
        assert self._process.stderr is not None
        self._log_task = asyncio.create_task(_copy_to_log(self._process.stderr))
        await self._until(lambda pid: True)

    async def reload(self) -> None:
        """Start a new process with the active files; the old one finishes its requests."""
        assert self._process is not None
        before = await self._pid()
        self._process.send_signal(signal.SIGUSR2)
        await self._until(lambda pid: pid != before)

    async def drain(self) -> None:
        """Answer /readyz with 503 from now on; all else is served as before."""
        await self.command("set var proc.draining bool(true)")

    async def stop(self, timeout_s: float) -> None:
        """Stop accepting connections, wait for the requests in flight, and end."""
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
        """Wait until HAProxy has ended, and return its exit code."""
        assert self._process is not None
        return await self._process.wait()

    async def command(self, text: str) -> str:
        """Send a command to the runtime API of the active process, and return the answer."""
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
        raise ConfigError("haproxy does not start; see its own lines in the log")


async def _copy_to_log(lines: asyncio.StreamReader) -> None:
    """Copy HAProxy's stderr to the log, which never blocks on a slow reader."""
    async for line in lines:
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
    """Replace the placeholders by the folder of the sockets and that of the set of files."""
    return text.replace(haproxy.FOLDER, str(folder)).replace(haproxy.HERE, str(here))


def _activate(folder: Path, before: Path) -> None:
    link = folder.parent / "next"
    link.symlink_to(folder.name)
    link.replace(folder.parent / "current")
    shutil.rmtree(before, ignore_errors=True)


async def check(path: Path) -> None:
    """Check a file with `haproxy -c`.

    Raises:
        ConfigError: HAProxy rejects the file, or is not installed.
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
        raise ConfigError(f"haproxy rejects the generated file: {'; '.join(lines)[:2000]}")


def _program() -> str:
    found = shutil.which(PROGRAM) or shutil.which(PROGRAM, path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise ConfigError(
            "haproxy is not installed; install version 2.6 or later, e.g. apt-get install haproxy"
        )
    return found


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGTERM)


class Route:
    """The state of a router, from which its files are made."""

    def __init__(self, read: Callable[[], RouterConfig], proxy: Proxy) -> None:
        """Read the settings.

        Args:
            read: Function that reads the settings; it runs again at each `look`.
            proxy: Process for which the files are made.

        Raises:
            ConfigError: The settings cannot be read.
        """
        self._read = read
        self._proxy = proxy
        self.config = read()
        self.listed: list[InstanceConfig] = []  # all instances
        self.addresses: dict[str, str] = {}  # name -> IP address, of hosts that can be resolved
        # names of the instances that have been ready, or were listed at the start
        self._admitted: set[str] = set()
        self._files: dict[str, str] = {}  # active files
        self.calls = self._calls(self.config)

    async def begin(self) -> None:
        """Make and activate the first files, with every instance.

        Raises:
            ConfigError: The files cannot be made, or HAProxy rejects them.
        """
        self._files = await self.made_now()
        await self._proxy.put(self._files)

    async def made_now(self) -> dict[str, str]:
        """Make the files with every instance.

        Raises:
            ConfigError: The list, keys or certificates cannot be read.
        """
        self.listed = await find(self.config.discovery)
        self.addresses = await addresses(self.listed, {})
        self._admitted = {one.name for one in self.listed}
        return await asyncio.to_thread(self._made, self.config)

    async def look(self) -> None:
        """Read everything again, and reload HAProxy where something has changed.

        Raises:
            ConfigError: A file cannot be used; nothing changes.
        """
        config = await asyncio.to_thread(self._read)
        self.calls = await asyncio.to_thread(self._calls, config)
        listed = await find(config.discovery)
        self.listed = listed
        self.addresses = await addresses(listed, self.addresses)
        names = {one.name for one in listed}
        self._admitted &= names
        new = [one for one in listed if one.name not in self._admitted]
        if new:
            self._admitted |= await self.calls.ready(new, config.health.timeout_s)
        made = await asyncio.to_thread(self._made, config)
        if made != self._files:
            await self._proxy.put(made)
            self._files = made
            self.config = config
            await self._proxy.reload()
            log.info("reloaded HAProxy: %d of %d instances", len(self._admitted), len(listed))

    def _made(self, config: RouterConfig) -> dict[str, str]:
        """Make the files.

        Raises:
            ConfigError: Keys or certificates cannot be read.
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
        inputs = haproxy.RenderInputs(
            instances=[
                one
                for one in self.listed
                if one.name in self._admitted and one.name in self.addresses
            ],
            addresses=self.addresses,
            keys=unexpired_keys(Path(config.api_keys_file)) if config.api_keys_file else [],
        )
        return haproxy.files(config, inputs) | certificates

    def _calls(self, config: RouterConfig) -> InstanceCalls:
        try:
            return InstanceCalls(config)
        except OSError as error:  # or ssl.SSLError, a subclass
            raise ConfigError(f"instances_tls: {error}") from error


def unexpired_keys(path: Path) -> list[KeyEntry]:
    """Read the keys that have not expired.

    Raises:
        ConfigError: The file cannot be used.
    """
    now_at = time.time()
    return [
        key
        for key in read_keys(path).keys
        if key.expires is None or key.expires.timestamp() > now_at
    ]


def _pem(certificate: str, key: str) -> str:
    """Join a certificate and its key to one PEM text, as HAProxy needs it."""
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
        read: Function that reads the settings; it runs again at each `look`.

    Yields:
        The router, and its HAProxy.

    Raises:
        ConfigError: The router cannot start.
    """
    async with AsyncExitStack() as stack:
        parent = os.environ.get("RUNTIME_DIRECTORY")  # set by systemd
        # mkdtemp makes it with mode 0700
        folder = await asyncio.to_thread(tempfile.mkdtemp, prefix="npu_gr", dir=parent)
        stack.push_async_callback(asyncio.to_thread, shutil.rmtree, folder, ignore_errors=True)
        proxy = Proxy(Path(folder))
        route = await asyncio.to_thread(Route, read, proxy)
        await route.begin()
        app = fan_out_app(lambda: route.calls, lambda: route.listed, route.config.max_budget_s / 3)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.UnixSite(runner, f"{folder}/{haproxy.FAN_OUT}").start()
        stack.push_async_callback(proxy.stop, route.config.shutdown_timeout_s)
        await proxy.start()
        if route.config.picker is not None:
            picking = _picking()
            await stack.enter_async_context(
                picking(route.config, lambda: (route.calls, route.listed, route.addresses))
            )
        yield route, proxy


def _picking() -> Callable[..., AbstractAsyncContextManager[int]]:
    try:
        from npu_gr.route.picker import picking
    except ImportError as error:
        raise ConfigError(
            f"picker: needs the extra `picker`: pip install 'npu_gr[picker]' ({error})"
        ) from error
    return picking


async def run(path: Path, overrides: Sequence[str] = ()) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal stops at once.

    Args:
        path: File of the settings.
        overrides: Settings `section.key=value`, which take precedence.

    Raises:
        ConfigError: The router cannot start, or HAProxy has ended.
    """
    now = asyncio.Event()
    with stop_signals() as signals:  # before HAProxy listens, since a stop may follow at once
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, now.set)
        async with routing(lambda: load(path, overrides)) as (route, proxy):
            config = route.config
            log.info(
                "listening on %s:%d, admin address %s:%d",
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
                    raise ConfigError("haproxy has ended; see its own lines in the log")
            log.info("draining: not ready, closing the listener in %.1f s", config.drain_grace_s)
            await proxy.drain()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(signals.get(), config.drain_grace_s)
    log.info("stopped")


async def check_rendered(config: RouterConfig) -> str:
    """Check the files of a configuration with HAProxy, in a temporary folder.

    Returns:
        A sentence with the result.

    Raises:
        ConfigError: The files cannot be made, or HAProxy rejects them.
    """
    with tempfile.TemporaryDirectory(prefix="npu_gr") as folder:
        proxy = Proxy(Path(folder))
        route = Route(lambda: config, proxy)
        await proxy.put(await route.made_now())
        return f"HAProxy accepts the file, with {len(route.listed)} instances"


async def rendered(path: Path, overrides: Sequence[str] = ()) -> str:
    """Return the text of HAProxy's file for the current settings.

    Raises:
        ConfigError: The file cannot be made.
    """
    folder = Path("/run/npu-gr-router")
    route = Route(lambda: load(path, overrides), Proxy(folder))
    return placed((await route.made_now())[haproxy.CONFIG], folder, folder / "current")


async def _keep_looking(route: Route, now: asyncio.Event) -> None:
    """Call `look` every `discovery.period_s`, or when `now` is set; log its errors once."""
    logged = ""
    await asyncio.sleep(TEACHES_S)
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(now.wait(), route.config.discovery.period_s)
        now.clear()
        try:
            await route.look()
            logged = ""
        except ConfigError as error:
            if str(error) != logged:
                log.error("%s; HAProxy keeps its current configuration", error)
            logged = str(error)
