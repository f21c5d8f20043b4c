"""The Lua scripts of the history store on Redis, and the records of events' features.

Each script is atomic. Unless a comment says otherwise, its KEYS are: log, first, keys, order,
features, events (see `redis.py`).

Features are a stream of runs. Each row has a checksum, since an append cannot read the rows before:

    id `end-0`    the last event of the run has index `end` - 1 among all events of the user
    one field     layout -> rows, each with a checksum of user, layout, row, and the event's check

So features that belong to another event are detected: an instance of an older version, which does
not know the stream, may have replaced the events.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from npu_gr.core.errors import StoreFailed
from npu_gr.core.feature_schema.columns import Columns
from npu_gr.core.history import Events
from npu_gr.history_store.checksum import CHECKED, U64, damaged, mix
from npu_gr.history_store.event_features import (
    RunLayout,
    pack_runs,
    place_rows,
    places_of,
    read_layout,
    read_rows,
)

U32 = npt.NDArray[np.uint32]


class RunGroup(NamedTuple):
    """Runs with the same layout, as a script returns them."""

    layout: bytes
    ends: bytes  # index after the last event of each run, as text, separated by blanks
    sizes: bytes  # bytes of each run, in the same form
    rows: bytes  # rows of all runs


def pack_entries(key: bytes, events: Events, records: bytes) -> list[tuple[int, bytes, bytes]]:
    """Pack the features of events as entries of the stream.

    Args:
        key: Key of the user.
        events: Events with features.
        records: CHECKED records of the events.

    Returns:
        For each run the index after its last event, its layout, and its rows.
    """
    checks = np.frombuffer(records, CHECKED)["check"]
    entries = []
    for run in pack_runs(events.features, len(events)):
        layout = read_layout(run.layout)
        plain = np.frombuffer(run.rows, layout.dtype)
        rows = np.empty(len(plain), layout.checked)
        for name in layout.dtype.names or ():
            rows[name] = plain[name]
        end = run.start + len(rows)
        rows["check"] = _row_checks(key, run.layout, checks[run.start : end], plain)
        entries.append((end, run.layout, rows.tobytes()))
    return entries


def unpack_groups(
    key: bytes, groups: Iterable[RunGroup], first_index: int, records: bytes
) -> Columns:
    """Read the features of events.

    Args:
        key: Key of the user.
        groups: Part of the stream.
        first_index: Index of the first of the events.
        records: Undamaged CHECKED records of the events.

    Raises:
        StoreFailed: a row is damaged, or belongs to another event.
    """
    checks = np.frombuffer(records, CHECKED)["check"]
    parts: list[tuple[RunLayout, Any, npt.NDArray[np.int64]]] = []
    for group in groups:
        layout, rows, places = _placed(group, first_index)
        if bad := _num_bad(key, group.layout, layout, checks, rows, places):
            raise damaged(f"{bad} checksums of features are wrong")
        parts.append((layout, rows, places))
    return place_rows(parts, len(checks))


def count_bad_rows(key: bytes, groups: Iterable[RunGroup], first_index: int, records: bytes) -> int:
    """Count the damaged rows of these events, for which `unpack_groups` would fail."""
    checks = np.frombuffer(records, CHECKED)["check"]
    bad = 0
    for group in groups:
        try:
            layout, rows, places = _placed(group, first_index)
        except StoreFailed:
            bad += 1
        else:
            bad += _num_bad(key, group.layout, layout, checks, rows, places)
    return bad


def _placed(group: RunGroup, first_index: int) -> tuple[RunLayout, Any, npt.NDArray[np.int64]]:
    layout = read_layout(group.layout)
    rows = read_rows(layout.checked, group.rows)
    ends, sizes = (np.array(text.split(), np.int64) for text in (group.ends, group.sizes))
    lengths = sizes // layout.checked.itemsize
    if (lengths * layout.checked.itemsize != sizes).any():
        raise damaged("features of its events are incomplete")
    return layout, rows, places_of(ends - lengths - first_index, lengths)


def _num_bad(
    key: bytes, raw: bytes, layout: RunLayout, checks: U32, rows: Any, places: npt.NDArray[np.int64]
) -> int:
    """Count the rows with a wrong checksum, and those after the last event.

    Rows before the first event are ignored.
    """
    is_here = (places >= 0) & (places < len(checks))
    here = rows[is_here]
    plain = np.empty(len(here), layout.dtype)
    for name in layout.dtype.names or ():
        plain[name] = here[name]
    is_wrong = here["check"] != _row_checks(key, raw, checks[places[is_here]], plain)
    return int(np.count_nonzero(is_wrong)) + int(np.count_nonzero(places >= len(checks)))


def _row_checks(key: bytes, layout: bytes, checks: U32, rows: Any) -> U32:
    """Compute one check for each row, column by column.

    It hashes a sum of the row's words, each times an odd number of its own, with the other inputs.
    """
    num_bytes = rows.dtype.itemsize
    padded = np.zeros((len(rows), -(-num_bytes // 8) * 8), np.uint8)
    padded[:, :num_bytes] = np.frombuffer(rows.tobytes(), np.uint8).reshape(-1, num_bytes)
    words: U64 = padded.view("<u8")
    odd = mix(np.arange(1, words.shape[1] + 1, dtype=np.uint64)) | np.uint64(1)
    seed = np.uint64(xxhash.xxh3_64_intdigest(len(key).to_bytes(4, "little") + key + layout))
    mixed = mix((words * odd).sum(1, dtype=np.uint64) ^ seed)
    return (mix(mixed ^ checks.astype(np.uint64)) >> np.uint64(32)).astype(np.uint32)


# Results of the scripts other than success.
OLD = -1  # there are records of an older version: move them, then try again
OTHER = -2  # the idempotency key was used for other events
BAD = -3  # the idempotency key's entry is damaged
CUT = -4  # the last record is incomplete, so records could not be appended to it
CHANGED = -5  # another client wrote meanwhile, or used the idempotency key: read again
STRAY = -6  # there are features of events that do not exist: an older version replaced the events
LATE = -7  # an event is older than the last one: read all, and put it in its place

# Idempotency keys: found and remembered, by microseconds, so that they have an order.
_KEYS = """
local function microseconds()
  local time = redis.call('TIME')
  return time[1] * 1e6 + time[2]
