"""The pace of an instance: how many seconds it takes for one more request of a kind, learnt from the departures.

A sample is the time between two answers, as long as something was left to do in between. So the pace holds whatever
bounds the instance: the device, or the event loop. Nothing is learnt while the instance is idle, and nothing is
probed. A busy fraction of a second renews it, and one pause moves it by a quarter at most.

Where more threads want to run than there are cores, a process stands still for some milliseconds some forty times a
second. That is no pause: it belongs to the pace. With .4 ms a request and no sample above eight times that, a fifth to
a third of the time was missing, so the door let in requests that were late.
"""

from __future__ import annotations

WEIGHT = 1 / 32  # of a new sample: 32 answers renew the pace, and 60 answers after a pause 3 % of it are left
MEMORY_S = 0.04  # where 32 answers take less time, answers of so long renew it
LARGEST = 8.0  # a sample counts as this many times the present pace at most
SLICE_S = 0.008  # or as long as that: a few turns of other threads on a core


class Pace:
    """Seconds a request of one kind."""

    __slots__ = ("_samples", "seconds")

    def __init__(self, guess_s: float) -> None:
        """Begin with a guess; the first samples replace it soon.

        Args:
            guess_s: seconds a request.
        """
        self.seconds = guess_s
        self._samples = 0

    def observe(self, gap_s: float) -> None:
        """Learn from one departure.

        Args:
            gap_s: seconds since the departure before, with something left to do all the time.
        """
        self._samples += 1
        weight = max(min(WEIGHT, self.seconds / MEMORY_S), 1 / (self._samples + 1))
        self.seconds += weight * (min(gap_s, max(LARGEST * self.seconds, SLICE_S)) - self.seconds)
