"""Which events of a dataset are in the history store of a site, so that a night loads only its day.

site/.loaded.json    the store, and the files of events that were loaded, by their digests
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from npu_gr.core.errors import DataError
from npu_gr.history_store.store import HistoryConfig

FILE = ".loaded.json"


class _Loaded(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    store: str
    digests: tuple[str, ...]


def not_loaded(
    site: Path, store: HistoryConfig, event_files: Sequence[dict[str, Any]]
) -> list[str] | None:
    """List the files of events that are not in the store; None = load everything.

    Args:
        site: Folder of the site.
        store: The section `history_store` of its configuration.
        event_files: Files of the dataset: `name` and `digest` of each.
    """
    try:
        found = msgspec.json.decode((site / FILE).read_bytes(), type=_Loaded)
    except (OSError, msgspec.MsgspecError):
        return None
    is_gone = store.kind == "embedded" and not Path(store.path).exists()
    if is_gone or found.store != _identity(store):
        return None
    return [one["name"] for one in event_files if one["digest"] not in found.digests]


def note_loaded(site: Path, store: HistoryConfig, event_files: Sequence[dict[str, Any]]) -> None:
    """Note that all events of a dataset are in the store.

    Raises:
        DataError: the file cannot be written.
    """
    digests = tuple(one["digest"] for one in event_files)
    temporary = site / f"{FILE}.tmp"
    try:
        temporary.write_bytes(msgspec.json.encode(_Loaded(store=_identity(store), digests=digests)))
        temporary.replace(site / FILE)
    except OSError as error:
        raise DataError(f"{site / FILE}: cannot be written: {error.strerror}") from error


def _identity(store: HistoryConfig) -> str:
    """Name a store by what finds it; timeouts and the like may change."""
    return f"{store.kind} {store.path if store.kind == 'embedded' else store.redis_url}"
