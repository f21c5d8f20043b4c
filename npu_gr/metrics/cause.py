"""What an alert on a cause consists of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """An alert on something that makes requests slow or wrong, or soon will."""

    alert: str
    runbook: str  # name of its page in docs/runbooks
    expr: str
    wait: str  # how long the expression must hold before the alert fires
    page: bool  # True = wakes somebody, False = opens a ticket
    summary: str
