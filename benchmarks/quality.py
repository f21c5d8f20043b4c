"""`python -m benchmarks quality`: served models against the strongest simple baseline.

Everything is trained in this run by the trainers' own functions, with the same split and validation
for all. The strongest baseline is chosen by its mean over the seeds on the test set itself, which
favours the baseline. The interval is of the difference, ours less the baseline's: a paired
bootstrap over seeds and users. `ok`: ours is not significantly worse, or reaches the floor of the
line.

  match    all ordered pairs of folders with a train.txt that share users; HIT@10 and HIT@50 over
           all target items
  match-ingredients
           the same pairs, HIT@50: each ingredient of SCCDR against the model without it, and cold-
           start users in the target
  match-knob
           synthetic pairs whose overlap, edges and popularity are set, HIT@50: where the separation
           of the domains pays
  next     the next item of a log, leave-one-out, without items of the history unless most next
           items are repeats; HR@10 and NDCG@10
  codes    the generator with given semantic IDs and with its own, all items, against published
           results on the log
  served   recommend over HTTP of a site that `npu-gr train all` makes of each --log
  repeats  the same of synthetic logs with 0, 30, 46 and 70 % repeats
  shown    the click of a planted log of impressions, AUC, against gradient-boosted trees on the
           same columns; needs lightgbm
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, permutations
from pathlib import Path
from typing import TypeVar

import click
import msgspec
import numpy as np

from benchmarks.frame import COUNT, FILE, THREADS, Line, compared, option
from benchmarks.quality_knob import KNOBS, Knob, planted_pair
from benchmarks.quality_match import (
    INGREDIENTS,
    JOINT_SVD,
    POPULARITY,
    SCCDR,
    SERVED,
    cold_start_ranks,
    fitted_ranks,
)
from benchmarks.quality_served import repeats_lines, served_lines
from benchmarks.quality_shown import lightgbm, shown_lines
from npu_gr.core.errors import ConfigError, DataError
from npu_gr.dataset import read_log
from npu_gr.history_store.interactions import Interactions, movielens_100k, read_item_features
from npu_gr.train.data import build_log
from npu_gr.train.generate.train import (
    BEAUTY,
    BEAUTY_GIVEN,
    MOVIELENS,
    SPLIT,
    GenerateOptions,
    train_generator,
)
from npu_gr.train.generate.train import QUICK as QUICK_GENERATOR
from npu_gr.train.match.domains import Domains, read_domains
from npu_gr.train.match.joined import BASELINES
from npu_gr.train.match.train import MatchOptions
from npu_gr.train.metrics import F64, difference, hits, ndcg_of_each
from npu_gr.train.next_item import NextItemRanks, rank_next_items, sample_targets
from npu_gr.train.rank.options import PRESETS, TrainOptions
from npu_gr.train.rank.train import train_rank
from npu_gr.train.retrieve import RetrieveOptions, train_retriever
from npu_gr.train.sasrec import SASRec, SASRecOptions
from npu_gr.train.site.configuration import options_for

PARTS = (
    *("match", "match-ingredients", "match-knob", "next", "codes", "cold"),
    *("served", "repeats", "shown"),
)
OPTIONS = (
    option(
        "--pairs",
        type=FILE,
        help="Folder with a folder for each domain, with train.txt and optionally test.txt.",
    ),
    option(
        "--log",
        "logs",
        multiple=True,
        type=FILE,
        help="Log for the next item, by default MovieLens-100K; repeatable.",
    ),
    option(
        "--codes",
        type=FILE,
        help="Folder with inter.json and index_rqvae.json: the generator with given IDs.",
    ),
    option(
        "--only",
        "parts",
        multiple=True,
        type=click.Choice(PARTS),
        help="Run this part; repeatable. Without it: match, next and codes, as data are given.",
    ),
    option("--seeds", default=3, type=COUNT, help="Trainings of each model."),
    option(
        "--quick",
        is_flag=True,
        help="One seed and few steps: a test of a few minutes.",
    ),
    THREADS,
)
REPEATING_USERS, QUICK_REPEATING_USERS = 1500, 800  # 600 of them choose the cascade
PAGES = 300, 100  # users, items
# (source, target) of DisenCDR's folders -> floors: HIT@10 and HIT@50 of the served model, HIT@50 of
# SCCDR alone
MATCH_FLOORS = {
    ("sport_phone", "phone_sport"): (0.050, 0.130, 0.122),
    ("phone_sport", "sport_phone"): (0.042, 0.090, 0.080),
}

# (users, items, events) of a public log -> published HR@10 with this protocol
PUBLISHED = {
    (943, 1682, 100_000): {  # MovieLens-100K
        "earlier: SASRec, d 64, 2 layers": 0.141,
        "earlier: HSTU, same size": 0.135,
        "earlier: 3-level decoder, beam 50": 0.117,
    },
    (22_363, 12_101, 198_502): {  # Amazon Beauty, with the codes of github.com/NonameUntitled/tiger
        "that repository: SASRec": 0.0516,
        "that repository: TIGER": 0.0582,
        "paper: TIGER": 0.0648,
        "published: SASRec, sampled softmax": 0.0921,
        "published: eSASRec": 0.0928,
        "earlier: SASRec-like": 0.0444,
    },
}

# github.com/blondered/transformer_benchmark leaves out the items of the history
AMONG_UNSEEN = ("published: SASRec, sampled softmax", "published: eSASRec")

METRICS: dict[str, Callable[[F64], F64]] = {
    "HIT@10": partial(hits, k=10),
    "HIT@50": partial(hits, k=50),
    "HR@10": partial(hits, k=10),
    "NDCG@10": partial(ndcg_of_each, k=10),
}
T = TypeVar("T", bound=msgspec.Struct)
Ranks = Mapping[str, list[F64]]  # model -> ranks of each seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The training options of each model."""

    seeds: tuple[int, ...]
    match: MatchOptions
    retrieve: RetrieveOptions
    generate: GenerateOptions
    given_codes: GenerateOptions  # with given semantic IDs
    own_codes: GenerateOptions
    rank: TrainOptions
    sasrec: SASRecOptions


