"""What the relay needs of an engine and of a history: it knows prefixes and pages, and no model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol, TypeVar

from npu_gr.core.request import I64
from npu_gr.engine.cost import CostModel
from npu_gr.engine.scheduler import Done, Urgency
from npu_gr.kv.arena import KVArena
from npu_gr.kv.layout import Run


class Prefix(Protocol):
    """A history as one model reads it: how many tokens, and which."""

    @property
    def timestamps(self) -> I64:
        """[n] unix seconds, kept beside the KV."""
        ...

    def __len__(self) -> int:
        """Tokens."""
        ...

    def fingerprint(self, num_tokens: int) -> str:
        """Of the first `num_tokens`: equal prefixes and no others have equal ones."""
        ...


P = TypeVar("P", bound=Prefix)
P_in = TypeVar("P_in", bound=Prefix, contravariant=True)


class Encoder(Protocol[P_in]):
    """The engine whose prefixes are relayed."""

    @property
    def cost(self) -> CostModel:
        """What a pass takes."""
        ...

    @property
    def copy_bytes_per_s(self) -> float:
        """Bandwidth between the tiers."""
        ...

    @property
    def queue_s(self) -> float:
        """How long a request that comes now would wait for the device."""
        ...

    @property
    def objective_s(self) -> float:
        """How long after it came a request should be done."""
        ...

    @property
    def residual_s(self) -> float:
        """What `cost` has been short by lately, a high quantile."""
        ...

    async def prefill(
        self, tokens: P_in, keep: tuple[Run, ...], deadline_at: float, urgency: Urgency, first_token: int = 0
    ) -> int:
        """Encode the prefix into the pages, which hold its first `first_token` tokens already.

        Returns:
            how many they hold now: all, unless `urgency` was cut.
        """
        ...

    async def copy(
        self,
        source: KVArena,
        source_runs: Sequence[Run],
        target: KVArena,
        target_runs: Sequence[Run],
        num_tokens: int,
        deadline_at: float,
        order_at: float | Urgency | None = None,
        *,
        is_sheddable: bool = False,
    ) -> None:
        """Copy a prefix between tiers."""
        ...

    def zero(self, arena: KVArena, runs: Sequence[Run]) -> asyncio.Future[Done[None]]:
        """Overwrite pages before any job that waits."""
        ...
