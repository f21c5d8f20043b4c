"""Constrained types that the options of several trainers share, and how the options of a trainer are listed."""

from __future__ import annotations

import json
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
Share = Annotated[float, Meta(ge=0.0, le=1.0)]  # of a whole, which may be nothing or all of it
Weight = Annotated[float, Meta(ge=0.0)]  # of a term of the loss; 0 leaves the term out
DropoutRatio = Annotated[float, Meta(ge=0.0, lt=1.0)]
Decay = Annotated[float, Meta(ge=0.0, lt=1.0)]  # of a moving average; 0 = no average


def list_options(presets: Mapping[str, msgspec.Struct]) -> str:
    """List every option with its default, what it may be, and its meaning.

    Options in a section as `section.key`.

    Args:
        presets: of one kind of options, by name; the first one has the defaults.
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
    """Say what an option means, and its values if it has few: what its annotations say."""
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
    names: ItemNames  # of a log that is no dataset: none, for its items' ids are their names


def read_training_data(
    log: Path,
    *,
    value_column: str = "rating",
    items: Path | None = None,
    columns: Sequence[str] = (),
) -> TrainingData:
    """Read a dataset, which brings features and names, or a log with perhaps a file of items.

    Args:
        log: the folder of a dataset, or a file as `read_log` has it.
        value_column: of a file.
        items: RecBole `.item` file; not with a dataset.
        columns: features to use; none at all = every one of a dataset, none of a file.

    Raises:
        DataError: it cannot be read.
        ConfigError: the dataset has no such feature, or an items' file is given beside it.
    """
    interactions = read_log(log, value_column=value_column)
    if not log.is_dir():
        return TrainingData(
            interactions, read_item_features(items, columns) if items else [], EMPTY
        )
    if items is not None:
        raise ConfigError(
            f"--items: the dataset {log} has its own; npu-gr prepare --items reads "
            "another file of them"
        )
    from npu_gr.dataset.files import read_dataset

    dataset = read_dataset(log)
    found = {feature.name: feature for feature in dataset.item_features()}
    if missing := [name for name in columns if name not in found]:
        raise ConfigError(
            f"--item-features: {log} has no {missing[0]!r}; there are {', '.join(found) or 'none'}"
        )
    return TrainingData(interactions, [found[name] for name in columns or found], dataset.names)


CONFIGURATION = "serve.yaml"
NUM_EVENTS = 10  # most of the example's history


class Example(NamedTuple):
    """A real history, as a request has it, and other items that may follow it."""

    history: dict[str, list[Any]]
    others: list[str | int]


def example(log: InteractionLog, names: ItemNames = EMPTY) -> Example:
    """Choose the first user with ten events, or the one with the most, and the most used items that the user lacks."""
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