def _unserved(options: T) -> T:
    """Skip the refit, which is only for serving."""
    return msgspec.structs.replace(options, refit=False)


FULL = Effort(
    seeds=(0, 1, 2),
    match=MatchOptions(),
    retrieve=_unserved(RetrieveOptions()),
    generate=_unserved(MOVIELENS),
    given_codes=_unserved(BEAUTY_GIVEN),
    own_codes=_unserved(BEAUTY),
    rank=_unserved(msgspec.structs.replace(PRESETS["demo"], split="leave-one-out")),
    sasrec=SASRecOptions(),
)
QUICK = Effort(
    seeds=(0,),
    match=MatchOptions(source_steps=20, target_steps=20, inter_steps=10),
    retrieve=_unserved(RetrieveOptions(windows=(5,), powers=(0.5,))),
    generate=_unserved(msgspec.structs.replace(QUICK_GENERATOR, epochs=2, validate_every=2)),
    given_codes=_unserved(
        msgspec.structs.replace(BEAUTY_GIVEN, epochs=1, validate_every=1, test_users=500)
    ),
    own_codes=_unserved(
        msgspec.structs.replace(BEAUTY, epochs=1, validate_every=1, test_users=500)
    ),
    rank=_unserved(msgspec.structs.replace(PRESETS["quick"], epochs=1, split="leave-one-out")),
    sasrec=SASRecOptions(epochs=2),
)
"""A test of a few minutes. Nothing is trained to the end, so `ok` may be false."""


