"""`python -m benchmarks features`: the cost of features in a cached rank and in its body.

A cached rank here is the service's work after the queue: encode the values, upload the segment, run
one pass, fetch the scores. The cost of a group of features is the extra time over the same model
without features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from benchmarks.frame import (
    BACKEND,
    SEED,
    THREADS,
    Line,
    compared,
    percentiles,
    timed,
    timed_for,
    timed_in_turn,
)
from benchmarks.rank import config, layout
from benchmarks.wire import IdNames
from npu_gr.backend.choose import choose
from npu_gr.backend.names import BackendName
from npu_gr.core.feature_schema.columns import Columns, ModelFeatures, OneRow
from npu_gr.core.feature_schema.schema import Feature
from npu_gr.core.history import Events
from npu_gr.core.request import RankRequest
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import PageRun
from npu_gr.engine.page_jobs import CachedPrefix
from npu_gr.engine.queue import SchedulerConfig
from npu_gr.engine.rank_engine import LateFeatures, RankEngine, RankPass
from npu_gr.engine.scheduler import Scheduler
from npu_gr.model.history_tokenizer import ItemVocabulary, Tokens, tokenize
from npu_gr.model.hstu import HSTU
from npu_gr.server.config import ServerConfig
from npu_gr.server.schemas import bulk
from npu_gr.server.schemas.media import JSON, MSGPACK, decode, skim
from npu_gr.server.schemas.rank import RankBody, parse

OPTIONS = (BACKEND, THREADS, SEED, timed_for(3.0))
TOKENS, CANDIDATES = 1024, 500
NUM_CROSS = 40
# target: time of a cached rank with 40 cross features relative to one without
MOST_SHARE = 1.10
RAW_MS = 0.1  # target: time to read 500 candidates x 40 cross features in raw msgpack

_COUNTRIES = tuple(f"c{place}" for place in range(50))
GROUPS: dict[str, tuple[Feature, ...]] = {
    "user": (
        Feature(name="country", of="user", kind="category", values=_COUNTRIES),
        Feature(name="segments", of="user", kind="hashed", num_buckets=10_000, max_values=8),
        Feature(name="age", of="user", kind="number", borders=(18.0, 25.0, 35.0, 50.0)),
    ),
    "event": (
        Feature(name="surface", of="event", kind="category", values=("home", "search", "mail")),
        Feature(name="watched_s", of="event", kind="number", mean=30.0, scale=20.0),
    ),
    "request": (
        Feature(name="hour", of="request", kind="category", values=tuple(map(str, range(24)))),
        Feature(name="device", of="request", kind="category", values=("phone", "tv")),
        Feature(name="page", of="request", kind="hashed", num_buckets=1000),
    ),
    f"cross x {NUM_CROSS}": tuple(
        Feature(name=f"cross_{place}", of="cross", kind="number", mean=0.5, scale=2.0)
        for place in range(NUM_CROSS)
    ),
}
GROUPS["all"] = tuple(feature for group in GROUPS.values() for feature in group)


def lines(backend: BackendName, seed: int, seconds: float) -> Iterator[Line]:
    """Measure reading, then each group of features.

    Raises:
        AssertionError: Raw columns and lists give different values, or cached and full inference
            different scores; nothing was timed.
    """
    yield _reading(seed, seconds)
    plain = _Bench(backend, (), seed)
    for name, features in GROUPS.items():
        ours, without = timed_in_turn([_Bench(backend, features, seed).rank, plain.rank], seconds)
        target = 1 / MOST_SHARE if name.startswith("cross") else None
        case = f"cached rank, L={TOKENS} M={CANDIDATES} {name}"
        yield timed("features", case, ours, "without features", without, target)


class _Names(IdNames):
    """The names of a service with only the cross features."""

    _features = ModelFeatures(GROUPS[f"cross x {NUM_CROSS}"])

    def features(self, _version: str | None) -> ModelFeatures:
        return self._features


def _reading(seed: int, seconds: float) -> Line:
    """Time reading 500 candidates x 40 cross features, in raw msgpack and in JSON lists."""
    random = np.random.default_rng(seed)
    values = random.normal(size=(NUM_CROSS, CANDIDATES)).astype(np.float32)
    features = GROUPS[f"cross x {NUM_CROSS}"]
    raw = {feature.name: row.tobytes() for feature, row in zip(features, values, strict=True)}
    lists = {feature.name: row.tolist() for feature, row in zip(features, values, strict=True)}
    body = {"user_id": "u", "candidates": np.arange(CANDIDATES).tobytes(), "base": "b"}
    in_raw = msgspec.msgpack.encode({**body, "features": {"cross": raw}})
    in_lists = msgspec.json.encode({**body, "features": {"cross": lists}})
    names, settings = _Names(), ServerConfig()

    def read(sent: bytes, media: str) -> RankRequest:
        if len(sent) > bulk.LOOSE_BYTES:
            bulk.check(skim(sent, media, RankBody), len(sent), RankBody, settings, bulk.LOOSE_BYTES)
        return parse(decode(sent, media, RankBody), settings, names)

    got, want = (read(*sent).cross_features for sent in ((in_raw, MSGPACK), (in_lists, JSON)))
    assert all(np.array_equal(got.numbers[name], want.numbers[name]) for name in want.numbers), (
        "raw columns"
    )
    functions: list[Callable[[], object]] = [
        partial(read, in_raw, MSGPACK),
        partial(read, msgspec.msgpack.encode(body), MSGPACK),
        partial(read, in_lists, JSON),
        partial(read, msgspec.json.encode(body), JSON),
    ]
    with_raw, without_raw, with_lists, without_lists = (
        percentiles(row)[0] * 1e3 for row in timed_in_turn(functions, seconds)
    )
    raw_ms, lists_ms = with_raw - without_raw, with_lists - without_lists
    case = f"read {CANDIDATES} x {NUM_CROSS} cross features, raw msgpack"
    return compared(
        "features", case, raw_ms, "ms", "JSON lists", lists_ms, lists_ms / raw_ms, lists_ms / RAW_MS
    )


class _Bench:
    """A model with these features, and a request whose prefix is cached."""

    def __init__(self, backend_name: BackendName, features: tuple[Feature, ...], seed: int) -> None:
        torch.manual_seed(seed)
        random = np.random.default_rng(seed)
        self._features = ModelFeatures(features)
        shape = msgspec.structs.replace(config(), features=features)
        backend = choose(backend_name)
        model = HSTU(shape).to(backend.device).eval()
        model.items.freeze()
        laid = layout(shape, backend)
        arena = KVArena(laid, laid.pages(TOKENS + 1), backend.device, pack=backend.pack_kv)
        self._engine = RankEngine(model, backend, Scheduler(SchedulerConfig()), arena)
        self._request = (
            {"hour": "7", "device": "tv", "page": "home"} if self._features.request.features else {}
        )
        cross = random.normal(size=(NUM_CROSS, CANDIDATES)).astype(np.float32)
        names = self._features.cross.features
        self._cross = Columns(dict(zip(names, cross, strict=False)))
        self._rows = random.integers(0, shape.num_items, CANDIDATES)
        tokens = self._tokens(shape.num_items, random)
        runs = (PageRun(0, laid.pages(len(tokens))),)
        nothing = np.empty(0, np.int64)
        self._engine.forward([RankPass(tokens, 0, nothing, 0, keep=runs)])
        self._hit = RankPass(tokens, 0, self._rows, 10**9, cached=CachedPrefix(runs, len(tokens)))
        self._cold = RankPass(tokens, 0, self._rows, 10**9)
        got, want = self._run(self._hit), self._run(self._cold)
        drift = float(np.abs(got - want).max() / want.std())
        assert drift <= 1e-5, f"cached scores drift by {drift:.1e}"

    def _tokens(self, num_items: int, random: np.random.Generator) -> Tokens:
        events = Events.make(
            random.integers(0, num_items, TOKENS),
            np.zeros(TOKENS),
            np.cumsum(random.integers(0, 86_400, TOKENS)),
        )
        user: OneRow | None = (
            {"country": "c7", "segments": ("s1", "s2", "s3"), "age": 33}
            if self._features.user.features
            else None
        )
        return tokenize(
            events,
            ItemVocabulary(np.arange(num_items)),
            1,
            max_tokens=TOKENS,
            cut_step_tokens=1,
            reject_unknown=True,
            features=self._features,
            user_features=user,
        )

    def _run(self, work: RankPass) -> Any:
        features = self._features
        late = LateFeatures(
            features.row(features.request, self._request),
            features.rows(features.cross, self._cross, CANDIDATES),
        )
        return self._engine.forward([replace(work, features=late)])[0]

    def rank(self) -> Any:
        """Encode the request's features, and score its candidates with the cached prefix."""
        return self._run(self._hit)
