"""The command `npu-gr train match`: train once and write vectors to serve, or run the ablation and write its table."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console

from npu_gr.core.errors import ConfigError, DataError
from npu_gr.core.settings import override
from npu_gr.matching.vectors import save
from npu_gr.train.match import checkpoint
from npu_gr.train.match.ablate import COLD, AblationRun, Plan, ablate
from npu_gr.train.match.arms import (
    ARMS,
    BASELINES,
    EXPORT,
    EXPORT_LESS,
    POPULARITY,
    SCCDR,
    TRAINED,
    fit_joint_svd,
    join,
    options_of,
)
from npu_gr.train.match.checkpoint import bars, export
from npu_gr.train.match.domains import Domains, split
from npu_gr.train.match.options import MatchOptions
from npu_gr.train.match.train import Trainer
from npu_gr.train.metrics import F64, hit_ratio, ndcg
from npu_gr.train.next_item import REPLICATES, Difference, compare_hits, difference
from npu_gr.train.options import how_to_match

SAVE_EVERY_S = 20.0  # between two saves of the state; each copies all weights


def run_training(
    domains: Domains,
    folder: Path,
    preset: str,
    overrides: tuple[str, ...],
    density: float,
    num_validation: int,
    console: Console,
) -> None:
    """Train, or resume an interrupted training; write the vectors, and their figures beside the baselines'.

    Args:
        domains: the data.
        folder: of the vectors and, until they are written, of the training's state.
        preset: sccdr, or the name of another arm of the ablation.
        overrides: `KEY=VALUE` options, which replace those of the preset.
        density: share of the target's edges to train on, in (0, 1].
        num_validation: most users to validate on.
        console: shows progress and figures.

    Raises:
        ConfigError: no such preset or option, or the density is out of range.
        DataError: the data cannot be trained on, or the folder cannot be written.
    """
    arms = {"sccdr": SCCDR, **{arm.removeprefix("+ ").replace(" ", "-").replace(",", ""): arm for arm in TRAINED}}
    if preset not in arms:
        raise ConfigError(f"--preset: {preset!r} is none of {', '.join(arms)}")
    base = override(MatchOptions(), overrides)
    options = msgspec.structs.replace(options_of(base, arms[preset], base.seed), **_given(base, overrides))
    data = split(domains, _checked(density), num_validation, options.seed)
    _warn(domains, console)
    trainer = Trainer(data, options)
    state = folder / "training.state"
    if checkpoint.resume(trainer, state):
        console.print(f"resumed after {trainer.place}")
    with bars(console) as show:
        save_state = checkpoint.every(SAVE_EVERY_S, lambda: checkpoint.save(trainer, state))
        trained = trainer.run(partial(show, ""), save_state)
    served = join(data, fit_joint_svd(data) if options.export == "joined" else None, trained)
    console.print(f"served: {served.settings}; {served.items.shape[1]} dimensions")
    judge = domains.judge()
    ranks = judge.ranks(served.users, served.items)
    with_twins = domains.judge_with_twins().ranks(served.users, served.items)
    figures = {"validation_smooth_hit": served.validation, **_figures(ranks), **_figures(with_twins, "_twins")}
    console.print(", ".join(f"{name} {value:.4f}" for name, value in figures.items()))
    by_baseline = {
        name: judge.ranks_by(fitted.served.scores) for name, fit in BASELINES.items() if (fitted := fit(data))
    }
    for name, found in by_baseline.items():
        console.print(f"{name}: " + ", ".join(f"{key} {value:.4f}" for key, value in _figures(found).items()))
    comparison = compare_hits("what is served", ranks, by_baseline)
    if comparison is not None:
        console.print(comparison.text(), markup=False, highlight=False)
    version = save(export(domains, data, served, figures), folder)
    state.unlink(missing_ok=True)
    console.print(f"vectors {version} in {folder}")
    user = domains.users[int(data.target.users[0])].user
    console.print(how_to_match(folder, user), soft_wrap=True, markup=False, highlight=False)


def run_ablation(
    domains: Domains,
    folder: Path,
    overrides: tuple[str, ...],
    densities: tuple[float, ...],
    num_seeds: int,
    num_validation: int,
    console: Console,
) -> None:
    """Run the trainings that are not on record; write `ablation.md` and, if matplotlib is installed, `ablation.png`.

    Args:
        domains: the data.
        folder: of the records, the table and the plot.
        overrides: `KEY=VALUE` options of every arm.
        densities: shares of the target's edges to train on, each in (0, 1].
        num_seeds: trainings of each arm and density.
        num_validation: most users to validate on.
        console: shows progress and the table.

    Raises:
        ConfigError: no such option, or a density is out of range.
        DataError: a training failed.
    """
    plan = Plan(
        base=override(MatchOptions(), overrides),
        densities=tuple(_checked(density) for density in densities),
        seeds=tuple(range(num_seeds)),
        num_validation=num_validation,
    )
    _warn(domains, console)
    with bars(console) as show:
        runs = ablate(domains, plan, folder, show)
    table = markdown(folder, runs)
    (folder / "ablation.md").write_text(table)
    console.print(table)
    try:
        plot(runs, folder / "ablation.png")
    except DataError as error:
        console.print(str(error))


def _warn(domains: Domains, console: Console) -> None:
    """Warn of twins, and of item ids that both domains have."""
    if (words := domains.about_twins()) is not None:
        console.print(words, markup=False, highlight=False)
    if not domains.ids_are_apart:
        console.print(
            "Both domains have some item ids: an id of a request's history is the target's item, so what a user does "
            "in the source later is not folded in."
        )


def _figures(ranks: F64, suffix: str = "") -> dict[str, float]:
    """Compute what is kept beside the vectors."""
    return {f"hit_{k}{suffix}": hit_ratio(ranks, k) for k in (10, 50, 100)} | {f"ndcg_10{suffix}": ndcg(ranks, 10)}


def _given(base: MatchOptions, overrides: tuple[str, ...]) -> dict[str, object]:
    """Select the options that the command line names: they replace the preset's."""
    return {key: getattr(base, key) for key in (text.partition("=")[0] for text in overrides)}


