"""The supervisor of an instance with front workers: it starts the engine and the workers, and never serves anything.

    supervisor ── engine            models, tiers, scheduler
        │   └──── worker 0 .. N-1   HTTP
        '-- holds the listening sockets, and gets the signals

    a worker dies       only its own requests are lost; another one takes its sockets, after a pause that doubles
    the engine dies     the workers refuse everything until the next one is ready
    the engine hangs    it is killed: health is answered by the workers, so nobody outside would do it
    it dies itself      the kernel ends all of them
    SIGTERM, SIGINT     unready; a grace; then the workers finish what they have, then the engine stops; a second one
                        ends the grace
    SIGHUP              the engine reads the configuration again
    SIGUSR1             every process logs what it does

Nothing of HTTP, numpy or torch is imported here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from npu_gr.core.signals import stop_signals
from npu_gr.front.backoff import MANY, WINDOW_S, Backoff, Deaths
from npu_gr.front.control import Control, Message
from npu_gr.front.sockets import Addresses, bind, close, hold
from npu_gr.server.config import ServerConfig

log = logging.getLogger(__name__)

BAD_CONFIGURATION = 2  # exit code: another start would end the same way
AGAIN = 75  # exit code of a worker that wants to be started anew, as it is no failure
ENGINE_STOP_S = 30.0  # for the engine to let go of everything, once nobody asks it any more
MORE_S = 5.0  # beyond the time that requests in flight have
LOOK_S = 1.0  # between two looks at the engine
HUNG_S = 30.0  # an engine that was ready and says nothing for so long hangs
BUFFER_BYTES = 1 << 20  # of a socket pair: a frame of a long history, and what goes beside it


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """What is started."""

    engine: Callable[[int], Sequence[str]]  # the command, by the descriptor of its control socket
    worker: Callable[[int, int], Sequence[str]]  # the command, by its number and that descriptor
    server: ServerConfig


class Child:
    """A process that is kept running."""

    def __init__(self, name: str, command: Callable[[int], Sequence[str]]) -> None:
        """Start nothing.

        Args:
            name: in the log.
            command: by the descriptor of its control socket.
        """
        self.name = name
        self.starts = 0
        self.was_ready = False
        self.is_running = False
        self.is_ready = False  # the process that runs now
        self.silent_s = 0.0  # since it was heard
        self.began_at = 0.0
        self.control: Control | None = None
        self.ended = asyncio.Event()
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the process that runs, or ran last."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        """Start the process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            self._process = subprocess.Popen(  # noqa: S603  (our own command)
                [*self._command(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                process_group=0,  # what a terminal sends to its group, the supervisor gets alone
            )
        self.control = Control(ours)
        self.starts += 1
        self.began_at = time.monotonic()
        self.is_running = True
        self.ended.clear()

    async def wait(self) -> int:
        """Wait for the end of the process; returns its exit code, or minus the signal that killed it."""
        assert self._process is not None
        loop = asyncio.get_running_loop()
        fd = os.pidfd_open(self._process.pid)
        exited = loop.create_future()
        loop.add_reader(fd, exited.set_result, None)
        try:
            await exited
        finally:
            loop.remove_reader(fd)
            os.close(fd)
        code = self._process.wait()
        self.is_running = self.is_ready = False
        if self.control is not None:
            self.control.close()
            self.control = None
        self.ended.set()
        return code

    def send(self, name: str, *values: object, sockets: Sequence[socket.socket] = ()) -> None:
        """Send it a message, if it runs."""
        if self.is_running and self.control is not None:
            self.control.send(name, *values, sockets=sockets)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal, if it runs."""
        if self.is_running and self._process is not None:
            self._process.send_signal(number)


class Supervisor:
    """Keeps the processes of one instance. Event loop only."""

    def __init__(self, plan: Processes) -> None:
        """Bind the addresses.

        Args:
            plan: what is started.

        Raises:
            ConfigError: an address cannot be bound.
        """
        self._plan = plan
        num_workers = plan.server.workers
        self._held = hold(plan.server)
        self._sockets: list[Addresses] = bind(plan.server, num_workers)
        self._engine = Child("the engine", plan.engine)
        self._workers = [Child(f"front worker {number}", partial(plan.worker, number)) for number in range(num_workers)]
        self._deaths = Deaths()
        self._is_stopping = False
        self._failed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._ready = asyncio.Event()

    async def run(self, on_listening: Callable[[int, int], None] = lambda _port, _admin: None) -> int:
        """Keep everything running until a signal says stop. Returns the exit code.

        Args:
            on_listening: called with the port and the admin port, once every worker listens.
        """
        loop = asyncio.get_running_loop()
        keepers = [loop.create_task(self._keep(child)) for child in (self._engine, *self._workers)]
        keepers.append(loop.create_task(self._watch()))
        with stop_signals() as stops:
            loop.add_signal_handler(signal.SIGHUP, self._engine.send, "reload")
            loop.add_signal_handler(signal.SIGUSR1, self._ask_for_stacks)
            stopped = asyncio.ensure_future(stops.get())
            ready = asyncio.ensure_future(self._ready.wait())
            wanted: set[asyncio.Future[Any]] = {stopped, ready, self._failed}
            await asyncio.wait(wanted, return_when=asyncio.FIRST_COMPLETED)
            if ready.done() and not self._failed.done():
                on_listening(*self._tell_addresses())
                await asyncio.wait({stopped, self._failed}, return_when=asyncio.FIRST_COMPLETED)
            ready.cancel()
            if stopped.done() and self._ready.is_set():
                log.info("draining for %.1f s", self._plan.server.drain_grace_s)
                self._engine.send("drain")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stops.get(), self._plan.server.drain_grace_s)
            stopped.cancel()
            await self._stop()
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        log.info("stopped")
        return self._failed.result() if self._failed.done() else 0

    def _tell_addresses(self) -> tuple[int, int]:
        ports = [addresses[0].getsockname()[1] for addresses in self._sockets[0]]
        config = self._plan.server
        tls = "" if config.tls is None else ", TLS"
        log.info("listening on %s:%d%s, %d front workers", config.host, ports[0], tls, config.workers)
        if len(ports) > 1:
            log.info("admin listening on %s:%d", config.admin_host, ports[1])
        return ports[0], ports[-1]

    # ---- processes

    async def _keep(self, child: Child) -> None:
        """Start a process, and again whenever it ends."""
        backoff = Backoff()
        while not self._is_stopping:
            child.start()
            listening = asyncio.ensure_future(self._hear(child))
            self._introduce(child)
            code = await child.wait()
            listening.cancel()
            if self._is_stopping:
                return
            if code == BAD_CONFIGURATION and not child.was_ready:
                self._fail(code)
                return
            if code == AGAIN:
                continue
            if not self._ready.is_set():
                log.error("%s ended with code %d before it was ready", child.name, code)
                self._fail(1)
                return
            wait_s = backoff.after(time.monotonic() - child.began_at)
            log.error("%s ended with code %d; it starts again in %.1f s", child.name, code, wait_s)
            if child is not self._engine:
                self._died()
            await asyncio.sleep(wait_s)

    async def _watch(self) -> None:
        """Kill an engine that hangs."""
        engine = self._engine
        while True:
            await asyncio.sleep(LOOK_S)
            engine.silent_s += LOOK_S  # looks are counted, not the clock: what stops this process is not its fault
            if engine.is_ready and not self._is_stopping and engine.silent_s > HUNG_S:
                log.error("the engine is killed: it has said nothing for %g s", HUNG_S)
                engine.is_ready = False
                engine.kill()

    def _fail(self, code: int) -> None:
        if not self._failed.done():
            self._failed.set_result(code)

    def _introduce(self, child: Child) -> None:
        """Give a process that has just started what it needs, and connect it with the others."""
        if child is self._engine:
            for worker in self._workers:
                self._connect(worker)
            return
        number = self._workers.index(child)
        addresses = self._sockets[number]
        child.send("listen", *map(len, addresses), sockets=[one for group in addresses for one in group])
        self._connect(child)

    def _connect(self, worker: Child) -> None:
        if not (worker.is_running and self._engine.is_running):
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with ours, theirs:
            for one in (ours, theirs):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
            self._engine.send("worker", self._workers.index(worker), worker.starts, sockets=[ours])
            worker.send("engine", sockets=[theirs])

    async def _hear(self, child: Child) -> None:
        control = child.control
        assert control is not None
        while (message := await control.receive()) is not None:
            self._heard(child, message)

    def _heard(self, child: Child, message: Message) -> None:
        child.silent_s = 0.0
        match message.name:
            case "alive":
                pass
            case "ready" | "listening":
                if child.was_ready:
                    log.info("%s is ready again", child.name)
                child.was_ready = child.is_ready = True
                if all(one.was_ready for one in (self._engine, *self._workers)):
                    self._ready.set()
            case "stuck":
                number, why = message.values
                log.error("%s is killed: %s", self._workers[number].name, why)
                self._workers[number].kill()
            case _:
                raise AssertionError(f"{child.name} says {message.name}")

    def _died(self) -> None:
        self._deaths.add(time.monotonic())
        if self._deaths.are_many(time.monotonic()):
            self._engine.send("unready", f"{MANY} front workers died within {WINDOW_S:g} s")
            asyncio.get_running_loop().call_later(WINDOW_S, self._calmed)

    def _calmed(self) -> None:
        if not self._deaths.are_many(time.monotonic()):
            self._engine.send("unready", "")

    def _ask_for_stacks(self) -> None:
        for child in (self._engine, *self._workers):
            child.kill(signal.SIGUSR1)

    # ---- the end

    async def _stop(self) -> None:
        """Let the workers finish what they have, then let the engine go."""
        self._is_stopping = True
        close([self._held])
        for addresses in self._sockets:
            close(addresses)  # before the workers close theirs: nobody may wait in a queue that nobody reads
        for worker in self._workers:
            worker.send("stop")
        await self._ends(self._workers, self._plan.server.shutdown_timeout_s + MORE_S)
        if self._engine.is_ready:
            self._engine.send("stop")
        else:
            self._engine.kill()  # it loads models, and has nothing to finish
        await self._ends([self._engine], ENGINE_STOP_S)

    async def _ends(self, children: Sequence[Child], within_s: float) -> None:
        running = [child for child in children if child.is_running]
        try:
            async with asyncio.timeout(within_s):
                for child in running:
                    await child.ended.wait()
        except TimeoutError:
            for child in running:
                if child.is_running:
                    log.error("%s has not stopped within %.0f s, and is killed", child.name, within_s)
                    child.kill()
                    await child.ended.wait()
