"""Which ranks find their prefix, by the bytes of each tier: the tiers' rules without their work.

A replay of signals and ranks takes microseconds each, so a plan tries many sizes. What takes time
is left out: a prefill, a copy and a put end at once, and no rank waits. The rules are those of
`relay.lookup`, `relay.prefill_admission`, `PrefixPool`, `DramStore` and `PoolCopies`:

    HBM    least recently ranked first; a prefix that a signal made waits for its rank, `t_life_s`
    DRAM   a copy of each ranked prefix; the least recently copied or reloaded is evicted first; TTL
    pool   the newest prefix of each user, which a signal fetches if no tier has one; TTL

A longer prefix of the same history takes the place of a shorter one in HBM; in DRAM both lie until
they are evicted. `npu-gr simulate` has the time, and needs a second for what takes a minute there.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from npu_gr.core.kinds import SIGNAL
from npu_gr.core.request import Fetched, Outcome
from npu_gr.engine.cost import CostModel
from npu_gr.engine.kv_cache.pages import KVLayout
from npu_gr.relay.trigger import reload_pays
from npu_gr.simulate.users import TrafficRequest

COMPUTED = Outcome.MISS_FULL.value


class Visit(NamedTuple):
    """One signal or rank, as the tiers see it."""

    at: float  # seconds
    is_signal: bool
    user: str
    start: int  # first event of the history's window: prefixes of another start are not usable
    num_tokens: int
    num_candidates: int


class TierSizes(NamedTuple):
    """Bytes of each tier; 0 = there is none. HBM always holds what waits for its rank."""

    hbm_bytes: float
    dram_bytes: float = 0.0
    pool_bytes: float = 0.0


class Rules(NamedTuple):
    """What decides besides the sizes."""

    layout: KVLayout
    t_life_s: float
    ttl_s: float  # of DRAM and the pool
    min_prefix_tokens: int
    cost: CostModel
    copy_bytes_per_s: float


class MemoryHits(NamedTuple):
    """Where the prefixes of the ranks came from, and what that cost."""

    sources: Counter[str]  # hbm_hit, dram_hit, pool_hit or miss_full of each counted rank
    device_s: float  # of the counted ranks, their prefills and copies
    copy_s: float  # of that, of the copies between HBM and DRAM, either way
    num_prefills: int  # of the signals

    @property
    def ratio(self) -> float:
        """Share of the ranks whose prefix, or a beginning of it, was there."""
        return 1 - self.sources[COMPUTED] / max(self.sources.total(), 1)


class _Key(NamedTuple):
    user: str
    start: int
    num_tokens: int


class _Tier:
    """Prefixes in the order of their last use, in pages."""

    def __init__(self, num_bytes: float, rules: Rules, ttl_s: float = float("inf")) -> None:
        self._layout = rules.layout
        self._free = num_bytes // rules.layout.page_bytes
        self._ttl_s = ttl_s
        self._ends_at: OrderedDict[_Key, float] = OrderedDict()  # least recently used first
        self._held: OrderedDict[_Key, float] = OrderedDict()  # until when it is not evicted
        self._of: dict[str, list[_Key]] = {}

    def longest(self, visit: Visit) -> _Key | None:
        """Find the longest usable prefix."""
        keys = (
            key
            for key in self._of.get(visit.user, ())
            if key.start == visit.start and key.num_tokens <= visit.num_tokens
        )
        found = max(keys, key=lambda key: key.num_tokens, default=None)
        if found is not None and self._ends_at.get(found, visit.at + 1) <= visit.at:
            self.drop(found)
            return self.longest(visit)
        return found

    def __contains__(self, key: _Key) -> bool:
        return key in self._ends_at or key in self._held

    def touch(self, key: _Key, now: float, held_s: float = 0.0) -> None:
        """Use a prefix; `held_s`: seconds for which it is not evicted."""
        self._ends_at.pop(key, None)
        self._held.pop(key, None)
        if held_s:
            self._held[key] = now + held_s
        else:
            self._ends_at[key] = now + self._ttl_s

    def add(self, key: _Key, now: float, held_s: float = 0.0) -> bool:
        """Keep a prefix if there is room, or room can be made."""
        while self._held and (first := next(iter(self._held.items())))[1] <= now:
            self.touch(first[0], now)
        pages = self._layout.pages(key.num_tokens)
        if key in self:
            self.touch(key, now, held_s)
            return True
        while self._free < pages:
            if not self._ends_at:
                return False
            self.drop(next(iter(self._ends_at)))
        self._free -= pages
        self._of.setdefault(key.user, []).append(key)
        self.touch(key, now, held_s)
        return True

    def drop(self, key: _Key) -> None:
        """Forget a prefix."""
        self._ends_at.pop(key, None)
        self._held.pop(key, None)
        self._free += self._layout.pages(key.num_tokens)
        keys = self._of[key.user]
        keys.remove(key)
        if not keys:
            del self._of[key.user]


class Memory:
    """The tiers of a fleet as one instance's: users do not change their instance."""

    def __init__(self, sizes: TierSizes, rules: Rules) -> None:
        self._rules = rules
        self._hbm = _Tier(sizes.hbm_bytes, rules)
        self._dram = _Tier(sizes.dram_bytes, rules, rules.ttl_s)
        self._pool = _Tier(sizes.pool_bytes, rules, rules.ttl_s)
        self._signalled: dict[str, str] = {}  # user -> where the signal found the prefix
        self.device_s = 0.0
        self.copy_s = 0.0
        self.num_prefills = 0

    @property
    def counts(self) -> tuple[float, float, int]:
        """Device seconds, those of copies among them, and prefills so far."""
        return self.device_s, self.copy_s, self.num_prefills

    def _computed(self, new: int, cached: int, num_candidates: int = 0) -> None:
        self.device_s += self._rules.cost.pass_s(new, cached, num_candidates)

    def _copied(self, key: _Key) -> None:
        seconds = self._copy_s(key)
        self.copy_s += seconds
        self.device_s += seconds

    def _copy_s(self, key: _Key) -> float:
        return self._rules.layout.bytes(key.num_tokens) / self._rules.copy_bytes_per_s

    def _reloads(self, key: _Key) -> bool:
        compute_s = self._rules.cost.full_s(key.num_tokens, 0)
        return reload_pays(self._copy_s(key), compute_s, self._rules.t_life_s)

    def signal(self, visit: Visit) -> None:
        """Make the prefix, or find it."""
        source = self._prepared(visit)
        self._signalled.setdefault(visit.user, source)

    def _prepared(self, visit: Visit) -> str:
        rules = self._rules
        key = _Key(*visit[2:5])
        base = self._hbm.longest(visit)
        copy = self._dram.longest(visit)
        if copy is not None and (
            (base is not None and copy.num_tokens <= base.num_tokens) or not self._reloads(copy)
        ):
            copy = None
        more = visit.num_tokens - (base.num_tokens if base else 0)
        if base is not None and (base == key or (copy is None and more < rules.min_prefix_tokens)):
            self._hbm.touch(base, visit.at, rules.t_life_s)
            return Outcome.HBM_HIT.value
        if visit.num_tokens < rules.min_prefix_tokens:
            return COMPUTED
        source = Outcome.DRAM_HIT.value
        if base is None and copy is None:
            copy = self._pool.longest(visit)
            source = Fetched.HIT.value
            if copy is not None and not self._dram.add(copy, visit.at):
                copy = None
        if copy is not None:
            if not self._hbm.add(copy, visit.at, rules.t_life_s):
                return COMPUTED
            self._dram.touch(copy, visit.at)
            self._copied(copy)
            return source
        if self._hbm.add(key, visit.at, rules.t_life_s):
            self.num_prefills += 1
            self._computed(more, visit.num_tokens - more)
            if base is not None and base in self._hbm:
                self._hbm.drop(base)
        return COMPUTED if base is None else Outcome.HBM_HIT.value

    def rank(self, visit: Visit) -> str:
        """Rank, and return where the prefix came from, before the signal if there was one."""
        source = Outcome.HBM_HIT.value
        used = self._hbm.longest(visit)
        copy = self._dram.longest(visit) if used is None else None
        if copy is not None and self._reloads(copy) and self._hbm.add(copy, visit.at):
            self._dram.touch(copy, visit.at)
            self._copied(copy)
            used = copy
            source = Outcome.DRAM_HIT.value
        cached = used.num_tokens if used else 0
        self._computed(visit.num_tokens - cached, cached, visit.num_candidates)
        if used is None:
            source = COMPUTED
            key = _Key(*visit[2:5])
            if visit.num_tokens >= self._rules.min_prefix_tokens and self._hbm.add(key, visit.at):
                used = key
        if used is not None:
            self._hbm.touch(used, visit.at)
            self._spill(used, visit.at)
        return self._signalled.pop(visit.user, source)

    def _spill(self, key: _Key, now: float) -> None:
        if key in self._dram or not self._dram.add(key, now):
            return
        self._copied(key)
        for before in list(self._pool._of.get(key.user, ())):
            self._pool.drop(before)
        self._pool.add(key, now)


