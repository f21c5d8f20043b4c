"""Train the HSTU ranker from an interaction log: one shared encoder that retrieves, ranks, and knows the order to show.

    validation   the last trained event of each user, of a large log of some users. Nothing is trained on it: it ends
                 the training at the epoch that makes it most likely, chooses the kind of the
                 neighbours, and fits the weights of the order, or serves another one: see
                 `order_choice.py`
    evaluation   the events that `split` keeps, beside the baselines; transitions and neighbours are counted anew of all
                 other events, the validation's among them, as the baselines count them
    refit        the model that is served is trained anew on all events, with the same settings, as many epochs and the
                 same weights of the order; transitions and neighbours are counted anew. What is
                 measured is the model of the older events; nothing is left to measure the served
                 one on

Deterministic: the same log, options and number of threads give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from npu_gr.catalogue.names import ItemNames
from npu_gr.core.errors import ConfigError
from npu_gr.history_store.interactions import Interactions, ItemValues
from npu_gr.model.blend import ScoreBlend
from npu_gr.model.weights import Checkpoint, save
from npu_gr.train.baselines import FittedBaselines, MatrixFactorisation, Means, fit_baselines
from npu_gr.train.data import InteractionLog, build_log
from npu_gr.train.generate.codes import ItemCodes
from npu_gr.train.metrics import F64
from npu_gr.train.next_item import sample_targets
from npu_gr.train.options import write_configuration
from npu_gr.train.rank.blend import NUM_FOLLOWERS, ListSizes
from npu_gr.train.rank.blend_choice import ChosenBlend, choose_blend
from npu_gr.train.rank.evaluate import Evaluation, evaluate_baseline, evaluate_ranker
from npu_gr.train.rank.fit import Fitted, GivesUp, SearchedOptions, fit, search
from npu_gr.train.rank.inputs import LogInputs
from npu_gr.train.rank.losses import HeldOutEvents, event_likelihood, hold_out
from npu_gr.train.rank.options import (
    ChosenTasks,
    TrainOptions,
    check_actions,
    choose_tasks,
    liking_values,
    make_labels,
)
from npu_gr.train.rank.schema import choose_features
from npu_gr.train.steps import TrainingProgress


class RankerCodes(NamedTuple):
    """Semantic IDs that the ranker's items get, by rows of the log: those of the generator that serves beside it."""

    evaluated: ItemCodes  # nothing of what is held out has shaped them
    served: ItemCodes  # of the refit


def train_rank(
    interactions: Interactions,
    item_features: Sequence[ItemValues],
    options: TrainOptions,
    progress: Callable[[TrainingProgress], None] = lambda _: None,
    evaluated: Callable[[Checkpoint], None] = lambda _: None,
    codes: RankerCodes | None = None,
) -> tuple[Checkpoint, Evaluation]:
    """Train a ranker, evaluate it beside the baselines, and refit it on all events.

    Args:
        interactions: the whole log; `options.split` decides which events are trained on.
        item_features: side features of items; they help most for items with few events.
        options: the model and its training.
        progress: called after every step of training and every user of the evaluation, in this
            thread.
        evaluated: called with the evaluated ranker, before the refit.
        codes: semantic IDs of the items; None = the ranker reads none.

    Returns:
        The checkpoint, with the evaluated ranker's figures as its metrics, and the figures of all
        models.

    Raises:
        DataError: the log is too small, a task has only one class, or the loss is not finite.
        ConfigError: the options do not make a model.
    """
    whole = build_log(interactions, item_features, options.split)
    check_actions(whole)
    log = whole if options.evaluate_on == "test" else whole.only_trained(options.split)
    chosen = choose_tasks(log) if options.tasks is None else ChosenTasks(options.tasks, "as told")
    labels = make_labels(log, chosen.tasks)  # what is wrong with them is said of all trained events
    click = next((task.name for task in chosen.tasks if task.is_next_item), None)
    held_out = hold_out(log, options) if click is not None else HeldOutEvents(log, [])
    if options.budget_s and not held_out.targets:
        raise ConfigError(
            "budget_s: no user has two trained events and a next item to predict: "
            "nothing to search on"
        )

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
        )

    def evaluate(found: Fitted) -> F64:
        return event_likelihood(LogInputs(log, found.model), found.model, held_out.targets, labels)

    searched = search(
        options, train, evaluate, has_likes=any(not task.is_next_item for task in chosen.tasks)
    )
    fitted = searched.fitted
    simple = fit_baselines(log, options.split, options.seed)
    order = (
        None
        if click is None
        else choose_blend(fitted.model, click, held_out, _sizes(options), simple.item_knn)
    )
    # as the baselines, which choose, and then count it too
    counted = None if order is None else order.counted(log)
    num_served = len(whole.items) if options.refit else int(held_out.log.trained.sum())
    evaluation = _evaluate(
        searched, order, counted, simple, log, held_out, chosen, num_served, options, progress
    )
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
        everything = whole.all_trained()
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
        )
        served = order.counted(everything) if order is not None and held_out.targets else None
        checkpoint = replace(checkpoint, model=again.model, order=served)
    return checkpoint, evaluation


