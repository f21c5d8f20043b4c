"""A model of the Open Inference Protocol is its kind.

Inputs make the body of /v1, outputs hold its answer.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from npu_gr.core.kinds import KINDS, Scored
from npu_gr.server.config import ServerConfig
from npu_gr.server.oip.models import BYTES, DTYPES, MODELS, Model
from npu_gr.server.oip.routes import read
from npu_gr.server.schemas.fields import ResponseFields
from npu_gr.server.schemas.media import JSON, decode
from tests.server.examples import EXAMPLES, HISTORY
from tests.server.fake import FakeNames
from tests.server.oip.inputs import inputs_of, json_body, raw_body

CONFIG = ServerConfig()
each_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
MORE: dict[str, dict[str, Any]] = {  # what else a body may have, beside the example's
    "rank": {"top_k": 2, "timestamp": 300, "fields": ["title"]},
    "generate": {
        "temperature": 0.5,
        "attributes": {"genre": ["a", 3]},
        "allow_items": [1, 2],
        "exclude_seen": True,
    },
    "match": {"history": HISTORY, "deny_items": ["name", "4"]},
    "recommend": {"context": {"page": "home", "n": 1}, "sources": ["generate"], "order": "rank"},
}


def test_the_models_are_the_kinds_that_score() -> None:
    assert list(MODELS) == [
        name for name, kind in KINDS.items() if kind.scored is not Scored.NOTHING
    ]
    assert MORE.keys() == MODELS.keys()


@each_model
def test_inputs_make_the_body_of_v1(model: Model) -> None:
    body = {**(EXAMPLES[model.kind.name].body or {}), **MORE[model.kind.name]}
    inputs = inputs_of(body)
    assert model.codec.body is not None
    expected = decode(msgspec.json.encode(body), JSON, model.codec.body)
    raw, headers = raw_body(inputs)
    lengths = (None, headers["Inference-Header-Content-Length"])
    for sent, length in zip((json_body(inputs), raw), lengths, strict=True):
        made = model.body(read(sent, length, model.kind.name), None, CONFIG)
        assert (
            model.codec.parse(made, CONFIG, FakeNames()).user
            == model.codec.parse(expected, CONFIG, FakeNames()).user
        )
        assert same(
            model.codec.parse(made, CONFIG, FakeNames()),
            model.codec.parse(expected, CONFIG, FakeNames()),
        )


def same(one: Any, other: Any) -> bool:
    """Compare requests: their arrays, too."""
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, msgspec.Struct):
        return all(same(getattr(one, name), getattr(other, name)) for name in one.__struct_fields__)
    return bool(one == other)


@each_model
def test_metadata_are_what_the_model_takes(model: Model) -> None:
    """Every input of metadata is a field of the body, with its datatype and shape."""
    body = {**(EXAMPLES[model.kind.name].body or {}), **MORE[model.kind.name]}
    given = {one.name: one for one in inputs_of(body)}
    for name, one in given.items():
        assert one.datatype in model.inputs[name].datatypes, name
    for field in model.inputs.values():
        assert set(field.datatypes) <= {BYTES, *DTYPES}
        assert field.shape in ((1,), (-1,))
    needed = {name for name, field in model.inputs.items() if field.is_needed}
    assert needed == {"user_id"} | ({"candidates"} if model.kind.name == "rank" else set())


@each_model
def test_an_answer_has_outputs_of_the_metadata_alone(model: Model) -> None:
    known = {one.name: one for one in model.outputs(("click",))}
    answer = model.answer(
        EXAMPLES[model.kind.name].answer, "id", ResponseFields(FakeNames(), ("title",)), ()
    )
    for tensor in answer.outputs:
        assert known[tensor.name].datatype == tensor.datatype
        assert len(known[tensor.name].shape) == len(tensor.shape)
        assert len(tensor.values) == np.prod(tensor.shape) * (
            1 if tensor.datatype == BYTES else DTYPES[tensor.datatype].itemsize
        )
    # the examples ask for no top, and draw nothing
    skipped = {"rank": {"top", "top.names", "titles"}, "recommend": {"propensities"}}.get(
        model.kind.name, set()
    )
    assert {one.name for one in answer.outputs} == known.keys() - skipped
    assert answer.parameters["request_id"] == "id"


def test_an_answer_is_that_of_v1() -> None:
    answer = MODELS["rank"].answer(EXAMPLES["rank"].answer, "id", ResponseFields(FakeNames()), ())
    scores = answer.outputs[0]
    np.testing.assert_array_equal(
        np.frombuffer(scores.values, "<f4"), np.array([1, np.nan, 2], np.float32)
    )
    assert answer.version == "m"
    assert answer.parameters["outcome"] == "miss_full"
    assert answer.parameters["history.num_tokens"] == 2
    assert answer.parameters["stages_s.device"] == 0.002
    generated = MODELS["generate"].answer(
        EXAMPLES["generate"].answer, "id", ResponseFields(FakeNames()), ("sids", "items.names")
    )
    sids, names = generated.outputs
    assert (sids.shape, names.values) == ((2, 2), ["5", "6"])
