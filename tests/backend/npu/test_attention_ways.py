"""The doctor lists the ways to run a ranker's attention on an NPU; the warm-up chooses one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from npu_gr.backend import checks
from npu_gr.backend.calls import BiasTables, HstuCall, HstuShape
from npu_gr.backend.choose import choose
from npu_gr.backend.names import AttentionMode
from npu_gr.backend.npu import device as npu_device
from npu_gr.backend.npu import ops as ascend_ops
from npu_gr.backend.npu.backend import NPUBackend
from npu_gr.backend.torch_ops import TorchOps
from npu_gr.core.errors import ConfigError
from tests.backend.npu.fake_device import FakeRuntime
from tests.models import events
from tests.serving import FIRST_ID, columns, make_config, serving, write_checkpoint

FITS = HstuShape(2, 16, 16, torch.float32, torch.float32, 64, 32, is_joined=False, is_biased=True)


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRuntime]:
    """As if a library were loaded: the operators' definitions answer for it."""
    monkeypatch.setattr(ascend_ops, "load_library", lambda _path: None)
    made = FakeRuntime()
    with made.recording():
        yield made


def test_a_ranker_whose_heads_the_kernels_reject_does_not_use_them(
    npu: FakeRuntime,
) -> None:
    backend = NPUBackend(npu=npu.as_npu())
    assert backend.hstu_ways(FITS) == ("ascend_c", "torch")
    for other in (
        {"qk_dim": 12},  # no whole number of 32 bytes
        {"v_dim": 20},
        {"dtype": torch.float64, "kept_dtype": torch.float64},
        {"kept_dtype": torch.bfloat16},
        {"norm_group": 2048},
        {"page_tokens": 4096},
    ):
        assert backend.hstu_ways(FITS._replace(**other)) == ("torch",), other
    assert backend.hstu_ways(FITS._replace(has_plain_times=False)) == ("torch",)
    assert NPUBackend("off", npu.as_npu()).hstu_ways(FITS) == ("torch",)


def test_a_way_shares_all_but_the_attention(npu: FakeRuntime) -> None:
    backend = NPUBackend(npu=npu.as_npu())
    plain = backend.running("torch")
    assert (backend.ops["hstu_attention"], plain.ops["hstu_attention"]) == ("ascend_c", "torch")
    assert (backend._passes is None, plain._passes is None) == (False, True)
    assert plain._graphs is backend._graphs
    assert plain.ops["beam_topk"] == "ascend_c"


def test_triton_is_there_where_it_is_asked_for_alone(
    npu: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "npu_gr.backend.triton.hstu_ascend", None)
    with pytest.raises(
        ConfigError, match="attention: triton needs triton-ascend, which brings triton"
    ):
        NPUBackend(npu=npu.as_npu(), attention="triton")
    attended: list[str] = []
    factor = 1.01

    class Attention:
        def takes_numbers(self, dtype: torch.dtype) -> bool:
            return dtype == torch.float32

        def takes(self, q: torch.Tensor, slabs: Any) -> bool:
            return self.takes_numbers(q.dtype)

        def causal(self, call: HstuCall, slabs: Any) -> torch.Tensor:
            attended.append("causal")
            return TorchOps().hstu_causal(call) * factor

        def targets(self, call: HstuCall, slabs: Any) -> torch.Tensor:
            attended.append("targets")
            return TorchOps().hstu_targets(call) * factor

    monkeypatch.setattr(checks, "version", lambda _package: "3.2.0")
    monkeypatch.setattr(npu_device, "find", lambda: npu.as_npu())
    stand_in = SimpleNamespace(NpuAttention=Attention)
    monkeypatch.setitem(sys.modules, "npu_gr.backend.triton.hstu_ascend", stand_in)
    with pytest.raises(
        ConfigError,
        match=r"something else: history rows in torch\.float32 differ "
        r"by 1\.0e-02",
    ):
        NPUBackend(npu=npu.as_npu(), attention="triton")
    (finding,) = (
        each for each in checks.device_findings("npu")["npu"] if each.name == "triton-ascend"
    )
    assert (finding.state, finding.remedy) == (
        checks.FindingState.BROKEN,
        "leave `attention: triton` out",
    )
    factor = 1.0
    (finding,) = (
        each for each in checks.device_findings("npu")["npu"] if each.name == "triton-ascend"
    )
    assert (finding.state, finding.found) == (
        checks.FindingState.OK,
        "3.2.0: the kernel computes as defined in fp32 and bf16",
    )
    backend = NPUBackend(npu=npu.as_npu(), attention="triton")
    attended.clear()
    fell: list[str] = []
    backend.on_fallback = fell.append
    assert backend.hstu_ways(FITS) == ("triton", "ascend_c", "torch")
    assert backend.hstu_ways(FITS._replace(dtype=torch.float16)) == ("torch",)
    assert backend.ops["hstu_attention"] == "triton"
    assert backend._passes is not None
    assert backend.hstu_pass(cast("Any", None)) is None, "it takes calls, not passes"
    bias = BiasTables(torch.zeros(2, 8), torch.zeros(2, 64))
    q = torch.ones(3, 2, 16)
    call = HstuCall(q, q, q, [(q, q)], torch.arange(6), bias, 0.25)
    backend.hstu_causal(call)
    backend.hstu_targets(call._replace(times=torch.arange(3)))
    assert attended == ["causal", "targets"]
    tables = BiasTables(bias.position.double(), bias.time.double())
    wide = HstuCall(q.double(), q.double(), q.double(), [], torch.arange(3), tables, 1.0)
    assert backend.hstu_causal(wide).any()
    assert backend.hstu_targets(wide._replace(times=torch.arange(0))).any()
    assert fell == ["hstu_attention"] * 2
    backend.running("ascend_c").hstu_causal(call)
    assert len(attended) == 2


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_where_there_is_one_way_none_can_be_named(name: Any) -> None:
    assert choose(name, attention="auto").hstu_ways(FITS) == (
        choose(name).ops.get("hstu_attention", "torch"),
    )
    with pytest.raises(
        ConfigError, match=f"attention: torch is not for the backend {name}: one of auto"
    ):
        choose(name, attention="torch")
    with pytest.raises(
        ConfigError,
        match="attention: mxrec is not for the backend cuda: one of auto, triton, torch",
    ):
        choose("cuda", attention="mxrec")


