"""Reloads while an instance serves: whether the last one took effect, and when one last did.

A refused reload leaves what served before in service, so nothing else shows it: an operator would believe that the new
checkpoint serves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from npu_gr.metrics.registry.families import Families


class Reloaded(StrEnum):
    """What can be read again while the instance serves; the value of the metric label `what`."""

    CONFIGURATION = "configuration"  # the file with every section; models too
    CATALOGUE = "catalogue"  # the items that generates find
    VECTORS = "vectors"  # what matches search


class ReloadMetrics:
    """The last reload of each thing that an instance serves. A thing that it does not serve has no series."""

    def __init__(self, make: Families, clock: Callable[[], float] = time.time) -> None:
        """Make the families.

        Args:
            make: on which registry.
            clock: unix seconds.
        """
        self._clock = clock
        self._successful = make.gauge(
            "last_reload_successful", "1 if the last reload took effect, 0 if it was refused.", ("what",)
        )
        self._success_at = make.gauge(
            "last_reload_success_timestamp_seconds", "When what serves now was loaded, in unix seconds.", ("what",)
        )

    def loaded(self, what: Reloaded) -> None:
        """Record that something was loaded, at the start or by a reload."""
        self._successful.labels(what.value).set(1)
        self._success_at.labels(what.value).set(self._clock())

    @contextmanager
    def attempt(self, what: Reloaded) -> Iterator[None]:
        """Record how the block ends: it reloads, or it raises, and what served before goes on."""
        try:
            yield
        except BaseException:  # a caller who leaves in the middle did not get what it asked for either
            self._successful.labels(what.value).set(0)
            raise
        self.loaded(what)
