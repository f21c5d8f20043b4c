"""Train the HSTU ranker from a log: one shared encoder that retrieves and ranks, and a score blend.

    training     on the trained events of `split`, without the validation
    validation   the last trained event of each user (of a sample of users, if there are many). The
                 epoch that makes it most likely is kept. It also fits the score blend, see
                 `blend_choice.py`
    evaluation   on the events after the trained ones, together with the baselines. The blend's
                 transitions and neighbours are counted again with the validation's events, as the
                 baselines count them
    refit        the served model is trained on all events with the same settings, epochs and blend
                 weights. The figures are those of the model before the refit, because no events are
                 left to evaluate the served one

Deterministic: the same log, options and number of threads give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from npu_gr.catalogue.names import ItemNames
from npu_gr.core.arrays import I64
from npu_gr.core.errors import ConfigError
from npu_gr.history_store.interactions import Interactions, ItemValues
from npu_gr.model.blend import ScoreBlend
from npu_gr.model.weights import Checkpoint, save
from npu_gr.train.baselines import MatrixFactorisation, Means
from npu_gr.train.data import InteractionLog, NextItem, build_log
from npu_gr.train.distributed import Ranks
from npu_gr.train.generate.codes import ItemCodes
from npu_gr.train.metrics import F64
from npu_gr.train.next_item import sample_targets
from npu_gr.train.options import write_configuration
from npu_gr.train.rank.blend import NUM_FOLLOWERS, NUM_OWN, ListSizes
from npu_gr.train.rank.blend_choice import ChosenBlend, choose_blend
from npu_gr.train.rank.evaluate import (
    Evaluation,
    evaluate_baseline,
    evaluate_ranker,
    ranked_figures,
)
from npu_gr.train.rank.fit import Fitted, GivesUp, SearchedOptions, fit, scores_by_rank, search
from npu_gr.train.rank.inputs import LogInputs
from npu_gr.train.rank.losses import (
    HeldOutEvents,
    event_likelihood,
    hold_out,
    label_likelihood,
    next_item_likelihood,
)
from npu_gr.train.rank.options import (
    ChosenTasks,
    TrainOptions,
    check_actions,
    choose_tasks,
    liking_values,
    make_labels,
)
from npu_gr.train.rank.schema import choose_features
from npu_gr.train.rank.shown import ShownFigures
from npu_gr.train.rank.warm import RankerStart
from npu_gr.train.resume import NO_STATES, TrainingStates
from npu_gr.train.sasrec import SASRec
from npu_gr.train.shared_baselines import RankBaselines, RankedBaselines, rank_baselines
from npu_gr.train.steps import TrainingProgress
from npu_gr.train.stored_log import StoredLog, sampled

MF_SCORE_CHOSEN = (
    "it reads mf_score, what matrix factorisation expects: the validation's labels are likelier"
)
NO_TIMES = "the log has no times, only the order of each user's events, so it reads no times"


class RankerCodes(NamedTuple):
    """Semantic IDs of the ranker's items, by rows of the log; the generator has the same."""

    evaluated: ItemCodes  # made without the held-out events
    served: ItemCodes  # made from all events


