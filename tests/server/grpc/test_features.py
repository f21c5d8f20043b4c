"""Features give the same bits as under /v1 as JSON in an infer."""

from __future__ import annotations

import json
from pathlib import Path

import grpc

from tests.features_of import every_feature
from tests.ports import free_port
from tests.server.grpc.rig import INFER, call
from tests.server.grpc.test_real_instance import tensor
from tests.server.oip.inputs import Input, infer_message, inputs_of
from tests.server.test_features_over_http import CROSS, REQUEST, SURFACE, USER, body
from tests.serving import serving, write_checkpoint


async def test_features_are_those_of_v1(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", features=every_feature())
    port = free_port()
    whole = body()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    async with serving(tmp_path, server={"grpc_port": port}) as (client, _), channel:
        async with client.post("/v1/rank", json=whole) as response:
            plain = await response.json()
            assert response.status == 200, plain
        async with client.post("/v1/rank", json={**whole, "features": {}}) as response:
            # features are seen in the scores
            assert (await response.json())["scores"] != plain["scores"]

        bare = {name: one for name, one in whole.items() if name != "features"}
        bare["history"] = {
            name: one for name, one in whole["history"].items() if name != "features"
        }
        inputs = [
            *inputs_of(bare),
            *(
                Input(f"features.{of}", "BYTES", [json.dumps(row)])
                for of, row in (("user", USER), ("request", REQUEST), ("cross", CROSS))
            ),
            Input("history.features", "BYTES", [json.dumps(SURFACE)]),
        ]
        inferred = await call(
            channel, INFER, infer_message("rank", inputs), "inference.ModelInferResponse"
        )
        names = [one.name for one in inferred.outputs]
        raws = dict(zip(names, inferred.raw_output_contents, strict=True))
        for task, scores in plain["scores"].items():
            assert tensor(raws[f"scores.{task}"], "FP32") == scores
