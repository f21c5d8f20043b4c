"""What the numbers of actions mean in a history store: its own list of names, by number.

The list is written before the first event that uses a number, and only grows at its end. So a model whose actions are
others is found before it reads a `buy` as a `view`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from npu_gr.core.errors import StoreFailed, StoreFault
from npu_gr.core.words import cut
from npu_gr.features.checksum import row_sum

TABLE = "CREATE TABLE IF NOT EXISTS actions (number INTEGER PRIMARY KEY, name BLOB, sum INTEGER)"


def difference(kept: Sequence[str], names: Sequence[str]) -> str:
    """Say where `names` do not begin with those that are kept; "" = they do."""
    for number, name in enumerate(kept):
        if number >= len(names):
            return f"action {number} is {cut(name)!r} there, and here there are only {len(names)}"
        if names[number] != name:
            return f"action {number} is {cut(name)!r} there, and {cut(names[number])!r} here"
    return ""


def read_names(db: sqlite3.Connection) -> tuple[str, ...]:
    """Read the list of an embedded store.

    Raises:
        StoreFailed: a row is damaged or missing.
    """
    rows = db.execute("SELECT number, name, sum FROM actions ORDER BY number").fetchall()
    for place, (number, name, found) in enumerate(rows):
        if number != place or not isinstance(name, bytes) or found != row_sum(number, name):
            raise StoreFailed("the history store has damaged names of actions", StoreFault.CORRUPT)
    return tuple(name.decode("utf-8", "surrogatepass") for _, name, _ in rows)


def write_names(db: sqlite3.Connection, names: Sequence[str]) -> tuple[str, ...]:
    """Add the names behind the list of an embedded store, if they begin with it; in a transaction.

    Returns:
        The list as it is then.

    Raises:
        StoreFailed: a row is damaged or missing.
    """
    kept = read_names(db)
    if difference(kept, names):
        return kept
    for number, name in list(enumerate(names))[len(kept) :]:
        raw = name.encode("utf-8", "surrogatepass")
        db.execute("INSERT INTO actions (number, name, sum) VALUES (?, ?, ?)", (number, raw, row_sum(number, raw)))
    return tuple(names)


# KEYS: the list. ARGV: names, from number 0 on. Returns the list as it is then.
WRITE = """
local kept = redis.call('LRANGE', KEYS[1], 0, -1)
if #kept > #ARGV then return kept end
for number, name in ipairs(kept) do
  if ARGV[number] ~= name then return kept end
end
for number = #kept + 1, #ARGV do redis.call('RPUSH', KEYS[1], ARGV[number]) end
return redis.call('LRANGE', KEYS[1], 0, -1)
"""
