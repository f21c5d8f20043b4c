"""`npu-gr doctor --acceptance`: compare operators and requests with the CPU's, and time them.

`doctor` compares single ops on small inputs. This module compares whole requests, with random
weights and prefix KV in both tiers: small ones in fp32, which must be equal up to rounding, and
ones of production size in bf16. The findings are packed into a bundle for a report.

Each step (an operator, a kind of request) runs in its own process with a time limit (`npu-gr doctor
--backend NAME --step STEP`). A step that hangs is killed and reported with the last kernel that it
launched; one that crashes is reported with its last line of output. The other steps still run.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from npu_gr.backend.base import Backend
from npu_gr.backend.checks import Finding, FindingState
from npu_gr.backend.choose import choose
from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.backend.names import ASCEND, BackendName
from npu_gr.backend.npu import check
from npu_gr.backend.npu import ops as ascend_ops
from npu_gr.catalogue.build import build_trie
from npu_gr.catalogue.trie import Codebooks, Trie
from npu_gr.core.arrays import F32
from npu_gr.core.errors import ConfigError
from npu_gr.core.history import Events, HistoryReport
from npu_gr.engine.beam_search import SearchOptions, Tables
from npu_gr.engine.generate_engine import (
    GeneratedItems,
    Generator,
    PromptKV,
    layout_of,
    make_prompt,
)
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import KVLayout, PageRun
from npu_gr.engine.page_jobs import CachedPrefix
from npu_gr.engine.queue import SchedulerConfig
from npu_gr.engine.rank_engine import RankEngine, RankPass
from npu_gr.engine.scheduler import Scheduler
from npu_gr.model.config import HSTUConfig
from npu_gr.model.decoder import Decoder, DecoderConfig
from npu_gr.model.history_tokenizer import Tokens
from npu_gr.model.hstu import HSTU
from npu_gr.tools.check_config import table
from npu_gr.tools.doctor import examine, is_well

ITEMS = 5000


class Sizes(NamedTuple):
    """Sizes of the models and requests, and tolerances."""

    dtype: torch.dtype
    tolerance: float  # of a logit, in the logits' standard deviations
    search_tolerance: float  # of an item's log-probability, in nats
    # share of the items that two searches must have in common; 1 = all, except for ties
    shared_items: float
    tokens: int  # of a history
    cached: int  # tokens of the history that are read from pages
    candidates: int
    layers: int
    head_dim: int  # of 4 heads
    codes: int  # of each of three levels
    searches: tuple[tuple[int, int], ...]  # items of a history, beams

    @property
    def ranker(self) -> HSTUConfig:
        """The ranker's configuration."""
        return HSTUConfig(
            num_items=1000,
            actions=("view", "buy"),
            tasks=("click", "buy"),
            dim=4 * self.head_dim,
            num_layers=self.layers,
            num_heads=4,
            qk_dim=self.head_dim,
            v_dim=self.head_dim,
            scaling_seqlen=512,
        )

    @property
    def decoder(self) -> DecoderConfig:
        """The generator's configuration."""
        return DecoderConfig(
            vocab_size=3 * self.codes,
            dim=4 * self.head_dim,
            num_layers=self.layers,
            num_heads=4,
            num_kv_heads=2,
            head_dim=self.head_dim,
            mlp_dim=8 * self.head_dim,
            max_tokens=2048,
            rope_theta=1e4,
            norm_eps=1e-6,
            qk_norm=True,
            qkv_bias=False,
            tied_head=False,
        )


