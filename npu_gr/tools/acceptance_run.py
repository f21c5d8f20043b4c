"""Run the steps of an acceptance, each in a process of its own with a time limit, and pack what a report needs.

A step that hangs is killed and named, with the kernel that it launched last; one that crashes is named with its last
words. Neither stops the others.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from npu_gr.backend.checks import Finding, FindingState
from npu_gr.backend.names import BackendName
from npu_gr.backend.npu import ops as ascend_ops
from npu_gr.core.errors import ConfigError
from npu_gr.tools.acceptance import ShapeLatency
from npu_gr.tools.acceptance_steps import OPERATOR, names
from npu_gr.tools.doctor import is_well
from npu_gr.tools.findings import table

REMEDY = "attach the bundle to a report: docs/ascend.md"
PACKAGES = ("npu_gr", "torch", "torch-npu", "numpy", "triton", "triton-ascend")
VARIABLES = ("ASCEND", "TORCH", "PYTORCH", "TASK_QUEUE", "PER_STREAM", "LD_LIBRARY_PATH", "OMP", "HCCL", "NPU_VISIBLE")
MAX_LOG_BYTES = 4 << 20  # of CANN's own logs, each file's end


class Acceptance(NamedTuple):
    """All findings and times."""

    findings: list[Finding]
    latencies: list[ShapeLatency]

    def as_text(self) -> str:
        """Format for people: findings, then a line each shape that was timed."""
        lines = [table(self.findings)]
        lines += [f"{time.name:48} {time.p50_ms:9.3f} ms p50 {time.p90_ms:9.3f} ms p90" for time in self.latencies]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, object]:
        """Format for programs."""
        return {
            "ok": is_well(self.findings),
            "checks": [finding._asdict() for finding in self.findings],
            "latency": [time._asdict() for time in self.latencies],
        }


def run(
    backend: BackendName,
    bundle: Path,
    timeout_s: float,
    quick: bool,
    profile: bool,
    tell: Callable[[str], None],
) -> Acceptance:
    """Run every step and write the bundle, a .tar.gz, whatever was found.

    Args:
        backend: by name.
        bundle: the file to write.
        timeout_s: of one step.
        quick: small shapes in place of a service's.
        profile: run each operator's step once more under CANN's `msprof op`.
        tell: is called with the name of each step as it begins.

    Raises:
        ConfigError: `profile` without msprof in PATH, or the bundle cannot be written.
    """
    if profile and shutil.which("msprof") is None:
        raise ConfigError("--msprof: no msprof in PATH: source CANN's set_env.sh")
    findings: list[Finding] = []
    latencies: list[ShapeLatency] = []
    with tempfile.TemporaryDirectory(prefix="npu_gr-acceptance-") as made:
        folder = Path(made)
        (folder / "machine.txt").write_text(_machine())
        for step in names(backend):
            tell(step)
            found, timed = _step(backend, step, quick, timeout_s, folder)
            findings += found
            latencies += timed
            if step == "machine" and not is_well(found):
                break  # nothing else can be right
            if profile and step.startswith(OPERATOR):
                findings.append(_profile(backend, step, quick, timeout_s, folder))
        result = Acceptance(findings, latencies)
        (folder / "report.txt").write_text(result.as_text() + "\n")
        (folder / "report.json").write_text(json.dumps(result.as_dict(), indent=1))
        _pack(folder, bundle)
    return result


def _command(backend: str, step: str, quick: bool) -> list[str]:
    flags = ["--quick"] if quick else []
    return [sys.executable, "-m", "npu_gr", "doctor", "--backend", backend, "--step", step, *flags]


def _step(
    backend: str, step: str, quick: bool, timeout_s: float, folder: Path
) -> tuple[list[Finding], list[ShapeLatency]]:
    variables = {"ASCEND_PROCESS_LOG_PATH": str(folder / "plog")}
    if step != "latency":
        variables["NPU_GR_TRACE_LAUNCHES"] = "1"  # each launch is waited for: no times with it
    log = folder / f"{step.replace(' ', '-')}.log"
    status = _run(_command(backend, step, quick), log, timeout_s, variables)
    text = log.read_text(errors="replace")
    launched = re.findall(r"^npu_gr: (\w+) (on \d+ cores|ended with -?\d+)$", text, re.MULTILINE)
    last = launched[-1][0] if launched and launched[-1][1].startswith("on") else ""
    during = f", in the kernel {last}" if last else ""
    if status is None:
        why = f"no answer within {timeout_s:g} s{during}"
        return [Finding(step, FindingState.BROKEN, why, REMEDY)], []
    answer = next((line for line in reversed(text.splitlines()) if line.startswith('{"findings"')), None)
    if status != 0 or answer is None:
        ended = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        said = [line for line in text.splitlines() if line.strip() and not line.startswith("npu_gr: ")]
        why = f"ended with {ended}{during}: {said[-1][:300] if said else 'nothing was said'}"
        return [Finding(step, FindingState.BROKEN, why, REMEDY)], []
    told = json.loads(answer)
    found = [Finding(name, FindingState(state), what, remedy) for name, state, what, remedy in told["findings"]]
    return found, [ShapeLatency(*timed) for timed in told["latencies"]]


def _profile(backend: str, step: str, quick: bool, timeout_s: float, folder: Path) -> Finding:
    """Run a step under msprof: its tables of a kernel's time, pipes and memory go into the bundle."""
    op = step.removeprefix(OPERATOR)
    command = ["msprof", "op", f"--output={folder / 'msprof' / op}", "--launch-count=20"]
    status = _run([*command, *_command(backend, step, quick)], folder / f"msprof-{op}.log", timeout_s, {})
    if status == 0:
        return Finding(f"msprof {op}", FindingState.OK, "in the bundle")
    ended = "no answer in time" if status is None else f"ended with {status}"
    return Finding(f"msprof {op}", FindingState.MISSING, ended, f"see msprof-{op}.log in the bundle")


def _run(command: list[str], log: Path, timeout_s: float, variables: dict[str, str]) -> int | None:
    """Run a command with its words in a file; None = it was killed, with all that it started, at its limit."""
    with log.open("w") as words:
        process = subprocess.Popen(  # noqa: S603  (our own command)
            command, stdout=words, stderr=subprocess.STDOUT, env={**os.environ, **variables}, start_new_session=True
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None
        except BaseException:  # Ctrl-C must not leave it on the device
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise


def _machine() -> str:
    """Describe what a reader of the report cannot ask: versions, the variables that matter, npu-smi's own words."""
    lines = [platform.platform(), f"python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            lines.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{package} is not installed")
    lines += [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)]
    for note in sorted(ascend_ops.LIBRARIES.glob("*.json")):
        lines.append(f"{note.name}: {note.read_text().strip()}")
    smi = shutil.which("npu-smi")
    if smi is None:
        lines.append("no npu-smi in PATH")
    else:
        done = subprocess.run([smi, "info"], capture_output=True, text=True, timeout=60, check=False)  # noqa: S603
        lines.append(done.stdout + done.stderr)
    return "\n".join(lines) + "\n"


def _pack(folder: Path, bundle: Path) -> None:
    for log in (folder / "plog").rglob("*"):
        if log.is_file() and log.stat().st_size > MAX_LOG_BYTES:
            log.write_bytes(log.read_bytes()[-MAX_LOG_BYTES:])
    part = bundle.with_name(f"{bundle.name}.part")
    try:
        with tarfile.open(part, "w:gz") as packed:
            packed.add(folder, "npu_gr-acceptance")
        part.replace(bundle)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConfigError(f"--bundle: {bundle} cannot be written: {error.strerror}") from error
