"""A hostile map of features is rejected before its objects are made, by name and limit.

A front worker loses nothing.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from npu_gr.core.errors import TooLarge
from npu_gr.server.config import ServerConfig
from npu_gr.server.schemas import bulk
from npu_gr.server.schemas.media import JSON, MSGPACK, skim
from npu_gr.server.schemas.rank import RankBody

MOST = ServerConfig().max_feature_values


def checked(cross: Any, media: str) -> None:
    body = {"user_id": "u", "candidates": [1], "features": {"cross": cross}}
    sent = (msgspec.json if media == JSON else msgspec.msgpack).encode(body)
    bulk.check(skim(sent, media, RankBody), len(sent), RankBody, ServerConfig(), bulk.LOOSE_BYTES)


@pytest.mark.parametrize("media", [JSON, MSGPACK])
@pytest.mark.parametrize(
    ("cross", "said"),
    [
        (
            {f"f{place}": [] for place in range(100_000)},
            "features.cross: 100000 columns, the limit is 256",
        ),
        ({"f": [1.5] * (MOST + 1)}, f"features.cross: {MOST + 1} entries, the limit is {MOST}"),
        ({"f": [1] * MOST, "g": [1, 2]}, f"features.cross: {MOST + 2} entries"),
        ({"f": ["a,b"] * (MOST + 1)}, f"features.cross: {MOST + 1} entries"),
        ({"f": [[1] * 1000] * 1000}, "features.cross: "),
        ({"f": bytes(4 * MOST + 4)}, f"features.cross: {MOST + 1} entries"),
    ],
    ids=["names", "values", "together", "texts", "lists", "raw"],
)
def test_what_is_too_much_is_rejected_before_it_is_read(cross: Any, said: str, media: str) -> None:
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
