"""Benches of what a training brings and costs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from benchmarks.commands.options import AS_JSON_LINES, SEED, THREADS
from benchmarks.commands.show import show
from npu_gr.cli.options import FILE

if TYPE_CHECKING:
    from benchmarks.line import Line


@click.command("quality")
@AS_JSON_LINES
@click.option("--pairs", type=FILE, help="Folder with a folder of train.txt, perhaps test.txt, for each domain.")
@click.option("--log", "logs", multiple=True, type=FILE, help="Of the next item; MovieLens-100K if absent; repeatable.")
@click.option("--codes", type=FILE, help="Folder with inter.json and index_rqvae.json: the generator with given IDs.")
@click.option(
    "--only",
    "parts",
    multiple=True,
    type=click.Choice(["match", "next", "codes", "features", "zozotown", "cold"]),
    help="Run these parts; the last three run only if they are named.",
)
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(1), help="Trainings of each model.")
@click.option("--quick", is_flag=True, help="One seed and few steps: shows that everything runs, in minutes.")
@THREADS
def bench_quality(
    as_json: bool,
    pairs: Path | None,
    logs: tuple[Path, ...],
    codes: Path | None,
    parts: tuple[str, ...],
    seeds: int,
    quick: bool,
    threads: int,
) -> None:
    """Train what we serve, and compare it with the strongest simple baseline: a line a data set, way and figure."""
    from dataclasses import replace
    from itertools import chain

    import torch

    from benchmarks.quality import FULL, QUICK, codes_lines, match_lines, next_lines
    from benchmarks.quality_cold import cold_lines, warm_lines
    from npu_gr.dataset import read_log
    from npu_gr.features.interactions import movielens_100k, read_item_features

    torch.set_num_threads(threads)
    effort = QUICK if quick else replace(FULL, seeds=tuple(range(seeds)))
    found: list[Iterable[Line]] = []
    if "cold" in parts:
        log = movielens_100k()
        features = read_item_features(log.with_suffix(".item"), ["class", "release_year"])
        found += [cold_lines(read_log(log), features, log.name, effort.rank, effort.generate)]
        found += [warm_lines(read_log(log), features, log.name, effort.rank, effort.seeds)]
    if pairs is not None and (not parts or "match" in parts):
        found.append(match_lines(pairs, effort))
    if not parts or "next" in parts:
        found += [next_lines(read_log(log), log.name, effort) for log in logs or (movielens_100k(),)]
    if codes is not None and (not parts or "codes" in parts):
        found.append(codes_lines(read_log(codes / "inter.json"), codes / "index_rqvae.json", codes.name, effort))
    if "features" in parts:
        from benchmarks.quality_features import movielens_lines

        found.append(movielens_lines(effort.features, effort.seeds))
    if "zozotown" in parts:
        from benchmarks.quality_zozotown import zozotown_lines

        found.append(zozotown_lines(effort.seeds[0]))
    for name, folder in (("match", pairs), ("codes", codes)):
        if folder is None and name in parts:
            raise click.UsageError(f"--only {name} needs --{'pairs' if name == 'match' else 'codes'}")
    show(chain(*found), "cpu", 0, as_json)


@click.command("match-train")
@AS_JSON_LINES
@click.option("--edges", default=1_000_000, show_default=True, type=click.IntRange(1000), help="Edges of both domains.")
@click.option("--steps", default=4, show_default=True, type=click.IntRange(2), help="Steps of each stage to time.")
@click.option("--threads", default=2, show_default=True, type=click.IntRange(1))
@SEED
def bench_match_train(as_json: bool, edges: int, steps: int, threads: int, seed: int) -> None:
    """Measure what training on so many edges costs: CPU minutes and memory."""
    import torch

    from benchmarks.match_train import lines

    torch.set_num_threads(threads)
    show(lines(edges, steps, seed), "cpu", seed, as_json)
