"""A future whose waiter goes on within the call that ends it, not in the next turn of the event loop.

A future of asyncio wakes who waits for it in the next turn, which under load takes as long as all that others have
begun meanwhile. What ends a job on the device is a turn by itself already, so its waiter need not wait for one more.

    job ends --> `end`: result --> the waiter's task goes on, up to what it waits for next

Only the first waiter is woken so; others, and all of a future that is cancelled, are woken as asyncio does it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Any, Self, TypeVar

T = TypeVar("T")


class PromptFuture(asyncio.Future[T]):
    """Event loop only, as every future."""

    _waiter: tuple[Callable[[Any], object], Context | None] | None = None

    def add_done_callback(self, fn: Callable[[Self], object], /, *, context: Context | None = None) -> None:
        if self._waiter is None and not self.done():
            self._waiter = (fn, context)
        else:
            super().add_done_callback(fn, context=context)

    def remove_done_callback(self, fn: Callable[[Self], object], /) -> int:
        if self._waiter is not None and self._waiter[0] == fn:
            self._waiter = None
            return 1 + super().remove_done_callback(fn)
        return super().remove_done_callback(fn)

    def cancel(self, msg: Any = None) -> bool:
        if not super().cancel(msg):
            return False
        if self._waiter is not None:
            fn, context = self._waiter
            self._waiter = None
            super().add_done_callback(fn, context=context)  # which calls it soon
        return True

    def end(self, result: T | BaseException) -> None:
        """Set the result or the error, and let the waiter go on. Not within a task: it would be within another."""
        if isinstance(result, BaseException):
            self.set_exception(result)
        else:
            self.set_result(result)
        if self._waiter is not None:
            fn, context = self._waiter
            self._waiter = None
            if context is None:
                fn(self)
            else:
                context.run(fn, self)
