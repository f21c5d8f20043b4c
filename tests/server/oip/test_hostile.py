"""What is wrong with an infer is told in words that name it, over HTTP and over gRPC.

Nothing fails in the service.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from npu_gr.core.errors import NpuGrError
from npu_gr.server.config import ServerConfig
from npu_gr.server.oip.models import MODELS, MOST_TENSORS
from npu_gr.server.oip.routes import HEADER_LENGTH, read
from tests.server.examples import EXAMPLES
from tests.server.fake import FakeService, serving_fake
from tests.server.oip.inputs import Input, inputs_of, json_body, raw_body

GOOD = [Input("user_id", "BYTES", ["u"]), Input("candidates", "INT64", [1, 2, 3])]
USER = {"name": "user_id", "datatype": "BYTES", "shape": [1], "data": ["u"]}


def tensor(name: str = "candidates", **changes: Any) -> dict[str, Any]:
    return {"name": name, "datatype": "INT64", "shape": [3], "data": [1, 2, 3], **changes}


class Bad(NamedTuple):
    """A body, and what is said of it."""

    body: Any  # bytes, or what becomes JSON
    status: int
    says: str
    headers: Mapping[str, str] = MappingProxyType({})
    path: str = "/v2/models/rank/infer"


def infer(*inputs: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"inputs": [USER, *inputs], **more}


BAD = {
    "no JSON": Bad(b"{", 400, "body: Input data was truncated"),
    "nothing": Bad(b"", 400, "body: Input data was truncated"),
    "a list": Bad([], 422, "Expected `object`"),
    "no inputs": Bad({}, 422, "missing required field `inputs`"),
    "inputs are text": Bad({"inputs": "x"}, 422, "inputs: Expected `array`"),
    "another field": Bad(
        infer(tensor(), input=1), 422, "unknown field input; did you mean inputs?"
    ),
    "two dimensions": Bad(infer(tensor(shape=[1, 3])), 422, "candidates: shape [1, 3]; takes [-1]"),
    "no dimension": Bad(infer(tensor(shape=[])), 422, "candidates: shape []; takes [-1]"),
    "below zero": Bad(infer(tensor(shape=[-1])), 422, "candidates: shape [-1]; takes [-1]"),
    "shape and data": Bad(
        infer(tensor(shape=[2])), 422, "candidates: 3 elements, but its shape has 2"
    ),
    "shape and less data": Bad(
        infer(tensor(shape=[4])), 422, "candidates: 3 elements, but its shape has 4"
    ),
    "two users": Bad(
        {"inputs": [{**USER, "shape": [2], "data": ["a", "b"]}]},
        422,
        "user_id: shape [2]; takes [1]",
    ),
    "datatype": Bad(
        infer(tensor(datatype="FP32")), 422, "candidates: datatype FP32; takes INT64 or BYTES"
    ),
    "no datatype": Bad(infer(tensor(datatype="X" * 500)), 422, "candidates: datatype XXX"),
    "too many": Bad(
        infer(tensor(shape=[10_001], data=[1] * 10_001)), 413, "10001 entries, the limit is 10000"
    ),
    "huge shape": Bad(
        infer(tensor(shape=[2**40])), 413, "1099511627776 entries, the limit is 10000"
    ),
    "text in numbers": Bad(
        infer(tensor(data=["1", 2, 3])), 422, "candidates: data: Expected `int`, got `str`"
    ),
    "half a number": Bad(
        infer(tensor(data=[1.5, 2, 3])), 422, "candidates: data: Expected `int`, got `float`"
    ),
    "over 63 bits": Bad(infer(tensor(data=[2**64, 2, 3])), 422, "candidates:"),
    "negative": Bad(infer(tensor(data=[-1, 2, 3])), 422, "candidates: -1 at index 0 is negative"),
    "not finite": Bad(
        infer(tensor("temperature", datatype="FP64", shape=[1], data=[1e999])),
        400,
        "body: JSON is malformed",
    ),
    "no data": Bad(
        infer({"name": "candidates", "datatype": "INT64", "shape": [3]}),
        422,
        "neither data nor binary",
    ),
    "unknown input": Bad(
        infer(tensor("candidats")), 422, "unknown input candidats; did you mean candidates?"
    ),
    "twice": Bad(infer(tensor(), tensor()), 422, "input candidates: given twice"),
    "input and parameter": Bad(
        infer(tensor(), parameters={"user_id": "u"}), 422, "parameter user_id: given twice"
    ),
    "column as parameter": Bad(
        infer(parameters={"candidates": "1"}), 422, "parameter candidates: must be sent as an input"
    ),
    "unknown parameter": Bad(
        infer(tensor(), parameters={"sequence_id": 7}), 422, "unknown parameter sequence_id"
    ),
    "parameter's type": Bad(infer(tensor(), parameters={"top_k": "3"}), 422, "top_k: Expected"),
    "parameter is a list": Bad(infer(tensor(), parameters={"top_k": [3]}), 422, "parameters"),
    "timeout": Bad(
        infer(tensor(), parameters={"timeout": -5}),
        422,
        "parameter timeout: -5; takes whole microseconds",
    ),
    "time is over": Bad(
        infer(tensor(), parameters={"timeout": 1}), 504, "took the whole time limit"
    ),
    "missing input": Bad(infer(), 422, "missing required field `candidates`"),
    "shared memory": Bad(
        infer(tensor(parameters={"shared_memory_region": "x"})),
        422,
        "unknown field `shared_memory_region`",
    ),
    "unknown output": Bad(
        infer(tensor(), outputs=[{"name": "score"}]), 422, "outputs: unknown output score"
    ),
    "output is not there": Bad(
        infer(tensor(), outputs=[{"name": "top"}]), 422, "outputs: top: the answer to this"
    ),
    "many tensors": Bad(
        {"inputs": [tensor()] * (MOST_TENSORS + 1)}, 413, "inputs: 65 tensors, the limit is 64"
    ),
    "long parameters": Bad(
        infer(tensor(), parameters={"base": "x" * 70_000}), 413, "bytes outside of its inputs"
    ),
    "long names": Bad(infer(tensor("x" * 70_000)), 413, "inputs: 70"),
    "header length over": Bad(
        json_body(GOOD), 400, f"{HEADER_LENGTH}: 99999", {HEADER_LENGTH: "99999"}
    ),
    "header length is no number": Bad(
        json_body(GOOD), 400, f"{HEADER_LENGTH}: expected", {HEADER_LENGTH: "-1"}
    ),
    "header length in the middle": Bad(
        json_body(GOOD), 400, "body: Input data was truncated", {HEADER_LENGTH: "20"}
    ),
    "bytes behind": Bad(json_body(GOOD) + b"xyz", 400, "body: ", {}),
    "another model": Bad(infer(tensor()), 404, "Not Found", path="/v2/models/nope/infer"),
    "two models": Bad(
        infer(tensor(), model_name="match"),
        422,
        "model_name: 'match' differs from the model of the URL, rank",
    ),
    "another version": Bad(
        infer(tensor()),
        404,
        "version: '7' of rank is not served; served: 1",
        path="/v2/models/rank/versions/7/infer",
    ),
    "two versions": Bad(
        infer(tensor(), parameters={"model_version": "2"}),
        422,
        "model_version: differs from the version of the address, '1'",
        path="/v2/models/rank/versions/1/infer",
    ),
    "name's length": Bad(infer(tensor(datatype="BYTES", data=["", "a", "b"])), 422, "candidates"),
    "name's code": Bad(
        b'{"inputs":[{"name":"user_id","datatype":"BYTES","shape":[1],"data":["\xff"]}]}',
        400,
        "parsed",
    ),
}


def raw(name: str, data: bytes, num: int = 1, datatype: str = "BYTES") -> Bad:
    """A body whose second tensor has these bytes."""
    listed = [
        USER,
        {
            "name": name,
            "datatype": datatype,
            "shape": [num],
            "parameters": {"binary_data_size": len(data)},
        },
    ]
    head = json.dumps({"inputs": listed}).encode()
    return Bad(head + data, 422, "", {HEADER_LENGTH: str(len(head))})


RAW = {
    "a length that is cut": raw("candidates", b"\1\0")._replace(
        says="its bytes end before element 0 of 1"
    ),
    "a length beyond": raw("candidates", b"\xff\xff\xff\xffx")._replace(
        says="element 0 has 4294967295 bytes"
    ),
    "bytes behind": raw("candidates", b"\1\0\0\0ab")._replace(says="1 bytes after its 1 elements"),
    "not UTF-8": raw("candidates", b"\1\0\0\0\xff")._replace(
        says="candidates: element 0 is not UTF-8"
    ),
    "half a number": raw("candidates", b"1234567", datatype="INT64")._replace(
        says="7 bytes, 1 elements of INT64 have 8"
    ),
    "not a number": raw("temperature", np.float64("nan").tobytes(), datatype="FP64")._replace(
        says="temperature: nan is not a finite number", path="/v2/models/generate/infer"
    ),
    "without end": raw("temperature", np.float32("inf").tobytes(), datatype="FP32")._replace(
        says="temperature: inf is not a finite number", path="/v2/models/generate/infer"
    ),
}


@pytest.fixture
async def client() -> AsyncIterator[Any]:
    service = FakeService({name: one.answer for name, one in EXAMPLES.items()})
    async with serving_fake(service) as (made, _):
        yield made


async def test_every_fault_is_told_in_words(client: Any) -> None:
    for name, bad in {**BAD, **RAW}.items():
        body = bad.body if isinstance(bad.body, bytes) else json.dumps(bad.body).encode()
        async with client.post(bad.path, data=body, headers=bad.headers) as response:
            told = await response.json(content_type=None)
        assert (response.status, bad.says in told["detail"]) == (bad.status, True), (name, told)
        assert told["error"] == told["detail"], name  # where clients of the protocol look
        assert len(told["detail"]) < 300, name


async def test_what_is_right_is_served(client: Any) -> None:
    """So that none of the faults is one of the test's."""
    body, headers = raw_body(GOOD)
    for data, more in ((json_body(GOOD), {}), (body, headers)):
        for path in ("/v2/models/rank/infer", "/v2/models/rank/versions/1/infer"):
            async with client.post(path, data=data, headers=more) as response:
                assert response.status == 200, await response.text()


