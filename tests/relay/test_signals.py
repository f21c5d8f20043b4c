"""A user's last signal explains a miss, and is timed once."""

from __future__ import annotations

from npu_gr.core.history import UserKey
from npu_gr.core.request import Reason, Verdict
from npu_gr.relay.config import LiveSettings, RelayConfig
from npu_gr.relay.signals import LastSignals
from npu_gr.relay.trigger import TriggerConfig

A, B, C = (UserKey("", user) for user in "abc")


def test_why_a_prefix_is_missing() -> None:
    signals = LastSignals(LiveSettings(RelayConfig(), TriggerConfig()))
    assert signals.why_missing(A) is Reason.NO_SIGNAL
    signals.remember(A, Verdict.SKIP_RATE, 1.0)
    assert signals.why_missing(A) is Reason.REJECTED_RATE
    signals.remember(A, Verdict.PREINFER, 2.0)
    assert signals.why_missing(A) is Reason.EXPIRED
    signals.forget(A)
    assert signals.why_missing(A) is Reason.NO_SIGNAL


def test_only_the_first_rank_after_a_signal_is_timed() -> None:
    signals = LastSignals(LiveSettings(RelayConfig(), TriggerConfig()))
    assert signals.rank_ended(A, 1.0) is None
    signals.remember(A, Verdict.PREINFER, 2.0)
    assert signals.rank_ended(A, 5.0) == 3.0
    assert signals.rank_ended(A, 6.0) is None
    signals.remember(A, Verdict.ALREADY_RESIDENT, 7.0)
    assert signals.rank_ended(A, 8.0) == 1.0


def test_the_oldest_is_forgotten_and_a_reload_changes_the_limit() -> None:
    settings = LiveSettings(RelayConfig(max_remembered=2), TriggerConfig())
    signals = LastSignals(settings)
    for user in (A, B, A, C):  # A came again after B
        signals.remember(user, Verdict.PREINFER, 0.0)
    assert [signals.why_missing(user) for user in (A, B, C)] == [Reason.EXPIRED, Reason.NO_SIGNAL, Reason.EXPIRED]
    settings.relay = RelayConfig(max_remembered=100)
    signals.remember(B, Verdict.PREINFER, 0.0)
    assert signals.why_missing(A) is Reason.EXPIRED
