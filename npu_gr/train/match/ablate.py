"""What each ingredient brings: every arm on every seed and density, one record a run, and the table of them all.

A run that is on record is not run again, so an interrupted ablation goes on where it was.
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
from npu_gr.train.match.evaluate import Judge, Ranks, hit_ratio, ndcg
from npu_gr.train.match.options import MatchOptions
from npu_gr.train.match.paired import REPLICATES, Difference, difference
from npu_gr.train.match.train import Progress, Result, Trainer

POPULARITY = "popularity"
_PLAIN = {"stop_gradient": False, "curriculum": False}
_NO_INTER = {"aligned": False, "neighbour": False}
ARMS: dict[str, dict[str, Any]] = {
    "target only": {"schedule": "target-only"},
    "shared user embedding": {"schedule": "mixed", "users": "shared", **_NO_INTER, **_PLAIN},
    "mixed": {"schedule": "mixed", "lambda_intra": 1.0, "lambda_inter": 0.1, **_PLAIN},  # tuned less
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
class Run:
    """One training: what it was, and where its ranks are."""

    key: str
    arm: str
    density: float
    seed: int
    validation_hit: float | None  # None: nothing was trained
    stage: str  # of the best weights
    step: int
    train_s: float  # CPU; less where stages were shared
    hit_10: float
    hit_50: float
    hit_100: float
    ndcg_10: float
    sampled_hit_10: float
    sampled_ndcg_10: float
    cold_users: int  # tested users without an edge in the thinned target
    cold_hit_50: float | None  # by their own target vector; None: there are none
    cold_bridge_hit_50: float | None  # by their source vector; None: no bridge was trained


class Plan(NamedTuple):
    """What to run."""

    base: MatchOptions
    densities: tuple[float, ...] = (0.4, 1.0)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    arms: tuple[str, ...] = tuple(ARMS)
    num_validation: int = 2000


def ablate(
    domains: Domains,
    plan: Plan,
    folder: Path,
    progress: Callable[[str, Progress], None] = lambda _name, _step: None,
) -> list[Run]:
    """Do what of the plan is not yet on record in `folder`: `runs.jsonl`, and the ranks of each run.

    Args:
        domains: both.
        plan: every arm is run on every seed and density.
        folder: of the records.
        progress: called after every step with the run's name.

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
                cell, began_at = (arm, density, seed), time.process_time()
                result = _run(plan, cell, data, shared, partial(progress, name))
                run, ranks = _measure(result, data, tested, key, cell, time.process_time() - began_at)
                _record(folder, run, ranks)
                done[key] = run
    return [done[run_key(plan, arm, density, seed)] for arm, density, seed in _cells(plan)]


def read_runs(folder: Path) -> dict[str, Run]:
    """What is on record, by key. A last line that was cut short counts for nothing.

    Raises:
        DataError: another line cannot be read.
    """
    path = folder / "runs.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    runs = {}
    for number, line in enumerate(lines, 1):
        try:
            run = Run(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise DataError(f"{path}, line {number}: {error}") from error
        if (folder / f"{run.key}.npz").exists():
            runs[run.key] = run
    return runs


def run_key(plan: Plan, arm: str, density: float, seed: int) -> str:
    """Names a run by all that decides it but the data."""
    table = msgspec.to_builtins(options_of(plan.base, arm, seed)) if arm != POPULARITY else {"seed": seed}
    text = json.dumps([arm, density, plan.num_validation, table], sort_keys=True)
    return xxhash.xxh3_64_hexdigest(text.encode())


def options_of(base: MatchOptions, arm: str, seed: int) -> MatchOptions:
    """The base with the arm's switches."""
    return msgspec.structs.replace(base, seed=seed, **ARMS[arm])


def _cells(plan: Plan) -> Iterator[tuple[str, float, int]]:
    for density in plan.densities:
        for arm in (POPULARITY, *plan.arms):
            for seed in plan.seeds:
                yield arm, density, seed


def _run(
    plan: Plan,
    cell: tuple[str, float, int],
    data: MatchData,
    shared: dict[str, bytes],
    progress: Callable[[Progress], None],
) -> Result:
    """Train the arm. Popularity is one: its vectors are a column of ones and the items' degrees."""
    arm, _, seed = cell
    if arm == POPULARITY:
        degrees = data.target.degrees()[1].astype(np.float32)
        users, items = torch.ones(data.target.num_users, 1), torch.from_numpy(degrees)[:, None]
        return Result(users, items, None, None, None, "", 0)
    return Trainer(data, options_of(plan.base, arm, seed)).run(progress, shared=shared)


def _measure(
    result: Result, data: MatchData, tested: Judge, key: str, cell: tuple[str, float, int], train_s: float
) -> tuple[Run, dict[str, Ranks]]:
    arm, density, seed = cell
    ranks = {
        "full": tested.ranks(result.users, result.items),
        "sampled": tested.sampled_ranks(result.users, result.items, seed=0),
    }
    users = tested.held.users
    cold = (data.target.degrees()[0][users] == 0) & (data.source.degrees()[0][users] > 0)
    ranks["cold"] = ranks["full"][cold]
    if result.source_users is not None and result.bridge_items is not None:
        ranks["bridge"] = tested.ranks(result.source_users, result.bridge_items)[cold]
    run = Run(
        key=key,
        arm=arm,
        density=density,
        seed=seed,
        validation_hit=result.validation_hit,
        stage=result.stage,
        step=result.step,
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


def _record(folder: Path, run: Run, ranks: dict[str, Ranks]) -> None:
    """The ranks first: a run is on record once its line is whole."""
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


def compare(folder: Path, runs: list[Run], ours: str, theirs: str, density: float, k: int = 50) -> Difference | None:
    """HIT@k of two arms over the seeds that both have; None: there are none."""
    hits: dict[str, dict[int, Any]] = {ours: {}, theirs: {}}
    for run in runs:
        if run.density == density and run.arm in hits:
            with np.load(folder / f"{run.key}.npz") as ranks:
                hits[run.arm][run.seed] = ranks["full"] < k
    seeds = sorted(hits[ours].keys() & hits[theirs].keys())
    if not seeds:
        return None
    return difference(np.array([hits[ours][seed] for seed in seeds]), np.array([hits[theirs][seed] for seed in seeds]))


def markdown(folder: Path, runs: list[Run]) -> str:
    """One table of means and one of paired differences a density."""
    lines = []
    for density in sorted({run.density for run in runs}):
        lines += [f"### {density:.0%} of the target's edges", "", *_means(runs, density), ""]
        lines += ["| HIT@50 of | against | difference (95 %) | relative | p |", "|---|---|---|---|---|"]
        for ours, theirs in COMPARED:
            found = compare(folder, runs, ours, theirs, density)
            if found is not None:
                base = np.mean([run.hit_50 for run in runs if run.density == density and run.arm == theirs])
                p = f"< {1 / REPLICATES:g}" if found.p <= 1 / REPLICATES else f"{found.p:.4f}"
                lines.append(
                    f"| {ours} | {theirs} | {found.mean:+.4f} ({found.low:+.4f} to {found.high:+.4f}) "
                    f"| {found.mean / base:+.1%} | {p} |"
                )
        lines.append("")
    lines.append("Means over seeds; the paired bootstrap draws seeds and users. 1+999: among 999 sampled items.")
    lines.append("Cold: tested users without an edge in the thinned target, by their target or their source vector.")
    return "\n".join(lines) + "\n"


def _means(runs: list[Run], density: float) -> list[str]:
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


def plot(runs: list[Run], path: Path) -> None:
    """HIT@50 of every arm with its seeds, a panel a density.

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
