"""Report an ablation: a table of means, paired differences, cold users, and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from npu_gr.core.errors import DataError
from npu_gr.train.match.ablate import COLD, AblationRun
from npu_gr.train.match.arms import ARMS, EXPORT, EXPORT_LESS, POPULARITY, SCCDR
from npu_gr.train.match.candidates import BASELINES
from npu_gr.train.paired import REPLICATES, Difference, difference

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
    means = {arm: np.mean(hits) for arm in BASELINES if (hits := _figures(runs, arm, density, "hit_50"))}
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
            base = np.mean(_figures(runs, theirs, density, "hit_50"))
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


def _figures(runs: list[AblationRun], arm: str, density: float, name: str) -> list[float]:
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
        cells = [f"{np.mean(found):.4f}" if (found := _figures(mine, arm, density, name)) else "-" for name in names]
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
            hits = _figures(runs, arm, density, "hit_50")
            panel.barh(place, np.mean(hits), color="tab:blue" if arm == EXPORT else "lightgray")
            panel.plot(hits, [place] * len(hits), "k.", markersize=4)
        panel.set_yticks(range(len(arms)), list(reversed(arms)))
        panel.set_xlabel("HIT@50, all items ranked")
        panel.set_title(f"{density:.0%} of the target's edges")
    figure.savefig(path)
