"""The doctor's findings are real, a wrong op is broken, and missing parts have a remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from npu_gr.backend import checks
from npu_gr.backend.calls import BeamCall, HstuCall
from npu_gr.backend.checks import OPS, Finding, FindingState, compare
from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.backend.cpu.library import NativeError
from npu_gr.backend.npu import device as npu_device
from npu_gr.backend.npu import ops as ascend_ops
from npu_gr.backend.npu.backend import NPUBackend
from npu_gr.backend.npu.check import disagreements
from npu_gr.tools import acceptance, doctor
from npu_gr.tools.acceptance import accept
from npu_gr.tools.check_config import table
from npu_gr.tools.doctor import examine, is_well
from tests.backend.npu.fake_device import FakeRuntime


class Wrong(CPUBackend):
    """One op is off by up to a tenth, one gives what is no number."""

    def hstu_targets(self, call: HstuCall) -> Tensor:
        out = super().hstu_targets(call)
        # a norm behind it would hide one factor for all
        return out * torch.linspace(1.0, 1.1, out.shape[2])

    def beam_attention(self, call: BeamCall) -> Tensor:
        return super().beam_attention(call) * float("nan")

    def beam_fork_(self, keys: Tensor, values: Tensor, parent: Tensor, num_slots: int) -> None:
        """It does nothing."""


def test_ops_are_compared_with_their_definition() -> None:
    assert {check.state for check in compare(CPUBackend())} == {FindingState.OK}
    wrong = {check.name: check for check in compare(Wrong("off"))}
    assert wrong["cpu: hstu_attention"].state is FindingState.BROKEN
    assert wrong["cpu: softmax_attention"].state is FindingState.BROKEN
    assert wrong["cpu: beam_fork"].state is FindingState.BROKEN
    assert wrong["cpu: beam_topk"].state is FindingState.OK
    assert "report this line" in wrong["cpu: beam_fork"].remedy


def test_a_cpu_machine_is_well_and_what_it_lacks_has_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unbuilt() -> None:
        raise NativeError("no library")

    monkeypatch.setattr(checks, "load", unbuilt)
    found = examine()
    assert is_well(found)
    assert {c.name for c in found if c.state is FindingState.MISSING} == {
        "CPU kernels",
        "Ascend driver",
        "NPU: torch_npu",
    } | (
        {"CUDA: torch"}
        if torch.version.cuda is None
        else set()
        if torch.cuda.is_available()
        else {"CUDA: device"}
    )
    assert all(check.remedy for check in found if check.state is not FindingState.OK)
    assert "-> pip install 'npu_gr[npu]'" in table(found)
    of_cuda = examine("cuda")
    assert not is_well(of_cuda) or torch.cuda.is_available()
    sections = list(dict.fromkeys(check.section for check in of_cuda))
    assert sections == [
        "machine",
        "backend cuda (chosen)",
        "backend cpu (not chosen)",
        "backend npu (not chosen)",
    ]
    titles = [
        line
        for line in table(found).splitlines()
        if line and not line.startswith((" ", "ok ", "missing "))
    ]
    assert titles == ["machine", "backend cpu (the default)", "backend cuda", "backend npu"]


def test_a_gpu_is_examined_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    about = SimpleNamespace(name="H100", major=9, minor=0, total_memory=80 * 2**30)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert [(check.name, check.state) for check in checks._cuda(is_needed=True)] == [
        ("CUDA: torch", FindingState.BROKEN)
    ]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _, device = checks._cuda(is_needed=False)
    assert (device.name, device.state, "nvidia-smi" in device.remedy) == (
        "CUDA: device",
        FindingState.MISSING,
        True,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _number: about)
    found = {check.name: check.found for check in checks._cuda(is_needed=True)}
    assert found["CUDA: torch"].endswith("for CUDA 13.0")
    assert found["CUDA: device 1"] == "H100, sm_90, 80 GiB"
    assert "CUDA: Triton" in found


def test_an_npu_is_examined_step_by_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    npu = FakeRuntime()
    monkeypatch.setattr(npu_device, "find", npu.as_npu)
    monkeypatch.setattr(
        doctor,
        "choose",
        lambda name: NPUBackend("off", npu.as_npu()) if name == "npu" else CPUBackend(),
    )
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    (tmp_path / "version.cfg").write_text("# CANN\nruntime_running_version=[8.5.0]\n")
    driver = tmp_path / "version.info"
    driver.write_text("Version=25.0.rc1\nascendhal_version=7\n")
    (tmp_path / "davinci0").touch()
    (tmp_path / "davinci_manager").touch()
    monkeypatch.setattr(checks, "DRIVER", driver)
    monkeypatch.setattr(checks, "DEVICES", tmp_path)
    with npu.recording():
        found = {check.name: check for check in examine("npu")}
    assert found["Ascend driver"][:3] == (
        "Ascend driver",
        FindingState.OK,
        "Version=25.0.rc1, 1 devices",
    )
    assert found["NPU: device"].found.startswith("Ascend910B1")
    assert "8.5.0" in found["NPU: CANN"].found
    assert found["Ascend C operators"].state is FindingState.MISSING
    assert "build.sh" in found["Ascend C operators"].remedy
    assert {name for name in found if name.startswith("npu: ")} == {f"npu: {op}" for op in OPS}
    assert is_well(list(found.values()))


def test_native_operators_are_compared_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The definitions stand in for a device's operators, then each gives something else."""
    monkeypatch.setattr(ascend_ops, "load_library", lambda _path: None)
    monkeypatch.setattr(npu_device, "find", FakeRuntime().as_npu)
    names = [schema.split("(")[0] for schema in ascend_ops.SCHEMAS]
    found = {check.name: check for check in checks._ascend(is_needed=True)}
    assert all(found[f"Ascend C {name}"].state is FindingState.OK for name in names)
    for name in names:
        ops = SimpleNamespace(
            **{other: ascend_ops.definition(other) for other in names} | {name: wrong(name)}
        )
        assert [op for op, why in disagreements(torch.device("cpu"), ops) if why] == [name]


def wrong(name: str) -> Callable[..., Any]:
    """One place of the last result is not what it should be; an op in place does nothing."""

    def op(*arguments: Any) -> Any:
        if name.endswith("_") or name.startswith("hstu_"):
            return None
        made = ascend_ops.definition(name)(*arguments)
        (made if isinstance(made, Tensor) else made[-1]).view(-1)[0] += 1
        return made

    return op


def test_acceptance_compares_whole_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    npu = FakeRuntime()
    monkeypatch.setattr(acceptance, "choose", lambda _name: NPUBackend("off", npu.as_npu()))
    with npu.recording():
        found = accept("npu")
    assert ("replay", 0) not in npu.calls, "the default stream captures nothing"
    assert any(call == "replay" for call, _ in npu.calls)
    assert [check.name for check in found][:3] == ["rank cold", "rank from HBM", "rank from DRAM"]
    assert is_well(found)
    monkeypatch.setattr(acceptance, "choose", lambda _name: Wrong("off"))
    broken = {check.name for check in accept("cpu") if check.state is FindingState.BROKEN}
    assert broken >= {"rank cold", "rank from HBM", "rank from DRAM", "generate, 128 beams"}


def test_broken_is_not_well() -> None:
    assert not is_well([Finding("a", FindingState.OK, ""), Finding("b", FindingState.BROKEN, "")])
    assert is_well([Finding("a", FindingState.MISSING, "")])