def lines(
    pairs: Path | None,
    logs: Sequence[Path],
    codes: Path | None,
    parts: Sequence[str],
    seeds: int,
    quick: bool,
) -> Iterator[Line]:
    """Train and evaluate; yield a line for each data set, model and metric.

    Args:
        pairs: Folder of matching; None = skip it.
        logs: Logs for the next item; empty = MovieLens-100K.
        codes: Folder of the generator with given IDs; None = skip it.
        parts: Parts to run; empty = match, next and codes, if their data are given.
        seeds: Number of trainings of each model.
        quick: Use one seed and few steps.

    Raises:
        ConfigError: A part is named without its data.
    """
    from benchmarks.quality_cold import cold_lines, warm_lines

    for name, folder in (
        ("--pairs for match", pairs),
        ("--pairs for match-ingredients", pairs),
        ("--codes for codes", codes),
    ):
        if folder is None and name.rpartition(" ")[2] in parts:
            raise ConfigError(f"bench quality: needs {name}")
    effort = QUICK if quick else replace(FULL, seeds=tuple(range(seeds)))
    if "cold" in parts:
        path = movielens_100k()
        features = read_item_features(path.with_suffix(".item"), ["class", "release_year"])
        yield from cold_lines(read_log(path), features, path.name, effort.rank, effort.generate)
        yield from warm_lines(read_log(path), features, path.name, effort.rank, effort.seeds)
    if pairs is not None and (not parts or "match" in parts):
        yield from match_lines(pairs, effort, _pair_lines)
    if pairs is not None and "match-ingredients" in parts:
        yield from match_lines(pairs, effort, _ingredient_lines)
    preset = "quick" if quick else "full"
    if "served" in parts:
        for log in logs or (movielens_100k(),):
            yield from served_lines(log.name, log, preset)
    if "repeats" in parts:
        num_users = QUICK_REPEATING_USERS if quick else REPEATING_USERS
        yield from repeats_lines(num_users, preset)
    if "shown" in parts:
        yield from shown_lines(effort.seeds, effort.rank, lightgbm(), *PAGES)
    if "match-knob" in parts:
        yield from knob_lines(KNOBS, effort)
    if not parts or "next" in parts:
        for log in logs or (movielens_100k(),):
            yield from next_lines(read_log(log), log.name, effort)
    if codes is not None and (not parts or "codes" in parts):
        yield from codes_lines(
            read_log(codes / "inter.json"), codes / "index_rqvae.json", codes.name, effort
        )


def match_lines(
    folder: Path,
    effort: Effort,
    of_pair: Callable[[tuple[str, str], Domains, Effort], Iterator[Line]],
) -> Iterator[Line]:
    """Compare models of matching on every ordered pair.

    Args:
        folder: Folder with a folder for each domain, with `train.txt` and optionally `test.txt`.
        effort: Training options.
        of_pair: Function that yields the lines of a pair.

    Raises:
        DataError: No two domains share users.
    """
    names = sorted(path.parent.name for path in folder.glob("*/train.txt"))
    found = False
    for source, target in permutations(names, 2):
        test = folder / target / "test.txt"
        try:
            domains = read_domains(
                folder / source / "train.txt",
                folder / target / "train.txt",
                test if test.exists() else None,
            )
        except DataError as error:
            if "share no user" in str(error):
                continue
            raise
        found = True
        yield from of_pair((source, target), domains, effort)
    if not found:
        raise DataError(f"{folder}: no two folders with a train.txt that share users")


