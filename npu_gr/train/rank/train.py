"""Train the HSTU ranker from an interaction log: one trunk that retrieves, ranks, and knows the order to show.

    validation   the last trained event of each user, of a large log of some users. Nothing is trained on it: it ends
                 the training at the epoch that makes it most likely, chooses the kind of the neighbours, and fits the
                 weights of the order; a source that orders it better alone than these do is served in their place, see
                 `alone.py`
    evaluation   the events that `split` keeps, beside the baselines; transitions and neighbours are counted anew of all
                 other events, the validation's among them, as the baselines count them
    refit        the model that is served is trained anew on all events, with the same settings, as many epochs and the
                 same weights of the order; transitions and neighbours are counted anew. What is measured is the model
                 of the older events; nothing is left to measure the served one on

Deterministic: the same log, options and number of threads give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from npu_gr.core.errors import ConfigError
from npu_gr.features.interactions import Interactions, ItemValues
from npu_gr.model.order import Order
from npu_gr.model.weights import Checkpoint
from npu_gr.train.baselines import MatrixFactorisation, Means, fit_baselines
from npu_gr.train.data import InteractionLog, NextItem, build_log
from npu_gr.train.generate.codes import ItemCodes
from npu_gr.train.metrics import F64
from npu_gr.train.next_item import sample_targets
from npu_gr.train.paired import Difference
from npu_gr.train.rank.alone import better_alone, to_serve
from npu_gr.train.rank.evaluate import Evaluation, evaluate_baseline, evaluate_ranker
from npu_gr.train.rank.fit import Fitted, GivesUp, fit
from npu_gr.train.rank.inputs import LogInputs
from npu_gr.train.rank.neighbour_choice import choose_kind
from npu_gr.train.rank.neighbour_kinds import USUAL, NeighbourKind, count_kinds
from npu_gr.train.rank.options import TrainOptions
from npu_gr.train.rank.order import ListSizes, count_order, count_transitions, retrieved_lists
from npu_gr.train.rank.schema import choose_features
from npu_gr.train.rank.search import SearchedOptions, search
from npu_gr.train.rank.tasks import ChosenTasks, check_actions, choose_tasks, liking_values, make_labels
from npu_gr.train.rank.validation import event_likelihood
from npu_gr.train.steps import TrainingProgress


class HeldOutEvents(NamedTuple):
    """A log whose validation is not trained on."""

    log: InteractionLog
    targets: Sequence[NextItem]  # the validation's next items


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
        progress: called after every step of training and every user of the evaluation, in this thread.
        evaluated: called with the evaluated ranker, before the refit.
        codes: semantic IDs of the items; None = the ranker reads none.

    Returns:
        The checkpoint, with the evaluated ranker's figures as its metrics, and the figures of all models.

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
        raise ConfigError("budget_s: no user has two trained events and a next item to predict: nothing to search on")

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

    def judge(found: Fitted) -> F64:
        return event_likelihood(LogInputs(log, found.model), found.model, held_out.targets, labels)

    searched = search(options, train, judge, has_likes=any(not task.is_next_item for task in chosen.tasks))
    fitted = searched.fitted
    kind, order, better = (USUAL, None, {}) if click is None else _fit_order(fitted, click, held_out, options)
    counted = None
    if click is not None:  # as the baselines, which choose on the validation and then count it
        counted = count_order(log, click, kind)
        order = None if order is None else replace(counted, weights=order.weights)
    num_served = len(whole.items) if options.refit else int(held_out.log.trained.sum())
    evaluation = _evaluate(searched, order, better, counted, kind, log, held_out, chosen, num_served, options, progress)
    checkpoint = Checkpoint(
        model=fitted.model,
        item_ids=log.item_ids,
        name=options.name,
        action_values=log.action_values,
        action_names=log.action_names,
        metrics={name: value for name, value in evaluation.as_dict().items() if "/" not in name},
        order=order,
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
        if order is not None:
            order = replace(count_order(everything, order.task, kind), weights=order.weights)
        checkpoint = replace(checkpoint, model=again.model, order=order)
    return checkpoint, evaluation


def hold_out(log: InteractionLog, options: TrainOptions) -> HeldOutEvents:
    """Keep the last trained event of each user who has another one, of a large log of some users, for the validation.

    Args:
        log: to train on.
        options: the most users, and the seed that draws them.
    """
    last = log.starts[:-1] + log.num_trained - 1
    users = np.flatnonzero(log.num_trained > 1)
    every = [NextItem(user, event) for user, event in zip(users.tolist(), last[users].tolist(), strict=True)]
    targets = sample_targets(every, options.validation_users, options.seed)
    num_trained = log.num_trained.copy()
    num_trained[[user for user, _ in targets]] -= 1
    return HeldOutEvents(replace(log, num_trained=num_trained), targets)


def _fit_order(
    fitted: Fitted, task: str, held_out: HeldOutEvents, options: TrainOptions
) -> tuple[NeighbourKind, Order | None, dict[str, Difference]]:
    """Fit the order on the validation, and compare each source alone with it.

    Returns:
        The kind of its neighbours; the order that is served, None = there is no validation; and the sources that are
        above the fitted one.
    """
    if not held_out.targets:
        return USUAL, None, {}
    log, targets = held_out
    transitions = count_transitions(log, task)
    kinds = count_kinds(log)
    inputs = LogInputs(log, fitted.model)
    lists = list(retrieved_lists(inputs, fitted.model, transitions, targets, _sizes(options), others=[*kinds.values()]))
    counted = {kind: replace(transitions, neighbours=neighbours) for kind, neighbours in kinds.items()}
    kind, order, own = choose_kind(counted, log, lists, targets)
    better = better_alone(order, log, own, targets)
    return kind, to_serve(order, better), better


def _sizes(options: TrainOptions) -> ListSizes:
    return ListSizes(options.num_retrieved, options.num_followers, options.num_neighbours)


def _evaluate(
    searched: SearchedOptions,
    order: Order | None,
    better: Mapping[str, Difference],
    counted: Order | None,
    kind: NeighbourKind,
    log: InteractionLog,
    held_out: HeldOutEvents,
    chosen: ChosenTasks,
    num_served: int,
    options: TrainOptions,
    progress: Callable[[TrainingProgress], None],
) -> Evaluation:
    labels = make_labels(log, chosen.tasks)
    first = labels.served_tasks[0] if labels.served_tasks else None
    likes = labels.served[:, 0].numpy() > 0 if first is not None else np.zeros(len(log.items), np.bool_)
    valued = log
    if first is not None:  # an event type's index is no value; being a positive is
        valued = replace(log, action_values=liking_values(log, chosen.tasks[first]), action_names=())
    simple = fit_baselines(log, options.split, options.seed)
    baselines = [*simple.fitted, Means(valued), MatrixFactorisation(valued, options.seed)]
    targets = sample_targets(log.next_items(), options.test_users, options.seed)
    ranker, parts = evaluate_ranker(
        log,
        searched.fitted.model,
        likes,
        targets,
        order=order,
        counted=counted,
        like_task=first,
        sizes=_sizes(options),
        done=lambda done, total: progress(TrainingProgress("ranker: evaluate", done, total)),
    )
    return Evaluation(
        split=options.split,
        num_trained=int(held_out.log.trained.sum()),
        num_served=num_served,
        num_judged=int((~log.trained).sum()),
        num_next=len(targets),
        tasks=chosen.reason,
        auc_task="" if first is None else chosen.tasks[first].name,
        fitting=_in_words(searched, order, kind, len(held_out.targets)),
        better_alone=better,
        left_out=simple.left_out,
        ranker=ranker,
        parts=parts,
        baselines=tuple(evaluate_baseline(valued, baseline, likes, targets) for baseline in baselines),
        likes=likes[~log.trained],
        users=log.users[~log.trained],
    )


def _in_words(searched: SearchedOptions, order: Order | None, kind: NeighbourKind, num_users: int) -> str:
    if order is None:
        return f"trained for all of {searched.options.epochs} epochs: there is no validation"
    weights = ", ".join(f"{name} {weight:.2f}" for name, weight in order.weights.items())
    epochs = f"epoch {searched.fitted.num_epochs} of {searched.options.epochs} is the best"
    changed = ", ".join(f"{name}={_plain(value)}" for name, value in searched.changes.items()) or "what was asked for"
    tried = f"; of {searched.num_trials} settings tried: {changed}" if searched.options.budget_s else ""
    on = f"on the last trained event of {num_users:,} users"
    return f"{on}: {epochs}{tried}; order: {weights}; neighbours: {kind.name}"


def _plain(value: float | tuple[str, ...]) -> str:
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else f"{value:g}"