EXACT = Sizes(
    torch.float32, 1e-3, 1e-3, 1.0, 300, 250, 50, 3, 32, 64, ((40, 16), (100, 128))
)  # one attention stage, and two
# bf16 on a CPU differs from fp32 by .04 of the spread, .22 nats, and 2 % of the items
PRODUCTION = Sizes(torch.bfloat16, 0.2, 0.5, 0.9, 4096, 3968, 512, 8, 64, 8192, ((300, 512),))
QUICK = PRODUCTION._replace(
    tokens=300, cached=250, candidates=40, layers=2, head_dim=32, codes=256, searches=((40, 32),)
)
RUNS = 20
OPERATOR = "operator "
AT_PRODUCTION = {"ranks at production shapes": "rank", "generates at production shapes": "generate"}
REMEDY = "attach the bundle to a report: docs/ascend.md"
PACKAGES = ("npu_gr", "torch", "torch-npu", "numpy", "triton", "triton-ascend")
VARIABLES = (
    "ASCEND",
    "TORCH",
    "PYTORCH",
    "TASK_QUEUE",
    "PER_STREAM",
    "LD_LIBRARY_PATH",
    "OMP",
    "HCCL",
    "NPU_VISIBLE",
)
MAX_LOG_BYTES = 4 << 20  # the end of each of CANN's log files


class ShapeLatency(NamedTuple):
    """Latency from the host's call to the result in host memory."""

    name: str
    p50_ms: float
    p90_ms: float


class Acceptance(NamedTuple):
    """All findings and times."""

    findings: list[Finding]
    latencies: list[ShapeLatency]

    def as_text(self) -> str:
        """Format for people: the findings, then one line per timed shape."""
        lines = [table(self.findings)]
        lines += [
            f"{time.name:48} {time.p50_ms:9.3f} ms p50 {time.p90_ms:9.3f} ms p90"
            for time in self.latencies
        ]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, object]:
        """Format for programs."""
        return {
            "ok": is_well(self.findings),
            "checks": [finding._asdict() for finding in self.findings],
            "latency": [time._asdict() for time in self.latencies],
        }


class AcceptanceRig:
    """A ranker and a generator over one backend, called directly instead of by a device thread."""

    def __init__(self, backend: Backend, sizes: Sizes = EXACT) -> None:
        torch.manual_seed(0)
        self.backend = backend
        self.sizes = sizes
        device = backend.device
        self.ranker = HSTU(sizes.ranker)
        decoder = Decoder(sizes.decoder)
        with torch.no_grad():
            for module in (self.ranker, decoder):
                for parameter in module.parameters():
                    if parameter.ndim > 1:
                        parameter.normal_(std=0.1)
        if sizes.dtype != torch.float32:
            self.ranker.cast(sizes.dtype)
            decoder.to(sizes.dtype)
        self.ranker.to(device).eval().items.freeze()
        shape = sizes.ranker
        layout = KVLayout(
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            qk_dim=shape.qk_dim,
            v_dim=shape.v_dim,
            dtype=str(sizes.dtype).removeprefix("torch."),
            arrangement=backend.arrangement(sizes.dtype, 64),
        )
        pages = layout.pages(sizes.tokens) + 8
        self.pages = KVArena(layout, pages, device, pack=backend.pack_kv)
        self.host = KVArena(
            layout, pages, torch.device("cpu"), backend.pins_host_memory, backend.pack_kv
        )
        self.engine = RankEngine(self.ranker, backend, Scheduler(SchedulerConfig()), self.pages)
        sids = np.random.default_rng(0).integers(0, sizes.codes, (ITEMS, 3))
        self.trie: Trie = build_trie(sids, np.arange(ITEMS), Codebooks.stacked([sizes.codes] * 3))
        most = max(width for _, width in sizes.searches)
        self.generator = Generator(decoder.to(device).eval(), backend, most, 3)
        self.tables = Tables.upload(self.trie, device)
        prompt = layout_of(decoder)
        self.prompts = KVArena(prompt, prompt.pages(sizes.decoder.max_tokens), device)

    def rank(
        self, num_tokens: int, num_candidates: int, cached_tokens: int = 0, tier: str = "hbm"
    ) -> F32:
        """Rank once.

        Args:
            num_tokens: Length of the history.
            num_candidates: Number c of candidates.
            cached_tokens: Number of leading tokens that are read from pages.
            tier: "hbm", or "dram" to copy the pages to the host and back first.

        Returns:
            Logits: float32 [c, tasks].
        """
        history = _history(num_tokens)
        candidates = np.arange(num_candidates, dtype=np.int64)
        cached = None
        if cached_tokens:
            runs = (PageRun(0, self.pages.layout.pages(cached_tokens)),)
            self.engine.forward(
                [RankPass(history[:cached_tokens], 0, candidates[:0], 0, keep=runs)]
            )
            if tier == "dram":
                self.backend.copy(
                    lambda: self.host.copy_tokens_from(self.pages, runs, runs, cached_tokens)
                )()
                self.pages.zero(runs)
                self.backend.synchronize()
                self.backend.copy(
                    lambda: self.pages.copy_tokens_from(self.host, runs, runs, cached_tokens)
                )()
            cached = CachedPrefix(runs, cached_tokens)
        return self.engine.forward([RankPass(history, 0, candidates, 10**9, cached)])[0]

    def generate(self, num_items: int, width: int) -> GeneratedItems:
        """Run beam search after a history of `num_items` items."""
        history = np.random.default_rng(1).integers(0, ITEMS, num_items)
        tokens = make_prompt(self.trie, history, self.sizes.decoder.max_tokens - 2).tokens
        part = PromptKV(self.prompts, (PageRun(0, self.prompts.num_pages),), len(tokens))
        self.generator.encode(tokens, [], part)
        options = SearchOptions(width=width)
        return self.generator.generate(self.trie, self.tables, tokens, [part], options, width)


