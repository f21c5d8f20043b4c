"""A prefill job: one prefix on its way into HBM, computed on the device or copied from DRAM.

    RUNNING --adopt--> STOPPING --its task stops--> ADOPTED --release--> ENDED or RUNNING *
       |                  |
       |                  +--the adopter gives up--> DESERTED --its task stops--> ENDED or RUNNING *
       |
       +--published, failed or erased--> ENDED

    * RUNNING again if other ranks still wait for the prefix

`PrefillManager` moves a job from state to state. `docs/relay.md` draws every state with the events
that change it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import Any

from npu_gr.engine.kv_cache.pages import PrefixLayout
from npu_gr.engine.kv_cache.prefix_pool import PrefixEntry
from npu_gr.engine.kv_cache.tier import PrefixKey
from npu_gr.engine.queue import JobOrder


class PrefillKind(StrEnum):
    """The work that fills the entry; the value is its label in metrics."""

    PREFILL = "prefill"  # the device encodes the tokens
    RELOAD = "reload"  # the pages are copied from DRAM
    REFRESH = "refresh"  # a prefill, of a prefix that a delta has touched: behind all other work


class PrefillState(Enum):
    """What fills the entry now.

    In every state but ENDED the entry is reserved, and ranks may join.
    """

    RUNNING = auto()  # the job's task
    STOPPING = auto()  # the task, until its current chunk ends; a rank waits to take over
    DESERTED = auto()  # the task, until its current chunk ends; that rank has given up
    ADOPTED = auto()  # the pass of a rank; there is no task
    ENDED = auto()  # nothing: the entry was published, or never will be


@dataclass(slots=True, eq=False)
class PrefillJob:
    """One prefix on its way into HBM."""

    entry: PrefixEntry
    kind: PrefillKind
    # Fills and publishes the entry, unless the order is cancelled at a step first.
    fill: Callable[[PrefillJob], Coroutine[Any, Any, None]]
    order: JobOrder  # place of its work in the device queue
    state: PrefillState = PrefillState.RUNNING
    task: asyncio.Task[None] | None = None  # None = it began as ADOPTED, so no task has run
    adoption: Adoption | None = None  # of the rank that stops it, or whose pass fills the entry
    encoded_tokens: int = 0  # tokens that the pages held when the task stopped
    # a resident prefix of the same history, to copy instead of encoding it again; None = none
    base: PrefixEntry | None = None
    joiners: int = 0  # ranks that wait for the prefix
    is_divisible: bool = True  # a rank can continue where the task stopped (see `Prefix`)
    # Cancelled in favour of another tenant's job; the task ends with its current chunk.
    gives_way: bool = False
    ended: asyncio.Future[None] = field(init=False)  # done in state ENDED

    @property
    def key(self) -> PrefixKey:
        """The key of the prefix."""
        return self.entry.key

    @property
    def is_adoptable(self) -> bool:
        """Whether a rank may take the job over and encode the rest in its own pass.

        Only a divisible prefill that no rank has adopted and no rank waits for.
        """
        has_task = self.state in (PrefillState.RUNNING, PrefillState.DESERTED)
        is_prefill = self.kind is not PrefillKind.RELOAD
        return is_prefill and self.is_divisible and has_task and not self.joiners

    @property
    def is_at_work(self) -> bool:
        """Whether a task fills the entry, not only the pass of a rank."""
        return self.task is not None and not self.task.done() and not self.gives_way

    def forget_if_overwritten(self, layout: PrefixLayout) -> None:
        """Begin again if the pass of a rank may have overwritten what the task had encoded."""
        encoded, num_tokens = self.encoded_tokens, self.entry.num_tokens
        if encoded < num_tokens and layout.step_end(encoded, num_tokens) < num_tokens:
            self.encoded_tokens = 0
            self.base = None  # its lease has ended

    def give_way(self) -> None:
        """Cancel the job in favour of another tenant's. Its prefix is not published."""
        assert self.task is not None
        self.gives_way = True
        self.task.cancel()

    @property
    def may_give_way(self) -> bool:
        """Whether it may be cancelled for another tenant: a prefill that no rank waits for."""
        is_running = self.kind is PrefillKind.PREFILL and self.state is PrefillState.RUNNING
        return is_running and self.is_at_work and not self.joiners


class Adoption:
    """A rank's right to fill the rest of a job's entry in its own pass and to publish it.

    The right ends with `release`, which the rank must call however its pass ends. A released
    adoption has no effect on a rank that adopts the same job later.
    """

    def __init__(self, job: PrefillJob, on_release: Callable[[PrefillJob], None]) -> None:
        self.job = job
        self._on_release = on_release

    @property
    def is_held(self) -> bool:
        """Whether the rank may still write into the entry, and publish it."""
        return self.job.adoption is self

    def release(self) -> None:
        """End the adoption. A second call does nothing.

        Ranks that have joined get the prefix if it was published; otherwise a task encodes the rest
        for them.
        """
        if self.is_held:
            self.job.adoption = None
            self._on_release(self.job)
