"""The curves of trainings for TensorBoard: each line of `metrics.jsonl`, as it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from npu_gr.core.errors import ConfigError
from npu_gr.train.site.metrics_log import MetricsLine, ignore_line

STEPS = 100  # of an epoch; TensorBoard counts in whole steps
_SHOWN = ("loss", "hit", "events_per_s", "hr_at_10")


@contextmanager
def tensorboard_log(folder: Path | None) -> Iterator[Callable[[MetricsLine], None]]:
    """Write the lines of one run into a subfolder that is named by the time; yields the callback.

    Args:
        folder: Folder of `tensorboard --logdir`; None = write nothing.

    Raises:
        ConfigError: TensorBoard is not installed, or the folder cannot be written.
    """
    if folder is None:
        yield ignore_line
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(f"--tensorboard: {error}; pip install 'npu_gr[tensorboard]'") from error
    try:
        run = folder / datetime.now(UTC).strftime("%Y-%m-%dT%H%M%S")
        writer = SummaryWriter(str(run))
    except OSError as error:
        raise ConfigError(f"--tensorboard {folder}: {error.strerror}") from error

    def write(line: MetricsLine) -> None:
        for name in _SHOWN:
            if (value := getattr(line, name)) is not None:
                at = int(STEPS * line.done), line.at
                writer.add_scalar(f"{line.model}/{line.stage}/{name}", value, *at)

    try:
        yield write
    finally:
        writer.close()