def _history(num_tokens: int) -> Tokens:
    random = np.random.default_rng(2)
    items = random.integers(0, 1000, num_tokens)
    events = Events.make(
        items, random.integers(0, 2, num_tokens), np.cumsum(random.integers(0, 86_400, num_tokens))
    )
    return Tokens(events, items, HistoryReport(fingerprint="", num_tokens=num_tokens))


def accept(
    name: BackendName, sizes: Sizes = EXACT, kinds: Sequence[str] = ("rank", "generate")
) -> list[Finding]:
    """Compare requests on the backend with the same ones on the CPU (plain torch ops, fp32)."""
    ours = AcceptanceRig(choose(name), sizes)
    cpu = AcceptanceRig(CPUBackend("off"), sizes._replace(dtype=torch.float32))
    # graphs are not captured on the default stream, so use another one, as a device thread does
    with ours.backend.stream():
        return [finding for kind in kinds for finding in _COMPARED[kind](ours, cpu)]


def _ranked(ours: AcceptanceRig, cpu: AcceptanceRig) -> list[Finding]:
    sizes = ours.sizes
    want = cpu.rank(sizes.tokens, sizes.candidates)
    findings = []
    for what, cached, tier in (
        ("cold", 0, ""),
        ("from HBM", sizes.cached, "hbm"),
        ("from DRAM", sizes.cached, "dram"),
    ):
        drift = float(
            np.abs(ours.rank(sizes.tokens, sizes.candidates, cached, tier) - want).max()
            / want.std()
        )
        findings.append(_check(f"rank {what}", drift, sizes.tolerance, "of the logits' spread"))
    return findings


def _generated(ours: AcceptanceRig, cpu: AcceptanceRig) -> list[Finding]:
    sizes = ours.sizes
    findings = []
    for num_items, width in sizes.searches:
        want_items = cpu.generate(num_items, width)
        try:
            difference = _distance(ours.generate(num_items, width), want_items, sizes.shared_items)
        except FloatingPointError:  # raised if logits are NaN
            difference = float("inf")
        findings.append(
            _check(f"generate, {width} beams", difference, sizes.search_tolerance, "nats")
        )
    return findings


_COMPARED: dict[str, Callable[[AcceptanceRig, AcceptanceRig], list[Finding]]] = {
    "rank": _ranked,
    "generate": _generated,
}


def _check(name: str, difference: float, tolerance: float, unit: str) -> Finding:
    is_ok = difference <= tolerance
    remedy = "" if is_ok else "do not serve with this backend, and report this line"
    return Finding(
        name,
        FindingState.OK if is_ok else FindingState.BROKEN,
        f"differs from the CPU by {difference:.1e} {unit}",
        remedy,
    )


