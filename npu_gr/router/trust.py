"""How much the health of the instances is believed: the slow start relative to the others, and the panic threshold.

Pure. An instance that has just come up gets a share of its users that grows to 1. What counts is that share in relation
to the fullest one: where all have just come up, each gets all of its users, because nobody else could take them. So
there is always an instance that takes a user, whoever owns the user.

An instance is a suspect if it is out only because it does not answer, or fails: an overload looks like that. In a panic
fewer than `health.panic_ratio` of the instances that are well or suspects are well. Then the suspects take their users
as well, because what is left would be the next to fail. An instance that refuses work, or at whose address nobody
listens, is no suspect: there is no doubt.
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
        instances: all of a router.
        now_at: the instant, of the monotonic clock.
        panic_ratio: there is a panic if a smaller share of those that are well or suspects is well.
    """
    well: list[InstanceState] = []
    num_suspects = 0
    for one in instances:
        if one.takes_signals(now_at):
            well.append(one)
        else:
            num_suspects += one.is_suspect(now_at)
    fullest = max((one.breaker.share(now_at) for one in well if one.config.special), default=0.0)
    return Trust(fullest, len(well) < panic_ratio * (len(well) + num_suspects))
