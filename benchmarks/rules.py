"""`python -m benchmarks rules`: what business rules add to a recommend over HTTP.

One instance with a site's models is asked over loopback, one request after the other: each request
with the configured `recommend.rules` and without, in turn, over 200 candidates of the site's
cascade. The figure is the median of the pairs' differences, so that a machine that slows down for a
while slows both.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import click
import msgspec
import numpy as np
import torch
import uvloop
from aiohttp.test_utils import TestClient, TestServer

from benchmarks.frame import COUNT, FILE, SEED, SET, Line, compared, option
from npu_gr.core.errors import ConfigError
from npu_gr.handlers.recommend import RecommendJob
from npu_gr.handlers.service import Service
from npu_gr.history_store.store import HistoryConfig
from npu_gr.service.app import instance
from npu_gr.service.config import Config, load

OPTIONS = (
    option(
        "--config",
        type=FILE,
        required=True,
        help="Configuration with recommend.rules, or give them with --set.",
    ),
    SET,
    SEED,
    option("--rounds", default=40, type=COUNT, help="Pairs of each request."),
    option("--count", default=25, type=click.IntRange(3), help="Requests."),
)
SHOWN_AT = 1_900_000_000
LENGTH = 64  # events of a history
NUM_ITEMS = 20  # of an answer
CANDIDATES = 200
TARGET_MS = 0.3


class _Pair(NamedTuple):
    """Seconds of a request with rules, and without."""

    rules_s: float
    plain_s: float


def lines(
    config: Path, overrides: Sequence[str], rounds: int, count: int, seed: int
) -> Iterator[Line]:
    """Yield one line: milliseconds that rules add.

    Args:
        config: Configuration of a site.
        overrides: Overridden settings, `section.key=value`.
        rounds: Pairs of each request.
        count: Requests.
        seed: Random seed of the histories.

    Raises:
        ConfigError: there is no cascade or no rule.
    """
    given = load(config, overrides)
    if given.recommend is None or given.recommend.rules is None:
        raise ConfigError(f"{config}: recommend.rules: needs rules to measure")
    torch.set_num_threads(given.threads)
    pairs = uvloop.run(_measured(given, rounds, count, seed))
    added_ms = np.array([pair.rules_s - pair.plain_s for pair in pairs]) * 1e3
    plain_ms = float(np.median([pair.plain_s for pair in pairs])) * 1e3
    ours = float(np.median(added_ms))
    draws = np.random.default_rng(seed).choice(added_ms, (1000, len(added_ms)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    yield compared(
        "rules",
        f"added to a recommend of {CANDIDATES} candidates over HTTP, {len(pairs):,} pairs",
        plain_ms + ours,
        "ms",
        "without rules",
        plain_ms,
        plain_ms / (plain_ms + ours),
        ok=ours <= TARGET_MS,
        low=float(low),
        high=float(high),
    )


async def _measured(config: Config, rounds: int, count: int, seed: int) -> list[_Pair]:
    assert config.recommend is not None
    recommend = msgspec.structs.replace(config.recommend, max_candidates=CANDIDATES)
    config = msgspec.structs.replace(
        config, recommend=recommend, history_store=HistoryConfig(kind="none")
    )
    async with instance(config) as (app, service), TestClient(TestServer(app)) as client:
        job = service.parts.jobs["recommend"]
        assert isinstance(job, RecommendJob)
        cascade = job.cascade
        with_rules = cascade.parts
        plain = msgspec.structs.replace(with_rules.config, rules=None)
        without = replace(with_rules, config=plain)
        bodies = _bodies(service, count, seed)

        async def took_s(body: bytes, ruled: bool) -> float:
            cascade.serve(with_rules if ruled else without, "")
            began_at = time.perf_counter()
            async with client.post("/v1/recommend", data=body, headers=_HEADERS) as response:
                await response.read()
            if response.status != 200:
                raise ConfigError(f"recommend answered {response.status}")
            return time.perf_counter() - began_at

        pairs = []
        for turn in range(rounds + 1):  # the first is a warm-up
            for body in bodies:
                first = turn % 2 == 0
                took = {ruled: await took_s(body, ruled) for ruled in (first, not first)}
                pairs.append(_Pair(took[True], took[False]))
        return pairs[len(bodies) :]


_HEADERS = {"content-type": "application/json", "x-request-timeout-ms": "10000"}


def _bodies(service: Service, count: int, seed: int) -> list[bytes]:
    ranking = service.versions.ranker()
    random = np.random.default_rng(seed)
    ids = ranking.vocabulary.ids
    action = ranking.model.actions[0]
    found = []
    for user in range(count):
        items = service.parts.names.items(random.choice(ids, LENGTH))
        history = {
            "items": items,
            "actions": [action] * LENGTH,
            "timestamps": [SHOWN_AT - LENGTH + at for at in range(LENGTH)],
        }
        body = {"user_id": f"bench-{user}", "history": history, "num_items": NUM_ITEMS}
        found.append(msgspec.json.encode(body | {"timestamp": SHOWN_AT}))
    return found
