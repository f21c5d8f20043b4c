"""What `npu-gr train match` does: one training that ends in vectors to serve, or the ablation that ends in a table."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec
import yaml
from rich.console import Console

from npu_gr.core.errors import ConfigError, DataError
from npu_gr.matching.vectors import save
from npu_gr.train.match import checkpoint
from npu_gr.train.match.ablate import ARMS, SCCDR, Plan, ablate, markdown, options_of, plot
from npu_gr.train.match.domains import Domains, split
from npu_gr.train.match.evaluate import Judge, hit_ratio, ndcg
from npu_gr.train.match.export import export
from npu_gr.train.match.options import MatchOptions
from npu_gr.train.match.progress import bars
from npu_gr.train.match.train import Trainer

SAVE_EVERY_S = 20.0


def make_options(overrides: tuple[str, ...]) -> MatchOptions:
    """The defaults with `KEY=VALUE` overrides.

    Raises:
        ConfigError: no such option, or not such a value.
    """
    table = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"--set {override}: expected key=value")
        table[key] = yaml.safe_load(value)
    try:
        return msgspec.convert(table, MatchOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--set: {error}") from error


def run_training(
    domains: Domains,
    folder: Path,
    preset: str,
    overrides: tuple[str, ...],
    density: float,
    num_validation: int,
    console: Console,
) -> None:
    """Train, or go on, and write the vectors.

    Raises:
        ConfigError: no such preset or option.
        DataError: the data cannot be trained on, or the folder cannot be written.
    """
    arms = {"sccdr": SCCDR, **{arm.removeprefix("+ ").replace(" ", "-").replace(",", ""): arm for arm in ARMS}}
    if preset not in arms:
        raise ConfigError(f"--preset: {preset!r} is none of {', '.join(arms)}")
    base = make_options(overrides)
    options = msgspec.structs.replace(options_of(base, arms[preset], base.seed), **_given(base, overrides))
    data = split(domains, _checked(density), num_validation, options.seed)
    trainer = Trainer(data, options)
    state = folder / "training.state"
    if checkpoint.resume(trainer, state):
        console.print(f"going on after {trainer.place}")
    with bars(console) as show:
        looked = checkpoint.every(SAVE_EVERY_S, lambda: checkpoint.save(trainer, state))
        result = trainer.run(partial(show, ""), looked)
    ranks = Judge.make(domains.test, domains.target).ranks(result.users, result.items)
    figures = {
        **({} if result.validation_hit is None else {"validation_hit_50": result.validation_hit}),
        **{f"hit_{k}": hit_ratio(ranks, k) for k in (10, 50, 100)},
        "ndcg_10": ndcg(ranks, 10),
    }
    console.print(", ".join(f"{name} {value:.4f}" for name, value in figures.items()))
    version = save(export(domains, data, result, figures), folder)
    state.unlink(missing_ok=True)
    console.print(f"vectors {version} in {folder}")


def run_ablation(
    domains: Domains,
    folder: Path,
    overrides: tuple[str, ...],
    densities: tuple[float, ...],
    num_seeds: int,
    num_validation: int,
    console: Console,
) -> None:
    """Run what is not on record; write `ablation.md`, and `ablation.png` where matplotlib is there.

    Raises:
        ConfigError: no such option.
        DataError: a training failed.
    """
    plan = Plan(
        base=make_options(overrides),
        densities=tuple(_checked(density) for density in densities),
        seeds=tuple(range(num_seeds)),
        num_validation=num_validation,
    )
    with bars(console) as show:
        runs = ablate(domains, plan, folder, show)
    table = markdown(folder, runs)
    (folder / "ablation.md").write_text(table)
    console.print(table)
    try:
        plot(runs, folder / "ablation.png")
    except DataError as error:
        console.print(str(error))


def _given(base: MatchOptions, overrides: tuple[str, ...]) -> dict[str, object]:
    """What was named on the command line stands above the preset."""
    return {key: getattr(base, key) for key in (override.partition("=")[0] for override in overrides)}


def _checked(density: float) -> float:
    if not 0 < density <= 1:
        raise ConfigError(f"--density: {density} is not in (0, 1]")
    return density