def _pair_lines(pair: tuple[str, str], domains: Domains, effort: Effort) -> Iterator[Line]:
    """Yield the lines of the served model, and of SCCDR alone."""
    case = f"match {pair[0]} -> {pair[1]}"
    evaluators = {
        "": domains.evaluator(),
        ", near-duplicates too": domains.evaluator_with_near_duplicates(),
    }
    arms = (POPULARITY, *BASELINES, SCCDR, SERVED)
    ranks = fitted_ranks(domains, effort.match, effort.seeds, arms, evaluators)
    for kind, found in ranks.items():
        simple = {arm: rows for arm, rows in found.items() if arm in BASELINES or arm == POPULARITY}
        for name in ("HIT@10", "HIT@50"):
            yield _line(f"{case}{kind}: served", name, found[SERVED], simple)
    served, alone = ranks[""][SERVED], ranks[""][SCCDR]
    yield _line(f"{case}: SCCDR alone", "HIT@50", alone, {POPULARITY: ranks[""][POPULARITY]})
    if (floors := MATCH_FLOORS.get(pair)) is not None:
        yield _floor_line(f"{case}: served", "HIT@10", served, "the floor", floors[0])
        yield _floor_line(f"{case}: served", "HIT@50", served, "the floor", floors[1])
        yield _floor_line(f"{case}: SCCDR alone", "HIT@50", alone, "the floor", floors[2])


def _ingredient_lines(pair: tuple[str, str], domains: Domains, effort: Effort) -> Iterator[Line]:
    """Yield the gain of each ingredient, for all tested users and for cold-start users."""
    case = f"match {pair[0]} -> {pair[1]}"
    arms = (POPULARITY, *INGREDIENTS, SERVED)
    found = fitted_ranks(domains, effort.match, effort.seeds, arms, {"": domains.evaluator()})[""]
    for less, ours in pairwise(arms):
        yield _line(f"{case}: {ours}", "HIT@50", found[ours], {less: found[less]})
    found = cold_start_ranks(domains, effort.match, effort.seeds)
    for ours, less in (
        (SERVED, POPULARITY),
        (SERVED, JOINT_SVD),
        ("separated", POPULARITY),
        ("+ stop-gradient", "separated"),
        (SCCDR, "+ stop-gradient"),
    ):
        yield _line(f"{case}: cold-start, {ours}", "HIT@50", found[ours], {less: found[less]})


def knob_lines(knobs: Sequence[Knob], effort: Effort) -> Iterator[Line]:
    """Compare SCCDR with simple models, and its ingredients, on synthetic pairs."""
    for knob in knobs:
        domains = planted_pair(knob, seed=0)
        found = fitted_ranks(
            domains,
            effort.match,
            effort.seeds,
            (*BASELINES, *INGREDIENTS),
            {"": domains.evaluator()},
        )[""]
        simple = {arm: ranks for arm, ranks in found.items() if arm in BASELINES}
        yield _line(f"match {knob.name}: {SCCDR}", "HIT@50", found[SCCDR], simple)
        for less, ours in pairwise(INGREDIENTS):
            yield _line(f"match {knob.name}: {ours}", "HIT@50", found[ours], {less: found[less]})


def next_lines(interactions: Interactions, case: str, effort: Effort) -> Iterator[Line]:
    """Yield the next-item metrics of each trainer's served model.

    Items of the history are excluded, unless most next items are repeats.

    Args:
        interactions: The log.
        case: Name of the log.
        effort: Training options.
    """
    learnt = {seed: _sasrec(interactions, effort, seed) for seed in effort.seeds}
    ways: dict[str, Callable[[int], _Compared]] = {
        "train retrieve": lambda seed: _retrieved(interactions, effort, seed),
        "train generate": lambda seed: _generated(interactions, effort, seed),
        "train rank": lambda seed: _ranked(interactions, effort, seed),
    }
    for way, train in ways.items():
        ours: list[F64] = []
        simple: dict[str, list[F64]] = {}
        of_what = "unseen"
        for seed in effort.seeds:
            found, baselines = train(seed)
            ours.append(found.evaluated)
            of_what = "all items" if found.evaluates_all else of_what
            for name, ranks in (baselines | {SASRec.name: learnt[seed]}).items():
                simple.setdefault(name, []).append(ranks.evaluated)
        for name in ("HR@10", "NDCG@10"):
            yield _line(f"next {case}: {way}, {of_what}", name, ours, simple)


_Compared = tuple[NextItemRanks, dict[str, NextItemRanks]]  # ours, baselines by name