end
local function known(key, digest, keep_s)  -- the result of the append with this key, or nil
  local entry = redis.call('HGET', KEYS[3], key)
  local at = tonumber(redis.call('ZSCORE', KEYS[4], key) or 0)
  if not entry or at + keep_s * 1e6 <= microseconds() then return nil end
  if redis.sha1hex(key .. string.sub(entry, 41)) ~= string.sub(entry, 1, 40) then return -3 end
  if string.sub(entry, 41, 40 + #digest) ~= digest then return -2 end
  return {tonumber(string.sub(entry, 41 + #digest)), 0}
end
local function remember(key, digest, kept, keep_s, most)
  local keys, order, now = KEYS[3], KEYS[4], microseconds()
  local answer = digest .. string.format('%d', kept)
  redis.call('HSET', keys, key, redis.sha1hex(key .. answer) .. answer)
  redis.call('ZADD', order, string.format('%.0f', now), key)
  local expired = string.format('%.0f', now - keep_s * 1e6)
  local old = redis.call('ZRANGEBYSCORE', order, '-inf', expired, 'LIMIT', 0, 8)
  if redis.call('ZCARD', order) > tonumber(most) then
    table.insert(old, redis.call('ZRANGE', order, 0, 0)[1])
  end
  for _, one in ipairs(old) do
    redis.call('HDEL', keys, one)
    redis.call('ZREM', order, one)
  end
  redis.call('EXPIRE', keys, keep_s)
  redis.call('EXPIRE', order, keep_s)
end
"""
# ARGV: data, limit and size of a record in bytes, idempotency key ("" = none), digest of its
# events, seconds to keep it, most keys of a user, time of the oldest event; then for each run of
# features the index after its last event, its layout, its rows.
APPEND = (
    _KEYS
    + """
local log, first, features = KEYS[1], KEYS[2], KEYS[5]
if redis.call('EXISTS', KEYS[6]) == 1 then return -1 end
local limit, record = tonumber(ARGV[2]), tonumber(ARGV[3])
local before = redis.call('STRLEN', log)
if before % record ~= 0 then return -4 end
local key, digest = ARGV[4], ARGV[5]
local done = key ~= '' and known(key, digest, ARGV[6])
if done then return done end
if before > 0 and #ARGV[1] > 0 then  -- a record is item (8 bytes), action (2), time (8), check
  local time = redis.call('GETRANGE', log, before - record + 10, before - record + 17)
  if struct.unpack('<i8', time) > tonumber(ARGV[8]) then return -7 end
end
if #ARGV > 8 then
  local total = (tonumber(redis.call('GET', first)) or 0) + before / record
  local newest = redis.call('XREVRANGE', features, '+', '-', 'COUNT', 1)[1]
  if newest and tonumber(string.match(newest[1], '%d+')) > total then return -6 end
  for at = 9, #ARGV, 3 do
    local id = string.format('%.0f-0', total + ARGV[at])
    redis.call('XADD', features, id, ARGV[at + 1], ARGV[at + 2])
  end
end
local size = redis.call('APPEND', log, ARGV[1])
if size >= 2 * limit then  -- trimmed every `limit` bytes, so O(appended bytes) amortised
  redis.call('SET', log, redis.call('GETRANGE', log, size - limit, -1))
  local now_first = redis.call('INCRBY', first, (size - limit) / record)
  if redis.call('EXISTS', features) == 1 then
    redis.call('XTRIM', features, 'MINID', string.format('%.0f', now_first + 1))
  end
  size = limit
end
local kept = math.floor(math.min(size, limit) / record)
if key ~= '' then remember(key, digest, kept, ARGV[6], ARGV[7]) end
return {kept, 1}
"""
)
# Returns the SHA-1 of a user's events and features, by which a change is detected.
_STATE = """
local function state()
  local parts = {redis.call('GET', KEYS[1]) or ''}
  if redis.call('EXISTS', KEYS[5]) == 1 then
    for _, entry in ipairs(redis.call('XRANGE', KEYS[5], '-', '+')) do
      table.insert(parts, entry[1] .. entry[2][1] .. entry[2][2])
    end
  end
  return redis.sha1hex(table.concat(parts))
end
"""
# ARGV: number of bytes to read, size of a record, 1 to return the state too, and the number of
# bytes before which no older records are returned (0 = none are). Runs of features are returned by
# layout: the ends of all runs with it, their sizes, their rows.
READ = (
    _STATE
    + """
if redis.call('EXISTS', KEYS[6]) == 1 then return -1 end
local size, want = redis.call('STRLEN', KEYS[1]), tonumber(ARGV[1])
local from = math.max(0, size - want)
local index = tonumber(redis.call('GET', KEYS[2]) or 0) + from / ARGV[2]
local groups, by_layout = {}, {}
if redis.call('EXISTS', KEYS[5]) == 1 then
  local begin = string.format('%.0f', math.floor(index) + 1)
  for _, entry in ipairs(redis.call('XRANGE', KEYS[5], begin, '+')) do
    local layout, rows = entry[2][1], entry[2][2]
    local group = by_layout[layout]
    if not group then
      group = {{}, {}, {}}
      by_layout[layout] = group
      table.insert(groups, layout)
    end
    table.insert(group[1], string.match(entry[1], '%d+'))
    table.insert(group[2], #rows)
    table.insert(group[3], rows)
  end
end
for at, layout in ipairs(groups) do
  local group = by_layout[layout]
  local ends, sizes = table.concat(group[1], ' '), table.concat(group[2], ' ')
  groups[at] = {layout, ends, sizes, table.concat(group[3])}
end
local oldest, older = math.max(0, size - ARGV[4]), ''
if oldest < from then older = redis.call('GETRANGE', KEYS[1], oldest, from - 1) end
local records = redis.call('GETRANGE', KEYS[1], from, -1)
return {index, records, groups, ARGV[3] == '1' and state() or '', older}
"""
)
# ARGV: new records, number of older events, the state that they replace ("" = any), idempotency key
# ("" = none), digest of its events, seconds to keep it, most keys of a user, and the answer to it;
# then for each run of features the index after its last event, its layout, its rows.
PUT = (
    _KEYS
    + _STATE
    + """
if ARGV[3] ~= '' then
  if redis.call('EXISTS', KEYS[6]) == 1 then return -1 end
  if state() ~= ARGV[3] then return -5 end
  if ARGV[4] ~= '' and known(ARGV[4], ARGV[5], ARGV[6]) then return -5 end
end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('SET', KEYS[2], ARGV[2])
redis.call('DEL', KEYS[5], KEYS[6])
for at = 9, #ARGV, 3 do
  redis.call('XADD', KEYS[5], ARGV[at] .. '-0', ARGV[at + 1], ARGV[at + 2])
end
if ARGV[4] ~= '' then remember(ARGV[4], ARGV[5], ARGV[8], ARGV[6], ARGV[7]) end
return 1
"""
)
# ARGV: the old records with checksums, and their number of bytes without
MOVE = """
if redis.call('STRLEN', KEYS[6]) ~= tonumber(ARGV[2]) then return 0 end
redis.call('APPEND', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[6])
return 1
"""
# KEYS: log, first, features. ARGV: index at which the previous answer ended, most runs, size of a
# record. Returns the index after the last run, the index of its first stored event, the records
# from that event on, and the runs.
FEATURES = """
if redis.call('EXISTS', KEYS[3]) == 0 then return nil end
local after, record = tonumber(ARGV[1]), tonumber(ARGV[3])
local runs = redis.call('XRANGE', KEYS[3], string.format('%.0f', after + 1), '+', 'COUNT', ARGV[2])
if #runs == 0 then return nil end
local first = tonumber(redis.call('GET', KEYS[2]) or 0)
local from = math.max(after, first)
for at, entry in ipairs(runs) do
  runs[at] = {string.match(entry[1], '%d+'), entry[2][1], entry[2][2]}
end
local last, records = runs[#runs][1], ''
if tonumber(last) > from then
  records = redis.call('GETRANGE', KEYS[1], (from - first) * record, (last - first) * record - 1)
end
return {last, string.format('%.0f', from), records, runs}
"""
# KEYS: the list. ARGV: names, from number 0 on. Returns the list that is stored now.
NAME_ACTIONS = """
local kept = redis.call('LRANGE', KEYS[1], 0, -1)
if #kept > #ARGV then return kept end
for number, name in ipairs(kept) do
  if ARGV[number] ~= name then return kept end
end
for number = #kept + 1, #ARGV do redis.call('RPUSH', KEYS[1], ARGV[number]) end
return redis.call('LRANGE', KEYS[1], 0, -1)
"""
