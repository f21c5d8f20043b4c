"""The part `wire` of `benchmarks long`: a million events in a store, over HTTP.

A real instance with SQLite serves a semi-local ranker to a user of the shortest and one of the
longest history: an append of one event, a signal, and a rank from the prefix that the signal left,
in turn. Times are CPU seconds of client and instance, which share a process. Once the ranker reads
the whole history, once its newest events (`service.max_history_tokens`, whose start moves in steps
of `service.cut_step_tokens`): a row of the window reads no further back.
"""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks.frame import Line, tell, timed
from npu_gr.model.config import HSTUConfig
from npu_gr.model.hstu import HSTU
from npu_gr.model.weights import Checkpoint, save
from tests.serving import serving

MOST = 2_000_000
AT_ONCE = 50_000  # events of a request
ROUNDS = 30
NEWEST, STEP = 4096, 2048  # of a history that is read in part
FLAT, APPEND = 1 / 1.2, 1 / 2  # least ratios
SHAPE = HSTUConfig(
    num_items=1000,
    actions=("0", "1"),
    tasks=("like",),
    dim=32,
    num_layers=3,
    max_history_tokens=MOST,
    attention_window_tokens=192,
    attention_first_tokens=32,
)
LATER_S = 1_600_000_000


def lines(lengths: tuple[int, ...], seed: int) -> Iterator[Line]:
    """Fill a store, and yield the times of its longest history against its shortest."""
    with TemporaryDirectory() as folder:
        torch.manual_seed(seed)
        ids = np.arange(SHAPE.num_items, dtype=np.int64)
        made = Checkpoint(model=HSTU(SHAPE), item_ids=ids, name="long", action_values=(0.0, 1.0))
        save(made, Path(folder) / "checkpoint")
        ends = min(lengths), max(lengths)
        for name, section in (
            ("the whole history", {}),
            (f"newest {NEWEST}", {"max_history_tokens": NEWEST, "cut_step_tokens": STEP}),
        ):
            tell("long", f"{name} over HTTP")
            times = asyncio.run(_times(Path(folder), ends, section, seed))
            for kind, least in (("append of one event", APPEND), ("signal", None), ("rank", FLAT)):
                ours, base = (times[kind, end] for end in reversed(ends))
                case = f"{kind} over HTTP at {ends[1]}, reads {name}"
                target = least if section else None
                yield timed("long", case, ours, f"at {ends[0]} events", base, target, unit="ms CPU")


def _body(user: str, **fields: Any) -> dict[str, Any]:
    return {"user_id": user, **fields}


def _events(random: np.random.Generator, first: int, count: int) -> dict[str, Any]:
    items = random.integers(0, SHAPE.num_items, count)
    times = np.arange(LATER_S + first, LATER_S + first + count)
    return {
        "items": b64encode(items.astype("<i8").tobytes()).decode(),
        "actions": ["0"] * count,
        "timestamps": times.tolist(),
    }


async def _times(
    folder: Path, ends: tuple[int, int], section: dict[str, Any], seed: int
) -> dict[tuple[str, int], list[float]]:
    random = np.random.default_rng(seed)
    found: dict[tuple[str, int], list[float]] = {}
    async with serving(
        folder,
        watched=False,
        service=section,
        history_store={"max_events_per_user": MOST},
        server={"max_history_events": MOST, "max_body_bytes": 64 << 20},
    ) as (client, _):

        async def post(path: str, body: dict[str, Any]) -> tuple[dict[str, Any], float]:
            began_at = time.process_time()
            answer = await client.post(f"/v1/{path}", json=body)
            answered = await answer.json()
            assert answer.status < 300, answered
            return answered, time.process_time() - began_at

        counts = {}
        for end in ends:
            known = await client.get(f"/v1/users/{end}?num_events=1")
            counts[end] = (await known.json()).get("num_events", 0)
            while counts[end] < end:
                part = min(AT_ONCE, end - counts[end])
                events = _events(random, counts[end], part)
                counts[end] = (await post("events", _body(str(end), events=events)))[0][
                    "num_events"
                ]
        for round_ in range(ROUNDS + 2):
            for end in ends:
                user = str(end)
                event = _events(random, counts[end], 1)
                counts[end] += 1
                _, append_s = await post("events", _body(user, events=event))
                _, signal_s = await post("signal", _body(user))
                candidates = random.permutation(SHAPE.num_items)[:100].tolist()
                asked = _body(user, candidates=candidates, timestamp=LATER_S + counts[end])
                answered, _ = await post("rank", asked)  # may wait for the signal's prefill
                again, rank_s = await post("rank", asked)
                assert again["outcome"] == "hbm_hit", again["outcome"]
                assert answered["scores"] == again["scores"]
                if round_ > 1:
                    for kind, seconds in (
                        ("append of one event", append_s), ("signal", signal_s), ("rank", rank_s),
                    ):  # fmt: skip
                        found.setdefault((kind, end), []).append(seconds)
    return found
