"""Features give the same bits as under /v1, as JSON in an infer and as maps of our own messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from npu_gr.server.rpc.messages import INFERENCE, OURS, message
from tests.features_of import every_feature
from tests.server.oip.inputs import Input, infer_message, inputs_of
from tests.server.rpc.rig import call
from tests.server.rpc.test_real_instance import as_message, tensor
from tests.server.test_features_over_http import CROSS, REQUEST, SURFACE, USER, body, in_raw
from tests.serving import free_port, serving, write_checkpoint


def cells(row: dict[str, Any]) -> dict[str, Any]:
    def value(one: Any) -> dict[str, Any]:
        return {"text_value": one} if isinstance(one, str) else {"number_value": one}

    return {name: {"values": list(map(value, one if isinstance(one, list) else [one]))} for name, one in row.items()}


def columns(table: dict[str, list[Any]]) -> dict[str, Any]:
    """Numbers and names where a row has one, raw hashes where it has several."""
    raws = in_raw(table)
    made: dict[str, Any] = {name: {"raw": raw} for name, raw in raws.items()}
    if "country" in table:
        made["country"] = {"names": [one or "" for one in table["country"]]}
    made["spent"] = {"numbers": [np.nan if one is None else one for one in table["spent"]]}
    return made


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
            assert (await response.json())["scores"] != plain["scores"]  # features are seen in the scores

        bare = {name: one for name, one in whole.items() if name != "features"}
        bare["history"] = {name: one for name, one in whole["history"].items() if name != "features"}
        inputs = [
            *inputs_of(bare),
            *(
                Input(f"features.{of}", "BYTES", [json.dumps(row)])
                for of, row in (("user", USER), ("request", REQUEST), ("cross", CROSS))
            ),
            Input("history.features", "BYTES", [json.dumps(SURFACE)]),
        ]
        inferred = await call(
            channel, f"/{INFERENCE}/ModelInfer", infer_message("rank", inputs), "inference.ModelInferResponse"
        )
        names = [one.name for one in inferred.outputs]
        raws = dict(zip(names, inferred.raw_output_contents, strict=True))
        for task, scores in plain["scores"].items():
            assert tensor(raws[f"scores.{task}"], "FP32") == scores

        asked = as_message(bare)
        asked["history"]["features"] = columns(SURFACE)
        asked["features"] = {"user": cells(USER), "request": cells(REQUEST), "cross": columns(CROSS)}
        made = message("npu_gr.v1.RankRequest")(**asked)
        ours = await call(channel, f"/{OURS}/Rank", made, "npu_gr.v1.RankAnswer")
        for task, scores in plain["scores"].items():
            assert tensor(np.array(ours.scores[task].values, np.float32).tobytes(), "FP32") == scores
        assert list(ours.missing_features) == plain["missing_features"]
        made.features.cross["spent"].names.append("x")
        with pytest.raises(grpc.aio.AioRpcError, match=r"features.cross.spent: holds numbers, names or raw ones"):
            await call(channel, f"/{OURS}/Rank", made, "npu_gr.v1.RankAnswer")
