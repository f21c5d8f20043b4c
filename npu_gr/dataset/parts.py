"""The parts of a merge: opened, checked that they fit together, and their actions joined."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from npu_gr.core.errors import DataError
from npu_gr.core.text_format import counted, quoted
from npu_gr.dataset.actions import (
    ActionKind,
    Actions,
    OldActions,
    ValueSample,
    of_events,
    of_values,
)
from npu_gr.dataset.cells import pa, pq
from npu_gr.dataset.files import NUMBER, Dataset, impressions_of, read_dataset

_SAME = {
    "features": "--items and --features",
    "user_features": "--users and --user-features NAME:KIND",
    "log_features": "--event-features, --request-features and --cross-features NAME:KIND",
}
"""Keys of the manifest that parts share, and the options that decide them."""


@dataclass(frozen=True, kw_only=True)
class LogPart:
    """A dataset to merge."""

    dataset: Dataset
    first_user: int  # code of its first user in the merged dataset

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The content of its manifest.json."""
        return self.dataset.manifest

    @property
    def event_paths(self) -> list[Path]:
        """Its files of events, oldest log first."""
        return [self.dataset.folder / one["name"] for one in self.dataset.event_files]

    @property
    def own_ranges(self) -> list[str]:
        """Columns of numbers of items.parquet, whose ranges are features."""
        return [one for one in self.dataset.items.column_names if one.startswith(NUMBER)]

    @property
    def impression_paths(self) -> list[Path]:
        """Its files of impressions."""
        paths = (path.with_name(impressions_of(path.name)) for path in self.event_paths)
        return [path for path in paths if path.exists()]


def opened_parts(parts: Path | str | Sequence[Path]) -> list[LogPart]:
    """Open the parts and check that they fit together.

    Args:
        parts: Folders, or a pattern of them.

    Raises:
        DataError: they do not fit; the message names the part and the option to make it with.
    """
    if isinstance(parts, str | Path):
        parts = sorted(map(Path, glob.glob(str(parts))))
        parts = [path for path in parts if path.is_dir()]
    if not parts:
        raise DataError("--merge: no folder has that name; give a pattern such as 'parts/*'")
    found: list[LogPart] = []
    first_user = 0
    for folder in parts:
        found.append(LogPart(dataset=read_dataset(folder), first_user=first_user))
        first_user += found[-1].manifest["users"]
    first = found[0]
    schema = pq.read_schema(first.event_paths[0])
    for part in found:
        name, manifest = part.dataset.folder, part.manifest
        if "time" not in manifest["columns"]:
            raise DataError(
                f"{name}: its log has no times, and the rows of other parts have no place among "
                "its own; prepare the whole log at once"
            )
        for key, option in _SAME.items():
            if manifest[key] != first.manifest[key]:
                raise DataError(
                    f"{name}: its {key} are not those of {first.dataset.folder}: "
                    f"{_words(manifest[key])}, not {_words(first.manifest[key])}; make all parts "
                    f"with the same {option}"
                )
        if "items: item" not in manifest["columns"] and (own := part.own_ranges):
            raise DataError(
                f"{name}: the ranges of {own[0].removeprefix(NUMBER)} are those of its own rows; "
                "make all parts with the same --items, or with --features that leave it out"
            )
        for path in part.event_paths:
            if (own := pq.read_schema(path)).names != schema.names:
                odd = sorted(set(own.names) ^ set(schema.names))
                raise DataError(
                    f"{path}: the column {odd[0]} is not in every part; make all parts with the "
                    "same options"
                )
    _check_users(found)
    return found


def _words(features: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{one['name']}:{one['kind']}" for one in features) or "none"


def _check_users(parts: Sequence[LogPart]) -> None:
    """Check that no user is in two parts, since the order of such a user's events is not known."""
    names = pa.concat_arrays(part.dataset.users["name"].combine_chunks() for part in parts)
    counts = names.value_counts().flatten()
    twice = counts[0].filter(pa.array(counts[1].to_numpy() > 1))
    if not len(twice):
        return
    user = twice[0].as_py()
    where = [
        part.dataset.folder for part in parts if user in part.dataset.users["name"].to_pylist()
    ]
    raise DataError(
        f"{where[1]}: the user {quoted(user)} is in {where[0]}, too "
        f"({counted(len(twice), 'user')} in all); "
        "a part must hold all events of its users: split the log by a hash of the user "
        "(docs/own-data.md has the SQL), or add days with --add-to"
    )


def event_names(parts: Sequence[LogPart]) -> list[str]:
    """List the actions of all parts, each once."""
    return list(dict.fromkeys(name for one in parts for name in one.manifest["actions"]["names"]))


def merged_actions(parts: Sequence[LogPart], old: OldActions) -> Actions:
    """Make the actions of the merged dataset.

    Raises:
        DataError: the parts have actions of different kinds or ranges.
    """
    first = parts[0].manifest["actions"]
    for part in parts:
        own = part.manifest["actions"]
        is_range = own["kind"] == ActionKind.BUCKETS and own["edges"] != first["edges"]
        if own["kind"] != first["kind"] or is_range:
            raise DataError(
                f"{part.dataset.folder}: its actions are {', '.join(own['names'][:5])} "
                f"({own['kind']}), those of {parts[0].dataset.folder} are "
                f"{', '.join(first['names'][:5])} ({first['kind']}); make one part first, and the "
                "others with --like THAT_PART"
            )
    kind = ActionKind(first["kind"])
    if kind is ActionKind.EVENTS:
        return of_events(event_names(parts), old)
    if kind is ActionKind.RATINGS:
        values = ValueSample()
        values.add(np.array([float(name) for name in event_names(parts)]))
        if not values.is_few:
            raise DataError(
                f"--merge: the parts have {len(values.distinct)} ratings together, so one run "
                "would make ranges of them; make one part first, and the others with --like "
                "THAT_PART"
            )
        return of_values(parts[0].manifest["columns"]["value"]["name"], values, 0, old)
    old.check(kind)
    if old.kind and (old.names, old.edges) != (first["names"], first["edges"]):
        raise DataError(
            f"{old.folder}: it has other ranges; make the parts with --like {old.folder}"
        )
    return Actions(
        kind=kind,
        names=list(first["names"]),
        edges=list(first["edges"]),
        places=np.empty(0, np.int64),
        notes=[],
    )
