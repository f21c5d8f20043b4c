"""An acceptance: a process each step; one that hangs or crashes is named, with its kernel; and a bundle for us."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tarfile
from pathlib import Path

import pytest

from npu_gr.backend.checks import FindingState
from npu_gr.core.errors import ConfigError
from npu_gr.tools import acceptance_run
from npu_gr.tools.acceptance_run import Acceptance
from npu_gr.tools.acceptance_steps import names
from npu_gr.tools.acceptance_steps import run as run_step
from tests.ops.pretended import toolkit

CSR = "operator csr_gather_topk"


def accept(folder: Path, *, timeout_s: float = 300.0, profile: bool = False) -> tuple[Acceptance, list[str]]:
    begun: list[str] = []
    return acceptance_run.run("npu", folder / "b.tar.gz", timeout_s, True, profile, begun.append), begun


def packed(folder: Path) -> dict[str, str]:
    with tarfile.open(folder / "b.tar.gz") as bundle:
        files = {member.name: bundle.extractfile(member) for member in bundle if member.isfile()}
        return {name.partition("/")[2]: file.read().decode() for name, file in files.items() if file}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pretended NPU with our library, and one operator as the only step."""
    libraries = toolkit.library() / "out"
    for name, value in toolkit.installed().environment(PRETENDED_LIBRARIES=str(libraries)).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(acceptance_run, "names", lambda _backend: [CSR])


