"""Bulk load of an interaction log into a history store: a second load of the same log changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from npu_gr.core.arrays import I16
from npu_gr.core.errors import DataError, NpuGrError, StoreFailed
from npu_gr.core.feature_schema.columns import Columns, as_columns
from npu_gr.core.feature_schema.schema import Feature
from npu_gr.core.history import Events, Mode, UserKey, Write, Written
from npu_gr.core.names import value_name
from npu_gr.core.text_format import cut
from npu_gr.history_store.interactions import Interactions

BATCH_USERS = 256
NAMED = 20  # actions in a message


class WritesMany(Protocol):
    """Where a log is loaded into: a history store, or a service that has one."""

    async def write_many(self, batch: list[Write]) -> Sequence[Written | NpuGrError]:
        """Do the writes; see `HistoryStore.write_many`."""
        ...


@dataclass(slots=True)
class Loaded:
    """What a load did."""

    num_users: int = 0
    num_added: int = 0  # events
    # events that were there, or are older than all that the store keeps of a full user
    num_known: int = 0
    num_filled: int = 0  # of these, that gained features
    num_replaced: int = 0  # users whose history was put in the place of another


async def load_interactions(
    store: WritesMany,
    interactions: Interactions,
    action_names: Sequence[str],
    tenant: str = "",
    mode: Mode = Mode.MERGE,
    progress: Callable[[int], None] | None = None,
    features: Sequence[Feature] = (),
) -> Loaded:
    """Write every user's events in time order.

    What ends in the middle is completed by a second load.

    Args:
        store: where to write.
        interactions: in time order.
        action_names: of the model; the place of a name is the action in the store.
        tenant: of all these users.
        mode: MERGE adds what the store lacks. REPLACE puts the log's events in the place of all
            that it has of a user.
        progress: called with the number of events of each batch that is written.
        features: of the model; those of events are loaded where the log has them.

    Raises:
        DataError: an action of the log is none of the model's, or a feature has values that do not
            fit the model's; nothing was loaded.
        StoreFailed: some users could not be written; all others of their batch were.
    """
    actions = _actions(interactions, action_names)
    of_events = _of_events(interactions, features)
    loaded = Loaded()
    for batch in _batches(interactions, actions, of_events, tenant, mode):
        results = await store.write_many(batch)
        failures = [one for one in results if isinstance(one, NpuGrError)]
        if failures:
            raise StoreFailed(
                f"{len(failures)} of {len(batch)} users could not be written: {failures[0]}; "
                f"{loaded.num_users} users before them are loaded: load again to complete it, "
                "nothing is doubled"
            )
        size = sum(len(one.events) for one in batch)
        written = [one for one in results if isinstance(one, Written)]
        added = sum(one.num_added for one in written)
        loaded.num_users += len(batch)
        loaded.num_added += added
        loaded.num_known += size - added
        loaded.num_filled += sum(one.num_filled for one in written)
        loaded.num_replaced += len(batch) if mode is Mode.REPLACE else 0
        if progress is not None:
            progress(size)
    return loaded


def _batches(
    interactions: Interactions, actions: I16, of_events: Columns, tenant: str, mode: Mode
) -> Iterator[list[Write]]:
    order = np.argsort(interactions.users, kind="stable")
    users, starts = np.unique(interactions.users[order], return_index=True)
    ends = [*starts[1:].tolist(), len(order)]
    batch: list[Write] = []
    for user, start, end in zip(users.tolist(), starts.tolist(), ends, strict=True):
        part = order[start:end]
        events = Events(
            interactions.items[part],
            actions[part],
            interactions.timestamps[part],
            features=of_events.take(part),
        )
        batch.append(Write(UserKey(tenant, interactions.user_names[user]), events, mode))
        if len(batch) == BATCH_USERS:
            yield batch
            batch = []
    if batch:
        yield batch


def _actions(interactions: Interactions, names: Sequence[str]) -> I16:
    """The model's action of each event: by the name of the log's action, or by the text of its value."""
    values, codes = np.unique(interactions.values, return_inverse=True)
    known = interactions.action_names
    wanted = [known[int(value)] if known else value_name(value) for value in values.tolist()]
    places = {name: place for place, name in enumerate(names)}
    unknown = [name for name in wanted if name not in places]
    if unknown:
        raise DataError(
            f"actions of the log that the model lacks: {_listed(unknown)}; the model has: "
            f"{_listed(names)}; "
            f"the log has: {_listed(wanted)}"
        )
    return np.array([places[name] for name in wanted], np.int16)[codes]


def features_loaded(interactions: Interactions, features: Sequence[Feature]) -> tuple[str, ...]:
    """Name the features of events that the model reads and the log has."""
    known = {one.name for one in features if one.of == "event"}
    return tuple(
        column.name
        for column in interactions.columns
        if column.of == "event" and column.name in known
    )


def _of_events(interactions: Interactions, features: Sequence[Feature]) -> Columns:
    """Read the features of all events as the service would read them.

    What the model does not have is left out.
    """
    known = {one.name: one for one in features if one.of == "event"}
    of_events = [column for column in interactions.columns if column.of == "event"]
    given = {one.name: one.values if one.is_number else one.values.tolist() for one in of_events}
    try:
        return as_columns(
            known, {name: given[name] for name in known if name in given}, len(interactions)
        )
    except ValueError as error:
        raise DataError(f"features of events: {error}") from error


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(repr(cut(name)) for name in names[:NAMED]) + more
