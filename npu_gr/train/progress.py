"""Show trainings in the terminal: one progress bar for each stage, which names the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from npu_gr.train.steps import TrainingProgress


@contextmanager
def training_progress(console: Console) -> Iterator[Callable[[TrainingProgress], None]]:
    """Show a progress bar for each stage of a training; yields what to call with its progress."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[loss]}"), console=console) as bar:
        tasks: dict[str, TaskID] = {}
        latest: dict[str, TrainingProgress] = {}  # by model

        def end(model: str) -> None:
            if model in latest:  # its last step was one short of the end
                bar.update(tasks[latest[model].stage], completed=latest[model].total)

        def show(step: TrainingProgress) -> None:
            model = step.stage.partition(":")[0]
            if step.stage not in tasks:
                end(model)
                tasks[step.stage] = bar.add_task(step.stage, total=step.total, loss="")
            latest[model] = step
            loss = "" if step.loss != step.loss else f"loss {step.loss:.4f}"
            bar.update(tasks[step.stage], completed=step.done, loss=loss)

        yield show
        for model in latest:
            end(model)