def stand_in(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A step that is this script of the shell."""
    monkeypatch.setattr(acceptance_run, "names", lambda _backend: ["operator a", "operator b"])
    monkeypatch.setattr(acceptance_run, "_command", lambda _backend, step, _quick: ["sh", "-c", script, "sh", step])


def is_gone(pid: int) -> bool:
    """Whether a process that was killed has died; it may still be a zombie."""
    status = Path(f"/proc/{pid}/stat")
    while status.exists() and status.read_text().split()[2] != "Z":
        os.sched_yield()
    return True


def test_the_steps_go_from_single_operators_to_requests() -> None:
    assert names("npu")[0] == "machine"
    assert {"operator masked_topk", CSR, "operator beam_fork_"} <= set(names("npu"))
    production = ["ranks at production shapes", "generates at production shapes", "ways of attention", "latency"]
    assert names("npu")[-5:] == ["requests in fp32", *production]
    assert names("cpu") == ["machine", *names("npu")[-5:]]


def test_whole_requests_run_end_to_end_on_what_is_there(
    tmp_path: Path, machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reduced: on the pretended NPU, whose operators are our kernels; at a service's sizes on a real one."""
    monkeypatch.setattr(acceptance_run, "names", lambda _backend: ["ranks at production shapes", "ways of attention"])
    done, _ = accept(tmp_path)
    found = {each.name: each for each in done.findings}
    assert list(found)[:3] == ["rank cold", "rank from HBM", "rank from DRAM"]
    assert list(found)[3:] == ["attention by ascend_c", "attention by torch"]
    assert {each.state for each in done.findings} == {FindingState.OK}, done.as_text()
    assert sum(each.found.endswith(", taken") for each in done.findings) == 1


@pytest.mark.parametrize("name", ["generates at production shapes", "ways of attention"])
def test_the_steps_run_on_a_cpu_too(name: str) -> None:
    found = run_step("cpu", name, quick=True).findings
    assert found
    assert {each.state for each in found} == {FindingState.OK}


def test_an_operator_is_compared_on_the_device_and_packed(tmp_path: Path, machine: None) -> None:
    done, begun = accept(tmp_path)
    assert begun == [CSR]
    assert {(each.state, each.found) for each in done.findings} == {(FindingState.OK, "as defined")}
    files = packed(tmp_path)
    assert set(files) == {"machine.txt", "report.txt", "report.json", "operator-csr_gather_topk.log"}
    assert "npu_gr: csr_norm_bf16 on " in files["operator-csr_gather_topk.log"]
    assert json.loads(files["report.json"]) == json.loads(json.dumps(done.as_dict()))
    assert "\ntorch 2." in files["machine.txt"]
    assert "ASCEND_HOME_PATH=" in files["machine.txt"]


def test_a_crash_names_the_kernel(tmp_path: Path, machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRETENDED_CRASHES", "csr_merge")
    done, _ = accept(tmp_path)
    (broken,) = done.findings
    assert (broken.name, broken.state) == (CSR, FindingState.BROKEN)
    assert broken.found.startswith("ended with SIGABRT, in the kernel csr_merge: ")
    assert "docs/ascend.md" in broken.remedy


def test_a_hang_names_the_kernel_and_the_next_step_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first has launched one kernel that ended and one that did not; what it started dies with it."""
    pid = tmp_path / "pid"
    hang = f"""test "$1" = 'operator b' && echo '{{"findings": [["b", "ok", "fine", ""]], "latencies": []}}' && exit
        echo npu_gr: csr_norm_bf16 on 40 cores; echo npu_gr: csr_norm_bf16 ended with 0
        echo npu_gr: csr_select_bf16 on 40 cores; sleep 1000 & echo $! > {pid}; wait"""
    stand_in(monkeypatch, hang)
    done, begun = accept(tmp_path, timeout_s=3.0)
    assert begun == ["operator a", "operator b"]
    assert done.findings[0].found == "no answer within 3 s, in the kernel csr_select_bf16"
    assert done.findings[1].found == "fine"
    assert is_gone(int(pid.read_text()))
    assert "csr_select_bf16" in packed(tmp_path)["operator-a.log"]


@pytest.mark.parametrize(
    ("script", "found"),
    [
        (
            "echo npu_gr: hstu_rows on 8 cores; echo npu_gr: hstu_rows ended with 0; kill -SEGV $$",
            "ended with SIGSEGV: not",
        ),
        ("echo a reason >&2; exit 3", "ended with exit status 3: a reason"),
        ("echo no answer", "ended with exit status 0: no answer"),
    ],
)
def test_how_a_step_ended_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, found: str) -> None:
    stand_in(monkeypatch, script)
    done, _ = accept(tmp_path)
    assert len(done.findings) == 2
    assert done.findings[0].found.startswith(found)


def test_a_machine_that_is_not_well_ends_it_with_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance_run, "names", lambda _backend: ["machine", "operator a"])
    script = """echo '{"findings": [["NPU", "broken", "gone", "look"]], "latencies": [["rank", 1.5, 2.5]]}'"""
    monkeypatch.setattr(acceptance_run, "_command", lambda _backend, _step, _quick: ["sh", "-c", script])
    done, begun = accept(tmp_path)
    assert begun == ["machine"]
    assert not done.as_dict()["ok"]
    assert "broken  NPU  gone" in packed(tmp_path)["report.txt"]
    assert "1.500 ms p50" in packed(tmp_path)["report.txt"]


def test_msprof_profiles_each_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, """echo '{"findings": [], "latencies": []}'""")
    with monkeypatch.context() as without:
        without.setenv("PATH", "/nowhere")
        with pytest.raises(ConfigError, match="no msprof in PATH"):
            accept(tmp_path, profile=True)
    profiler = tmp_path / "msprof"
    profiler.write_text(
        '#!/bin/sh\nmkdir -p "${2#--output=}"\necho "$1" "$3" > "${2#--output=}/OpBasicInfo.csv"\n"$4" "$5" "$6"\n'
    )
    profiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    done, _ = accept(tmp_path, profile=True)
    assert [(each.name, each.state) for each in done.findings] == [
        ("msprof a", FindingState.OK),
        ("msprof b", FindingState.OK),
    ]
    assert packed(tmp_path)["msprof/a/OpBasicInfo.csv"] == "op --launch-count=20\n"
    profiler.write_text("#!/bin/sh\nexit 7\n")
    failed, _ = accept(tmp_path, profile=True)
    assert {(each.state, each.found) for each in failed.findings} == {(FindingState.MISSING, "ended with 7")}


def test_canns_logs_are_packed_and_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance_run, "MAX_LOG_BYTES", 8)
    script = 'mkdir -p "$ASCEND_PROCESS_LOG_PATH/debug"; echo 0123456789 > "$ASCEND_PROCESS_LOG_PATH/debug/plog.log"'
    stand_in(monkeypatch, script)
    accept(tmp_path)
    assert packed(tmp_path)["plog/debug/plog.log"] == "3456789\n"


def test_a_bundle_that_cannot_be_written_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "true")
    with pytest.raises(ConfigError, match=r"--bundle: /proc/none/b.tar.gz cannot be"):
        accept(Path("/proc/none"))


def test_an_interrupt_leaves_nothing_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if timeout is not None:
                started.append(self)
                raise KeyboardInterrupt
            return super().wait()

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        acceptance_run._run(["sleep", "1000"], tmp_path / "log", 5.0, {})
    assert started[0].returncode == -signal.SIGKILL
