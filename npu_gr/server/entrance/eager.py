"""A task whose first step runs within the call that begins it, not in a later turn of the event loop.

Under load a turn takes as long as what everybody else has begun in it, so whoever waits for one turn less is answered
that much earlier. Python 3.12 has such tasks. This is for 3.11, too, by the functions that asyncio documents for tasks
of other makes (`_enter_task`, `_leave_task`):

    begin --> step 1, at once --> what it waits for is kept --> the task's own first step hands that to the task

So the coroutine has its task from its first line on (deadlines and groups ask for it), and how it ends or is cancelled
is the task's business.

Invariants, held by tests/server/entrance/test_eager.py:
  E1  a coroutine sees the same values, errors and cancellations, in the same order, as in a task that is not eager
  E2  its task ends in a later turn than the one in which it began, with whatever the coroutine ended with
"""

from __future__ import annotations

import asyncio
from asyncio.tasks import _enter_task, _leave_task
from collections.abc import Coroutine
from contextvars import copy_context
from types import FrameType
from typing import Any


class EagerTask(Coroutine[Any, Any, None]):
    """A coroutine on its way into a task: to the task it is the coroutine itself."""

    __slots__ = ("_awaited", "_context", "_coroutine", "_ended", "_has_begun", "_loop", "task")

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, None]) -> None:
        """Make the task, which takes its first step in the next turn of the loop if `begin` is not called before.

        Args:
            loop: that runs.
            coroutine: that has not begun.
        """
        self._loop = loop
        self._coroutine = coroutine
        self._has_begun = False  # and the task does not know what came of it yet
        self._awaited: Any = None  # by the first step; None = it lets others go first
        self._ended: BaseException | None = None  # the first step was the last
        self._context = copy_context()
        self.task: asyncio.Task[None] = loop.create_task(self, context=self._context)

    def begin(self) -> None:
        """Take the first step now. Only where no task runs, so that whoever is served lets nobody in within itself."""
        self._has_begun = True
        _enter_task(self._loop, self.task)
        try:
            self._awaited = self._context.run(self._coroutine.send, None)
        except BaseException as error:  # noqa: BLE001  (the task ends with it)
            is_cancelled = (
                isinstance(error, StopIteration) and self.task.cancelling()
            )  # by itself, right before it ended
            self._ended = asyncio.CancelledError() if is_cancelled else error
        finally:
            _leave_task(self._loop, self.task)

    def send(self, value: None) -> Any:
        """Take a step of the task."""
        if not self._has_begun:
            return self._coroutine.send(value)
        self._has_begun = False
        if self._ended is not None:
            try:
                raise self._ended
            finally:
                self._ended = None  # it holds this frame
        awaited, self._awaited = self._awaited, None
        return awaited

    def throw(self, *error: Any) -> Any:
        """Take a step of the task, which was cancelled: so is what the first step waits for."""
        if not self._has_begun:
            return self._coroutine.throw(*error)
        if self._ended is not None:  # before it was cancelled
            return self.send(None)
        awaited = self.send(None)
        if awaited is not None and awaited.cancel():
            return awaited  # which wakes the task with the cancellation
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """Close the coroutine."""
        self._coroutine.close()

    def __await__(self) -> Any:
        return self._coroutine.__await__()

    # for dumps of all tasks, as coroutines have them

    @property
    def cr_frame(self) -> FrameType | None:
        """Where it stands."""
        return getattr(self._coroutine, "cr_frame", None)

    @property
    def cr_await(self) -> Any:
        """What it awaits."""
        return getattr(self._coroutine, "cr_await", None)
