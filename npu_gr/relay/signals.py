"""Each user's last signal: it explains a miss, and times a prefix from its signal to the end of its rank."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from npu_gr.core.history import UserKey
from npu_gr.core.request import Reason, Verdict
from npu_gr.relay.config import LiveSettings

# Why a signal produced nothing. A verdict that is not here produced something, or found it there.
_REFUSALS = {
    Verdict.SKIP_NOT_AT_RISK: Reason.NOT_AT_RISK,
    Verdict.SKIP_FOOTPRINT: Reason.REJECTED_FOOTPRINT,
    Verdict.SKIP_LOAD: Reason.REJECTED_LOAD,
    Verdict.SKIP_RATE: Reason.REJECTED_RATE,
    Verdict.SKIP_SHARE: Reason.REJECTED_SHARE,
    Verdict.SKIP_DISABLED: Reason.DISABLED,
}


class _Signal(NamedTuple):
    refusal: Reason  # NONE = it led to a prefix
    came_at: float
    is_pending: bool  # no rank has ended since


class LastSignals:
    """The last signal of up to `max_remembered` users; the user whose signal is oldest is forgotten first."""

    def __init__(self, settings: LiveSettings) -> None:
        self._settings = settings
        self._last: OrderedDict[UserKey, _Signal] = OrderedDict()

    def remember(self, user: UserKey, verdict: Verdict, now_at: float) -> None:
        """Keep a signal and what came of it."""
        self._last[user] = _Signal(_REFUSALS.get(verdict, Reason.NONE), now_at, is_pending=True)
        self._last.move_to_end(user)
        if len(self._last) > self._settings.relay.max_remembered:
            self._last.popitem(last=False)

    def rank_ended(self, user: UserKey, now_at: float) -> float | None:
        """Return the seconds since the user's signal, for the first rank after it; None for any other rank."""
        signal = self._last.get(user)
        if signal is None or not signal.is_pending:
            return None
        self._last[user] = signal._replace(is_pending=False)
        return now_at - signal.came_at

    def why_missing(self, user: UserKey) -> Reason:
        """Explain why a user has no prefix in any tier."""
        signal = self._last.get(user)
        if signal is None:
            return Reason.NO_SIGNAL
        return signal.refusal or Reason.EXPIRED

    def knows(self, user: UserKey) -> bool:
        """Whether a signal of the user is remembered."""
        return user in self._last

    def forget(self, user: UserKey) -> None:
        """Forget a user's signal."""
        self._last.pop(user, None)
