"""The rows of one request in a pass of the ranker, and the cached tokens that they read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from npu_gr.backend.calls import HstuIds, PagedKV
from npu_gr.backend.tiles import Slab, Tiles
from npu_gr.model.feature_rows import FeatureValues


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """Cached tokens of one user, as the attention reads them."""

    times: Tensor  # int64 [p] unix seconds
    slabs: Callable[[int], Sequence[Slab | Tiles]]  # layer -> its keys and values in token order

    @property
    def num_tokens(self) -> int:
        return len(self.times)


# (layer, k [n, H, Dq], v [n, H, Dv] of the new history rows) -> slabs of the whole history as it is now stored, which
# the attention then reads; None = the attention reads the rows themselves.
Sink = Callable[[int, Tensor, Tensor], Sequence[Slab | Tiles] | None]


class HostTokens(NamedTuple):
    """What the host knows of a segment's tokens: `Past` and `Sink` as numbers."""

    times: npt.NDArray[np.int64]  # [p + n] unix seconds
    pages: PagedKV | None  # of the cached tokens, and of the new ones if they are kept; None = neither
    ids: HstuIds | None = None  # of the new tokens and the candidates; None = the tensors alone have them


class LastEvent(NamedTuple):
    """A history whose rows ask with the time of the behaviour after them: what its last behaviour adds to `Segment`."""

    row_times: Tensor  # int64 [n], the times as which the history's rows ask
    action: Tensor  # int64 [1] of the last behaviour
    time: Tensor  # int64 [] of the last behaviour


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """The rows of one request. All tensors are on the model's device."""

    items: Tensor  # int64 [e] item rows of the new events
    actions: Tensor  # int64 [e]
    times: Tensor  # int64 [n] unix seconds of the new history tokens: the user's if they are among them, then events'
    candidates: Tensor  # int64 [c] item rows
    candidate_time: int = 0  # unix seconds
    is_next: bool = False  # `candidates` is NEXT alone: the result is u
    past: Past | None = None
    sink: Sink | None = None  # receives the new history rows' keys and values, layer by layer
    host: HostTokens | None = None  # the same, for a device that computes whole layers
    last: LastEvent | None = None  # `candidates` is the last behaviour, which asks what comes next
    user: FeatureValues | None = None  # [1] makes the user's tokens the first of the new ones; None = there are none
    events: FeatureValues | None = None  # [e]; None of these three: missing
    request: FeatureValues | None = None  # [1]
    cross: FeatureValues | None = None  # [c]

    @property
    def num_tokens(self) -> int:
        """New history tokens, n."""
        return len(self.times)

    @property
    def num_user_tokens(self) -> int:
        """The user's among them."""
        return len(self.times) - len(self.items)

    @property
    def num_rows(self) -> int:
        """New history rows plus candidate rows."""
        return self.num_tokens + len(self.candidates)

    def asking_by_last(self) -> Segment:
        """Let the last behaviour be the row that answers, at the request's time. Needs a behaviour, and no past."""
        assert self.past is None
        assert self.sink is None
        last = LastEvent(self.times[1:], self.actions[-1:], self.times[-1])
        return Segment(
            items=self.items[:-1],
            actions=self.actions[:-1],
            times=self.times[:-1],
            candidates=self.items[-1:],
            candidate_time=self.candidate_time,
            is_next=True,
            last=last,
        )
