"""`Client`: `AsyncClient` for programs without an event loop. One thread of its own runs the loop of all calls.

So there is one implementation, any number of threads may share a client and its connections, and a signal is on its way
while the program does something else. A call costs two hand-overs between threads.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

from npu_gr.client.async_client import AsyncClient
from npu_gr.client.relay import AsyncRelayCall
from npu_gr.client.wire import Behaviours, Features, Name
from npu_gr.core.errors import NpuGrError
from npu_gr.core.tls import ClientTlsConfig
from npu_gr.server.codec.signal import SignalOut

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)


class Loop:
    """An event loop in a thread, until closed. Any thread may run coroutines in it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()  # nothing is handed over to a loop that ends
        self._is_closed = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._work, name="npu_gr client", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and wait for it; an interrupt of the waiting thread cancels it.

        Raises:
            RuntimeError: the loop is closed, or it was made before this process was forked.
        """
        if self._process != os.getpid():
            work.close()
            raise RuntimeError("a client does not survive a fork: make it in the process that uses it")
        with self._lock:
            if self._is_closed:
                work.close()
                raise RuntimeError("the client is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise RuntimeError("the client was closed during the call") from None
        except BaseException:
            future.cancel()
            raise

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel what runs, run `last`, and end the thread. In a fork there is nothing to close."""
        if self._process != os.getpid():
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            asyncio.run_coroutine_threadsafe(self._end(last), self._loop)
        if threading.current_thread() is not self._thread:  # which may be the one that collects a forgotten client
            self._thread.join()

    async def _end(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        try:
            await last()
        finally:
            self._loop.stop()


class Waits(Protocol[A_co]):
    """A class whose methods wait for those of `A`."""

    @property
    def _loop(self) -> Loop: ...

    @property
    def _inner(self) -> A_co: ...


def waiting(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Waits[A], P], T]:
    """Make a method that runs a coroutine of the inner object, with its arguments, documentation and types."""

    @wraps(method)
    def call(self: Waits[A], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._loop.run(method(self._inner, *args, **kwargs))

    return call


class Client:
    """Calls one service, from any number of threads: `with Client("http://...") as client`, or `close()` at the end.

    `AsyncClient` says what the methods do and raise.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8080",
        *,
        api_key: str | None = None,
        api_key_file: Path | None = None,
        tls: ClientTlsConfig | None = None,
        tenant: str = "",
        timeout_s: float = 1.0,
        max_connections: int = 100,
        max_attempts: int = 3,
    ) -> None:
        """Read the files and start the thread; connect to nobody yet. The arguments are those of `AsyncClient`."""
        self._inner = AsyncClient(
            base_url,
            api_key=api_key,
            api_key_file=api_key_file,
            tls=tls,
            tenant=tenant,
            timeout_s=timeout_s,
            max_connections=max_connections,
            max_attempts=max_attempts,
        )
        self._loop = Loop()
        self._loop.run(self._inner.__aenter__())
        # also when the program forgets it, and at the end of the process
        self._finalizer = weakref.finalize(self, self._loop.close, self._inner.__aexit__)

    def close(self) -> None:
        """Close every connection and end the thread. Calls in flight raise RuntimeError."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    rank = waiting(AsyncClient.rank)
    generate = waiting(AsyncClient.generate)
    match = waiting(AsyncClient.match)
    recommend = waiting(AsyncClient.recommend)
    signal = waiting(AsyncClient.signal)
    events = waiting(AsyncClient.events)
    ingest = waiting(AsyncClient.ingest)
    erase = waiting(AsyncClient.erase)
    items = waiting(AsyncClient.items)
    models = waiting(AsyncClient.models)
    is_ready = waiting(AsyncClient.is_ready)

    def relay(
        self,
        user: Name,
        *,
        history: Behaviours | None = None,
        num_candidates: int | None = None,
        features: Features | None = None,
        model_version: str | None = None,
        tenant: str | None = None,
        timeout_s: float | None = None,
    ) -> RelayCall:
        """Signal at once, and rank when retrieval is done: `with client.relay(user) as relay`; see `AsyncClient`."""
        return RelayCall(
            self,
            self._inner.relay(
                user,
                history=history,
                num_candidates=num_candidates,
                features=features,
                model_version=model_version,
                tenant=tenant,
                timeout_s=timeout_s,
            ),
        )


class RelayCall:
    """One user's signal and ranks, as `AsyncRelayCall`."""

    def __init__(self, client: Client, inner: AsyncRelayCall) -> None:
        self._client = client  # kept: a forgotten client closes itself
        self._loop = client._loop
        self._inner = inner

    @property
    def signalled(self) -> SignalOut | None:
        """The answer of the signal; None = there is none yet, or it failed."""
        return self._inner.signalled

    @property
    def failure(self) -> NpuGrError | None:
        """The failure of the signal."""
        return self._inner.failure

    def __enter__(self) -> Self:
        self._loop.run(self._inner.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._inner.__aexit__())

    rank = waiting(AsyncRelayCall.rank)