def _checked(density: float) -> float:
    if not 0 < density <= 1:
        raise ConfigError(f"--density: {density} is not in (0, 1]")
    return density


BEST = "the best baseline"
COMPARED = [  # ours, theirs
    (EXPORT, BEST),
    (EXPORT, EXPORT_LESS),
    (EXPORT, SCCDR),
    (SCCDR, BEST),
    (SCCDR, POPULARITY),
    (SCCDR, "target only"),
    ("target only", POPULARITY),
    ("target only", "target only, no prior"),
    ("initialised, no inter-domain loss", "target only"),
    ("separated", "initialised, no inter-domain loss"),
    ("separated", "separated, not initialised"),
    ("separated", "mixed"),
    ("shared user embedding", "target only"),
    ("+ stop-gradient", "separated"),
    (SCCDR, "+ stop-gradient"),
    *((f"{COLD}{ours}", f"{COLD}{theirs}") for ours, theirs in (
        ("separated, source vector", "separated, own vector"),
        ("+ stop-gradient, source vector", "separated, source vector"),
        ("+ curriculum, source vector", "+ stop-gradient, source vector"),
        ("joint SVD", POPULARITY),
        ("separated, source vector", "joint SVD"),
        ("export", "joint SVD"),
    )),
]  # fmt: skip


def compare(
    folder: Path, runs: list[AblationRun], ours: str, theirs: str, density: float, k: int = 50, of: str = "full"
) -> Difference | None:
    """Compare HIT@k of two arms over the seeds that both have.

    Args:
        folder: of the records.
        runs: on record.
        ours: an arm.
        theirs: an arm.
        density: of the runs to compare.
        k: of HIT@k.
        of: full = of the tested edges that ask for no twin; twins = of all.

    Returns:
        Ours less theirs; None: the arms share no seed.
    """
    hits: dict[str, dict[int, Any]] = {ours: {}, theirs: {}}
    for run in runs:
        if run.density == density and run.arm in hits:
            with np.load(folder / f"{run.key}.npz") as ranks:
                hits[run.arm][run.seed] = ranks[of] < k
    seeds = sorted(hits[ours].keys() & hits[theirs].keys())
    if not seeds:
        return None
    return difference(np.array([hits[ours][seed] for seed in seeds]), np.array([hits[theirs][seed] for seed in seeds]))


