"""The prefixes that exist for the histories of one model version: in HBM, on their way into it, and in DRAM."""

from __future__ import annotations

from typing import Generic

from npu_gr.core.history import UserKey
from npu_gr.core.request import Reason
from npu_gr.engine.kv.dram_store import DramEntry
from npu_gr.engine.kv.keys import PrefixKey
from npu_gr.engine.kv.prefix_pool import PrefixEntry
from npu_gr.engine.kv.tiers import Tiers
from npu_gr.relay.config import LiveSettings
from npu_gr.relay.encoder import Encoder, P
from npu_gr.relay.filler import PrefixFiller
from npu_gr.relay.find import Existing, longest, longest_producer
from npu_gr.relay.producer import ProducerKind
from npu_gr.relay.producers import Producers
from npu_gr.relay.signals import LastSignals
from npu_gr.relay.trigger import reload_pays


class Inventory(Generic[P]):
    """Looks prefixes up. It changes nothing, except that DRAM copies whose TTL is over are dropped."""

    def __init__(
        self,
        settings: LiveSettings,
        engine: Encoder[P],
        tiers: Tiers,
        filler: PrefixFiller[P],
        producers: Producers[P],
        signals: LastSignals,
        model_version: str,
    ) -> None:
        """Look things up in `tiers`, `producers` and `signals`.

        Args:
            settings: whether DRAM is used.
            engine: its cost model.
            tiers: where prefixes lie; other versions may share them.
            filler: predicts a reload.
            producers: prefixes on their way into HBM.
            signals: explain a miss.
            model_version: part of every key.
        """
        self._settings = settings
        self._engine = engine
        self._tiers = tiers
        self._filler = filler
        self._producers = producers
        self._signals = signals
        self._version = model_version
        self._layout_id = tiers.pool.arena.layout.layout_id

    def key(self, user: UserKey, tokens: P) -> PrefixKey:
        """Return the key of a whole history."""
        return PrefixKey(user, self._version, self._layout_id, tokens.fingerprint(len(tokens)))

    def is_resident(self, key: PrefixKey) -> bool:
        """Return whether a prefix can be leased."""
        return self._tiers.pool.get(key) is not None

    def is_being_written(self, key: PrefixKey) -> bool:
        """Return whether a prefix has a producer, in this relay or in another one over the same tiers."""
        return key in self._producers or self._tiers.pool.is_reserved(key)

    def resident(self, user: UserKey, tokens: P) -> PrefixEntry | None:
        """Return the longest usable prefix in HBM."""
        return longest(self._tiers.pool.find(user, self._version, self._layout_id), tokens)

    def copy(self, user: UserKey, tokens: P) -> DramEntry | None:
        """Return the longest usable prefix in DRAM, unless the brown-out keeps DRAM out."""
        dram = self._tiers.dram
        if dram is None or not self._settings.uses_dram:
            return None
        return longest(dram.find(user, self._version, self._layout_id), tokens)

    def existing(self, user: UserKey, tokens: P, budget_s: float) -> Existing:
        """Look a history up: in HBM, among the producers, in DRAM, until one place has a usable prefix.

        Args:
            user: whose history.
            tokens: the whole history.
            budget_s: seconds that a reload may take.
        """
        resident = self.resident(user, tokens)
        if resident is not None:
            return Existing(resident=resident)
        producer = longest_producer(self._producers.of(user), tokens)
        if producer is not None:
            return Existing(producer=producer)
        copy = self.copy(user, tokens)
        if copy is None:
            return Existing(why_missing=self._why_missing(user))
        pays = not self._tiers.pool.is_reserved(copy.key) and self.reload_pays(copy, budget_s)
        return Existing(copy=copy, copy_pays=pays)

    def reload_pays(self, copy: DramEntry, budget_s: float) -> bool:
        """Return whether a reload is faster than computing the prefix again, and within the budget."""
        num_reloading = self._producers.in_flight(ProducerKind.RELOAD)
        copy_s = self._filler.reload_s(copy.num_tokens, num_reloading)
        return reload_pays(copy_s, self._engine.cost.full_s(copy.num_tokens, 0), budget_s)

    def _why_missing(self, user: UserKey) -> Reason:
        if self._tiers.pool.find(user, self._version, self._layout_id):
            return Reason.FINGERPRINT_MISMATCH
        return self._signals.why_missing(user)
