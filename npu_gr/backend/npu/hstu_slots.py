"""The padded sizes of an HSTU pass, and the blocks in which it computes its scores.

A pass that a device graph will replay has few sizes to choose from (`graph_slots`): fewer than 60
sets for 16,000 tokens and eight requests, so all of them are captured before the first request. A
pass without a graph is padded less (`tight_slots`).

The scores of a pass may be larger than their workspace: then they are computed block by block, by
requests, or by rows of one request (`score_blocks`). So no number of requests and no length of a
history leaves the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from npu_gr.backend.calls import GraphShape
from npu_gr.backend.npu.hstu_batch import I32, KEY_BLOCK, ROW_BLOCK, BatchTimes, Entry
from npu_gr.backend.npu.limits import ELEMENT_BYTES, MAX_SCORE_BYTES, Slots

GRAPH_ROWS = (512, 1024)  # per request; with more rows, launches are a small part of a pass
LEAST_GRAPH_KEYS = 2048  # its products take less time than their launches
PAGE_IDS = 64  # the length of the list of page ids is a multiple of this


class PassSlots(NamedTuple):
    """The padded sizes of a pass."""

    requests: int
    rows: int  # per request
    keys: int  # per request
    is_graph: bool


def row_slots(rows: int) -> int:
    """Round a number of rows up to a power of two from 32 to 1024, then to multiples of 512."""
    return max(ROW_BLOCK, 1 << (rows - 1).bit_length()) if rows <= 1024 else -(-rows // 512) * 512


def key_slots(keys: int) -> int:
    """Round a number of keys up to a multiple of 256, or of 1/32 of the next power of two."""
    step = max(KEY_BLOCK, (1 << max(0, keys - 1).bit_length()) // 32)
    return max(step, -(-keys // step) * step)


def graph_keys() -> Iterator[int]:
    """Yield the numbers of keys of graphs, each at least 1.5 times the one before, without end."""
    keys = LEAST_GRAPH_KEYS
    while True:
        yield keys
        keys = -(-keys * 3 // (2 * KEY_BLOCK)) * KEY_BLOCK


def tight_slots(requests: int, rows: int, keys: int) -> PassSlots:
    """Return the sizes of a pass that is launched kernel by kernel."""
    return PassSlots(_power_of_two(requests), row_slots(rows), key_slots(keys), is_graph=False)


def graph_slots(requests: int, rows: int, keys: int, *, has_candidates: bool = True) -> PassSlots:
    """Return the sizes of a pass that a graph replays; tight ones if it has too many rows.

    A prefill takes the most rows: the last chunk, which is short, needs no graph of its own.
    """
    choices = GRAPH_ROWS if has_candidates else GRAPH_ROWS[-1:]
    padded = next((slots for slots in choices if slots >= rows), None)
    if padded is None:
        return tight_slots(requests, rows, keys)
    width = next(slots for slots in graph_keys() if slots >= keys)
    return PassSlots(_power_of_two(requests), padded, width, is_graph=True)


def graph_shapes(max_requests: int, max_tokens: int, chunk_tokens: int) -> Iterator[GraphShape]:
    """Yield every graph that ranks from cached prefixes, and prefills, need.

    Args:
        max_requests: Most requests of a pass.
        max_tokens: Most history tokens of a request.
        chunk_tokens: Tokens of a step of a prefill.
    """
    for rows in GRAPH_ROWS:
        for keys in _up_to(max_tokens + rows):
            requests = 1
            while requests < 2 * max_requests:
                yield GraphShape(requests, rows, keys, has_candidates=True)
                requests *= 2
    if chunk_tokens <= GRAPH_ROWS[-1]:
        for keys in _up_to(max_tokens):
            yield GraphShape(1, GRAPH_ROWS[-1], keys, has_candidates=False)


def _up_to(max_keys: int) -> Iterator[int]:
    for keys in graph_keys():
        yield keys
        if keys >= max_keys:
            return


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


class ScoreBlock(NamedTuple):
    """Scores that are in memory at a time: of some requests, and of some rows of each."""

    first: int  # of the requests
    end: int
    first_row: int
    end_row: int


def score_blocks(slots: Slots, rows: Sequence[int]) -> list[ScoreBlock]:
    """Divide the scores of a pass into blocks of at most `MAX_SCORE_BYTES`.

    Args:
        slots: Sizes of the pass.
        rows: Rows of each request; a block without any is left out.
    """
    row_bytes = slots.num_heads * slots.keys * ELEMENT_BYTES[slots.dtype]
    fitting = MAX_SCORE_BYTES // row_bytes
    if fitting >= slots.rows:
        blocks = -(-slots.requests // (fitting // slots.rows))
        together = -(-slots.requests // blocks)  # equal blocks share their workspace
        return [
            ScoreBlock(first, min(first + together, slots.requests), 0, slots.rows)
            for first in range(0, slots.requests, together)
            if any(rows[first : first + together])
        ]
    step = max(ROW_BLOCK, fitting // ROW_BLOCK * ROW_BLOCK)
    return [
        ScoreBlock(request, request + 1, first, min(first + step, slots.rows))
        for request, count in enumerate(rows)
        for first in range(0, count, step)
    ]


def block_arrays(
    block: ScoreBlock, entries: Sequence[Entry], times: BatchTimes, row_slots: int
) -> dict[str, I32]:
    """Return what the kernels read of a block: meta, bounds and times of its rows.

    Args:
        block: The block.
        entries, times: All requests of the pass, and their times.
        row_slots: Padded number of rows of each request.
    """
    requests = slice(block.first, block.end)
    borders = times.bounds[requests]
    rows = borders[:, block.first_row // ROW_BLOCK : block.end_row // ROW_BLOCK]
    return {
        "meta": np.array([_part(e, block) for e in entries[requests]], np.int32),
        "bounds": np.concatenate([rows, borders[:, row_slots // ROW_BLOCK :]], axis=1),
        "row_times": times.rows[requests, block.first_row : block.end_row],
    }


def _part(entry: Entry, block: ScoreBlock) -> Entry:
    """Describe a block of a request's rows: its last row is the request's last token.

    More candidates than rows: the first candidates are in the history's place, and no row of the
    block sees them.
    """
    first, end = min(block.first_row, entry.rows), min(block.end_row, entry.rows)
    behind = entry.rows - end
    return entry._replace(
        rows=end - first,
        keys=entry.keys - behind,
        targets=max(0, entry.targets - behind),
        first_query=entry.first_query + first,
    )
