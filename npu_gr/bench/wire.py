"""`npu-gr bench wire`: read a rank's body with raw columns, against one with lists of JSON numbers, or of texts.

The body with texts is also read as `npu_gr.client` sends it: raw ids, names of actions. Measures the CPU time from the
received bytes to the request that the service gets: parse, validate, make the arrays. The floor is one copy of the
body.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from npu_gr.bench.line import Line, percentiles, timed_in_turn
from npu_gr.client.columns import Behaviours, item_column
from npu_gr.core.arrays import I64
from npu_gr.core.names import ActionNames
from npu_gr.core.request import RankRequest
from npu_gr.feature_schema.columns import ModelFeatures
from npu_gr.server.codec.media import JSON, MSGPACK, decode
from npu_gr.server.codec.rank import RankBody, parse
from npu_gr.server.config import ServerConfig

LENGTHS = (1024, 16_384)  # events of a history
CANDIDATES = 500
RAW_16K_MS = 0.2  # target: 16 k tokens as raw msgpack take at most this


class _Names:
    """Actions whose names are their indices; items are named by their ids."""

    unsorted_history: Literal["refuse", "sort"] = "refuse"

    def actions(self, _version: str | None) -> ActionNames:
        return _ACTIONS

    def features(self, _version: str | None) -> ModelFeatures:
        return ModelFeatures()

    def items(self, ids: I64) -> list[str | int]:
        names: list[str | int] = ids.tolist()
        return names

    def titles(self, ids: I64) -> list[str | None]:
        return [None] * len(ids)


_ACTIONS = ActionNames(["0", "1", "2", "3", "4"])
_NAMES = _Names()


def bodies(num_tokens: int, seed: int) -> dict[str, tuple[bytes, str]]:
    """Make the same request in every form: name of the form -> (body, media type)."""
    random = np.random.default_rng(seed)
    columns: dict[str, npt.NDArray[Any]] = {
        "items": random.integers(0, 10**9, num_tokens),
        "actions": random.integers(0, 5, num_tokens).astype(np.int16),
        "timestamps": 1_700_000_000 + np.cumsum(random.integers(0, 10_000, num_tokens)),
    }
    candidates = random.integers(0, 10**9, CANDIDATES)

    def body(form: Callable[[npt.NDArray[Any]], object]) -> dict[str, object]:
        return {
            "user_id": "u",
            "candidates": form(candidates),
            "history": {name: form(column) for name, column in columns.items()},
        }

    return {
        "JSON lists": (msgspec.json.encode(body(lambda a: a.tolist())), JSON),
        "JSON raw": (msgspec.json.encode(body(lambda a: base64.b64encode(a.tobytes()).decode())), JSON),
        "msgpack raw": (msgspec.msgpack.encode(body(lambda a: a.tobytes())), MSGPACK),
    }


def texts(num_tokens: int, seed: int) -> dict[str, tuple[bytes, str]]:
    """Make the same request with texts as names: name of the form -> (body, media type)."""
    random = np.random.default_rng(seed)
    items, candidates = (
        [f"SKU-{item:09d}-C" for item in random.integers(0, 10**9, num)] for num in (num_tokens, CANDIDATES)
    )
    actions = [str(action) for action in random.integers(0, 5, num_tokens)]
    times = (1_700_000_000 + np.cumsum(random.integers(0, 10_000, num_tokens))).tolist()
    lists = {"items": items, "actions": actions, "timestamps": times}
    ours = Behaviours(items, actions, times).on_the_wire("history")
    return {
        "JSON lists": (msgspec.json.encode({"user_id": "u", "candidates": candidates, "history": lists}), JSON),
        "client": (
            msgspec.msgpack.encode({"user_id": "u", "candidates": item_column(candidates, "c"), "history": ours}),
            MSGPACK,
        ),
    }


def lines(seed: int, budget_s: float) -> Iterator[Line]:
    """Measure every form at every length, one line each.

    Args:
        seed: of the ids and times in the bodies.
        budget_s: seconds that each line may take.

    Raises:
        AssertionError: a form is read as another request than the lists are; nothing was timed then.
    """
    config = ServerConfig()
    for num_tokens, make in product(LENGTHS, (bodies, texts)):
        forms = make(num_tokens, seed)
        (lists, media) = forms.pop("JSON lists")

        def read(body: bytes, media: str) -> RankRequest:
            return parse(decode(body, media, RankBody), config, _NAMES)

        want = read(lists, media)
        for name, (body, kind) in forms.items():
            got = read(body, kind)
            assert got.history.events is not None
            assert want.history.events is not None
            assert got.history.events.fingerprint() == want.history.events.fingerprint(), name
            assert np.array_equal(got.candidates, want.candidates), name
            functions: list[Callable[[], object]] = [
                partial(read, lists, media),
                partial(read, body, kind),
                partial(bytearray, body),
            ]
            slow, ours, copy = timed_in_turn(functions, budget_s)
            baseline_ms = percentiles(slow)[0] * 1e3
            ours_ms, p10, p90 = (s * 1e3 for s in percentiles(ours))
            floor_ms = percentiles(copy)[0] * 1e3
            target = baseline_ms / RAW_16K_MS if name == "msgpack raw" and num_tokens == max(LENGTHS) else None
            yield Line(
                bench="wire",
                case=f"L={num_tokens} M={CANDIDATES} {name}",
                ours=ours_ms,
                unit="ms",
                baseline="JSON lists",
                baseline_value=baseline_ms,
                ratio=baseline_ms / ours_ms,
                target=target,
                ok=None if target is None else ours_ms <= RAW_16K_MS,
                floor=baseline_ms / floor_ms,
                of_floor=floor_ms / ours_ms,
                p10=p10,
                p90=p90,
            )