def _sasrec(interactions: Interactions, effort: Effort, seed: int) -> NextItemRanks:
    log = build_log(interactions, [], SPLIT)
    targets = sample_targets(log.next_items(), effort.retrieve.test_users, seed)
    model = SASRec(log, SPLIT, seed, effort.sasrec)
    return rank_next_items(log, targets, (model.next_items(log, user) for user, _ in targets))


def _retrieved(interactions: Interactions, effort: Effort, seed: int) -> _Compared:
    report = train_retriever(
        interactions, msgspec.structs.replace(effort.retrieve, seed=seed)
    ).report
    return report.own.ranks, {row.model: row.ranks for row in report.baselines}


def _generated(interactions: Interactions, effort: Effort, seed: int) -> _Compared:
    report = train_generator(
        interactions, [], msgspec.structs.replace(effort.generate, seed=seed)
    ).report
    return report.own.ranks, {row.model: row.ranks for row in report.baselines}


def _ranked(interactions: Interactions, effort: Effort, seed: int) -> _Compared:
    _, evaluation = train_rank(interactions, [], msgspec.structs.replace(effort.rank, seed=seed))
    return evaluation.ranker.ranks, {row.model: row.ranks for row in evaluation.baselines}


def codes_lines(
    interactions: Interactions, codes: Path, case: str, effort: Effort
) -> Iterator[Line]:
    """Compare generators with given and with own semantic IDs, on one seed; each takes 30 min.

    Args:
        interactions: The log.
        codes: JSON file {"item": [code, ...]}.
        case: Name of the log.
        effort: Training options.
    """
    own_count = options_for(len(np.unique(interactions.items))).generate.code_count
    ways = (("given IDs", codes, effort.given_codes), ("own IDs", None, effort.own_codes))
    for kind, path, of_kind in ways:
        options = msgspec.structs.replace(of_kind, seed=effort.seeds[0], code_count=own_count)
        report = train_generator(interactions, [], options, path).report
        ours = [report.own.ranks.overall]
        simple = {row.model: [row.ranks.overall] for row in report.baselines}
        for name in ("HR@10", "NDCG@10"):
            yield _line(f"codes {case}: train generate, {kind}, all items", name, ours, simple)
        size = (len(interactions.user_names), len(np.unique(interactions.items)), len(interactions))
        for model, floor in (
            PUBLISHED.get(size, {}).items() if options.test_users >= size[0] else ()
        ):
            of_what, ranks = "all items", ours
            if model in AMONG_UNSEEN:
                of_what, ranks = "unseen", [report.own.ranks.unseen]
            yield _floor_line(
                f"codes {case}: train generate, {kind}, {of_what}", "HR@10", ranks, model, floor
            )


def _line(case: str, name: str, ours: list[F64], baselines: Ranks) -> Line:
    """Compare ours with the baseline that has the best mean over the seeds."""
    means = {model: _mean(name, ranks) for model, ranks in baselines.items()}
    best = max(means, key=lambda model: means[model])
    metric = METRICS[name]
    found = difference(
        np.array([metric(r) for r in ours]), np.array([metric(r) for r in baselines[best]])
    )
    value = _mean(name, ours)
    return Line(
        bench="quality",
        case=f"{case}, {name}",
        ours=value,
        unit=name,
        baseline=best,
        baseline_value=means[best],
        ratio=value / means[best] if means[best] else float("nan"),
        target=1.0,
        ok=found.high >= 0,
        low=found.low,
        high=found.high,
    )


def _floor_line(case: str, name: str, ours: list[F64], baseline: str, floor: float) -> Line:
    value = _mean(name, ours)
    return compared(
        "quality", f"{case}, {name}, {baseline}", value, name, baseline, floor, value / floor, 1.0
    )


def _mean(name: str, ranks: list[F64]) -> float:
    return float(np.mean([METRICS[name](row).mean() for row in ranks]))
