"""`python -m benchmarks wire`: reading a rank's body with raw columns, against JSON lists.

Lists of numbers are compared with raw columns, and with an infer request of the Open Inference
Protocol, over HTTP and gRPC; lists of strings with the body of `npu_gr.client`: raw ids and names
of actions. It measures the time from the received bytes to the service's request: parse, validate,
make the arrays. The floor is one copy of the body.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks.frame import SEED, Line, percentiles, timed, timed_for, timed_in_turn
from npu_gr.client.wire import Behaviours, item_column
from npu_gr.core.arrays import I64
from npu_gr.core.feature_schema.columns import ModelFeatures
from npu_gr.core.kinds import RANK
from npu_gr.core.names import ActionNames, item_ids
from npu_gr.core.request import RankRequest
from npu_gr.server.config import ServerConfig
from npu_gr.server.grpc.inference import INFERENCE, asked_by, message
from npu_gr.server.oip.models import MODELS, pack
from npu_gr.server.oip.routes import read as read_infer
from npu_gr.server.schemas.media import JSON, MSGPACK, decode
from npu_gr.server.schemas.rank import RankBody, parse

OPTIONS = (SEED, timed_for(1.0))
LENGTHS = (1024, 16_384)  # events of a history
CANDIDATES = 500
RAW_16K_MS = 0.2  # target: 16 k tokens as raw msgpack take at most this


class IdNames:
    """Names of a service whose actions are named by indices, and items by ids."""

    unsorted_history: Literal["reject", "sort"] = "reject"

    def actions(self, _version: str | None) -> ActionNames:
        return _ACTIONS

    def features(self, _version: str | None) -> ModelFeatures:
        return ModelFeatures()

    def item_ids(self, names: Sequence[str | int]) -> I64:
        return item_ids(names)

    def items(self, ids: I64) -> list[str | int]:
        names: list[str | int] = ids.tolist()
        return names

    def titles(self, ids: I64) -> list[str | None]:
        return [None] * len(ids)


_ACTIONS = ActionNames(["0", "1", "2", "3", "4"])
_NAMES = IdNames()


def bodies(num_tokens: int, seed: int) -> dict[str, tuple[bytes, str]]:
    """Make a request in every form: name of the form -> (body, media type)."""
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

    head, data = raw_infer("u", candidates, columns)
    return {
        "JSON lists": (msgspec.json.encode(body(lambda a: a.tolist())), JSON),
        "JSON raw": (
            msgspec.json.encode(body(lambda a: base64.b64encode(a.tobytes()).decode())),
            JSON,
        ),
        "msgpack raw": (msgspec.msgpack.encode(body(lambda a: a.tobytes())), MSGPACK),
        "infer raw": (head + data, str(len(head))),
        "infer gRPC": (inference_message("u", candidates, columns), INFERENCE),
    }


def raw_infer(
    user: str,
    candidates: I64,
    columns: Mapping[str, npt.NDArray[Any]],
    parameters: Mapping[str, Any] | None = None,
) -> tuple[bytes, bytes]:
    """Make an infer request over HTTP: its JSON, and the raw bytes behind it."""
    tensors = _tensors(user, candidates, columns)
    inputs = [
        {
            "name": name,
            "datatype": kind,
            "shape": [num],
            "parameters": {"binary_data_size": len(raw)},
        }
        for name, kind, num, raw in tensors
    ]
    head = msgspec.json.encode({"inputs": inputs, "parameters": parameters or {}})
    return head, b"".join(raw for *_, raw in tensors)


def inference_message(user: str, candidates: I64, columns: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Make an infer request over gRPC."""
    tensors = _tensors(user, candidates, columns)
    made: bytes = message("inference.ModelInferRequest")(
        model_name="rank",
        inputs=[{"name": name, "datatype": kind, "shape": [num]} for name, kind, num, _ in tensors],
        raw_input_contents=[raw for *_, raw in tensors],
    ).SerializeToString()
    return made


def _tensors(
    user: str, candidates: I64, columns: Mapping[str, npt.NDArray[Any]]
) -> list[tuple[str, str, int, bytes]]:
    named = {"candidates": candidates} | {
        f"history.{name}": column for name, column in columns.items()
    }
    listed = [
        (name, f"INT{8 * one.itemsize}", len(one), one.tobytes()) for name, one in named.items()
    ]
    return [("user_id", "BYTES", 1, pack([user])), *listed]


def read(body: bytes, media: str, config: ServerConfig) -> RankRequest:
    """Parse a body.

    Args:
        body: The body.
        media: Media type; digits = size of an infer request's JSON; `INFERENCE` = gRPC message.
        config: Configuration of the server.
    """
    if media == INFERENCE:
        infer = asked_by(message("inference.ModelInferRequest").FromString(body))
        return parse(MODELS[RANK.name].body(infer, None, config), config, _NAMES)
    if media.isdigit():
        return parse(
            MODELS[RANK.name].body(read_infer(body, media, RANK.name), None, config), config, _NAMES
        )
    return parse(decode(body, media, RankBody), config, _NAMES)


def texts(num_tokens: int, seed: int) -> dict[str, tuple[bytes, str]]:
    """Make a request with strings as names: name of the form -> (body, media type)."""
    random = np.random.default_rng(seed)
    items, candidates = (
        [f"SKU-{item:09d}-C" for item in random.integers(0, 10**9, num)]
        for num in (num_tokens, CANDIDATES)
    )
    actions = [str(action) for action in random.integers(0, 5, num_tokens)]
    times = (1_700_000_000 + np.cumsum(random.integers(0, 10_000, num_tokens))).tolist()
    lists = {"items": items, "actions": actions, "timestamps": times}
    ours = Behaviours(items, actions, times).on_the_wire("history")
    return {
        "JSON lists": (
            msgspec.json.encode({"user_id": "u", "candidates": candidates, "history": lists}),
            JSON,
        ),
        "client": (
            msgspec.msgpack.encode(
                {"user_id": "u", "candidates": item_column(candidates, "c"), "history": ours}
            ),
            MSGPACK,
        ),
    }


def lines(seed: int, seconds: float) -> Iterator[Line]:
    """Measure every form at every length, one line each.

    Raises:
        AssertionError: A form and the lists give different requests; nothing was timed.
    """
    config = ServerConfig()
    for num_tokens, make in product(LENGTHS, (bodies, texts)):
        forms = make(num_tokens, seed)
        (lists, media) = forms.pop("JSON lists")
        want = read(lists, media, config)
        for name, (body, kind) in forms.items():
            got = read(body, kind, config)
            assert got.history.events is not None
            assert want.history.events is not None
            assert got.history.events.fingerprint() == want.history.events.fingerprint(), name
            assert np.array_equal(got.candidates, want.candidates), name
            functions: list[Callable[[], object]] = [
                partial(read, lists, media, config),
                partial(read, body, kind, config),
                partial(bytearray, body),
            ]
            slow, ours, copy = timed_in_turn(functions, seconds)
            base_s = percentiles(slow)[0]
            is_evaluated = name == "msgpack raw" and num_tokens == max(LENGTHS)
            target = base_s * 1e3 / RAW_16K_MS if is_evaluated else None
            case = f"L={num_tokens} M={CANDIDATES} {name}"
            yield timed(
                "wire", case, ours, "JSON lists", slow, target, floor=base_s / percentiles(copy)[0]
            )
