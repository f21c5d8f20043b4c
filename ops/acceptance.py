"""Accept a device in ten minutes: `make acceptance-cuda`, `make acceptance-npu`.

    python ops/acceptance.py cuda --out acceptance --wheels wheels

Steps run in the order of their value, each in processes of its own with a time limit. The table and
the bundle are written again after every step, so a run that is cut off is useful up to there. Exit
status 0: every step that could run passed. It needs only Python's own modules.

`--list` prints what the machine lacks, one requirement a line. Where there is no network, download
these wheels elsewhere (`pip download -d wheels ...`) and name their folder.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
BUDGET_S = 600.0
# import name -> requirement; doctor and benchmarks need the first two, tests the rest
NEEDED = {
    "msgspec": "msgspec",
    "aiohttp": "aiohttp",
    "pytest": "pytest",
    "pytest_asyncio": "pytest-asyncio",
    "blockbuster": "blockbuster",
    "orjson": "orjson",
    "httptools": "httptools",
    "hdrh": "hdrhistogram",
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
}
# tests that run on the device, and those of the code around its graphs
TESTS = {
    "cuda": ("-m", "cuda or triton", "tests/backend/test_ops.py", "tests/backend/triton"),
    "npu": ("-m", "npu", "tests"),
    "cpu": ("tests/backend/test_graphs.py", "-k", "replay"),
}


class Step(NamedTuple):
    """A command with a time limit."""

    name: str
    limit_s: float
    command: tuple[str, ...]
    needs: str = ""  # a program without which it is skipped


class Done(NamedTuple):
    """The result of a step."""

    name: str
    state: str  # ok, failed, cut off, skipped
    seconds: float
    words: str


def steps(device: str, out: Path, *, is_quick: bool) -> Iterator[Step]:
    """Yield the steps of a device in the order of their value.

    Args:
        device: cuda, npu or cpu.
        out: Folder of the results.
        is_quick: Small shapes and short measurements.
    """
    python = sys.executable
    quick = ("--quick",) if is_quick else ()
    seconds = "0.2" if is_quick else "2"
    bench = (python, "-m", "benchmarks")
    doctor = (python, "-m", "npu_gr", "doctor", "--backend", device)
    bundle = str(out / "doctor.tar.gz")
    yield Step(
        "doctor with parity", 200, (*doctor, "--acceptance", "--bundle", bundle, *quick,
        "--timeout-s", "60"),
    )  # fmt: skip
    ranks = (*bench, "device", "--backend", device, "--seconds", seconds, "--json", "--only")
    yield Step("served, against FastAPI", 120, (*ranks, "served"))
    tests = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", "-n", "0")
    yield Step("tests of the device", 150, (*tests, *TESTS[device]))
    if device != "cpu":
        kernels = (*bench, "kernels", "--device", device, "--seconds", seconds, "--json")
        yield Step("ops, against torch's", 90, kernels)
    if not is_quick:
        yield Step("full inference, against torch.compile", 120, (*ranks, "compiled"))
    beams = (*bench, "generate", "--backend", device, "--seconds", seconds, "--json")
    if not is_quick:
        yield Step("beams, against SDPA", 90, beams)
    if device == "cuda":
        latency = (*doctor, "--step", "latency", "--quick")
        yield Step(
            "kernel profile", 60, ("ncu", "--clock-control", "none", "-k", "regex:hstu", "-c", "6",
            "--set", "basic", *latency), "ncu",
        )  # fmt: skip
        exact = (*doctor, "--step", "requests in fp32", "--quick")
        memory = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "1", *exact)
        yield Step("memory check", 60, memory, "compute-sanitizer")
    if device == "npu":
        operator = (*doctor, "--step", "operator csr_gather_topk", "--quick")
        yield Step("kernel profile", 60, ("msprof", "op", *operator), "msprof")


def missing() -> list[str]:
    """List the requirements that this machine lacks."""
    return [needed for name, needed in NEEDED.items() if importlib.util.find_spec(name) is None]


def run(step: Step, out: Path, left_s: float) -> Done:
    """Run a step with its output in a file; it is killed at its limit with all its processes.

    Args:
        step: The step.
        out: Folder of the results.
        left_s: Seconds that are left for all steps.
    """
    if step.needs and shutil.which(step.needs) is None:
        return Done(step.name, "skipped", 0.0, f"{step.needs} is not on this machine")
    limit_s = min(step.limit_s, left_s)
    if limit_s <= 0:
        return Done(step.name, "skipped", 0.0, "no time is left")
    log = out / f"{step.name.replace(' ', '-').replace(',', '')}.log"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    began_at = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            step.command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            status: int | None = process.wait(limit_s)
        except BaseException as error:  # also on Ctrl-C, so that no process stays on the device
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            status = None
    seconds = time.monotonic() - began_at
    said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = said[-1][:200] if said else "no output"
    if status is None:
        return Done(step.name, "cut off", seconds, f"at {limit_s:.0f} s: {last}")
    return Done(step.name, "failed" if status else "ok", seconds, last)


def figures(out: Path) -> Iterator[str]:
    """Yield a row for each line of the benchmarks that has been printed so far."""
    for log in sorted(out.glob("*.log")):
        for text in log.read_text(errors="replace").splitlines():
            if not text.startswith('{"bench"'):
                continue
            line = json.loads(text)
            ours = f"{line['ours']:.3g} {line['unit']}"
            theirs = f"{line['baseline_value']:.3g} {line['unit']}"
            cells = line["case"], ours, line["baseline"], theirs, f"{line['ratio']:.2f}x"
            yield f"| {' | '.join(cells)} |"


def write(device: str, out: Path, done: Sequence[Done]) -> None:
    """Write the table of steps and figures, and the bundle of all files."""
    rows = [f"| {d.name} | {d.state} | {d.seconds:.0f} | {d.words} |" for d in done]
    table = [
        f"# Acceptance of {device}",
        "",
        "| step | result | s | last line |",
        "|---|---|---|---|",
    ]
    found = list(figures(out))
    if found:
        found = ["", "| case | ours | against | theirs | ratio |", "|---|---|---|---|---|", *found]
    (out / "table.md").write_text("\n".join([*table, *rows, *found]) + "\n")
    part = out.with_suffix(".tar.gz.part")
    with tarfile.open(part, "w:gz") as bundle:
        bundle.add(out, out.name)
    part.replace(out.with_suffix(".tar.gz"))


def machine(out: Path) -> None:
    """Write what the vendor's tools say of the devices."""
    for tool, arguments in (("nvidia-smi", ["-q"]), ("npu-smi", ["info"])):
        if (path := shutil.which(tool)) is not None:
            with (out / f"{tool}.txt").open("w") as file:
                subprocess.run([path, *arguments], stdout=file, timeout=30, check=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all steps; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("device", choices=list(TESTS))
    parser.add_argument("--out", type=Path, default=Path("acceptance"), help="folder of results")
    parser.add_argument("--wheels", type=Path, help="folder of wheels, installed without an index")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="limit of the whole run")
    parser.add_argument("--quick", action="store_true", help="small shapes, fewer baselines")
    parser.add_argument("--list", action="store_true", help="print what is missing, and end")
    given = parser.parse_args(arguments)
    lacks = missing()
    if given.list:
        sys.stdout.write("".join(f"{one}\n" for one in lacks))
        return 0
    ends_at = time.monotonic() + given.budget_s
    out = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    machine(out)
    todo = list(steps(given.device, out, is_quick=given.quick))
    if lacks and given.wheels is not None:
        pip = (sys.executable, "-m", "pip", "install", "-q", "--no-index", "--find-links")
        todo.insert(0, Step("wheels", 60, (*pip, str(given.wheels), *lacks)))
    elif lacks:
        sys.stderr.write(f"missing, see --list: {', '.join(lacks)}\n")
    done: list[Done] = []
    for step in todo:
        sys.stderr.write(f"{step.name} ...\n")
        done.append(run(step, out, ends_at - time.monotonic()))
        write(given.device, out, done)
    sys.stdout.write((out / "table.md").read_text())
    return int(any(one.state in ("failed", "cut off") for one in done))


if __name__ == "__main__":
    sys.exit(main())
