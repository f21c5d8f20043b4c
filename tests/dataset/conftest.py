"""What every test here shares."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test loses its power supply."""
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)
