"""KServe's own clients, in an environment of their own.

They want older versions of protobuf and pandas than ours.

Needs the package index: `python -m pytest -m bare tests/server/grpc/test_kserve.py`.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import venv
from pathlib import Path

import pytest

from tests.server.examples import EXAMPLES
from tests.server.grpc.rig import serving_rpc

pytestmark = pytest.mark.bare
SCRIPT = """
import asyncio
import sys

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

http, rpc = sys.argv[1:]


def request(is_raw):
    inputs = []
    for name, column, datatype in (
        ("user_id", np.array([b"somebody"], object), "BYTES"),
        ("candidates", np.array([1, 2, 3]), "INT64"),
    ):
        made = InferInput(name, list(column.shape), datatype)
        made.set_data_from_numpy(column, binary_data=is_raw)
        inputs.append(made)
    return InferRequest("rank", inputs, request_id="7", parameters={"tenant": "t"})


def check(answer):
    assert (answer.model_name, answer.id) == ("rank", "7")
    expected = np.array([1, np.nan, 2], np.float32)
    np.testing.assert_array_equal(answer.outputs[0].as_numpy(), expected)


async def main():
    rest = InferenceRESTClient(RESTConfig(protocol="v2"))
    assert await rest.is_server_live(http)
    assert await rest.is_server_ready(http)
    assert await rest.is_model_ready(http, "rank")
    for is_raw in (True, False):
        check(await rest.infer(http, request(is_raw), model_name="rank"))
    await rest.close()
    async with InferenceGRPCClient(rpc) as grpc:
        assert await grpc.is_server_live()
        assert await grpc.is_server_ready()
        assert await grpc.is_model_ready("rank")
        for is_raw in (True, False):
            check(await grpc.infer(request(is_raw)))


asyncio.run(main())
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has KServe's clients."""
    folder = tmp_path_factory.mktemp("kserve")
    venv.create(folder, with_pip=True)
    subprocess.run(
        [folder / "bin" / "pip", "install", "--quiet", "kserve>=0.15"], check=True, timeout=900
    )
    return folder / "bin" / "python"


async def test_kserve_over_http_and_grpc(python: Path, tmp_path: Path) -> None:
    (tmp_path / "ask.py").write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    async with serving_rpc() as rig:
        url = f"http://127.0.0.1:{rig.http.port}"
        command = [str(python), str(tmp_path / "ask.py"), url, rig.address]

        def run() -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=300
            )

        done = await asyncio.to_thread(run)
        assert done.returncode == 0, done.stderr
        requests = [request for _, request, _ in rig.service.served]
    assert len(requests) == 4
    assert {request.user for request in requests} == {EXAMPLES["rank"].user}
    assert {tuple(request.candidates) for request in requests} == {(1, 2, 3)}