@pytest.fixture
def body() -> dict[str, Any]:
    history = events(60, 3)
    candidates = list(range(FIRST_ID, FIRST_ID + 20))
    at = int(history.timestamps[-1]) + 5
    return {"user_id": "u", "history": columns(history), "candidates": candidates, "timestamp": at}


async def test_a_served_ranker_has_measured_its_way_and_tells(
    npu: FakeRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    write_checkpoint(tmp_path / "checkpoint", qk_dim=16, max_history_tokens=100)
    asked: list[AttentionMode] = []
    monkeypatch.setattr("npu_gr.service.warmup.WARM_UP_LENGTHS", (16, 60))

    def device(
        _name: str, _native: str, _library: None, attention: AttentionMode, _device: None
    ) -> NPUBackend:
        asked.append(attention)
        return NPUBackend(npu=npu.as_npu(), attention=attention)

    found = {}
    for attention in ("auto", "torch"):
        monkeypatch.setattr("npu_gr.service.app.choose", device)
        read = partial(make_config, tmp_path, attention=attention)
        async with serving(tmp_path, watched=False, read=read, attention=attention) as (
            client,
            service,
        ):
            answer = await client.post("/v1/rank", json=body)
            assert answer.status == 200, await answer.text()
            health = await (await client.get("/healthz")).json()
            (own,) = health["models"]
            found[attention] = own, (await answer.json())["scores"]["click"]
            if attention == "auto":
                measured = service.models()[0].attention
                write_checkpoint(tmp_path / "checkpoint", seed=1, qk_dim=16, max_history_tokens=100)
                again = (await service.reload_models())[0]
                assert again.version != own["version"]
                assert again.ops["hstu_attention"] == own["ops"]["hstu_attention"]
                assert again.attention is measured, (
                    "a ranker is not measured while another one serves"
                )
                write_checkpoint(tmp_path / "checkpoint", qk_dim=16, max_history_tokens=100)
    assert asked == ["auto", "torch"]
    tried = {way["name"]: way for way in found["auto"][0]["attention"]}
    assert list(tried) == ["ascend_c", "torch"]
    assert all(
        way["prefill_ms"] > 0 and way["rank_ms"] > 0 and not way["rejected"]
        for way in tried.values()
    )
    assert found["auto"][0]["ops"]["hstu_attention"] in tried
    assert (found["torch"][0]["ops"]["hstu_attention"], found["torch"][0]["attention"]) == (
        "torch",
        [],
    )
    for _, scores in found.values():
        np.testing.assert_allclose(scores, found["torch"][1], rtol=1e-4, atol=1e-5)
    monkeypatch.setattr("npu_gr.service.app.choose", lambda *_: NPUBackend("off", npu.as_npu()))
    with pytest.raises(
        ConfigError, match="attention: ascend_c cannot run this ranker here; available: torch"
    ):
        async with serving(tmp_path, attention="ascend_c"):
            pass
