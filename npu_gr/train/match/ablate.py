"""Measure what each ingredient of SCCDR brings: train every arm on every density and seed, and compare them.

Each run leaves a record. A run on record is not run again, so an interrupted ablation resumes where it was.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import xxhash

from npu_gr.core.errors import DataError
from npu_gr.train.match.domains import Domains, MatchData, split
from npu_gr.train.match.evaluate import Judge
from npu_gr.train.match.options import MatchOptions
from npu_gr.train.match.train import StageProgress, TrainedVectors, Trainer
from npu_gr.train.metrics import F64, hit_ratio, ndcg
from npu_gr.train.paired import REPLICATES, Difference, difference

POPULARITY = "popularity"  # the arm that trains nothing
_PLAIN = {"stop_gradient": False, "curriculum": False}
_NO_INTER = {"aligned": False, "neighbour": False}
# Arm -> options that differ from the base, which is the whole of SCCDR.
ARMS: dict[str, dict[str, Any]] = {
    "target only": {"schedule": "target-only"},
    "shared user embedding": {"schedule": "mixed", "users": "shared", **_NO_INTER, **_PLAIN},
    # Its weights of the losses were tuned less than those of the other arms.
    "mixed": {"schedule": "mixed", "lambda_intra": 1.0, "lambda_inter": 0.1, **_PLAIN},
    "separated, not initialised": {"initialise": False, **_PLAIN},
    "initialised, no inter-domain loss": _NO_INTER,
    "separated": _PLAIN,
    "+ stop-gradient": {"curriculum": False},
    "+ curriculum": {},
}
SCCDR = "+ curriculum"
COMPARED = [  # ours, theirs
    (SCCDR, POPULARITY),
    (SCCDR, "target only"),
    (SCCDR, "shared user embedding"),
    ("shared user embedding", "target only"),
    ("separated", "mixed"),
    ("separated", "separated, not initialised"),
    ("separated", "initialised, no inter-domain loss"),
    ("+ stop-gradient", "separated"),
    (SCCDR, "+ stop-gradient"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationRun:
    """The record of one run: a line of `runs.jsonl`. Its ranks are in `<key>.npz`."""

    key: str
    arm: str
    density: float
    seed: int
    validation_hit: float | None  # HIT@50 of the best weights; None: nothing was trained
    stage: str  # that the best weights are from
    step: int
    train_s: float  # CPU seconds; the first run that trains a shared stage pays for it
    hit_10: float
    hit_50: float
    hit_100: float
    ndcg_10: float
    sampled_hit_10: float
    sampled_ndcg_10: float
    cold_users: int  # tested users without an edge in the thinned target
    cold_hit_50: float | None  # by their target vectors; None: there are no such users
    cold_bridge_hit_50: float | None  # by their source vectors; None: no such users, or no bridge was trained


class _Cell(NamedTuple):
    """One run of a plan."""

    arm: str
    density: float
    seed: int


class Plan(NamedTuple):
    """The runs of an ablation: every arm on every density and seed."""

    base: MatchOptions
    densities: tuple[float, ...] = (0.4, 1.0)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    arms: tuple[str, ...] = tuple(ARMS)
    num_validation: int = 2000  # most users to validate on


def ablate(
    domains: Domains,
    plan: Plan,
    folder: Path,
    progress: Callable[[str, StageProgress], None] = lambda _name, _step: None,
) -> list[AblationRun]:
    """Run the part of a plan that is not on record yet.

    Args:
        domains: the data.
        plan: the runs.
        folder: of the records: `runs.jsonl`, and the ranks of each run.
        progress: called after every step, with the run's name.

    Returns:
        All runs of the plan.

    Raises:
        DataError: a record cannot be read, or a training failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = read_runs(folder)
    tested = Judge.make(domains.test, domains.target)
    for density in plan.densities:
        for seed in plan.seeds:
            data = split(domains, density, plan.num_validation, seed)
            shared: dict[str, bytes] = {}
            for arm in (POPULARITY, *plan.arms):
                key = run_key(plan, arm, density, seed)
                if key in done:
                    continue
                name = f"{density:.0%} of the target, seed {seed}: {arm}"
                cell = _Cell(arm, density, seed)
                began_at = time.process_time()
                trained = _run(plan, cell, data, shared, partial(progress, name))
                run, ranks = _measure(trained, data, tested, key, cell, time.process_time() - began_at)
                _record(folder, run, ranks)
                done[key] = run
    return [done[run_key(plan, arm, density, seed)] for arm, density, seed in _cells(plan)]


