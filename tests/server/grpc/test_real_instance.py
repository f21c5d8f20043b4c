"""One real instance gives the same answer every way, bit for bit.

The ways: /v1 and the Open Inference Protocol, over HTTP and gRPC.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import numpy as np

from tests.ports import free_port
from tests.server.grpc.rig import INFER, call
from tests.server.oip.inputs import infer_message, inputs_of, raw_body
from tests.server.test_match_over_http import section as match_section
from tests.server.test_recommend_over_http import HISTORY
from tests.server.test_recommend_over_http import section as cascade_section
from tests.serving import FIRST_ID, serving
from tests.vector_search.vectors import KNOWN

BODIES: dict[str, dict[str, Any]] = {
    "rank": {
        "user_id": "u",
        "history": HISTORY,
        "candidates": [*range(FIRST_ID, FIRST_ID + 20), 7],
        "top_k": 3,
    },
    "generate": {"user_id": "u", "history": HISTORY, "num_items": 5},
    "match": {"user_id": KNOWN, "num_items": 5},
    "recommend": {"user_id": "u", "history": HISTORY, "num_items": 5, "timestamp": 1_700_000_000},
}


def tensor(values: bytes, datatype: str) -> list[Any]:
    dtype = {"INT64": "<i8", "FP32": "<f4", "INT32": "<i4"}[datatype]
    return [
        None if isinstance(one, float) and np.isnan(one) else one
        for one in np.frombuffer(values, dtype).tolist()
    ]


async def test_all_ways_are_one(tmp_path: Path) -> None:
    port = free_port()
    sections = cascade_section(tmp_path) | {
        "match": match_section(tmp_path),
        "server": {"grpc_port": port},
    }
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    async with serving(tmp_path, **sections) as (client, _), channel:
        for name, body in BODIES.items():
            in_columns = {"format": "columns"} if name == "recommend" else {}
            async with client.post(f"/v1/{name}", json=body | in_columns) as response:
                plain = await response.json()
                assert response.status == 200, plain
            scores = plain["scores"] if name != "rank" else plain["scores"]["click"]
            output = "scores" if name != "rank" else "scores.click"
            items = plain["items"] if name != "rank" else plain["top"]

            data, headers = raw_body(inputs_of(body))
            async with client.post(
                f"/v2/models/{name}/infer", data=data, headers=headers
            ) as response:
                told = await response.json()
                assert response.status == 200, told
            found = {one["name"]: one["data"] for one in told["outputs"]}
            assert found[output] == scores
            assert found["items" if name != "rank" else "top"] == items

            inferred = await call(
                channel,
                INFER,
                infer_message(name, inputs_of(body)),
                "inference.ModelInferResponse",
            )
            raws = dict(
                zip(
                    [one.name for one in inferred.outputs],
                    inferred.raw_output_contents,
                    strict=True,
                )
            )
            assert tensor(raws[output], "FP32") == scores
