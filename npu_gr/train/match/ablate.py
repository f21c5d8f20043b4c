"""Measure what each ingredient brings: fit every arm on every density and seed, beside the simple baselines.

Each run leaves a record. A run on record is not run again, so an interrupted ablation resumes where it was.

Cold users by the thousands: a part of the shared users loses every target edge, and each is asked for one of them.

The users of a fold are cold in it, everything is fitted to what is left, and the next fold follows. Each way to score
them has a popularity term; its weight in a fold is the one that is best on the users of the other folds.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import xxhash
from torch import Tensor

from npu_gr.core.arrays import I64
from npu_gr.core.errors import DataError
from npu_gr.train.baselines.linear import SCALE_USERS, log_popularity, root_mean_square
from npu_gr.train.judge import Graph, HeldOut, Judge, Scores, smooth_hit
from npu_gr.train.match.arms import ARMS, EXPORT, POPULARITY, SCCDR, TRAINED, Bench, FittedArm, options_of
from npu_gr.train.match.domains import Domains, MatchData, split
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


NUM_FOLDS = 3
POPULARITY_WEIGHTS = (0.0, 0.2, 0.5, 1.0, 2.0, 4.0)
# Way -> the trained arm, and by which of its vectors the users are scored.
_VECTORS = {
    "initialised, own vector": ("initialised, no inter-domain loss", "own"),
    "separated, own vector": ("separated", "own"),
    "separated, source vector": ("separated", "source"),
    "+ stop-gradient, source vector": ("+ stop-gradient", "source"),
    "+ curriculum, source vector": (SCCDR, "source"),
}
JOINT_SVD = "joint SVD"
WAYS = (POPULARITY, *_VECTORS, JOINT_SVD, EXPORT)


def cold_ranks(
    domains: Domains,
    base: MatchOptions,
    density: float,
    num_validation: int,
    seed: int,
    progress: Callable[[str, StageProgress], None] = lambda _name, _step: None,
) -> dict[str, F64]:
    """Rank the tested edges of cold users, those of twins left out.

    Args:
        domains: the data.
        base: options of the whole of SCCDR.
        density: share of the target's edges that is kept.
        num_validation: most users to validate on.
        seed: of the folds, the split and the trainings.
        progress: called after every step, with the training's name.

    Returns:
        Way of `WAYS` -> float64 [cold users tested] ranks, by user: with each seed in the same order.
    """
    data = split(domains, density, num_validation, seed)
    shared = np.flatnonzero((domains.source.degrees()[0] > 0) & (domains.target.degrees()[0] > 0))
    parts = np.array_split(np.random.default_rng(seed).permutation(shared), NUM_FOLDS)
    found: dict[str, list[F64]] = {way: [] for way in WAYS}
    tested = domains.judge()
    users = []
    for number, part in enumerate(parts, 1):
        judge = tested.only(np.isin(tested.held_out.users, part))
        users.append(judge.held_out.users)
        named = partial(_named, progress, f"cold users, fold {number}: ")
        bench = Bench(_without(data, part), base, seed, named)
        for way in WAYS:
            found[way].append(_ranks(bench, way, judge))
    by_user = np.argsort(np.concatenate(users))
    return {way: _weighted(folds)[by_user] for way, folds in found.items()}


def _ranks(bench: Bench, way: str, judge: Judge) -> F64:
    """Rank under each weight of the popularity term: float64 [weights, users]. What is served has no further term."""
    if way in (POPULARITY, EXPORT):
        fitted = bench.fit(way)
        assert fitted is not None, "it has no limit"
        return judge.ranks_by(fitted.scores)[None]
    scores = bench.svd().served.scores if way == JOINT_SVD else _vector_scores(bench, *_VECTORS[way])
    unit = 1 / root_mean_square(scores(torch.from_numpy(judge.held_out.users[:SCALE_USERS])))
    popularity = log_popularity(bench.data.whole().target.degrees()[1])
    popularity = popularity / root_mean_square(popularity)

    def tables(users: Tensor) -> Iterator[Tensor]:
        base = scores(users) * unit
        return (base + popularity * weight for weight in POPULARITY_WEIGHTS)

    return judge.ranks_of_each(tables)


def _vector_scores(bench: Bench, arm: str, which: str) -> Scores:
    trained = bench.trained(arm)
    users, items = trained.users, trained.items
    if which == "source":
        assert trained.source_users is not None
        assert trained.bridge_items is not None
        users, items = trained.source_users, trained.bridge_items
    return lambda rows: users[rows] @ items.T


def _weighted(folds: list[F64]) -> F64:
    """Take each fold's ranks under the weight that is best on the other folds."""
    chosen = []
    for number, ranks in enumerate(folds):
        others = np.concatenate([fold for other, fold in enumerate(folds) if other != number], axis=1)
        chosen.append(ranks[int(np.argmax([smooth_hit(row) for row in others]))])
    return np.concatenate(chosen)


def _without(data: MatchData, users: I64) -> MatchData:
    """Take away every target edge of some users, and their validation."""
    kept = ~np.isin(data.target.users, users)
    target = Graph(data.target.users[kept], data.target.items[kept], data.target.num_users, data.target.num_items)
    validated = ~np.isin(data.validation.users, users)
    held_out = HeldOut(data.validation.users[validated], data.validation.items[validated])
    return replace(data, target=target, validation=held_out)