def read_runs(folder: Path) -> dict[str, AblationRun]:
    """Read the runs on record, by key. A last line that was cut short is ignored.

    Raises:
        DataError: another line cannot be read.
    """
    path = folder / "runs.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    runs = {}
    for number, line in enumerate(lines, 1):
        try:
            run = AblationRun(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise DataError(f"{path}, line {number}: {error}") from error
        if (folder / f"{run.key}.npz").exists():
            runs[run.key] = run
    return runs


def run_key(plan: Plan, arm: str, density: float, seed: int) -> str:
    """Name a run by everything that decides it but the data.

    Args:
        plan: the base options, and the users to validate on.
        arm: of `ARMS`, or `POPULARITY`.
        density: share of the target's edges.
        seed: of the split and the training.
    """
    table = msgspec.to_builtins(options_of(plan.base, arm, seed)) if arm != POPULARITY else {"seed": seed}
    text = json.dumps([arm, density, plan.num_validation, table], sort_keys=True)
    return xxhash.xxh3_64_hexdigest(text.encode())


def options_of(base: MatchOptions, arm: str, seed: int) -> MatchOptions:
    """Set the options of an arm.

    Args:
        base: options of the whole of SCCDR.
        arm: of `ARMS`.
        seed: of the training.
    """
    return msgspec.structs.replace(base, seed=seed, **ARMS[arm])


def _cells(plan: Plan) -> Iterator[_Cell]:
    for density in plan.densities:
        for arm in (POPULARITY, *plan.arms):
            for seed in plan.seeds:
                yield _Cell(arm, density, seed)


def _run(
    plan: Plan,
    cell: _Cell,
    data: MatchData,
    shared: dict[str, bytes],
    progress: Callable[[StageProgress], None],
) -> TrainedVectors:
    """Train an arm. Popularity needs no training: its user vectors are ones, its item vectors the items' degrees."""
    if cell.arm == POPULARITY:
        degrees = data.target.degrees()[1].astype(np.float32)
        return TrainedVectors(
            users=torch.ones(data.target.num_users, 1),
            items=torch.from_numpy(degrees)[:, None],
            source_users=None,
            bridge_items=None,
            validation_hit=None,
            stage="",
            step=0,
        )
    return Trainer(data, options_of(plan.base, cell.arm, cell.seed)).run(progress, shared=shared)


def _measure(
    trained: TrainedVectors, data: MatchData, tested: Judge, key: str, cell: _Cell, train_s: float
) -> tuple[AblationRun, dict[str, F64]]:
    ranks = {
        "full": tested.ranks(trained.users, trained.items),
        "sampled": tested.sampled_ranks(trained.users, trained.items, seed=0),
    }
    users = tested.held_out.users
    cold = (data.target.degrees()[0][users] == 0) & (data.source.degrees()[0][users] > 0)
    ranks["cold"] = ranks["full"][cold]
    if trained.source_users is not None and trained.bridge_items is not None:
        ranks["bridge"] = tested.ranks(trained.source_users, trained.bridge_items)[cold]
    run = AblationRun(
        key=key,
        arm=cell.arm,
        density=cell.density,
        seed=cell.seed,
        validation_hit=trained.validation_hit,
        stage=trained.stage,
        step=trained.step,
        train_s=train_s,
        hit_10=hit_ratio(ranks["full"], 10),
        hit_50=hit_ratio(ranks["full"], 50),
        hit_100=hit_ratio(ranks["full"], 100),
        ndcg_10=ndcg(ranks["full"], 10),
        sampled_hit_10=hit_ratio(ranks["sampled"], 10),
        sampled_ndcg_10=ndcg(ranks["sampled"], 10),
        cold_users=int(cold.sum()),
        cold_hit_50=hit_ratio(ranks["cold"], 50) if cold.any() else None,
        cold_bridge_hit_50=hit_ratio(ranks["bridge"], 50) if cold.any() and "bridge" in ranks else None,
    )
    return run, ranks


def _record(folder: Path, run: AblationRun, ranks: dict[str, F64]) -> None:
    """Write the ranks, then the line: a run is on record once its line is whole."""
    temporary = folder / f"{run.key}.tmp.npz"
    with temporary.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **{k: v.astype(np.float32) for k, v in ranks.items()})
    os.replace(temporary, folder / f"{run.key}.npz")
    path = folder / "runs.jsonl"
    whole = path.read_bytes().rpartition(b"\n")[:2] if path.exists() else ()  # without a line that was cut short
    with path.open("r+b" if path.exists() else "wb") as out:
        out.truncate(sum(map(len, whole)))
        out.seek(0, os.SEEK_END)
        out.write(json.dumps(asdict(run)).encode() + b"\n")


