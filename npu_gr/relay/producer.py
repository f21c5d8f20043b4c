"""One prefix on its way into HBM, and its states. `producers.py` moves a producer from one state to the next.

    RUNNING ---adopt---> STOPPING ---its task has stopped---> ADOPTED ---release---> ENDED, or RUNNING again
       |                    |                                                          if others still wait for it
       |                    +--the adopter goes away--> DESERTED --its task has stopped--> ENDED, or RUNNING again
       +--published, failed, erased--> ENDED

`docs/relay.md` draws all states with the events that move a producer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import Any

from npu_gr.engine.job import JobOrder
from npu_gr.engine.kv.keys import PrefixKey
from npu_gr.engine.kv.prefix_pool import PrefixEntry


class ProducerKind(StrEnum):
    """The work that fills the entry; the value is its label in metrics."""

    PREFILL = "prefill"  # the device encodes tokens
    RELOAD = "reload"  # a copy from DRAM


class ProducerState(Enum):
    """Who fills the entry now. In every state but ENDED the entry is reserved, and ranks may join."""

    RUNNING = auto()  # its task does
    STOPPING = auto()  # its task, which a rank waits for to end with the chunk that runs
    DESERTED = auto()  # its task, which ends with the chunk that runs; the rank that wanted that has gone
    ADOPTED = auto()  # the pass of a rank; there is no task
    ENDED = auto()  # nobody: the entry was published, or never will be


@dataclass(slots=True, eq=False)
class Producer:
    """One prefix on its way into HBM."""

    entry: PrefixEntry
    kind: ProducerKind
    fill: Callable[[Producer], Coroutine[Any, Any, None]]  # fills and publishes the entry, unless it is stopped before
    order: JobOrder  # of its work in the device queue
    state: ProducerState = ProducerState.RUNNING
    task: asyncio.Task[None] | None = None  # None = no task has run: it began with a rank
    adoption: Adoption | None = None  # by the rank that stops it, or whose pass fills the entry
    encoded_tokens: int = 0  # that the pages held when its task stopped
    joiners: int = 0  # ranks that wait for it
    is_divisible: bool = True  # as of the prefix: a rank can go on where its task has stopped
    gives_way: bool = False  # to another tenant: its task is cancelled, and ends with the chunk that runs
    ended: asyncio.Future[None] = field(init=False)  # done in state ENDED

    @property
    def key(self) -> PrefixKey:
        """The key of the prefix."""
        return self.entry.key

    @property
    def is_adoptable(self) -> bool:
        """Whether a rank may encode the rest itself: it is a prefill, no rank has adopted it, and none waits for it.

        A prefill in one piece has no rest: a rank joins it.
        """
        has_task = self.state in (ProducerState.RUNNING, ProducerState.DESERTED)
        return self.kind is ProducerKind.PREFILL and self.is_divisible and has_task and not self.joiners

    @property
    def is_at_work(self) -> bool:
        """Whether a task fills the entry, not only the pass of a rank."""
        return self.task is not None and not self.task.done() and not self.gives_way

    @property
    def may_give_way(self) -> bool:
        """Whether nobody needs it yet: it is a prefill that no rank waits for."""
        is_running = self.kind is ProducerKind.PREFILL and self.state is ProducerState.RUNNING
        return is_running and self.is_at_work and not self.joiners


class Adoption:
    """A rank's right to fill the rest of a producer's entry in its own pass, and then to publish it.

    The right ends with `release`, which the rank calls however it ends. A released adoption never affects a rank that
    has adopted the same producer since.
    """

    def __init__(self, producer: Producer, on_release: Callable[[Producer], None]) -> None:
        self.producer = producer
        self._on_release = on_release

    @property
    def is_held(self) -> bool:
        """Whether the rank may still write into the entry, and publish it."""
        return self.producer.adoption is self

    def release(self) -> None:
        """End the adoption. Joined ranks get the prefix if it was published; otherwise a task fills the rest for them.

        A second call does nothing.
        """
        if self.is_held:
            self.producer.adoption = None
            self._on_release(self.producer)
