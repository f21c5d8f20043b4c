"""Tensors of requests, for tests: any body of /v1 as inputs in JSON, raw bytes or protobuf."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np

from npu_gr.server.grpc.inference import message
from npu_gr.server.oip.models import DTYPES, pack


class Input(NamedTuple):
    """One tensor."""

    name: str
    datatype: str
    values: list[Any]

    @property
    def raw(self) -> bytes:
        if self.datatype == "BYTES":
            return pack([str(one) for one in self.values])
        return np.array(self.values, DTYPES[self.datatype]).tobytes()


def inputs_of(body: dict[str, Any], prefix: str = "") -> list[Input]:
    """Every value of a body of /v1 as an input; what is neither plain nor a list is JSON."""
    found: list[Input] = []
    for name, value in body.items():
        if name in ("history", "events"):
            found += inputs_of(value, f"{name}.")
            continue
        values = (
            value
            if isinstance(value, list)
            else [json.dumps(value) if isinstance(value, dict) else value]
        )
        if name == "actions":
            values = [str(one) for one in values]
        if len(set(map(type, values))) > 1:  # numbers and texts: a number is its text
            values = [str(one) for one in values]
        datatype = {bool: "BOOL", int: "INT64", float: "FP64", str: "BYTES"}[type(values[0])]
        found.append(Input(prefix + name, datatype, values))
    return found


def json_body(inputs: list[Input], **more: Any) -> bytes:
    """The JSON of an infer."""
    listed = [
        {"name": one.name, "datatype": one.datatype, "shape": [len(one.values)], "data": one.values}
        for one in inputs
    ]
    return json.dumps({"inputs": listed, **more}).encode()


def raw_body(inputs: list[Input], **more: Any) -> tuple[bytes, dict[str, str]]:
    """An infer whose tensors are raw bytes behind the JSON, and its headers."""
    listed = [
        {
            "name": one.name,
            "datatype": one.datatype,
            "shape": [len(one.values)],
            "parameters": {"binary_data_size": len(one.raw)},
        }
        for one in inputs
    ]
    head = json.dumps({"inputs": listed, **more}).encode()
    return head + b"".join(one.raw for one in inputs), {
        "Inference-Header-Content-Length": str(len(head))
    }


def infer_message(model: str, inputs: list[Input], *, is_raw: bool = True, **more: Any) -> Any:
    """A ModelInferRequest."""
    tensors = []
    for one in inputs:
        tensor: dict[str, Any] = {
            "name": one.name,
            "datatype": one.datatype,
            "shape": [len(one.values)],
        }
        if not is_raw:
            field = {"BYTES": "bytes_contents", "BOOL": "bool_contents", "FP64": "fp64_contents"}
            values = (
                [str(value).encode() for value in one.values]
                if one.datatype == "BYTES"
                else one.values
            )
            tensor["contents"] = {field.get(one.datatype, "int64_contents"): values}
        tensors.append(tensor)
    raws = [one.raw for one in inputs] if is_raw else []
    return message("inference.ModelInferRequest")(
        model_name=model, inputs=tensors, raw_input_contents=raws, **more
    )