def best_baseline(runs: list[AblationRun], density: float) -> str | None:
    """Name the baseline with the highest mean HIT@50; None = none was run."""
    means = {arm: np.mean(hits) for arm in BASELINES if (hits := _table_figures(runs, arm, density, "hit_50"))}
    return max(means, key=lambda arm: means[arm], default=None)


def markdown(folder: Path, runs: list[AblationRun]) -> str:
    """Write, for each density, a table of means and one of paired differences."""
    lines = []
    for density in sorted({run.density for run in runs}):
        best = best_baseline(runs, density)
        lines += [f"### {density:.0%} of the target's edges", "", *_means(runs, density), ""]
        lines += [
            "| HIT@50 of | against | difference (95 %) | relative | p | twins among them |",
            "|---|---|---|---|---|---|",
        ]
        for ours, named in COMPARED:
            theirs = best if named == BEST else named
            gain = None if theirs is None else compare(folder, runs, ours, theirs, density)
            if gain is None or theirs is None:
                continue
            base = np.mean(_table_figures(runs, theirs, density, "hit_50"))
            against = theirs if named != BEST else f"{theirs} ({BEST})"
            twins = None if ours.startswith(COLD) else compare(folder, runs, ours, theirs, density, of="twins")
            cells = (ours, against, _interval(gain), f"{gain.mean / base:+.1%}", _p(gain), _interval(twins))
            lines.append(f"| {' | '.join(cells)} |")
        if best is not None and (lost := compare(folder, runs, EXPORT, best, density)) is not None and lost.high < 0:
            lines += ["", f"WARNING: what is served is worse than {best} on this data."]
        lines.append("")
    lines += [
        "Means over seeds; the paired bootstrap draws seeds and users. Figures are of the tested edges that ask for no",
        "twin of what the user has in the source; twins: of all of them, when no twin is hidden.",
    ]
    return "\n".join(lines) + "\n"


def _interval(found: Difference | None) -> str:
    return "-" if found is None else f"{found.mean:+.4f} ({found.low:+.4f} to {found.high:+.4f})"


def _p(found: Difference) -> str:
    return f"< {1 / REPLICATES:g}" if found.p <= 1 / REPLICATES else f"{found.p:.4f}"


def _arms(runs: list[AblationRun], density: float) -> list[str]:
    """List the arms on record, in order."""
    names = [run.arm for run in runs if run.density == density]
    return [arm for arm in (*ARMS, *dict.fromkeys(a for a in names if a.startswith(COLD))) if arm in names]


def _table_figures(runs: list[AblationRun], arm: str, density: float, name: str) -> list[float]:
    found = [getattr(run, name) for run in runs if run.arm == arm and run.density == density]
    return [value for value in found if value is not None]


def _means(runs: list[AblationRun], density: float) -> list[str]:
    lines = [
        "| arm | seeds | tested | HIT@10 | HIT@50 | HIT@100 | NDCG@10 | twins: HIT@10 | HIT@50 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for arm in _arms(runs, density):
        mine = [run for run in runs if run.arm == arm and run.density == density]
        names = ("hit_10", "hit_50", "hit_100", "ndcg_10", "twins_hit_10", "twins_hit_50")
        figures = [_table_figures(mine, arm, density, name) for name in names]
        cells = [f"{np.mean(found):.4f}" if found else "-" for found in figures]
        lines.append(f"| {arm} | {len(mine)} | {mine[0].num_tested} | {' | '.join(cells)} |")
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
    figure = Figure(figsize=(6 * len(densities), 5), layout="constrained")
    axes = figure.subplots(1, len(densities), squeeze=False)[0]
    for panel, density in zip(axes, densities, strict=True):
        arms = [arm for arm in _arms(runs, density) if not arm.startswith(COLD)]
        for place, arm in enumerate(reversed(arms)):
            hits = _table_figures(runs, arm, density, "hit_50")
            panel.barh(place, np.mean(hits), color="tab:blue" if arm == EXPORT else "lightgray")
            panel.plot(hits, [place] * len(hits), "k.", markersize=4)
        panel.set_yticks(range(len(arms)), list(reversed(arms)))
        panel.set_xlabel("HIT@50, all items ranked")
        panel.set_title(f"{density:.0%} of the target's edges")
    figure.savefig(path)
