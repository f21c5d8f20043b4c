"""Option types that several trainers share, the list of options, and commands to try a model."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import yaml
from msgspec import Meta

from npu_gr.catalogue.names import EMPTY, ItemNames
from npu_gr.core import shipped
from npu_gr.core.errors import ConfigError, DataError
from npu_gr.core.settings import to_table
from npu_gr.dataset import read_log
from npu_gr.history_store.interactions import Interactions, ItemValues, read_item_features
from npu_gr.train.data import InteractionLog

Seed = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Weight = Annotated[float, Meta(ge=0.0)]  # of a term of the loss; 0 leaves the term out
DropoutRatio = Annotated[float, Meta(ge=0.0, lt=1.0)]
Decay = Annotated[float, Meta(ge=0.0, lt=1.0)]  # of a moving average; 0 = no average
WARM_EPOCHS = 0.25  # share of the epochs of a training from random weights


def warm(epochs: int) -> int:
    """Compute the epochs of a training that goes on from an earlier model."""
    return math.ceil(epochs * WARM_EPOCHS)


def list_options(presets: Mapping[str, msgspec.Struct]) -> str:
    """List every option with its default, its allowed values, and its meaning.

    An option in a section is listed as `section.key`.

    Args:
        presets: Name -> options of one trainer; the first preset has the defaults.
    """
    default = next(iter(presets))
    tables = {name: to_table(preset) for name, preset in presets.items()}
    return "\n".join(
        [
            f"--set KEY=VALUE, with the values of the preset {default}:",
            *_option_lines(type(presets[default]), tables),
        ]
    )


def _option_lines(
    options: type[msgspec.Struct], tables: dict[str, Any], section: str = ""
) -> list[str]:
    default, *others = tables
    hints = get_type_hints(options, include_extras=True)
    lines = []
    for field in msgspec.structs.fields(options):
        key = field.encode_name
        kind = hints[field.name]
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            inner = {name: table[key] for name, table in tables.items()}
            lines += _option_lines(kind, inner, f"{section}{key}.")
            continue
        shown = f"{section}{key}={_yaml(tables[default][key])}"
        differing = [
            f"{name}: {_yaml(tables[name][key])}"
            for name in others
            if tables[name][key] != tables[default][key]
        ]
        words = [description(kind), *differing]
        lines.append(f"  {shown:<32} {'; '.join(word for word in words if word)}".rstrip())
    return lines


def description(kind: Any) -> str:
    """Return an option's description, after its values if it is a `Literal`."""
    if get_origin(kind) is not Annotated:
        return " | ".join(map(str, get_args(kind))) if get_origin(kind) is Literal else ""
    bare, *notes = get_args(kind)
    said = [note.description for note in notes if isinstance(note, Meta) and note.description]
    return ". ".join(text for text in (description(bare), *said) if text)


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


class TrainingData(NamedTuple):
    """The data of one training."""

    interactions: Interactions
    features: list[ItemValues]
    names: ItemNames  # empty for a log that is no dataset: the item ids are the names


def read_training_data(
    log: Path,
    *,
    value_column: str = "rating",
    items: Path | None = None,
    columns: Sequence[str] = (),
) -> TrainingData:
    """Read a dataset with its features and names, or a log file with an optional items file.

    Args:
        log: Folder of a dataset, or a file that `read_log` reads.
        value_column: Name of the column of values, for a file.
        items: RecBole `.item` file, for a log file; a dataset has its own items.
        columns: Item features to use; empty = all of a dataset, none of an items file.

    Raises:
        DataError: the log or the items file cannot be read.
        ConfigError: the dataset has no such feature, or `items` is given with a dataset.
    """
    features, names = read_items(log, items, columns)
    return TrainingData(read_log(log, value_column=value_column), features, names)


def read_items(
    log: Path, items: Path | None, columns: Sequence[str]
) -> tuple[list[ItemValues], ItemNames]:
    """Read the features and names of items; arguments and errors as `read_training_data`."""
    if not log.is_dir():
        return read_item_features(items, columns) if items else [], EMPTY
    if items is not None:
        raise ConfigError(
            f"--items: the dataset {log} has its own items; to use another items file, run npu-gr "
            "prepare --items"
        )
    from npu_gr.dataset.files import read_dataset

    dataset = read_dataset(log)
    found = {feature.name: feature for feature in dataset.item_features()}
    if missing := [name for name in columns if name not in found]:
        raise ConfigError(
            f"--item-features: {log} has no {missing[0]!r}; there are {', '.join(found) or 'none'}"
        )
    return [found[name] for name in columns or found], dataset.names


CONFIGURATION = "serve.yaml"
NUM_EVENTS = 10  # most events of the example's history


class Example(NamedTuple):
    """A real history in the form of a request, and items that the user does not have."""

    history: dict[str, list[Any]]
    others: list[str | int]


def example(log: InteractionLog, names: ItemNames = EMPTY) -> Example:
    """Choose an example: the first user with ten events, or the one with the most events.

    `others` are the most used items that the user does not have.
    """
    user = int(np.argmax(np.minimum(np.diff(log.starts), NUM_EVENTS)))
    part = slice(
        int(log.starts[user]), min(int(log.starts[user + 1]), int(log.starts[user]) + NUM_EVENTS)
    )
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
        others=names.names(
            log.item_ids[best[uses[best] >= 0]] if (uses >= 0).any() else log.item_ids[best]
        ),
    )


def write_configuration(table: dict[str, Any], folder: Path) -> None:
    """Write a configuration into a folder.

    Raises:
        DataError: the folder cannot be written.
    """
    temporary = folder / f"{CONFIGURATION}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(shipped.schema_line() + yaml.safe_dump(table, sort_keys=False))
        temporary.replace(folder / CONFIGURATION)
    except OSError as error:
        raise DataError(f"{folder / CONFIGURATION}: cannot be written: {error.strerror}") from error


def next_command(folder: Path, path: str, body: dict[str, Any]) -> str:
    """Write the commands that serve a model's folder and send it a request.

    Args:
        folder: Folder of the model and its `serve.yaml`.
        path: Path of the request, e.g. /v1/rank.
        body: Body of the request.
    """
    return f"""Serve the model, and send a request:
{serve(folder / CONFIGURATION)} &
{curl(path, body)}"""


def how_to_match(folder: Path, user: str) -> str:
    """Explain how to serve vectors together with a model, and how to match items for a user.

    Args:
        folder: Folder of the vectors.
        user: Name of a user who has a vector.
    """
    section = yaml.safe_dump({"match": {"vectors": str(folder)}}, sort_keys=False)
    return f"""
{section}
Add this section to the configuration of a ranker or a generator (an instance that matches needs
one of them), or set it on the command line, e.g. with the folder of `npu-gr train rank`:

{serve(Path("ranker") / CONFIGURATION)} --set {shlex.quote(f"match.vectors={folder}")} &
{curl("/v1/match", {"user_id": user, "num_items": 10})}"""


def serve(configuration: Path) -> str:
    """Write the shell command that serves a configuration."""
    return f"npu-gr serve --config {shlex.quote(str(configuration))}"


def curl(path: str, body: dict[str, Any], port: int = 8080) -> str:
    """Write the shell command that posts `body` to `path` (e.g. /v1/rank)."""
    text = shlex.quote(json.dumps(body, ensure_ascii=False))
    return f"curl -s localhost:{port}{path} -H 'content-type: application/json' -d {text}"
