"""A clock that a test sets."""

from __future__ import annotations


class Clock:
    """Called, it says `now_at`, in seconds."""

    def __init__(self, now_at: float = 0.0) -> None:
        self.now_at = now_at

    def __call__(self) -> float:
        return self.now_at
