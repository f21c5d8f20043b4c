"""Show a training in the terminal: one progress bar for each stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from npu_gr.train.match.train import StageProgress


@contextmanager
def bars(console: Console) -> Iterator[Callable[[str, StageProgress], None]]:
    """Show bars while the block runs.

    Yields:
        A function to call after every step, with the training's name ("" if it is the only one) and its progress.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[figures]}"), console=console) as progress:
        tasks: dict[tuple[str, str], TaskID] = {}

        def show(name: str, step: StageProgress) -> None:
            key = (name, step.stage)
            if key not in tasks:
                for old in tasks.values():
                    progress.update(old, visible=name == "")  # of many trainings only the current stage is shown
                tasks[key] = progress.add_task(f"{name} {step.stage}".strip(), total=step.total, figures="")
            hit = f", best smooth HIT {step.hit:.4f}" if step.hit >= 0 else ""
            progress.update(tasks[key], completed=step.done, figures=f"loss {step.loss:.4f}{hit}")

        yield show
