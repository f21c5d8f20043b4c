"""The command `npu-gr train match`: train once and write vectors to serve, or run the ablation and write its table."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console

from npu_gr.core.errors import ConfigError, DataError
from npu_gr.core.settings import override
from npu_gr.matching.vectors import save
from npu_gr.train.match import checkpoint
from npu_gr.train.match.ablate import Plan, ablate
from npu_gr.train.match.arms import SCCDR, TRAINED, options_of
from npu_gr.train.match.candidates import BASELINES, fit_joint_svd
from npu_gr.train.match.domains import Domains, split
from npu_gr.train.match.export import export
from npu_gr.train.match.joined import join
from npu_gr.train.match.options import MatchOptions
from npu_gr.train.match.progress import bars
from npu_gr.train.match.report import markdown, plot
from npu_gr.train.match.train import Trainer
from npu_gr.train.metrics import F64, hit_ratio, ndcg
from npu_gr.train.next_command import how_to_match
from npu_gr.train.paired import compare_hits

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
