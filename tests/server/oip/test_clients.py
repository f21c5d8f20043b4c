"""Triton's own clients ask for everything that a client of the Open Inference Protocol asks for."""

from __future__ import annotations

import asyncio
import warnings
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from npu_gr.server.oip.models import MODELS
from tests.server.examples import HISTORY as EXAMPLE_HISTORY
from tests.server.grpc.rig import Rig, serving_rpc

with warnings.catch_warnings():  # its generated code is one version of protobuf older
    warnings.simplefilter("ignore")
    import tritonclient.grpc as triton_grpc

HISTORY: dict[str, Any] = EXAMPLE_HISTORY
ACTIONS = [str(one).encode() for one in HISTORY["actions"]]


def tensors(made: Any) -> list[Any]:
    """Inputs of a rank, in the words of one of the two clients."""
    columns = {
        "user_id": np.array([b"somebody"], object),
        "history.items": np.array(HISTORY["items"]),
        "history.actions": np.array(ACTIONS, object),
        "history.timestamps": np.array(HISTORY["timestamps"]),
        "candidates": np.array([b"1", b"2", b"name"], object),
    }
    listed = []
    for name, column in columns.items():
        one = made.InferInput(
            name, list(column.shape), "BYTES" if column.dtype == object else "INT64"
        )
        one.set_data_from_numpy(column)
        listed.append(one)
    return listed


def ask(client: Any, made: Any, rig: Rig) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("rank")
    assert client.is_model_ready("rank", "1")
    result = client.infer(
        "rank",
        tensors(made),
        request_id="7",
        parameters={"tenant": "t", "top_k": 2},
        timeout=3_000_000,
    )
    np.testing.assert_array_equal(
        result.as_numpy("scores.click"), np.array([1, np.nan, 2], np.float32)
    )
    name, request, budget_s = rig.service.served[-1]
    assert (name, request.user, request.top_k) == ("rank", ("t", "somebody"), 2)
    assert request.history.events.items.tolist() == HISTORY["items"]
    assert request.history.events.actions.tolist() == [0, 1]
    assert request.candidates[:2].tolist() == [1, 2]
    assert request.candidates[2] > 2**62  # a name
    assert 1.0 < budget_s < 3.0
    wanted = [made.InferRequestedOutput("sids"), made.InferRequestedOutput("items.names")]
    user = tensors(made)[:1]
    for outputs in (wanted, None):
        generated = client.infer("generate", user, outputs=outputs, model_version="1")
        assert generated.as_numpy("sids").tolist() == [[0, 1], [1, 0]]
        names = [
            one.decode() if isinstance(one, bytes) else one
            for one in generated.as_numpy("items.names")
        ]
        assert names == ["5", "6"]
        assert (generated.as_numpy("items") is None) == (outputs is not None)
    assert client.infer("match", user).as_numpy("items").tolist() == [9]
    assert client.infer("recommend", user).as_numpy("origins").tolist() == [b"generate"]
    with pytest.raises(InferenceServerException, match="unknown input user; did you mean user_id"):
        client.infer(
            "rank",
            [made.InferInput("user", [1], "BYTES").set_data_from_numpy(np.array([b"u"], object))],
        )


async def test_triton_over_http() -> None:
    async with serving_rpc() as rig:

        def run() -> None:
            with triton_http.InferenceServerClient(f"127.0.0.1:{rig.http.port}") as client:
                ask(client, triton_http, rig)
                assert client.get_server_metadata()["extensions"] == [
                    "binary_tensor_data",
                    "statistics",
                ]
                for name, model in MODELS.items():
                    shown = client.get_model_metadata(name)
                    assert [one["name"] for one in shown["inputs"]] == list(model.inputs)
                assert not client.is_model_ready("nope")
                (counted,) = client.get_inference_statistics("rank")["model_stats"]
                assert counted["inference_count"] == 1
                assert counted["inference_stats"]["success"]["ns"] > 0
                assert counted["inference_stats"]["fail"]["count"] == 1
                assert len(client.get_inference_statistics()["model_stats"]) == 4

        await asyncio.to_thread(run)


async def test_triton_over_grpc() -> None:
    async with serving_rpc() as rig:

        def run() -> None:
            with triton_grpc.InferenceServerClient(rig.address) as client:
                ask(client, triton_grpc, rig)
                assert client.get_server_metadata(as_json=True)["name"] == "npu_gr"
                for name, model in MODELS.items():
                    shown = client.get_model_metadata(name, as_json=True)
                    assert [one["name"] for one in shown["inputs"]] == list(model.inputs)
                    assert [one["name"] for one in shown["outputs"]] == [
                        one.name for one in model.outputs(("click",))
                    ]
                with pytest.raises(
                    InferenceServerException, match="'nope' is not served; served: rank, generate"
                ):
                    client.is_model_ready("nope")
                (counted,) = client.get_inference_statistics("rank", as_json=True)["model_stats"]
                assert counted["inference_count"] == "1"
                assert int(counted["inference_stats"]["success"]["ns"]) > 0
                assert len(client.get_inference_statistics(as_json=True)["model_stats"]) == 4

        await asyncio.to_thread(run)


async def test_triton_in_an_event_loop_in_json() -> None:
    async with serving_rpc() as rig:
        client = triton_aio.InferenceServerClient(f"127.0.0.1:{rig.http.port}")
        user = triton_http.InferInput("user_id", [1], "BYTES")
        user.set_data_from_numpy(np.array([b"u"], object), binary_data=False)
        candidates = triton_http.InferInput("candidates", [3], "INT64")
        candidates.set_data_from_numpy(np.array([1, 2, 3]), binary_data=False)
        wanted = triton_http.InferRequestedOutput("scores.click", binary_data=False)
        result = await client.infer("rank", [user, candidates], outputs=[wanted])
        np.testing.assert_array_equal(
            result.as_numpy("scores.click"), np.array([1, np.nan, 2], np.float32)
        )
        await client.close()


async def test_a_stream_of_triton_goes_on_after_an_error() -> None:
    async with serving_rpc() as rig:

        def run() -> list[Any]:
            answers: list[Any] = []
            with triton_grpc.InferenceServerClient(rig.address) as client:
                client.start_stream(lambda result, error: answers.append(error or result))
                for name in ("generate", "nope", "generate"):
                    client.async_stream_infer(name, tensors(triton_grpc)[:1], request_id=name)
                client.stop_stream()
            return answers

        first, second, third = await asyncio.to_thread(run)
        assert first.as_numpy("items").tolist() == third.as_numpy("items").tolist() == [5, 6]
        assert "'nope' is not served" in str(second)
        assert (
            rig.count(
                "requests_total",
                route="/inference.GRPCInferenceService/ModelStreamInfer",
                code="404",
            )
            == 1
        )
