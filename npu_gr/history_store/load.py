"""Bulk load of an interaction log into a history store; it is idempotent."""

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
NAMED = 20  # most actions to list in a message


class WritesMany(Protocol):
    """Target of a load: a history store, or a service that has one."""

    async def write_many(self, batch: list[Write]) -> Sequence[Written | NpuGrError]:
        """Do the writes (see `HistoryStore.write_many`)."""
        ...


@dataclass(slots=True)
class Loaded:
    """The result of a load."""

    num_users: int = 0
    num_added: int = 0  # events that were added
    # Events that were stored already, or are older than all events of a user at the limit.
    num_known: int = 0
    num_filled: int = 0  # stored events that gained features
    num_replaced: int = 0  # users whose history was replaced


async def load_interactions(
    store: WritesMany,
    interactions: Interactions,
    action_names: Sequence[str],
    tenant: str = "",
    mode: Mode = Mode.MERGE,
    progress: Callable[[int], None] | None = None,
    features: Sequence[Feature] = (),
) -> Loaded:
    """Write every user's events in time order. After a failure, load again to complete it.

    Args:
        store: Target of the load.
        interactions: Log, in time order.
        action_names: Actions of the model; the store keeps an action as the index of its name.
        tenant: Tenant of all users.
        mode: MERGE adds the events that the store lacks. REPLACE replaces all events that it has of
            a user by those of the log.
        progress: Function that is called with the number of events of each written batch.
        features: Features of the model; event features that the log has are loaded.

    Raises:
        DataError: the model lacks an action of the log, or values of a feature do not fit the
            model; nothing was loaded.
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
                "no event is stored twice"
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
    """Map each event to an action of the model, by the log's name of the action or its value."""
    values, codes = np.unique(interactions.values, return_inverse=True)
    known = interactions.action_names
    wanted = [known[int(value)] if known else value_name(value) for value in values.tolist()]
    places = {name: place for place, name in enumerate(names)}
    unknown = [name for name in wanted if name not in places]
    if unknown:
        raise DataError(
            f"actions of the log that the model lacks: {_listed(unknown)}; the model has: "
            f"{_listed(names)}; the log has: {_listed(wanted)}"
        )
    return np.array([places[name] for name in wanted], np.int16)[codes]


def features_loaded(interactions: Interactions, features: Sequence[Feature]) -> tuple[str, ...]:
    """List the event features that the model reads and the log has."""
    known = {one.name for one in features if one.of == "event"}
    return tuple(
        column.name
        for column in interactions.columns
        if column.of == "event" and column.name in known
    )


def _of_events(interactions: Interactions, features: Sequence[Feature]) -> Columns:
    """Convert the event features that the model has, as the service would for a request."""
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
