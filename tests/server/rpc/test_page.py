"""The examples of docs/protocols.md run as they stand there, in their order, against a real instance."""

from __future__ import annotations

import asyncio
import re
import warnings
from pathlib import Path

import pytest
from grpc_tools import protoc

from tests.client.shop import shop
from tests.serving import free_port
from tests.sources import ROOT

PAGE = (ROOT / "docs" / "protocols.md").read_text()


async def test_the_examples_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"```(python|bash)\n(.*?)```", PAGE, re.S)
    assert [kind for kind, _ in blocks] == ["python", "python", "python", "bash", "python"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    port = free_port()
    async with shop(tmp_path, grpc_port=port) as (url, _):
        names: dict[str, object] = {}

        def run(kind: str, code: str) -> None:
            if kind == "bash":  # without two more processes
                first, second = code.strip().splitlines()
                assert first == "npu-gr proto > npu_gr.proto"
                Path("npu_gr.proto").write_text((ROOT / "npu_gr/server/rpc/protos/npu_gr.proto").read_text())
                assert protoc.main(second.removeprefix("python -m ").split()) == 0
                return
            code = code.replace("localhost:8080", url.removeprefix("http://").rstrip("/"))
            code = code.replace("localhost:8083", f"127.0.0.1:{port}")
            code = code.replace("timeout=0.3", "timeout=30").replace("300_000", "30_000_000")  # a busy machine
            with warnings.catch_warnings():  # generated code is one version of protobuf older
                warnings.filterwarnings("ignore", "Protobuf gencode")
                exec(compile(code, "docs/protocols.md", "exec"), names)  # noqa: S102  (ours)

        def run_all() -> None:  # in one thread, as gevent wants it
            try:
                for kind, code in blocks:
                    run(kind, code)
            finally:
                for client in ("client", "over_grpc"):
                    names[client].close()  # type: ignore[attr-defined]

        await asyncio.to_thread(run_all)
    written = capsys.readouterr().out
    assert "['scores.click', 'scores.like', 'top', 'top.names', 'titles', 'missing_features']" in written
    assert re.search(r"\[ ?-?[\d.]+ +-?[\d.]+ +nan\] \[b'(SKU-0005-C|30)'", written), written
    assert re.search(r"\n(preinfer|skip_\w+)\nmiss_full \[", written), written
    assert "['answer', 'answer']" in written