def _distance(got: GeneratedItems, want: GeneratedItems, shared_items: float) -> float:
    """Return the largest difference of a score.

    If all items must be shared, an item that one search missed is compared with the last score of
    that search, since the two may tie. Else missed items are skipped, if they are few enough.
    """
    if len(got.scores) != len(want.scores):
        return float("inf")
    scores = [
        dict(zip(one.item_ids.tolist(), one.scores.tolist(), strict=True)) for one in (got, want)
    ]
    shared = scores[0].keys() & scores[1].keys()
    needs_all = shared_items == 1.0
    if not needs_all and len(shared) < shared_items * len(want.scores):
        return float("inf")
    last = [min(one.values(), default=0.0) for one in scores]
    compared = scores[0].keys() | scores[1].keys() if needs_all else shared
    return max(
        (abs(scores[0].get(item, last[0]) - scores[1].get(item, last[1])) for item in compared),
        default=0.0,
    )


def latencies(name: BackendName, sizes: Sizes = PRODUCTION, runs: int = 20) -> list[ShapeLatency]:
    """Time requests on the host, without the first runs, which capture and compile."""
    rig = AcceptanceRig(choose(name), sizes)
    shape = f"{sizes.tokens} tokens, {sizes.candidates} items"
    cases: dict[str, Callable[[], object]] = {
        f"prefill and rank {shape}": lambda: rig.rank(sizes.tokens, sizes.candidates, sizes.cached),
        f"rank cold {shape}": lambda: rig.rank(sizes.tokens, sizes.candidates),
    }
    for num_items, width in sizes.searches:
        what = f"generate {3 * num_items} tokens, {width} beams"
        cases[what] = lambda n=num_items, w=width: rig.generate(n, w)  # type: ignore[misc]
    with rig.backend.stream():
        return [_timed(case, run, runs) for case, run in cases.items()]


def _timed(name: str, run: Callable[[], object], runs: int) -> ShapeLatency:
    taken_ms = []
    for _ in range(runs + 3):
        began_at = time.perf_counter()
        run()
        taken_ms.append((time.perf_counter() - began_at) * 1e3)
    deciles = statistics.quantiles(taken_ms[3:], n=10)
    return ShapeLatency(name, deciles[4], deciles[8])


def names(backend: BackendName) -> list[str]:
    """Return the names of the steps in order: machine, operators, requests, latency."""
    operators = [OPERATOR + name for name in ascend_ops.names()] if backend == ASCEND else []
    return ["machine", *operators, "requests in fp32", *AT_PRODUCTION, "latency"]


def run_step(backend: BackendName, name: str, quick: bool) -> Acceptance:
    """Run a step in this process.

    Raises:
        ConfigError: the backend is not available.
    """
    sizes = QUICK if quick else PRODUCTION
    if name == "machine":
        return Acceptance(examine(backend), [])
    if name.startswith(OPERATOR):
        return Acceptance(_operator(backend, name.removeprefix(OPERATOR), quick), [])
    if name == "requests in fp32":
        return Acceptance(accept(backend, EXACT), [])
    if name in AT_PRODUCTION:
        return Acceptance(accept(backend, sizes, [AT_PRODUCTION[name]]), [])
    assert name == "latency", name
    timed = latencies(backend, sizes, 3 if quick else RUNS)
    if backend == ASCEND:
        timed += _operator_latencies(backend, quick)
    return Acceptance([], timed)


def _operator(backend: BackendName, op: str, quick: bool) -> list[Finding]:
    """Compare a native operator with its reference, on the calls that a service makes."""
    device = choose(backend, "require").device
    found = []
    for what, arguments in check.service_calls(op, quick):
        wrong = check.difference(op, arguments, device)
        state = FindingState.BROKEN if wrong else FindingState.OK
        remedy = "set `native: off`, and attach the bundle to a report" if wrong else ""
        found.append(Finding(f"{op}: {what}", state, wrong or "as defined", remedy))
    return found