def train_rank(
    interactions: Interactions | StoredLog,
    item_features: Sequence[ItemValues],
    options: TrainOptions,
    progress: Callable[[TrainingProgress], None] = lambda _: None,
    evaluated: Callable[[Checkpoint], None] = lambda _: None,
    codes: RankerCodes | None = None,
    states: TrainingStates = NO_STATES,
    start: RankerStart | None = None,
    rank: RankBaselines = rank_baselines,
) -> tuple[Checkpoint, Evaluation]:
    """Train a ranker, compare it with the baselines, and refit it on all events.

    Args:
        interactions: The whole log; `options.split` decides which events are trained on. Of one in
            files, a sample of the users is validated and evaluated.
        item_features: Side features of items; they help most for items with few events.
        options: Options of the model and its training.
        progress: Callback after every training step and every user of the evaluation, in this
            thread.
        evaluated: Callback with the evaluated ranker, before the refit.
        codes: Semantic IDs of the items; None = the ranker does not read any.
        states: Where the state of the trainings is kept.
        start: Earlier rankers to train on; None = train from random weights.
        rank: Ranks the test users' next items by the baselines.

    Returns:
        The checkpoint, with the evaluated ranker's figures as its metrics, and the figures of all
        models.

    Raises:
        DataError: the log is too small, a task has only one class, or the loss is not finite.
        ConfigError: the options do not make a model.
    """
    whole, users = None, np.empty(0, np.int64)
    if isinstance(interactions, StoredLog):
        whole = interactions.split(options.split)
        full_log, users = interactions.sample(whole, options.seed)
        if options.evaluate_on != "test":
            raise ConfigError("evaluate_on: must be test for a log of more than memory_events")
    else:
        full_log = build_log(interactions, item_features, options.split)
    check_actions(full_log)
    log = full_log if options.evaluate_on == "test" else full_log.only_trained(options.split)
    chosen = (
        choose_tasks(log)
        if options.tasks is None
        else ChosenTasks(options.tasks, "set by the option `tasks`")
    )
    labels = make_labels(log, chosen.tasks)  # before the hold-out: errors count all trained events
    click = next((task.name for task in chosen.tasks if task.is_next_item), None)
    held_out = hold_out(log, options) if click is not None else HeldOutEvents(log, [])
    if options.budget_s and Ranks().size > 1:
        raise ConfigError(
            f"budget_s: must be 0 on {Ranks().size} ranks, whose clocks would end the search at "
            "different trials; search in one process, and train with its settings"
        )
    if options.budget_s and not held_out.targets:
        raise ConfigError(
            "budget_s: no user has two trained events and a next item to predict, so there is no "
            "validation to search on; set it to 0"
        )

    rest = None if whole is None else _without(whole, users, held_out.log)

    def train(tried: TrainOptions, stage: str, gives_up: GivesUp) -> Fitted:
        return fit(
            held_out.log,
            item_features,
            chosen.tasks,
            tried,
            held_out.targets,
            stage,
            progress,
            gives_up=gives_up,
            codes=None if codes is None else codes.evaluated,
            features=choose_features(held_out.log, item_features, chosen.tasks, tried),
            states=states,
            start=None if start is None else start.evaluated,
            whole=rest,
        )

    def evaluate(found: Fitted) -> F64:
        inputs = LogInputs(log, found.model)
        if scores_by_rank(log, options):
            ranks = next_item_likelihood(inputs, found.model, held_out.targets).ranks
            return 1 / (ranks + 1)
        return event_likelihood(inputs, found.model, held_out.targets, labels)

    def likes(found: Fitted) -> F64:
        return label_likelihood(LogInputs(log, found.model), found.model, held_out.targets, labels)

    searched = search(
        options,
        train,
        evaluate,
        has_likes=bool(labels.served_tasks),
        likes=likes if labels.served_tasks and held_out.targets else None,
    )
    fitted = searched.fitted
    targets = sample_targets(log.next_items(), options.test_users, options.seed)
    next_item_baselines = rank(log, options.split, options.seed, targets)
    if options.sasrec:
        learnt = SASRec(log, options.split, options.seed, progress=progress)
        next_item_baselines = next_item_baselines.and_one(log, targets, learnt)
    blend = (
        None
        if click is None
        else choose_blend(
            fitted.model,
            click,
            held_out,
            _sizes(options, held_out.log),
            next_item_baselines.item_knn,
            lambda done, total: progress(TrainingProgress("ranker: neighbours", done, total)),
        )
    )
    # with the validation's events, as the baselines are refitted after their tuning
    counted = None if blend is None else blend.counted(log)
    num_trained = int((held_out.log if rest is None else rest).num_trained.sum())
    num_served = num_trained
    if options.refit:
        num_served = len((full_log if whole is None else whole).items)
    evaluation = _evaluate(
        searched,
        blend,
        counted,
        next_item_baselines,
        log,
        targets,
        held_out,
        chosen,
        num_trained,
        num_served,
        options,
        progress,
    )
    if whole is not None:
        note = sampled("tasks, validation, score blend, baselines and figures", full_log, whole)
        evaluation = replace(evaluation, notes=(note, *evaluation.notes))
    checkpoint = Checkpoint(
        model=fitted.model,
        item_ids=log.item_ids,
        name=options.name,
        action_values=log.action_values,
        action_names=log.action_names,
        metrics={name: value for name, value in evaluation.as_dict().items() if "/" not in name},
        order=counted if held_out.targets else None,
    )
    evaluated(checkpoint)
    if options.refit:
        everything = full_log.all_trained()
        again = fit(
            everything,
            item_features,
            chosen.tasks,
            searched.options,
            [],
            "ranker: refit",
            progress,
            fitted.num_epochs,
            codes=None if codes is None else codes.served,
            features=choose_features(everything, item_features, chosen.tasks, searched.options),
            states=states,
            start=None if start is None else start.served,
            whole=None if whole is None else whole.all_trained(),
        )
        served = blend.counted(everything) if blend is not None and held_out.targets else None
        checkpoint = replace(checkpoint, model=again.model, order=served)
    return checkpoint, evaluation


