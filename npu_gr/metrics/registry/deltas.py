"""What one process counted, added to the registry of another: so an instance of several processes has one of them.

Prometheus' own mode for several processes knows no exemplars, no information, and no gauge that is read when it is
scraped. What is counted here is sent instead: what each series gained since the last time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from prometheus_client import Counter, Histogram
from prometheus_client.samples import Exemplar as Kept

# of the process itself: it has no place in a sum over processes
OF_PROCESS = frozenset({"event_loop_lag_seconds", "event_loop_freezes_total", "gc_pause_seconds"})


class Exemplar(NamedTuple):
    """The request that a bucket of a histogram names."""

    bucket: int
    labels: dict[str, str]
    value: float
    time_s: float | None  # unix


class Delta(NamedTuple):
    """What one series gained."""

    family: str  # its name, without the prefix of the package
    labels: tuple[str, ...]  # values
    gained: tuple[float, ...]  # of a counter one number; of a histogram its sum, then each bucket
    exemplars: tuple[Exemplar, ...] = ()


class Gained:
    """Finds what the families of a process gained since the last call."""

    def __init__(self, families: Mapping[str, Counter | Histogram]) -> None:
        """Everything that is there counts as known.

        Args:
            families: by name.
        """
        self._families = {name: family for name, family in families.items() if name not in OF_PROCESS}
        self._known: dict[tuple[str, tuple[str, ...]], tuple[float, ...]] = {}
        self.take()

    def take(self) -> list[Delta]:
        """List the series that gained something, and forget that they did."""
        found = []
        for name, family in self._families.items():
            for labels, child in _children(family):
                values = _values(child)
                before = self._known.get((name, labels))
                if values == before:
                    continue
                self._known[name, labels] = values
                if before is None:
                    before = (0.0,) * len(values)
                gained = tuple(now - then for now, then in zip(values, before, strict=True))
                if any(gained):
                    found.append(Delta(name, labels, gained, tuple(_exemplars(child, gained))))
        return found


def add(
    families: Mapping[str, Counter | Histogram],
    deltas: Iterable[Delta],
    on_counter: Callable[[str, tuple[str, ...], float], None] = lambda _name, _labels, _num: None,
) -> None:
    """Add what another process counted.

    Args:
        families: of this process, by name.
        deltas: of the other one.
        on_counter: told of each counter that grew.

    Raises:
        ValueError: a family or a series is not of this build.
    """
    for delta in deltas:
        family = families.get(delta.family)
        if family is None or len(delta.labels) != len(family._labelnames):
            raise ValueError(f"{delta.family} {delta.labels}: there is no such series")
        child: Any = family.labels(*delta.labels) if delta.labels else family
        if isinstance(family, Counter):
            child.inc(delta.gained[0])
            on_counter(delta.family, delta.labels, delta.gained[0])
            continue
        if len(delta.gained) != len(child._buckets) + 1:
            raise ValueError(f"{delta.family}: {len(delta.gained) - 1} buckets, needs {len(child._buckets)}")
        child._sum.inc(delta.gained[0])
        for bucket, num in zip(child._buckets, delta.gained[1:], strict=True):
            if num:
                bucket.inc(num)
        for one in delta.exemplars:
            child._buckets[one.bucket].set_exemplar(Kept(one.labels, one.value, one.time_s))


def _children(family: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    if family._labelnames:
        yield from list(family._metrics.items())
    else:
        yield (), family


def _values(child: Any) -> tuple[float, ...]:
    if isinstance(child, Counter):
        return (child._value.get(),)
    child.fold()
    return (child._sum.get(), *(bucket.get() for bucket in child._buckets))


def _exemplars(child: Any, gained: tuple[float, ...]) -> Iterator[Exemplar]:
    if isinstance(child, Counter):
        return
    for index, bucket in enumerate(child._buckets):
        if gained[index + 1] and (kept := bucket.get_exemplar()) is not None:
            yield Exemplar(index, dict(kept.labels), kept.value, kept.timestamp)