# ---- the report


def compare(
    folder: Path, runs: list[AblationRun], ours: str, theirs: str, density: float, k: int = 50
) -> Difference | None:
    """Compare HIT@k of two arms over the seeds that both have.

    Args:
        folder: of the records.
        runs: on record.
        ours: an arm.
        theirs: an arm.
        density: of the runs to compare.
        k: of HIT@k.

    Returns:
        Ours less theirs; None: the arms share no seed.
    """
    hits: dict[str, dict[int, Any]] = {ours: {}, theirs: {}}
    for run in runs:
        if run.density == density and run.arm in hits:
            with np.load(folder / f"{run.key}.npz") as ranks:
                hits[run.arm][run.seed] = ranks["full"] < k
    seeds = sorted(hits[ours].keys() & hits[theirs].keys())
    if not seeds:
        return None
    return difference(np.array([hits[ours][seed] for seed in seeds]), np.array([hits[theirs][seed] for seed in seeds]))


def markdown(folder: Path, runs: list[AblationRun]) -> str:
    """Write, for each density, a table of means and one of paired differences."""
    lines = []
    for density in sorted({run.density for run in runs}):
        lines += [f"### {density:.0%} of the target's edges", "", *_means(runs, density), ""]
        lines += ["| HIT@50 of | against | difference (95 %) | relative | p |", "|---|---|---|---|---|"]
        for ours, theirs in COMPARED:
            gain = compare(folder, runs, ours, theirs, density)
            if gain is not None:
                base = np.mean([run.hit_50 for run in runs if run.density == density and run.arm == theirs])
                p = f"< {1 / REPLICATES:g}" if gain.p <= 1 / REPLICATES else f"{gain.p:.4f}"
                lines.append(
                    f"| {ours} | {theirs} | {gain.mean:+.4f} ({gain.low:+.4f} to {gain.high:+.4f}) "
                    f"| {gain.mean / base:+.1%} | {p} |"
                )
        lines.append("")
    lines.append("Means over seeds; the paired bootstrap draws seeds and users. 1+999: among 999 sampled items.")
    lines.append("Cold: tested users without an edge in the thinned target, by their target or their source vector.")
    return "\n".join(lines) + "\n"


def _means(runs: list[AblationRun], density: float) -> list[str]:
    lines = [
        "| arm | seeds | HIT@10 | HIT@50 | HIT@100 | NDCG@10 | HIT@10 (1+999) | NDCG@10 (1+999) "
        "| cold HIT@50 | cold, source vector |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for arm in (POPULARITY, *ARMS):
        mine = [run for run in runs if run.arm == arm and run.density == density]
        if not mine:
            continue
        names = ("hit_10", "hit_50", "hit_100", "ndcg_10", "sampled_hit_10", "sampled_ndcg_10")
        cells = [f"{np.mean([getattr(run, name) for run in mine]):.4f}" for name in names]
        for name in ("cold_hit_50", "cold_bridge_hit_50"):
            values = [value for run in mine if (value := getattr(run, name)) is not None]
            cells.append(f"{np.mean(values):.4f}" if values else "-")
        lines.append(f"| {arm} | {len(mine)} | {' | '.join(cells)} |")
    return lines


def plot(runs: list[AblationRun], path: Path) -> None:
    """Draw HIT@50 of every arm, a bar for the mean and a dot for each seed, in a panel for each density.

    Raises:
        DataError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DataError("the plot needs pip install 'npu_gr[plot]'") from error
    densities = sorted({run.density for run in runs})
    figure = Figure(figsize=(6 * len(densities), 4), layout="constrained")
    axes = figure.subplots(1, len(densities), squeeze=False)[0]
    for panel, density in zip(axes, densities, strict=True):
        arms = [arm for arm in (POPULARITY, *ARMS) if any(r.arm == arm and r.density == density for r in runs)]
        for place, arm in enumerate(reversed(arms)):
            hits = [run.hit_50 for run in runs if run.arm == arm and run.density == density]
            panel.barh(place, np.mean(hits), color="tab:blue" if arm == SCCDR else "lightgray")
            panel.plot(hits, [place] * len(hits), "k.", markersize=4)
        panel.set_yticks(range(len(arms)), list(reversed(arms)))
        panel.set_xlabel("HIT@50, all items ranked")
        panel.set_title(f"{density:.0%} of the target's edges")
    figure.savefig(path)
