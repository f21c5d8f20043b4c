"""What the demo's cascade is worth, and what it recommends by title."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from npu_gr.catalogue.names import ItemNames
from npu_gr.features.interactions import Interactions
from npu_gr.tools.evaluate_service import EvaluationClient, ServiceEvaluation, evaluate
from npu_gr.train.data import to_train_on
from npu_gr.train.next_event import JUDGED_USERS, next_events
from npu_gr.train.site.examples import asked_at, recommend

SHOWN_USERS = 3
SHOWN_ITEMS = 5


async def evaluated(url: str, admin_url: str, log: Interactions) -> ServiceEvaluation:
    """Ask the evaluated models for the last event of some users, which no model has seen.

    Args:
        url: of their service.
        admin_url: its admin address.
        log: all events.
    """
    known = to_train_on(log.users, log.timestamps, "leave-one-out")
    return await evaluate(url, admin_url, next_events(log, known, JUDGED_USERS), np.unique(log.items).tolist())


async def show(url: str, log: Interactions, names: ItemNames, console: Console) -> None:
    """Print what a service recommends to a few users whose histories are in its store.

    Args:
        url: of the service.
        log: all events.
        names: of the items.
        console: to print on.
    """
    counts = np.bincount(log.users, minlength=len(log.user_names))
    users = np.argsort(counts, kind="stable")[len(counts) // 4 :: max(1, len(counts) // 4)][:SHOWN_USERS]
    async with EvaluationClient(url) as client:
        for user in users.tolist():
            own = log[log.users == user]
            body = recommend(log.user_names[user], timestamp=asked_at(log))
            answer, _ = await client.post("/v1/recommend", body)
            console.print(_user_table(log.user_names[user], own, names, answer))


def _user_table(user: str, own: Interactions, names: ItemNames, answer: dict[str, Any]) -> Table:
    """What one user watched, what is recommended, and how long the stages took."""
    last = own[-SHOWN_ITEMS:]
    watched = [
        f"{title or item} ({value:g})"
        for item, title, value in zip(last.items, names.titles(last.items), last.values, strict=True)
    ]
    offered = [title or str(item) for item, title in zip(answer["items"], answer["titles"], strict=True)]
    table = Table("watched last (stars)", "recommended", title=f"user {user}, {len(own)} films")
    for row in range(max(len(watched), len(offered))):
        table.add_row(*(texts[row] if row < len(texts) else "" for texts in (watched[::-1], offered)))
    stages = ", ".join(
        f"{stage['stage']} {stage['began_s'] * 1e3:.0f}-{(stage['began_s'] + stage['took_s']) * 1e3:.0f} ms"
        for stage in answer["stages"]
    )
    table.caption = (
        f"{sum(answer['stages_s'].values()) * 1e3:.0f} ms: {stages}; "
        f"{answer['num_candidates']} candidates; the rank read {answer['prefix_tokens']} of "
        f"{answer['history']['num_tokens']} history tokens from cached KV ({answer['outcome']})"
    )
    return table
