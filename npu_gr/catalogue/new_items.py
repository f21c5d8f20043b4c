"""Completes the records of new items by the columns that the items of a catalogue have."""

from __future__ import annotations

from collections.abc import Sequence

from npu_gr.catalogue.filters import TYPES
from npu_gr.catalogue.records import Column, Record
from npu_gr.catalogue.versions import Snapshot
from npu_gr.core.errors import CatalogueError
from npu_gr.core.names import value_name
from npu_gr.core.text_format import cut, quoted


def completed(snapshot: Snapshot, records: Sequence[Record]) -> list[Record]:
    """Give new records the columns that the snapshot's items have.

    A missing attribute is the value of the feature of the same name. Without an order score an item
    gets the lowest one, and so comes after the others of its SID.

    Raises:
        CatalogueError: an attribute is missing, unknown or of another type, or the snapshot has no
            order scores; the message has the field.
    """
    if not snapshot.trie.num_items:
        return list(records)
    lowest = None if snapshot.order is None else float(snapshot.order.min())
    made = []
    for row, record in enumerate(records):
        for name in record.attributes:
            if name not in snapshot.attributes:
                raise CatalogueError(
                    f"add[{row}].attributes.{cut(name)}: the items of the catalogue have "
                    f"{', '.join(snapshot.attributes) or 'no attributes'}"
                )
        if record.order is not None and lowest is None:
            raise CatalogueError(f"add[{row}].order: the items of the catalogue have none")
        attributes = {
            name: _attribute(record, name, column, f"add[{row}].attributes.{name}")
            for name, column in snapshot.attributes.items()
        }
        order = lowest if record.order is None else record.order
        made.append(Record(record.item_id, record.sid, order, attributes, record.features))
    return made


def _attribute(record: Record, name: str, column: Column, field: str) -> bool | int | float | str:
    """Return the attribute of a new record for a column, or raise CatalogueError with `field`."""
    value: bool | int | float | str | None = record.attributes.get(name)
    if value is None:
        feature = record.features.get(name, [])
        values = feature if isinstance(feature, list) else [feature]
        if len(values) != 1 or values[0] is None:
            raise CatalogueError(
                f"{field}: is missing; give it, or one value of the feature {quoted(name)}"
            )
        value = values[0]
        if column.dtype.kind == "U" and not isinstance(value, str):
            value = value_name(value)
    if type(value) not in TYPES[column.dtype.kind]:
        raise CatalogueError(f"{field}: {quoted(value)} is not of the type of the other items")
    return value
