"""Relay calls: signal at once, and rank against the same history after retrieval.

signal answered             the rank names the signal's fingerprint as `base`, without a history
no answer yet, or an error  the rank sends the whole history; it never waits for the signal
base unknown (another       the rank is sent again with the whole history
instance, or evicted)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Self

from npu_gr.client.wire import Behaviours, Features, Names, Ranked, Time
from npu_gr.core.errors import NpuGrError, UnknownPrefix
from npu_gr.server.schemas.signal import SignalOut

log = logging.getLogger(__name__)


class AsyncRelayCall:
    """One user's signal and ranks: `async with client.relay(user) as relay`."""

    def __init__(
        self,
        signal: Callable[[], Awaitable[SignalOut]],
        rank: Callable[..., Awaitable[Ranked]],
        history: Behaviours | None,
        features: Features | None,
        timeout_s: float,
    ) -> None:
        """Prepare; `async with` sends the signal.

        Args:
            signal: Coroutine function that sends the signal.
            rank: `AsyncClient.rank` for the same user.
            history: History of both requests; None = read the history store.
            features: Features of the user.
            timeout_s: Default time limit of a rank.
        """
        # the answer to the signal; None = it has not arrived, or the signal failed
        self.signalled: SignalOut | None = None
        self.failure: NpuGrError | None = None  # error of the signal
        self._send_signal = signal
        self._rank = rank
        self._history = history
        self._user_features = None if features is None else features.user
        self._timeout_s = timeout_s
        self._signal: asyncio.Task[None] | None = None
        self._is_base_known = True  # until a rank gets UnknownPrefix

    async def __aenter__(self) -> Self:
        self._signal = asyncio.create_task(self._try_signal())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._signal is not None
        self._signal.cancel()  # no rank will follow
        await asyncio.gather(self._signal, return_exceptions=True)

    async def rank(
        self,
        candidates: Names,
        *,
        timestamp: Time | None = None,
        top_k: int | None = None,
        features: Features | None = None,
        fields: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> Ranked:
        """Score candidates with the signal's history and user features; see `AsyncClient.rank`.

        Args:
            features: Features of the request and the candidates; those of the user are ignored.
        """
        loop = asyncio.get_running_loop()
        left_s = self._timeout_s if timeout_s is None else timeout_s
        until_at = loop.time() + left_s
        rank = partial(self._rank, candidates, timestamp=timestamp, top_k=top_k, fields=fields)
        late = None if features is None else replace(features, user=None)
        if self.signalled is not None and self._is_base_known:
            base = self.signalled.history.fingerprint
            try:
                return await rank(base=base, features=late, timeout_s=left_s)
            except UnknownPrefix:
                self._is_base_known = False
                left_s = max(until_at - loop.time(), 1e-3)
        if self._user_features is not None:
            late = replace(features or Features(), user=self._user_features)
        return await rank(history=self._history, features=late, timeout_s=left_s)

    async def _try_signal(self) -> None:
        try:
            self.signalled = await self._send_signal()
        except NpuGrError as error:
            self.failure = error
            log.debug("the signal failed; ranks send the whole history: %s", error)
