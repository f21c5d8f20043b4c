"""An acceptance: a process each step; one that hangs or crashes is named, with its kernel.

And a bundle for us.
"""

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
from npu_gr.tools import acceptance
from npu_gr.tools.acceptance import Acceptance, names, run_step
from tests.ops.pretended import toolkit

CSR = "operator csr_gather_topk"


def accept(folder: Path, *, timeout_s: float = 300.0) -> tuple[Acceptance, list[str]]:
    begun: list[str] = []
    return acceptance.run("npu", folder / "b.tar.gz", timeout_s, True, begun.append), begun


def packed(folder: Path) -> dict[str, str]:
    with tarfile.open(folder / "b.tar.gz") as bundle:
        files = {member.name: bundle.extractfile(member) for member in bundle if member.isfile()}
        return {
            name.partition("/")[2]: file.read().decode() for name, file in files.items() if file
        }


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pretended NPU with our library, and one operator as the only step."""
    libraries = toolkit.library() / "out"
    for name, value in toolkit.installed().environment(PRETENDED_LIBRARIES=str(libraries)).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(acceptance, "names", lambda _backend: [CSR])


def stand_in(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A step that is this script of the shell."""
    monkeypatch.setattr(acceptance, "names", lambda _backend: ["operator a", "operator b"])
    monkeypatch.setattr(
        acceptance, "_command", lambda _backend, step, _quick: ["sh", "-c", script, "sh", step]
    )


def is_gone(pid: int) -> bool:
    """Whether a process that was killed has died; it may still be a zombie."""
    status = Path(f"/proc/{pid}/stat")
    while status.exists() and status.read_text().split()[2] != "Z":
        os.sched_yield()
    return True


def test_the_steps_go_from_single_operators_to_requests() -> None:
    assert names("npu")[0] == "machine"
    assert {"operator masked_topk", CSR, "operator beam_fork_"} <= set(names("npu"))
    production = ["ranks at production shapes", "generates at production shapes", "latency"]
    assert names("npu")[-4:] == ["requests in fp32", *production]
    assert names("cpu") == ["machine", *names("npu")[-4:]]


def test_whole_requests_run_end_to_end_on_what_is_there(
    tmp_path: Path, machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reduced: on the pretended NPU, whose operators are our kernels.

    At a service's sizes on a real one.
    """
    monkeypatch.setattr(acceptance, "names", lambda _backend: ["ranks at production shapes"])
    done, _ = accept(tmp_path)
    found = {each.name: each for each in done.findings}
    assert list(found) == ["rank cold", "rank from HBM", "rank from DRAM"]
    assert {each.state for each in done.findings} == {FindingState.OK}, done.as_text()


def test_the_steps_run_on_a_cpu_too() -> None:
    found = run_step("cpu", "generates at production shapes", quick=True).findings
    assert found
    assert {each.state for each in found} == {FindingState.OK}


def test_an_operator_is_compared_on_the_device_and_packed(tmp_path: Path, machine: None) -> None:
    done, begun = accept(tmp_path)
    assert begun == [CSR]
    assert {(each.state, each.found) for each in done.findings} == {(FindingState.OK, "as defined")}
    files = packed(tmp_path)
    assert set(files) == {
        "machine.txt",
        "report.txt",
        "report.json",
        "operator-csr_gather_topk.log",
    }
    assert "npu_gr: csr_norm_bf16 on " in files["operator-csr_gather_topk.log"]
    assert json.loads(files["report.json"]) == json.loads(json.dumps(done.as_dict()))
    assert "\ntorch 2." in files["machine.txt"]
    assert "ASCEND_HOME_PATH=" in files["machine.txt"]


def test_a_crash_names_the_kernel(
    tmp_path: Path, machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRETENDED_CRASHES", "csr_merge")
    done, _ = accept(tmp_path)
    (broken,) = done.findings
    assert (broken.name, broken.state) == (CSR, FindingState.BROKEN)
    assert broken.found.startswith("ended with SIGABRT, in the kernel csr_merge: ")
    assert "docs/ascend.md" in broken.remedy


def test_a_hang_names_the_kernel_and_the_next_step_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first has launched one kernel that ended and one that did not.

    What it started dies with it.
    """
    pid = tmp_path / "pid"
    fine = '{"findings": [["b", "ok", "fine", ""]], "latencies": []}'
    hang = f"""test "$1" = 'operator b' && echo '{fine}' && exit
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
            "ended with SIGSEGV: no",
        ),
        ("echo a reason >&2; exit 3", "ended with exit status 3: a reason"),
        ("echo no answer", "ended with exit status 0: no answer"),
    ],
)
def test_how_a_step_ended_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, found: str
) -> None:
    stand_in(monkeypatch, script)
    done, _ = accept(tmp_path)
    assert len(done.findings) == 2
    assert done.findings[0].found.startswith(found)


def test_a_machine_that_is_not_well_ends_it_with_a_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance, "names", lambda _backend: ["machine", "operator a"])
    findings = '"findings": [["NPU", "broken", "gone", "look"]]'
    script = f"""echo '{{{findings}, "latencies": [["rank", 1.5, 2.5]]}}'"""
    monkeypatch.setattr(
        acceptance, "_command", lambda _backend, _step, _quick: ["sh", "-c", script]
    )
    done, begun = accept(tmp_path)
    assert begun == ["machine"]
    assert not done.as_dict()["ok"]
    assert "broken  NPU  gone" in packed(tmp_path)["report.txt"]
    assert "1.500 ms p50" in packed(tmp_path)["report.txt"]


def test_canns_logs_are_packed_and_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "MAX_LOG_BYTES", 8)
    script = (
        'mkdir -p "$ASCEND_PROCESS_LOG_PATH/debug"; echo 0123456789 > '
        '"$ASCEND_PROCESS_LOG_PATH/debug/plog.log"'
    )
    stand_in(monkeypatch, script)
    accept(tmp_path)
    assert packed(tmp_path)["plog/debug/plog.log"] == "3456789\n"


def test_a_bundle_that_cannot_be_written_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "true")
    with pytest.raises(ConfigError, match=r"--bundle: /proc/none/b.tar.gz cannot be"):
        accept(Path("/proc/none"))


def test_an_interrupt_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if timeout is not None:
                started.append(self)
                raise KeyboardInterrupt
            return super().wait()

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        acceptance._run(["sleep", "1000"], tmp_path / "log", 5.0, {})
    assert started[0].returncode == -signal.SIGKILL
