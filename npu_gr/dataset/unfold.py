"""Events that hold a list of products, as orders do, become one event for each product.

Segment's `Order Completed` has `properties.products`, Google Analytics `items`, Shopify
`line_items`, OTTO `events`. A row is unfolded if it has no item of its own: each object of the list
takes the place of the list, and its keys count where the row has none of that name. A list of names
whose column is called like items (`content_ids`, `items`) becomes a column of one name
(`content_id`, `item`).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import orjson

from npu_gr.core.feature_schema.values import MISSING
from npu_gr.dataset.cells import pa
from npu_gr.dataset.columns import is_item_name
from npu_gr.dataset.lines import flat, json_object, read_lines


def find_list(columns: Mapping[str, Any]) -> str:
    """Find the list that has the items of rows without another; "" = there is none.

    Args:
        columns: The first cells of all columns, by name.
    """
    cells = {name: array.to_pylist() for name, array in columns.items()}
    is_list = {name: pa.types.is_list(array.type) for name, array in columns.items()}
    own = [name for name in cells if is_item_name(name) and not is_list[name]]
    counts = {
        name: sum(
            _has_item(cell) or bool(cell and singular(name))
            for at, cell in enumerate(column)
            if all(cells[one][at] in (None, *MISSING) for one in own)
        )
        for name, column in cells.items()
        if is_list[name]
    }
    best = max(counts, key=lambda name: counts[name], default="")
    return best if counts.get(best) else ""


def singular(name: str) -> str:
    """Return the name of one of a list's items, `item_id` of `item_ids`; "" = no such list."""
    one = name.rpartition(".")[2].removesuffix("s")
    return one if name.endswith("s") and is_item_name(one) else ""


def _has_item(cell: list[Any] | None) -> bool:
    objects = (json_object(text) for text in cell or () if isinstance(text, str))
    return any(row is not None and any(map(is_item_name, row)) for row in objects)


def unfolded(path: Path, name: str, folder: Path) -> Path:
    """Write JSON lines with the list of a column unfolded into a folder; return the new path."""
    folder.mkdir(parents=True, exist_ok=True)
    found = folder / f"{path.name.split('.')[0]}.jsonl"
    with found.open("wb") as file:
        for line in chain.from_iterable(read_lines(path)):
            row = json_object(line.decode(errors="replace"))
            parts = None if row is None else _parts(row, name)
            if parts is None:
                file.write(line + b"\n")  # as it is, so that an error names what the file has
                continue
            file.writelines(orjson.dumps(part) + b"\n" for part in parts)
    return found


def _parts(row: dict[str, Any], name: str) -> list[dict[str, Any]] | None:
    """Return the rows of a row's list; None if it has no list, or an item of its own."""
    keys = name.split(".") if name not in row else [name]
    inner: Any = row
    for key in keys[:-1]:
        inner = inner.get(key) if isinstance(inner, dict) else None
    objects = inner.get(keys[-1]) if isinstance(inner, dict) else None
    if not isinstance(objects, list):
        return None
    one_name = singular(keys[-1])
    if not any(isinstance(one, dict) or one_name for one in objects) or any(
        is_item_name(key) and not isinstance(value, list) and str(value) not in MISSING
        for key, value in flat(row).items()
    ):
        return None
    outer = {key: value for key, value in inner.items() if key != keys[-1]}
    # what is neither an object nor a name has no item, so its row is rejected, and counted
    parts = [
        one if isinstance(one, dict) else {one_name: one} if one_name else {} for one in objects
    ]
    return [_replaced(row, keys[:-1], one | outer) for one in parts]


def _replaced(row: dict[str, Any], keys: list[str], inner: dict[str, Any]) -> dict[str, Any]:
    if not keys:
        return inner
    return row | {keys[0]: _replaced(row[keys[0]], keys[1:], inner)}
