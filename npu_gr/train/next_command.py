"""What to do with a trained model: a configuration that serves it, the command, and a request with real items."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from npu_gr.catalogue.names import EMPTY, ItemNames
from npu_gr.core import shipped
from npu_gr.core.errors import DataError
from npu_gr.train.data import InteractionLog

CONFIGURATION = "serve.yaml"
NUM_EVENTS = 10  # most of the example's history


class Example(NamedTuple):
    """A real history, as a request has it, and other items that may follow it."""

    history: dict[str, list[Any]]
    others: list[str | int]


def example(log: InteractionLog, names: ItemNames = EMPTY) -> Example:
    """Choose the first user with ten events, or the one with the most, and the most used items that the user lacks."""
    user = int(np.argmax(np.minimum(np.diff(log.starts), NUM_EVENTS)))
    part = slice(int(log.starts[user]), min(int(log.starts[user + 1]), int(log.starts[user]) + NUM_EVENTS))
    action_names = log.names_of_actions
    uses = np.bincount(log.items, minlength=log.num_items)
    uses[log.items[log.starts[user] : log.starts[user + 1]]] = -1
    best = np.argsort(-uses, kind="stable")[:5]
    return Example(
        history={
            "items": names.names(log.item_ids[log.items[part]]),
            "actions": [action_names[action] for action in log.actions[part].tolist()],
            "timestamps": log.times[part].tolist(),
        },
        others=names.names(log.item_ids[best[uses[best] >= 0]] if (uses >= 0).any() else log.item_ids[best]),
    )


def write_configuration(table: dict[str, Any], folder: Path) -> None:
    """Write a configuration into a folder.

    Raises:
        DataError: the folder cannot be written.
    """
    aside = folder / f"{CONFIGURATION}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        aside.write_text(shipped.schema_line() + yaml.safe_dump(table, sort_keys=False))
        aside.replace(folder / CONFIGURATION)
    except OSError as error:
        raise DataError(f"{folder / CONFIGURATION}: cannot be written: {error.strerror}") from error


def next_command(folder: Path, path: str, body: dict[str, Any]) -> str:
    """Say how to serve a folder that has a configuration, and how to ask it.

    Args:
        folder: of the model and its configuration.
        path: of the request, e.g. /v1/rank.
        body: of the request.
    """
    return f"""Serve it, and ask it:
{serve(folder / CONFIGURATION)} &
{curl(path, body)}"""


def how_to_match(folder: Path, user: str) -> str:
    """Say how to serve vectors beside a model, and how to ask for a user's items.

    Args:
        folder: of the vectors.
        user: one that the vectors know.
    """
    section = yaml.safe_dump({"match": {"vectors": str(folder)}}, sort_keys=False)
    return f"""
{section}
Add this section to the configuration of a ranker or a generator, for an instance that matches does one of both; or say
it as the instance starts, e.g. on the folder of `npu-gr train rank`:

{serve(Path("ranker") / CONFIGURATION)} --set {shlex.quote(f"match.vectors={folder}")} &
{curl("/v1/match", {"user_id": user, "num_items": 10})}"""


def serve(configuration: Path) -> str:
    """Write the command that serves, for a shell."""
    return f"npu-gr serve --config {shlex.quote(str(configuration))}"


def curl(path: str, body: dict[str, Any]) -> str:
    """Write the command that asks, for a shell.

    Args:
        path: of the request, e.g. /v1/rank.
        body: of the request.
    """
    text = shlex.quote(json.dumps(body, ensure_ascii=False))
    return f"curl -s localhost:8080{path} -H 'content-type: application/json' -d {text}"