def replayed(
    visits: Iterable[Visit], sizes: TierSizes, rules: Rules, warmup_s: float
) -> MemoryHits:
    """Replay signals and ranks over tiers of these sizes.

    Args:
        visits: In time order.
        sizes: Bytes of each tier.
        rules: What decides besides.
        warmup_s: Instant before which nothing is counted.
    """
    memory = Memory(sizes, rules)
    sources = Counter[str]()
    before = memory.counts
    for visit in visits:
        if visit.is_signal:
            memory.signal(visit)
        else:
            source = memory.rank(visit)
            if visit.at >= warmup_s:
                sources[source] += 1
        if visit.at < warmup_s:
            before = memory.counts
    device_s, copy_s, num_prefills = memory.counts
    return MemoryHits(sources, device_s - before[0], copy_s - before[1], num_prefills - before[2])


def visits_of(
    traffic: Iterable[TrafficRequest], max_tokens: int, cut_step_tokens: int, per_event: int = 1
) -> list[Visit]:
    """Cut the histories of a traffic as the tokenizer does.

    Args:
        traffic: Signals and ranks, in time order; their lengths are in events.
        max_tokens: Longest history that the model reads, in tokens.
        cut_step_tokens: Step of the window's start.
        per_event: Tokens of an event.
    """
    most = max_tokens // per_event
    step = -(-cut_step_tokens // per_event)
    found = []
    for request in traffic:
        start = -(-max(0, request.num_tokens - most) // step) * step
        found.append(
            Visit(
                request.due_at,
                request.kind == SIGNAL.name,
                f"{request.tenant}\0{request.user}",
                start,
                max(request.num_tokens - start, 0) * per_event,
                request.num_candidates,
            )
        )
    return found
