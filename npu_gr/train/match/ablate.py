"""Measure what each ingredient brings: fit every arm on every density and seed, beside the simple baselines.

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
import xxhash

from npu_gr.core.errors import DataError
from npu_gr.train.match.arms import ARMS, TRAINED, Bench, FittedArm, options_of
from npu_gr.train.match.cold import cold_ranks
from npu_gr.train.match.domains import Domains, split
from npu_gr.train.match.options import MatchOptions
from npu_gr.train.match.train import StageProgress
from npu_gr.train.metrics import F64, hit_ratio, ndcg

COLD = "cold users: "  # begins the name of an arm that is asked for cold users


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationRun:
    """The record of one run: a line of `runs.jsonl`. Its ranks are in `<key>.npz`, of the twins too.

    Figures are of the tested edges that ask for no twin; twins of what a user has do not compete.
    """

    key: str
    arm: str
    density: float
    seed: int
    validation: float | None  # smooth HIT; None: nothing was validated
    settings: str  # what was chosen, in words
    train_s: float  # CPU seconds; the first run that fits a shared part pays for it
    num_tested: int
    hit_10: float
    hit_50: float
    hit_100: float
    ndcg_10: float
    twins_hit_10: float | None  # of all tested edges, twins among them; None: not asked
    twins_hit_50: float | None


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
    arms: tuple[str, ...] = ARMS
    num_validation: int = 2000  # most users to validate on
    cold: bool = True  # also ask for cold users, at the first density


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
        All runs of the plan, but of arms that are too large for the data.

    Raises:
        DataError: a record cannot be read, or a training failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = read_runs(folder)
    tested = domains.judge()
    tested_with_twins = domains.judge_with_twins()
    for density in plan.densities:
        for seed in plan.seeds:
            cells = [_Cell(arm, density, seed) for arm in plan.arms]
            missing = [cell for cell in cells if run_key(plan, *cell) not in done]
            if not missing:
                continue
            name = f"{density:.0%} of the target, seed {seed}: "
            data = split(domains, density, plan.num_validation, seed)
            bench = Bench(data, plan.base, seed, partial(_named, progress, name))
            for cell in missing:
                began_at = time.process_time()
                fitted = bench.fit(cell.arm)
                if fitted is not None:
                    ranks = {
                        "full": tested.ranks_by(fitted.scores),
                        "twins": tested_with_twins.ranks_by(fitted.scores),
                    }
                    run = _measured(run_key(plan, *cell), cell, fitted, ranks, time.process_time() - began_at)
                    _record(folder, run, ranks)
                    done[run.key] = run
    runs = [done[key] for cell in _cells(plan) if (key := run_key(plan, *cell)) in done]
    for seed in plan.seeds if plan.cold else ():
        runs += _cold(domains, plan, seed, folder, done, progress)
    return runs


def _cold(
    domains: Domains,
    plan: Plan,
    seed: int,
    folder: Path,
    done: dict[str, AblationRun],
    progress: Callable[[str, StageProgress], None],
) -> list[AblationRun]:
    """Ask for cold users with one seed, unless that is on record."""
    density = plan.densities[0]
    prefix = run_key(plan, COLD, density, seed)
    found = [run for run in done.values() if run.key.startswith(f"{prefix}-")]
    if found:
        return found
    began_at = time.process_time()
    every = cold_ranks(domains, plan.base, density, plan.num_validation, seed, progress)
    train_s = time.process_time() - began_at
    for number, (way, ranks) in enumerate(every.items()):
        cell = _Cell(f"{COLD}{way}", density, seed)
        run = _measured(f"{prefix}-{number}", cell, None, {"full": ranks}, train_s)
        _record(folder, run, {"full": ranks})
        found.append(run)
    return found


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
        arm: of `ARMS`, or `COLD`.
        density: share of the target's edges.
        seed: of the split and the training.
    """
    options = options_of(plan.base, arm, seed) if arm in TRAINED else msgspec.structs.replace(plan.base, seed=seed)
    text = json.dumps([arm, density, plan.num_validation, msgspec.to_builtins(options)], sort_keys=True)
    return xxhash.xxh3_64_hexdigest(text.encode())


def _named(progress: Callable[[str, StageProgress], None], prefix: str, arm: str, step: StageProgress) -> None:
    progress(prefix + arm, step)


def _cells(plan: Plan) -> Iterator[_Cell]:
    for density in plan.densities:
        for arm in plan.arms:
            for seed in plan.seeds:
                yield _Cell(arm, density, seed)


def _measured(key: str, cell: _Cell, fitted: FittedArm | None, ranks: dict[str, F64], train_s: float) -> AblationRun:
    twins = ranks.get("twins")
    return AblationRun(
        key=key,
        arm=cell.arm,
        density=cell.density,
        seed=cell.seed,
        validation=fitted.validation if fitted else None,
        settings=fitted.settings if fitted else "",
        train_s=train_s,
        num_tested=len(ranks["full"]),
        hit_10=hit_ratio(ranks["full"], 10),
        hit_50=hit_ratio(ranks["full"], 50),
        hit_100=hit_ratio(ranks["full"], 100),
        ndcg_10=ndcg(ranks["full"], 10),
        twins_hit_10=None if twins is None else hit_ratio(twins, 10),
        twins_hit_50=None if twins is None else hit_ratio(twins, 50),
    )


def _record(folder: Path, run: AblationRun, ranks: dict[str, F64]) -> None:
    """Write the ranks, then the line: a run is on record once its line is whole."""
    temporary = folder / f"{run.key}.tmp.npz"
    arrays: dict[str, Any] = {name: values.astype(np.float32) for name, values in ranks.items()}
    with temporary.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
    os.replace(temporary, folder / f"{run.key}.npz")
    path = folder / "runs.jsonl"
    whole = path.read_bytes().rpartition(b"\n")[:2] if path.exists() else ()  # without a line that was cut short
    with path.open("r+b" if path.exists() else "wb") as out:
        out.truncate(sum(map(len, whole)))
        out.seek(0, os.SEEK_END)
        out.write(json.dumps(asdict(run)).encode() + b"\n")