def _without(whole: InteractionLog, users: I64, sample: InteractionLog) -> InteractionLog:
    """Hold out of a log in files what a sample of its users holds out."""
    num_trained = whole.num_trained.copy()
    num_trained[users] = sample.num_trained
    return replace(whole, num_trained=num_trained)


def _sizes(options: TrainOptions, log: InteractionLog) -> ListSizes:
    own = NUM_OWN if log.has_repeats else 0
    return ListSizes(options.num_retrieved, NUM_FOLLOWERS, options.num_neighbours, own)


def _evaluate(
    searched: SearchedOptions,
    blend: ChosenBlend | None,
    counted: ScoreBlend | None,
    next_item_baselines: RankedBaselines,
    log: InteractionLog,
    targets: Sequence[NextItem],
    held_out: HeldOutEvents,
    chosen: ChosenTasks,
    num_trained: int,
    num_served: int,
    options: TrainOptions,
    progress: Callable[[TrainingProgress], None],
) -> Evaluation:
    labels = make_labels(log, chosen.tasks)
    first = labels.served_tasks[0] if labels.served_tasks else None
    likes = (
        labels.served[:, 0].numpy()[log.actions] > 0
        if first is not None
        else np.zeros(len(log.items), np.bool_)
    )
    valued = log
    if first is not None:  # the index of an event type is no rating; 1 for positives is
        valued = replace(
            log, action_values=liking_values(log, chosen.tasks[first]), action_names=()
        )
    of_likes = (Means(valued), MatrixFactorisation(valued, options.seed))
    ranker, parts = evaluate_ranker(
        log,
        searched.fitted.model,
        likes,
        targets,
        blend=counted if held_out.targets else None,
        counted=counted,
        like_task=first,
        sizes=_sizes(options, log),
        done=lambda done, total: progress(TrainingProgress("ranker: evaluate", done, total)),
    )
    return Evaluation(
        split=options.split,
        num_trained=num_trained,
        num_served=num_served,
        num_evaluated=int((~log.trained).sum()),
        num_next=len(targets),
        tasks=chosen.reason,
        chosen_tasks=chosen.tasks,
        auc_task="" if first is None else chosen.tasks[first].name,
        fitting=_in_words(searched, blend, len(held_out.targets)),
        notes=(
            *(() if log.has_times else (NO_TIMES,)),
            *((MF_SCORE_CHOSEN,) if searched.reads_mf_score else ()),
            *next_item_baselines.notes,
        ),
        better_alone={} if blend is None else blend.better,
        skipped=next_item_baselines.skipped,
        ranker=ranker,
        parts=parts,
        baselines=(
            *(ranked_figures(name, of) for name, of in next_item_baselines.ranks.items()),
            *(evaluate_baseline(valued, baseline, likes, targets) for baseline in of_likes),
        ),
        likes=likes[~log.trained],
        users=log.users[~log.trained],
        shown=(
            None
            if labels.shown_task is None
            else ShownFigures(
                log,
                searched.fitted.model,
                chosen.tasks[labels.shown_task].name,
                labels.shown_task,
                labels.next_task,
            )
        ),
        next_users=np.array([target.user for target in targets], np.int64),
    )


def _in_words(searched: SearchedOptions, blend: ChosenBlend | None, num_users: int) -> str:
    if blend is None or not num_users:
        return f"trained for all of {searched.options.epochs} epochs: there is no validation"
    epochs = f"epoch {searched.fitted.num_epochs} of {searched.options.epochs} is the best"
    changed = (
        ", ".join(f"{name}={_plain(value)}" for name, value in searched.changes.items())
        or "the given options"
    )
    tried = (
        f"; best of {searched.num_trials} settings tried: {changed}"
        if searched.options.budget_s
        else ""
    )
    on = f"on the last trained event of {num_users:,} users"
    return f"{on}: {epochs}{tried}; {blend.text()}"


def _plain(value: float | tuple[str, ...]) -> str:
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else f"{value:g}"


def publish(checkpoint: Checkpoint, names: ItemNames, folder: Path) -> str:
    """Write the folder of a ranker.

    The names are written first, so that a reader never finds a checkpoint without names.

    Returns:
        The version of the checkpoint.

    Raises:
        DataError: the names or the configuration cannot be written.
        CheckpointError: the checkpoint cannot be written.
    """
    names.save(folder)
    version = save(checkpoint, folder)
    write_configuration(configuration(folder), folder)
    return version


def configuration(folder: Path) -> dict[str, Any]:
    """Make the configuration of an instance that ranks."""
    return {"checkpoint": str(folder), "history_store": {"path": str(folder / "history.db")}}
