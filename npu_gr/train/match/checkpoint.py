"""Save the state of a training, so that it resumes after an interruption: one file, written aside and then renamed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import xxhash
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from npu_gr.core.arrays import I64
from npu_gr.core.errors import DataError
from npu_gr.matching.fold import SourceItems
from npu_gr.matching.vectors import Vectors
from npu_gr.train.judge import Graph
from npu_gr.train.match.arms import JoinedVectors
from npu_gr.train.match.domains import Domains, MatchData
from npu_gr.train.match.train import StageProgress, Trainer

_MAGIC = b"npu_gr match 1\n"


def save(trainer: Trainer, path: Path) -> None:
    """Write the state. No reader, and no kill at any moment, finds half of it.

    Raises:
        DataError: the file cannot be written.
    """
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(_MAGIC + identity(trainer) + trainer.state())
        os.replace(temporary, path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def resume(trainer: Trainer, path: Path) -> bool:
    """Load the state into a new trainer, if there is a file.

    Returns:
        Whether there was.

    Raises:
        DataError: the state belongs to other data or options, or the file is no state at all.
    """
    if not path.exists():
        return False
    data = path.read_bytes()
    head = len(_MAGIC) + len(identity(trainer))
    if not data.startswith(_MAGIC):
        raise DataError(f"{path}: not the state of a training")
    if data[len(_MAGIC) : head] != identity(trainer):
        raise DataError(f"{path}: the state of a training on other data or options; remove it to start again")
    trainer.load(data[head:])
    return True


def every(seconds: float, action: Callable[[], None]) -> Callable[[], None]:
    """Make a function that calls `action`, but not within `seconds` of its last call."""
    last_at = time.monotonic()

    def call() -> None:
        nonlocal last_at
        if time.monotonic() - last_at >= seconds:
            action()
            last_at = time.monotonic()

    return call


def identity(trainer: Trainer) -> bytes:
    """Hash the data and the options: 32 hex digits."""
    digest = xxhash.xxh3_128(msgspec.json.encode(trainer.options))
    data: MatchData = trainer.data
    for graph in (data.source, data.target):
        digest.update(f"{graph.num_users} {graph.num_items}".encode())
        digest.update(graph.users.data)
        digest.update(graph.items.data)
    digest.update(data.validation.users.data)
    digest.update(data.validation.items.data)
    return digest.hexdigest().encode()


def export(domains: Domains, data: MatchData, joined: JoinedVectors, figures: dict[str, float]) -> Vectors:
    """Join vectors with the names and histories that serving needs.

    Args:
        domains: every edge in them counts as seen.
        data: that the training saw: it decides which users have vectors.
        joined: the vectors.
        figures: metrics to keep beside the vectors, by name.
    """
    target_starts, target_items = _by_user(domains.target)
    source_starts, source_items = _by_user(domains.source)
    num_source = domains.source.num_items
    knows_source = joined.folding.source_states is not None
    return Vectors(
        user_keys=domains.users,
        item_ids=domains.target_ids,
        users=joined.users.numpy(),
        items=joined.items.numpy(),
        in_target=data.whole().target.degrees()[0] > 0,
        in_source=(data.source.degrees()[0] > 0) & knows_source,
        popularity=domains.target.degrees()[1],
        seen_starts=target_starts,
        seen_items=target_items.astype(np.int32),
        figures=figures,
        folding=joined.folding,
        source=SourceItems(
            ids=domains.source_ids if domains.ids_are_apart else None,
            seen_starts=source_starts,
            seen_items=source_items.astype(np.int32),
            twin_starts=np.searchsorted(domains.twins.source_items, np.arange(num_source + 1)),
            twin_items=domains.twins.target_items.astype(np.int32),
        ),
    )


def _by_user(graph: Graph) -> tuple[I64, I64]:
    order = np.argsort(graph.users, kind="stable")
    return np.searchsorted(graph.users[order], np.arange(graph.num_users + 1)), graph.items[order]


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
