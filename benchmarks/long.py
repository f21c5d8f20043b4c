"""`python -m benchmarks long`: prefixes that take less memory: of an attention window, of int8.

    window     a semi-local ranker's prefix at any length of history
    full       the same ranker with full attention next to it, up to 16,384 events
    int8       keys and values in int8 against bfloat16: memory and time
    quality    and their scores, of a ranker that it trains (some minutes)
    attention  what a window costs in quality: three rankers that it trains (some minutes)
    far        the same where the answer lies `--lag` events back, and learnt tokens (some minutes)
    wire       a user with the longest of the lengths in a store, over HTTP

Times are CPU seconds of one core, of an engine without a service around it but in the part
wire. Every length's cached scores are compared with a cold rank's before anything is timed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import click
import msgspec
import torch

from benchmarks import long_far, long_int8, long_quality, long_wire
from benchmarks.frame import (
    BACKEND,
    FILE,
    SEED,
    THREADS,
    Line,
    Numbers,
    compared,
    only,
    option,
    percentiles,
    timed_for,
    timed_in_turn,
)
from benchmarks.long_user import Long, Prepared
from benchmarks.rank import config, layout
from npu_gr.backend.base import Backend
from npu_gr.backend.choose import choose
from npu_gr.backend.names import BackendName
from npu_gr.dataset import read_log
from npu_gr.history_store.interactions import movielens_100k
from npu_gr.train.rank.options import TrainOptions

PARTS = ("window", "full", "int8", "quality", "attention", "far", "wire")
OPTIONS = (
    BACKEND,
    option("--dtype", default="bfloat16", type=click.Choice(["float32", "bfloat16"])),
    option("--lengths", default="1024,16384,65536", type=Numbers(), help="Events of a history."),
    option("--window", default=192, type=click.IntRange(1), help="attention_window_tokens."),
    option("--first", default=32, type=click.IntRange(0), help="attention_first_tokens."),
    option("--lag", default=5000, type=click.IntRange(1000), help="Of the part far."),
    only(PARTS),
    option("--log", type=FILE, help="Log of quality and attention; by default MovieLens-100K."),
    THREADS,
    SEED,
    timed_for(3.0),
)
TRAINED = TrainOptions(refit=False, test_users=1)  # of the part quality: `npu-gr train rank`
FLAT, FLAT_BYTES, LINEAR, APPEND = 1 / 1.2, 1 / 1.1, 1 / 1.1, 1 / 2  # least ratios
SMALLER = 50  # so many times as many users in the same memory, at USERS_AT events
USERS_AT = 16_384


def _ratio(
    case: str,
    ours: list[float],
    base: list[float],
    target: float | None,
    name: str,
    per: float = 1.0,
) -> Line:
    mine, before = percentiles(ours)[0] * 1e3, percentiles(base)[0] * 1e3 * per
    return compared("long", case, mine, "ms", name, before, before / mine, target)


def lines(
    backend: BackendName,
    dtype: str,
    lengths: tuple[int, ...],
    window: int,
    first: int,
    lag: int,
    parts: Sequence[str],
    log: Path | None,
    seed: int,
    seconds: float,
) -> Iterator[Line]:
    """Yield a line for each figure and length.

    Raises:
        AssertionError: The cached scores are not those of a cold rank; nothing was timed.
        DataError: There is no log to train on.
    """
    device = choose(backend)
    if "window" in parts:
        yield from _window_lines(device, dtype, lengths, window, first, seed, seconds)
    if "full" in parts:
        yield from _full_lines(device, dtype, lengths, window, first, seed, seconds)
    if "int8" in parts:
        yield from long_int8.lines(device, seconds, seed)
    if "quality" in parts:
        options = msgspec.structs.replace(TRAINED, seed=seed)
        served = long_int8.Served(device, read_log(log or movielens_100k()), options)
        yield from long_int8.quality(served)
    if "attention" in parts:
        yield from long_quality.lines(device, read_log(log or movielens_100k()), seed)
    if "far" in parts:
        yield from long_far.lines(device, lag, seed)
    if "wire" in parts:
        yield from long_wire.lines(lengths, seed)


def _window_lines(
    device: Backend,
    dtype: str,
    lengths: tuple[int, ...],
    window: int,
    first: int,
    seed: int,
    seconds: float,
) -> Iterator[Line]:
    kind = getattr(torch, dtype)
    shape = msgspec.structs.replace(
        config(), attention_window_tokens=window, attention_first_tokens=first
    )
    long = Long.untrained(shape, device, kind, seed)
    whole = layout(config(), device, torch.bfloat16)
    shortest, *others = (Prepared(long, n) for n in lengths)
    base = f"at {shortest.num_events} events"
    for one in (shortest, *others):
        assert one.rank() == one.rank(cached=False), f"{one.num_events} events: another score"
    for one in others:
        at = f"N={one.num_events} K1={window} K2={first} layers={shape.num_layers} {dtype}"
        run = partial(timed_in_turn, budget_s=seconds, clock=time.process_time)
        ranks, appends = run([shortest.rank, one.rank]), run([shortest.append, one.append])
        cold = run([partial(each.rank, cached=False) for each in (shortest, one)])
        yield _ratio(f"cached rank, {at}", ranks[1], ranks[0], FLAT, base)
        yield _ratio(f"cold rank, {at}", cold[1], cold[0], None, base)
        yield _ratio(f"append of one event, {at}", appends[1], appends[0], APPEND, base)
        per = one.num_events / shortest.num_events
        yield _ratio(
            f"prefill, {at}", [one.prefill_s], [shortest.prefill_s], LINEAR, f"{base}, scaled", per
        )
        sizes = long.layout.bytes(one.num_events), long.layout.bytes(shortest.num_events)
        yield _bytes(f"bytes a user, {at}", *sizes, base, FLAT_BYTES)
    at = f"N={USERS_AT} K1={window} K2={first} {dtype}"
    sizes = long.layout.bytes(USERS_AT), whole.bytes(USERS_AT)
    yield _bytes(f"bytes a user, {at}", *sizes, "full attention, bfloat16", SMALLER)


def _full_lines(
    device: Backend,
    dtype: str,
    lengths: tuple[int, ...],
    window: int,
    first: int,
    seed: int,
    seconds: float,
) -> Iterator[Line]:
    kind = getattr(torch, dtype)
    shape = msgspec.structs.replace(
        config(), attention_window_tokens=window, attention_first_tokens=first
    )
    arms = [Long.untrained(each, device, kind, seed) for each in (shape, config())]
    for num_events in (each for each in lengths if each <= USERS_AT):
        ours, base = (Prepared(each, num_events) for each in arms)
        at = f"N={num_events} K1={window} K2={first} {dtype}"
        mine, full = timed_in_turn([ours.rank, base.rank], seconds, clock=time.process_time)
        yield _ratio(f"cached rank, {at}", mine, full, None, "full attention")
        name = "full attention"
        yield _ratio(f"prefill, {at}", [ours.prefill_s], [base.prefill_s], None, name)


def _bytes(case: str, ours: int, before: int, name: str, target: float) -> Line:
    return compared("long", case, ours, "bytes", name, before, before / ours, target)