def test_no_body_is_more_than_a_fault_of_the_caller() -> None:
    """Random damage to good bodies: read, made a body and parsed, or an error of ours."""
    config = ServerConfig()
    draw = random.Random(0)
    read_whole = 0
    statuses = set()
    for index in range(4000):
        name = draw.choice(list(MODELS))
        inputs = inputs_of(EXAMPLES[name].body or {})
        body, headers = raw_body(inputs) if index % 2 else (json_body(inputs), {})
        broken = bytearray(body)
        for _ in range(draw.choice((0, 1, 1, 2, 8))):
            at = draw.randrange(len(broken))
            match draw.randrange(4):
                case 0:
                    broken[at] = draw.randrange(256)
                case 1:
                    del broken[at : at + draw.choice((1, 4, 40))]
                case 2:
                    broken[at:at] = draw.choice(
                        (b"9", b"-", b'"', b"{", b"[", b"\xff", b"1e999", b"\0" * 5)
                    )
                case _:
                    broken[at : at + 8] = draw.randbytes(8)
            broken = broken or bytearray(b" ")
        try:
            asked = read(bytes(broken), headers.get(HEADER_LENGTH), name)
            MODELS[name].body(asked, draw.choice((None, "1")), config)
            read_whole += 1
        except NpuGrError as error:
            statuses.add(error.status)
    assert 300 < read_whole < 3700
    assert statuses == {400, 422}
