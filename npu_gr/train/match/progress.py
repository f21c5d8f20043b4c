"""A bar a stage of a training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from npu_gr.train.match.train import Progress


@contextmanager
def bars(console: Console) -> Iterator[Callable[[str, Progress], None]]:
    """Called with a training's name, "" for the only one, and after each of its steps with how far it is."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, TextColumn("{task.fields[figures]}"), console=console) as shown:
        tasks: dict[tuple[str, str], TaskID] = {}

        def show(name: str, step: Progress) -> None:
            key = (name, step.stage)
            if key not in tasks:
                for old in tasks.values():
                    shown.update(old, visible=name == "")
                tasks[key] = shown.add_task(f"{name} {step.stage}".strip(), total=step.total, figures="")
            hit = f", best HIT@50 {step.hit:.4f}" if step.hit >= 0 else ""
            shown.update(tasks[key], completed=step.done, figures=f"loss {step.loss:.4f}{hit}")

        yield show
