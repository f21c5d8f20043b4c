"""A hostile map of features is refused before its objects are made, by name and limit; a front worker loses nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from npu_gr.core.errors import TooLarge
from npu_gr.core.feature_schema.columns import Columns
from npu_gr.core.history import Events, HistoryRef, UserKey
from npu_gr.core.request import RankRequest
from npu_gr.front.wire import decoder, encoder, wire_of
from npu_gr.server.codec import bulk
from npu_gr.server.codec.media import JSON, MSGPACK, skim
from npu_gr.server.codec.rank import RankBody
from npu_gr.server.config import ServerConfig

MOST = ServerConfig().max_feature_values


def checked(cross: Any, media: str) -> None:
    body = {"user_id": "u", "candidates": [1], "features": {"cross": cross}}
    sent = (msgspec.json if media == JSON else msgspec.msgpack).encode(body)
    bulk.check(skim(sent, media, RankBody), len(sent), RankBody, ServerConfig(), bulk.LOOSE_BYTES)


@pytest.mark.parametrize("media", [JSON, MSGPACK])
@pytest.mark.parametrize(
    ("cross", "said"),
    [
        ({f"f{place}": [] for place in range(100_000)}, "features.cross: 100000 columns, the limit is 256"),
        ({"f": [1.5] * (MOST + 1)}, f"features.cross: {MOST + 1} entries, the limit is {MOST}"),
        ({"f": [1] * MOST, "g": [1, 2]}, f"features.cross: {MOST + 2} entries"),
        ({"f": ["a,b"] * (MOST + 1)}, f"features.cross: {MOST + 1} entries"),
        ({"f": [[1] * 1000] * 1000}, "features.cross: "),
        ({"f": bytes(4 * MOST + 4)}, f"features.cross: {MOST + 1} entries"),
    ],
    ids=["names", "values", "together", "texts", "lists", "raw"],
)
def test_what_is_too_much_is_refused_before_it_is_read(cross: Any, said: str, media: str) -> None:
    with pytest.raises(TooLarge, match=said):
        checked(cross, media)


@pytest.mark.parametrize("media", [JSON, MSGPACK])
@pytest.mark.parametrize(
    "cross",
    [
        {},
        {f"f{place}": [1.5] * 500 for place in range(40)},
        {f"f{place}": bytes(2000) for place in range(40)},
        {"f:g": ["a:b,c"] * 500, 'q"': ['"'] * 500},
        {"f": [["a", "b"]] * 1000},
    ],
    ids=["nothing", "numbers", "raw", "signs", "lists"],
)
def test_what_fits_is_let_through(cross: Any, media: str) -> None:
    checked(cross, media)


def test_a_front_worker_loses_nothing() -> None:
    random = np.random.default_rng(0)
    features = Columns(
        {"spent": random.normal(size=3).astype(np.float32)},
        {
            "tags": random.integers(0, 9, (3, 2)).astype(np.uint64),
            "one": random.integers(0, 9, (3, 1)).astype(np.uint64),
        },
    )
    events = Events.make([1, 2, 3], [0, 0, 0], [1, 2, 3])
    request = RankRequest(
        user=UserKey("", "u"),
        candidates=np.arange(3),
        history=HistoryRef(
            events=Events(events.items, events.actions, events.timestamps, features=features),
            user_features={"age": 3, "tags": ("a", "b"), "is": True},
        ),
        request_features={"page": "home", "price": 1.5},
        cross_features=features,
    )
    wire = wire_of(RankRequest)
    assert wire.pack is None  # msgspec carries it as it is
    got = decoder(wire.type).decode(encoder().encode(request))
    assert got.history.user_features == request.history.user_features
    assert got.request_features == request.request_features
    for ours in (got.cross_features, got.history.events.features):
        assert ours.given.keys() == features.given.keys()
        for name, column in features.given.items():
            assert np.array_equal(ours.given[name], column)
            assert ours.given[name].shape == column.shape
