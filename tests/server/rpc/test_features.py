"""Features in a message give the scores of /v1: values as lists of plain ones, columns raw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import numpy as np

from npu_gr.server.rpc.messages import OURS, message
from tests.features_of import every_feature
from tests.server.rpc.rig import call
from tests.server.test_features_over_http import CANDIDATES, HISTORY, REQUEST, SURFACE, USER, body, in_raw
from tests.serving import free_port, serving, write_checkpoint


def values(row: dict[str, Any]) -> dict[str, Any]:
    def value(one: Any) -> dict[str, Any]:
        kind = "text_value" if isinstance(one, str) else "int_value" if isinstance(one, int) else "number_value"
        return {kind: one}

    return {name: {"values": [value(one) for one in (cell if isinstance(cell, list) else [cell])]}
            for name, cell in row.items()}  # fmt: skip


async def test_a_message_gives_the_scores_of_v1(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", features=every_feature())
    port = free_port()
    cross: dict[str, list[Any]] = {
        "country": ["fr", None, "xx"],
        "tags": [["a"], [], ["b", "c"]],
        "spent": [1.5, None, 0.25],
    }
    asked = message("npu_gr.v1.RankRequest")(
        user_id="u",
        candidates={"ids": CANDIDATES},
        timestamp=1_700_000_000,
        history={
            "items": {"ids": HISTORY["items"]},
            "actions": {"names": [str(one) for one in HISTORY["actions"]]},
            "timestamps": {"seconds": HISTORY["timestamps"]},
            "features": in_raw(SURFACE),
        },
        features={"user": values(USER), "request": values(REQUEST), "cross": in_raw(cross)},
    )
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    async with serving(tmp_path, server={"grpc_port": port}) as (client, _), channel:
        want = await (await client.post("/v1/rank", json=body(cross=cross))).json()
        ours = await call(channel, f"/{OURS}/Rank", asked, "npu_gr.v1.RankAnswer")
        assert np.array_equal(np.array(ours.scores["click"].values, "<f4"), np.array(want["scores"]["click"], "<f4"))
        assert list(ours.missing_features) == want["missing_features"]
