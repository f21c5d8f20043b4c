"""`Client`: `AsyncClient` for programs without an event loop.

A background thread runs the event loop of all calls. So there is one implementation, any number of
threads may share a client and its connections, and a signal is sent while the program does
something else. A call costs two switches between threads.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

from npu_gr.client.async_client import AsyncClient
from npu_gr.client.relay import AsyncRelayCall
from npu_gr.core.errors import NpuGrError
from npu_gr.server.schemas.signal import SignalOut

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)


class Loop:
    """An event loop in a background thread; any thread may run coroutines in it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()  # no coroutine is submitted while the loop ends
        self._is_closed = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._work, name="npu_gr client", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and wait for its result; an exception in the waiting thread cancels it.

        Raises:
            RuntimeError: The loop is closed, or belongs to the process before a fork.
        """
        if self._process != os.getpid():
            work.close()
            raise RuntimeError(
                "the client was made before this process was forked; make it after the fork"
            )
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
        """Cancel all calls, run `last`, and end the thread. Does nothing in a forked process."""
        if self._process != os.getpid():
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            asyncio.run_coroutine_threadsafe(self._end(last), self._loop)
        # the garbage collector may call this from the loop's own thread
        if threading.current_thread() is not self._thread:
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
    """A class whose methods block on the coroutines of `A`."""

    @property
    def _loop(self) -> Loop: ...

    @property
    def _inner(self) -> A_co: ...


def waiting(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Waits[A], P], T]:
    """Make a blocking method of a coroutine method, with its signature and docstring."""

    @wraps(method)
    def call(self: Waits[A], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._loop.run(method(self._inner, *args, **kwargs))

    return call


def like(
    method: Callable[Concatenate[Any, P], Any],
) -> Callable[[Callable[..., T]], Callable[Concatenate[Any, P], T]]:
    """Give a method the signature of another one."""

    def named(call: Callable[..., T]) -> Callable[Concatenate[Any, P], T]:
        mine = inspect.signature(call, eval_str=False)
        theirs = inspect.signature(method, eval_str=False)
        call.__signature__ = theirs.replace(return_annotation=mine.return_annotation)  # type: ignore[attr-defined]
        return call

    return named


class Client:
    """Calls one service, from any number of threads: `with Client("http://...") as client`.

    Without `with`, call `close()` at the end. The methods are those of `AsyncClient`.
    """

    @like(AsyncClient.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Read the files and start the thread; connections are opened by the first calls.

        The arguments are those of `AsyncClient`.
        """
        self._inner = AsyncClient(*args, **kwargs)
        self._loop = Loop()
        self._loop.run(self._inner.__aenter__())
        # runs also when the client is garbage-collected, and at the exit of the process
        self._finalizer = weakref.finalize(self, self._loop.close, self._inner.__aexit__)

    def close(self) -> None:
        """Close all connections and end the thread; calls in flight raise RuntimeError."""
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
    user = waiting(AsyncClient.user)
    similar = waiting(AsyncClient.similar)
    trending = waiting(AsyncClient.trending)
    items = waiting(AsyncClient.items)
    models = waiting(AsyncClient.models)
    is_ready = waiting(AsyncClient.is_ready)

    @like(AsyncClient.relay)
    def relay(self, *args: Any, **kwargs: Any) -> RelayCall:
        """Signal at once, and rank after retrieval: `with client.relay(user) as relay`.

        See `AsyncClient.relay`.
        """
        return RelayCall(self, self._inner.relay(*args, **kwargs))


class RelayCall:
    """Blocking form of `AsyncRelayCall`: a user's signal and ranks."""

    def __init__(self, client: Client, inner: AsyncRelayCall) -> None:
        self._client = client  # a reference, since a garbage-collected client closes itself
        self._loop = client._loop
        self._inner = inner

    @property
    def signalled(self) -> SignalOut | None:
        """The answer to the signal; None = it has not arrived, or the signal failed."""
        return self._inner.signalled

    @property
    def failure(self) -> NpuGrError | None:
        """The error of the signal; None = it has not failed."""
        return self._inner.failure

    def __enter__(self) -> Self:
        self._loop.run(self._inner.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._inner.__aexit__())

    rank = waiting(AsyncRelayCall.rank)