def _sizes(options: TrainOptions) -> ListSizes:
    return ListSizes(options.num_retrieved, NUM_FOLLOWERS, options.num_neighbours)


def _evaluate(
    searched: SearchedOptions,
    order: ChosenBlend | None,
    counted: ScoreBlend | None,
    simple: FittedBaselines,
    log: InteractionLog,
    held_out: HeldOutEvents,
    chosen: ChosenTasks,
    num_served: int,
    options: TrainOptions,
    progress: Callable[[TrainingProgress], None],
) -> Evaluation:
    labels = make_labels(log, chosen.tasks)
    first = labels.served_tasks[0] if labels.served_tasks else None
    likes = (
        labels.served[:, 0].numpy() > 0 if first is not None else np.zeros(len(log.items), np.bool_)
    )
    valued = log
    if first is not None:  # an event type's index is no value; being a positive is
        valued = replace(
            log, action_values=liking_values(log, chosen.tasks[first]), action_names=()
        )
    baselines = [*simple.fitted, Means(valued), MatrixFactorisation(valued, options.seed)]
    targets = sample_targets(log.next_items(), options.test_users, options.seed)
    ranker, parts = evaluate_ranker(
        log,
        searched.fitted.model,
        likes,
        targets,
        order=counted if held_out.targets else None,
        counted=counted,
        like_task=first,
        sizes=_sizes(options),
        done=lambda done, total: progress(TrainingProgress("ranker: evaluate", done, total)),
    )
    return Evaluation(
        split=options.split,
        num_trained=int(held_out.log.trained.sum()),
        num_served=num_served,
        num_evaluated=int((~log.trained).sum()),
        num_next=len(targets),
        tasks=chosen.reason,
        auc_task="" if first is None else chosen.tasks[first].name,
        fitting=_in_words(searched, order, len(held_out.targets)),
        better_alone={} if order is None else order.better,
        skipped=simple.skipped,
        ranker=ranker,
        parts=parts,
        baselines=tuple(
            evaluate_baseline(valued, baseline, likes, targets) for baseline in baselines
        ),
        likes=likes[~log.trained],
        users=log.users[~log.trained],
    )


def _in_words(searched: SearchedOptions, order: ChosenBlend | None, num_users: int) -> str:
    if order is None or not num_users:
        return f"trained for all of {searched.options.epochs} epochs: there is no validation"
    epochs = f"epoch {searched.fitted.num_epochs} of {searched.options.epochs} is the best"
    changed = (
        ", ".join(f"{name}={_plain(value)}" for name, value in searched.changes.items())
        or "what was asked for"
    )
    tried = (
        (f"; of {searched.num_trials} settings tried: {changed}")
        if searched.options.budget_s
        else ""
    )
    on = f"on the last trained event of {num_users:,} users"
    return f"{on}: {epochs}{tried}; {order.text()}"


def _plain(value: float | tuple[str, ...]) -> str:
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else f"{value:g}"


def publish(checkpoint: Checkpoint, names: ItemNames, folder: Path) -> str:
    """Write the folder. The names come first, so that nobody reads a checkpoint whose items have none.

    Returns:
        The version of the checkpoint.

    Raises:
        DataError: the folder cannot be written.
        CheckpointError: the same.
    """
    names.save(folder)
    version = save(checkpoint, folder)
    write_configuration(configuration(folder), folder)
    return version


def configuration(folder: Path) -> dict[str, Any]:
    """Make the configuration of an instance that ranks."""
    return {"checkpoint": str(folder), "history_store": {"path": str(folder / "history.db")}}
