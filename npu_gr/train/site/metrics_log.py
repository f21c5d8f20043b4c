"""The curves of a site's trainings: `metrics.jsonl`, a line a second for each model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from npu_gr.core.errors import DataError
from npu_gr.train.steps import TrainingProgress

METRICS = "metrics.jsonl"
EVERY_S = 1.0


class MetricsLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of one training."""

    at: float  # unix seconds
    model: str
    stage: str  # train, evaluate, refit, ...
    done: float  # epochs, steps or users
    total: float
    loss: float | None = None  # mean of the last batches
    hit: float | None = None  # best smooth HIT on the validation so far
    hr_at_10: float | None = None  # of the last validation
    events_per_s: float | None = None  # trained since the line before of this stage


def ignore_line(line: MetricsLine) -> None:
    """Ignore a line."""


@contextmanager
def metrics_log(
    site: Path,
    show: Callable[[TrainingProgress], None],
    *,
    goes_on: bool,
    now: Callable[[], float] = time.time,
    also: Callable[[MetricsLine], None] = ignore_line,
) -> Iterator[Callable[[TrainingProgress], None]]:
    """Write the progress of all trainings to a file, next to showing it; yields the callback.

    A stage's first and last step are always written, so that short stages have a line too.

    Args:
        site: Folder of the site.
        show: Callback that shows the progress.
        goes_on: Whether to append to the file of an interrupted run.
        now: Clock, in unix seconds.
        also: Callback with each line that is written.

    Raises:
        DataError: the file cannot be written.
    """
    written: dict[str, tuple[float, int]] = {}  # by stage: when, and the events until then
    try:
        with (site / METRICS).open("ab" if goes_on else "wb", buffering=0) as file:

            def write(step: TrainingProgress) -> None:
                show(step)
                at = now()
                before_at, before = written.get(step.stage, (0.0, 0))
                if at < before_at + EVERY_S and step.done < step.total:
                    return
                written[step.stage] = at, step.num_events
                num_new = step.num_events - before if before else 0
                model, _, stage = step.stage.partition(": ")
                line = MetricsLine(
                    at=at,
                    model=model,
                    stage=stage,
                    done=step.done,
                    total=step.total,
                    loss=step.loss if step.loss == step.loss else None,
                    hit=step.hit if step.hit >= 0 else None,
                    hr_at_10=step.hr_at_10 if step.hr_at_10 == step.hr_at_10 else None,
                    events_per_s=num_new / (at - before_at) if num_new and at > before_at else None,
                )
                file.write(msgspec.json.encode(line) + b"\n")
                also(line)

            yield write
    except OSError as error:
        raise DataError(f"{site / METRICS}: cannot be written: {error.strerror}") from error
