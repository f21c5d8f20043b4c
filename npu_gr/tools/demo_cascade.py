"""The end of `npu-gr demo`: what the cascade recommends to real users, how good that is, and where the time goes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

from npu_gr.core.names import answered_ids
from npu_gr.features.interactions import Interactions, read_item_features
from npu_gr.tools.evaluate_service import EvaluationClient, NextEventCase, evaluate, next_events
from npu_gr.train.data import to_train_on
from npu_gr.train.generate.publish import publish
from npu_gr.train.generate.train import MOVIELENS, train_generator
from npu_gr.train.next_command import CONFIGURATION
from npu_gr.train.steps import TrainingProgress

GENERATOR = msgspec.structs.replace(MOVIELENS, epochs=12, validate_every=12, validation_users=100, test_users=100)
"""Trained in less than a CPU minute, for a demo; `npu-gr train generate` trains a better one in four."""
NUM_RETRIEVED = 100
NUM_POPULAR = 200
EVALUATED_USERS = 300
SHOWN_USERS = 4
SHOWN_ITEMS = 5


def prepare(
    folder: Path, history: Interactions, console: Console, progress: Callable[[TrainingProgress], None]
) -> list[str]:
    """Train or reuse the generator, and list the popular items.

    Args:
        folder: of the demo.
        history: the events to learn from.
        console: to say what is done.
        progress: called with the training's progress.

    Returns:
        The overrides that add both to a service's configuration.
    """
    home = folder / "generator"
    if (home / CONFIGURATION).exists():
        console.print(f"reusing the generator in {home}")
    else:
        trained = train_generator(history, [], GENERATOR, None, progress)
        publish(trained, [], GENERATOR, home)
    generate = yaml.safe_load((home / CONFIGURATION).read_text())["generate"]
    items, counts = np.unique(history.items, return_counts=True)
    popular = items[np.argsort(-counts, kind="stable")][:NUM_POPULAR]
    (folder / "popular.txt").write_text("".join(f"{item}\n" for item in popular.tolist()))
    recommend = {"sources": {"generate": NUM_RETRIEVED}, "order": "fused", "popular": str(folder / "popular.txt")}
    return [f"generate={json.dumps(generate)}", f"recommend={json.dumps(recommend)}"]


async def show(url: str, admin_url: str, log: Interactions, source: Path, console: Console) -> dict[str, Any]:
    """Print what the cascade recommends to a few users, and evaluate it on more.

    Args:
        url: of the service.
        admin_url: its admin address.
        log: all events.
        source: the file that the log was read from; titles lie beside it.
        console: to print on.

    Returns:
        The evaluation, for the report.
    """
    known = to_train_on(log.users, log.timestamps, "user-time")
    cases = next_events(log, known, EVALUATED_USERS)
    titles = _titles(source)
    async with EvaluationClient(url) as client:
        for case in cases[:SHOWN_USERS]:
            body = case.body("shown") | {"num_items": SHOWN_ITEMS, "timestamp": case.happened_at}
            answer, _ = await client.post("/v1/recommend", body)
            console.print(_user_table(case, answer, titles))
    evaluation = await evaluate(url, admin_url, cases, np.unique(log.items).tolist())
    console.print(evaluation.table())
    return evaluation.as_dict()


def _titles(source: Path) -> dict[int, str]:
    """Titles by item id, from the `.item` file beside the log."""
    [titles] = read_item_features(source.with_suffix(".item"), ["movie_title"])
    return {item: " ".join(titles.values[word] for word in words) for item, words in titles.of_item.items()}


def _user_table(case: NextEventCase, answer: dict[str, Any], titles: dict[int, str]) -> Table:
    """What one user watched, what is recommended, and how long the stages took."""
    newest = zip(case.items[-SHOWN_ITEMS:], case.values[-SHOWN_ITEMS:], strict=True)
    watched = [f"{titles.get(item, item)} ({value:g})" for item, value in newest]
    offered = [
        titles.get(item, str(item)) + (" <- watched next" if item == case.target else "")
        for item in answered_ids(answer["items"]).tolist()
    ]
    table = Table("watched last (stars)", "recommended", title=f"user {case.user}, {len(case.items)} films before")
    for left, right in zip(reversed(watched), offered, strict=False):
        table.add_row(left, right)
    stages = ", ".join(
        f"{stage['stage']} {stage['began_s'] * 1e3:.0f}-{(stage['began_s'] + stage['took_s']) * 1e3:.0f} ms"
        for stage in answer["stages"]
    )
    table.caption = (
        f"{sum(answer['stages_s'].values()) * 1e3:.0f} ms: signal at 0 ms ({answer['verdict']}), {stages}; "
        f"{answer['num_candidates']} candidates; the rank read {answer['prefix_tokens']} of "
        f"{answer['history']['num_tokens']} history tokens from cached KV ({answer['outcome']})"
    )
    return table
