"""Old names that work until version UNTIL: configuration keys, values, metrics, commands.

Each use of an old name logs one warning with the new name. docs/upgrading.md has the same rows.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

from npu_gr.core.errors import ConfigError

log = logging.getLogger(__name__)

UNTIL = "0.3"  # the first version without the old names

# Configuration keys: old path -> new path. What is in a section keeps its name. A row counts for
# the configurations that have the new path, and lack the old one.
KEYS: dict[str, str] = {
    # an instance; kv of a simulation, too
    "features.source": "feature_store",
    "features": "history_store",
    "history_store.source": "feature_store",  # of a file that is half renamed
    "kv": "kv_cache",
    "brownout.most": "brownout.max_step",
    "recommend.sources.trunk": "recommend.sources.shared_encoder",
    "recommend.rank_share": "recommend.max_rank_share",
    "recommend.rank_least_s": "recommend.min_rank_s",
    "recommend.answer_s": "recommend.margin_s",
    # a router
    "idle_s": "idle_timeout_s",
    "health.return_s": "health.slow_start_s",
    # trainers
    "average_decay": "ema_decay",
    "item_length": "item_init_norm",
    "code_length": "code_init_norm",
    "pacing_looks": "curriculum_validations",
    "num_found": "num_retrieved",
    "num_following": "num_transitions",
    "choosing_users": "selection_users",
    "rank.average_decay": "rank.ema_decay",
    "rank.item_length": "rank.item_init_norm",
    "generate.average_decay": "generate.ema_decay",
    "generate.code_length": "generate.code_init_norm",
}
# Values of configuration keys: path -> old value -> new value.
VALUES: dict[str, dict[str, str]] = {
    "recommend.order": {"fitted": "blended"},
    "service.unknown_items": {"refuse": "reject"},
    "service.unsorted_history": {"refuse": "reject"},
}
# Values in requests and in query logs, whatever field has them.
REQUEST_VALUES = {"trunk": "shared_encoder", "fitted": "blended", "refuse": "reject"}
# Metric families: old name -> new name. Both are exported, with the same labels and values.
METRICS: dict[str, str] = {
    "npu_gr_api_keys_refused_total": "npu_gr_api_keys_rejected_total",
    "npu_gr_door_pace_seconds": "npu_gr_admission_service_time_seconds",
    "npu_gr_door_requests": "npu_gr_admission_requests",
    "npu_gr_door_window_requests": "npu_gr_admission_concurrency_limit",
    "npu_gr_producers_in_flight": "npu_gr_prefills_in_flight",
    "npu_gr_refusals_total": "npu_gr_rejections_total",
}
COMMANDS: dict[str, str] = {"consume": "kafka-ingest", "judge": "evaluate"}  # of npu-gr


def current(value: Any) -> Any:
    """Return the new name of a value of a request, or of each in a list; others unchanged."""
    if isinstance(value, list | tuple):
        return type(value)(map(current, value))
    return REQUEST_VALUES.get(value, value) if isinstance(value, str) else value


def new_path(path: str, known: Collection[str], where: str) -> str:
    """Return the new path of a configuration key, with a warning if it differs.

    Args:
        path: Path `section.key`, with the old or the new name.
        known: Paths of the configuration.
        where: Origin of the key, for the warning.
    """
    for old, new in KEYS.items():
        if f"{path}.".startswith(f"{old}.") and _counts(old, new, known):
            warn(where, path, new + path[len(old) :])
            return new + path[len(old) :]
    return path


def old_paths(known: Collection[str]) -> Iterator[str]:
    """Yield the old path of each key of a configuration that has one."""
    for old, new in KEYS.items():
        if _counts(old, new, known):
            yield from (
                old + path[len(new) :] for path in known if f"{path}.".startswith(f"{new}.")
            )


def with_new_names(table: Mapping[str, Any], known: Collection[str], where: str) -> dict[str, Any]:
    """Return a copy of a configuration with the new names of keys and values.

    Args:
        table: Complete configuration, as read from YAML.
        known: Paths of the configuration.
        where: Origin of the table, for warnings and errors.

    Raises:
        ConfigError: both the old and the new name of a key are given.
    """
    made: dict[str, Any] = _copy(table)
    for old, new in KEYS.items():
        if not _counts(old, new, known) or (found := _section(made, old)) is None:
            continue
        section, key = found
        if _section(made, new) is not None:
            raise ConfigError(f"{where}: {old} is now {new}, and both are given; remove {old}")
        warn(where, old, new)
        parents, _, new_key = new.rpartition(".")
        if parents == old.rpartition(".")[0]:  # keep the position, since `sources` are ordered
            items = [(new_key if name == key else name, value) for name, value in section.items()]
            section.clear()
            section.update(items)
            continue
        made[new] = section.pop(key)
    for path, values in VALUES.items():
        if path in known and (found := _section(made, path)) is not None:
            section, key = found
            value = section[key]
            if isinstance(value, str) and value in values:
                warn(where, f"{path}: {value}", f"{path}: {values[value]}")
                section[key] = values[value]
    return made


@cache
def warn(where: str, old: str, new: str) -> None:
    """Log the use of an old name, once for each origin and name."""
    log.warning("%s: %s is now %s; the old name works until npu_gr %s", where, old, new, UNTIL)


def _counts(old: str, new: str, known: Collection[str]) -> bool:
    """Whether a row of KEYS is about a configuration with these paths.

    `recommend.sources` is a table, so its keys are no paths of their own.
    """
    if old in known:
        return False
    return new in known or (new.startswith("recommend.sources.") and "recommend.sources" in known)


def _section(table: dict[str, Any], path: str) -> tuple[dict[str, Any], str] | None:
    """Find the section that holds a path, and its last key; None = the table lacks it."""
    section: Any = table
    *parents, key = path.split(".")
    for name in parents:
        section = section.get(name) if isinstance(section, dict) else None
    return (section, key) if isinstance(section, dict) and key in section else None


def _copy(value: Any) -> Any:
    return {k: _copy(v) for k, v in value.items()} if isinstance(value, Mapping) else value