def _operator_latencies(backend: BackendName, quick: bool) -> list[ShapeLatency]:
    made = choose(backend, "require")
    timed = []
    for op in ascend_ops.names():
        for what, arguments in check.service_calls(op, quick):
            moved = [x.to(made.device) if isinstance(x, torch.Tensor) else x for x in arguments]

            def call(op: str = op, moved: list[object] = moved) -> None:
                made.synchronize()
                getattr(torch.ops.npu_gr, op)(*moved)
                made.synchronize()

            timed.append(_timed(f"{op}: {what}", call, RUNS))
    return timed


def run(
    backend: BackendName,
    bundle: Path,
    timeout_s: float,
    quick: bool,
    on_step: Callable[[str], None],
) -> Acceptance:
    """Run every step and write the bundle (.tar.gz), also if steps fail.

    Args:
        backend: Name of the backend.
        bundle: File to write.
        timeout_s: Time limit of a step.
        quick: Use small shapes instead of production shapes.
        on_step: Callback with the name of each step as it begins.

    Raises:
        ConfigError: the bundle cannot be written.
    """
    findings: list[Finding] = []
    latencies: list[ShapeLatency] = []
    with tempfile.TemporaryDirectory(prefix="npu_gr-acceptance-") as made:
        folder = Path(made)
        (folder / "machine.txt").write_text(_machine())
        for step in names(backend):
            on_step(step)
            found, timed = _step(backend, step, quick, timeout_s, folder)
            findings += found
            latencies += timed
            if step == "machine" and not is_well(found):
                break  # the other steps would fail for the same reason
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
        variables["NPU_GR_TRACE_LAUNCHES"] = "1"  # waits for each launch, so it is off when timing
    log = folder / f"{step.replace(' ', '-')}.log"
    status = _run(_command(backend, step, quick), log, timeout_s, variables)
    text = log.read_text(errors="replace")
    launched = re.findall(r"^npu_gr: (\w+) (on \d+ cores|ended with -?\d+)$", text, re.MULTILINE)
    last = launched[-1][0] if launched and launched[-1][1].startswith("on") else ""
    during = f", in the kernel {last}" if last else ""
    if status is None:
        why = f"no answer within {timeout_s:g} s{during}"
        return [Finding(step, FindingState.BROKEN, why, REMEDY)], []
    answer = next(
        (line for line in reversed(text.splitlines()) if line.startswith('{"findings"')), None
    )
    if status != 0 or answer is None:
        ended = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        said = [
            line for line in text.splitlines() if line.strip() and not line.startswith("npu_gr: ")
        ]
        why = f"ended with {ended}{during}: {said[-1][:300] if said else 'no output'}"
        return [Finding(step, FindingState.BROKEN, why, REMEDY)], []
    answered = json.loads(answer)
    found = [
        Finding(name, FindingState(state), *others) for name, state, *others in answered["findings"]
    ]
    return found, [ShapeLatency(*timed) for timed in answered["latencies"]]


def _run(command: list[str], log: Path, timeout_s: float, variables: dict[str, str]) -> int | None:
    """Run a command with its output in a file; None if it was killed at its time limit."""
    with log.open("w") as output:
        process = subprocess.Popen(  # noqa: S603  (our own command)
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            start_new_session=True,
        )
        try:
            return process.wait(timeout_s)
        except BaseException as error:  # also on Ctrl-C, so that no process stays on the device
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return None
            raise


def _machine() -> str:
    """Describe the machine: versions, environment variables, and the output of npu-smi."""
    lines = [platform.platform(), f"python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            lines.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{package} is not installed")
    lines += [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(VARIABLES)
    ]
    for note in sorted(ascend_ops.LIBRARIES.glob("*.json")):
        lines.append(f"{note.name}: {note.read_text().strip()}")
    if (smi := shutil.which("npu-smi")) is None:
        return "\n".join([*lines, "no npu-smi in PATH\n"])
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
