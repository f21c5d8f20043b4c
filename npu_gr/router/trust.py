"""How much the health of the instances is believed: the slow start relative to the others, and the panic threshold.

Pure. An instance that has just come up gets a share of its users that grows to 1. What counts is that share in relation
to the fullest one: where all have just come up, each gets all of its users, because nobody else could take them. So
there is always an instance that takes a user, whoever owns the user.

In a panic fewer than `health.panic_ratio` of the instances are well. Then the suspects take their users as well: they
are out only because they do not answer or fail, which is what an overload looks like, and what is left would be the
next to fail. An instance that refuses work, or at whose address nobody listens, stays out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from npu_gr.router.instance import InstanceState
from npu_gr.router.ring import fraction


class Trust(NamedTuple):
    """What the health of all instances means for each of them."""

    fullest: float  # the largest share of its users that an instance gets which takes signals; 0: there is none
    is_panic: bool

    def lets_in(self, one: InstanceState, user: bytes, now_at: float) -> bool:
        """Whether an instance that takes new work, or is draining, takes the work of this user."""
        share = one.breaker.share(now_at)
        return share >= self.fullest or fraction(user) * self.fullest < share


def trust(instances: Iterable[InstanceState], now_at: float, panic_ratio: float) -> Trust:
    """Judge the instances together.

    Args:
        instances: all of a router. Those that an operator has taken out do not count.
        now_at: the instant, of the monotonic clock.
        panic_ratio: there is a panic if a smaller share of them takes signals.
    """
    there = [one for one in instances if not one.is_drained]
    well = [one for one in there if one.takes_signals(now_at)]
    fullest = max((one.breaker.share(now_at) for one in well if one.config.special), default=0.0)
    return Trust(fullest, len(well) < panic_ratio * len(there))
