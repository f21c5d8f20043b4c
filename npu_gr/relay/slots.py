"""The pre-infers and reloads at work, shared by the tenants (`core.shares`): who may start one more, and its turn.

Where all of `trigger.max_inflight` are at work, a tenant with fewer than its share may still start one: the youngest
prefill of a tenant with more than its share gives way. The device takes the prefills of several tenants in turn, each
as if the tenant had its share of the device for itself; those of one tenant run in the order in which they came.

Source: start-time fair queueing (Goyal, Vin, Cheng 1996), as in `admission/turns.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from npu_gr.engine.kv.prefix_pool import PrefixPool
from npu_gr.relay.encoder import P
from npu_gr.relay.producer import Producer
from npu_gr.relay.producers import Producers


class TenantSlots(NamedTuple):
    """The producers at work, as one tenant finds them."""

    used: int  # that need not give way to this tenant
    is_at_share: bool  # it has its share of them, and others want the rest
    gives_way: Producer | None  # ends if this tenant starts one more
    own: list[Producer]  # of this tenant
    ratio: float  # its share, as a part of 1

    @classmethod
    def now(cls, pool: PrefixPool, producers: Producers[P], max_inflight: int, tenant: str) -> TenantSlots:
        """Look at the producers.

        Args:
            pool: knows which tenants want prefixes.
            producers: of the relay.
            max_inflight: producers at work at once.
            tenant: who would start one more.
        """
        account = pool.shares.asking(tenant)
        ratios = pool.shares.ratios()
        own = producers.at_work_of(account)
        used = producers.in_flight()
        if used < max_inflight or len(ratios) == 1:
            return cls(used, False, None, own, ratios[account])
        slots = {each: max(1, int(max_inflight * ratios.get(each, 0.0))) for each in pool.shares.accounts}
        if len(own) >= slots[account]:
            return cls(used, True, None, own, ratios[account])
        gives_way = producers.youngest_over(slots.items())
        return cls(used - (gives_way is not None), False, gives_way, own, ratios[account])

    def begins_at(self, now_at: float, takes_s: float) -> float:
        """Return the place of one more in the queue: when it would begin on this tenant's share of the device.

        Args:
            now_at: the clock.
            takes_s: device seconds of one, about.
        """
        behind_s = len(self.own) * takes_s / self.ratio if self.ratio < 1.0 else 0.0
        return max(now_at + behind_s, *(each.order.arrived_at or 0.0 for each in self.own), 0.0)
