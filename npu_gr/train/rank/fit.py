"""Fit a ranker to the trained events of a log, and search for better settings.

`fit` trains one ranker and keeps the epoch with the best likelihood of the validation's next items;
for a catalogue of more than `max_softmax_items`, that with their best mean reciprocal rank. There,
the likelihood is best many epochs earlier: a model that goes on orders the top better while it gets
too sure of itself. Reciprocal ranks are never 0, so a validation of few users tells epochs apart
too, which NDCG@10 does not.

`search` spends some seconds on a hill climb over the settings. The first trial has the given
options. Each next trial changes one setting of the best trial so far, and replaces it if it is
better on the validation by more than a standard error: by the likelihood of the events (their
items, and what users did with them), or, for a large catalogue, by the reciprocal rank of their
items, as an epoch. What users did must not get less likely by more than a standard error. A trial
ends early if its score is behind that of the best trial at the same share of its epochs. The test
events are never used.

The number of trials depends on the machine, so a search is not reproducible bit for bit; the
training with the settings that it chose is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from npu_gr.core.errors import ConfigError
from npu_gr.core.feature_schema.factors import MF_SCORE
from npu_gr.core.feature_schema.schema import Feature
from npu_gr.history_store.interactions import ItemValues
from npu_gr.model.config import HSTUConfig, ItemFeature
from npu_gr.model.feature_rows import draw_kept
from npu_gr.model.hstu import HSTU
from npu_gr.model.weights import Checkpoint
from npu_gr.train.data import Batch, InteractionLog, NextItem
from npu_gr.train.epochs import epoch
from npu_gr.train.generate.codes import ItemCodes, item_vectors
from npu_gr.train.metrics import F64, hit_ratio, mean_reciprocal_rank
from npu_gr.train.rank.inputs import LogInputs
from npu_gr.train.rank.losses import batch_loss, next_item_likelihood
from npu_gr.train.rank.options import Task, TrainOptions, make_labels
from npu_gr.train.rank.schema import (
    factorise,
    item_tables,
    without_schema_features,
    write_item_schema,
)
from npu_gr.train.rank.shown import position_biases, start_bias
from npu_gr.train.rank.shown_term import fit_term
from npu_gr.train.rank.warm import start_at
from npu_gr.train.resume import NO_STATES, TrainingStates
from npu_gr.train.steps import EpochTrainer, TrainingProgress

COOCCURRENCE_WINDOW = 5  # two items co-occur if they are at most so many events apart
# standard deviations of the weights at the start
LINEAR_DEVIATION = 0.02  # layers and head: small, so that a layer starts close to the identity
ACTION_DEVIATION = 0.06  # action embeddings
ITEM_NOISE = 0.005  # noise on the item embeddings
# share of the training without click loss: its items are drawn from the retrieval's softmax, which
# is not yet better than uniform
CLICK_AFTER = 0.1


# (share of the epochs done, log of the score on the validation) -> whether to end the training
GivesUp = Callable[[float, float], bool]


class Fitted(NamedTuple):
    """A trained ranker, in evaluation mode."""

    model: HSTU
    num_epochs: int  # epochs that it was trained for
    # log of the score that chose the epoch, after each epoch; empty = no validation
    curve: tuple[float, ...]


def fit(
    log: InteractionLog,
    item_features: Sequence[ItemValues],
    tasks: Sequence[Task],
    options: TrainOptions,
    validation: Sequence[NextItem],
    stage: str,
    progress: Callable[[TrainingProgress], None],
    num_epochs: int | None = None,
    gives_up: GivesUp = lambda *_: False,
    features: Sequence[Feature] = (),
    codes: ItemCodes | None = None,
    states: TrainingStates = NO_STATES,
    start: Checkpoint | None = None,
    whole: InteractionLog | None = None,
) -> Fitted:
    """Train a ranker. The same arguments and number of threads give the same bits.

    Args:
        log: Log whose trained events are trained on.
        item_features: Side features of items.
        tasks: Tasks of the model, one logit each.
        options: Options of the model and its training.
        validation: Next items that are not trained on; the best epoch for them is the result.
            Empty = train to the end.
        stage: Name of the training in its progress.
        progress: Callback after every step.
        num_epochs: End after so many epochs, on the learning-rate schedule of all
            `options.epochs`. None = all epochs.
        gives_up: Callback after every epoch with a validation; True ends the training.
        features: Features that the model reads in addition to items, actions and times.
        codes: Semantic IDs of the log's items, by row; None = the model does not read any.
        states: Where the state of the training is kept.
        start: Earlier ranker to train on; None = train from random weights.
        whole: Log to train on where `log` is a sample of its users, by which the model starts and
            is validated; None = `log`.

    Raises:
        DataError: a task has only one class, or the loss is not finite.
        ConfigError: the options do not make a model, or need all events of `whole` in memory.
    """
    trained = log if whole is None else whole
    labels = make_labels(trained, tasks)
    torch.manual_seed(options.seed)
    model = new_model(log, item_features, tasks, options, features, codes)
    if start is not None:
        start_at(model, log.item_ids, start)
    if model.config.shown_task:
        model.factors_of_shown.copy_(torch.from_numpy(fit_term(log, options.max_history_tokens)))
    folds = None
    if model.config.has_factors:
        served, folds = factorise(log, tasks, options.seed)
        model.factors_of_items.copy_(torch.from_numpy(served.items))
        model.factors_of_actions.copy_(torch.from_numpy(served.values))
    if whole is not None:
        check_reads_no_columns(model.config)
    inputs = LogInputs(trained, model, folds)
    validated = inputs if whole is None else LogInputs(log, model)
    # at least one output: a log with one action has no auxiliary label
    auxiliary = nn.Linear(options.head_dim, max(1, labels.auxiliary.shape[1]))
    biases = position_biases()
    if labels.shown_task is not None and start is None:
        start_bias(model, log, labels.shown_task)
    trainer = EpochTrainer(
        model,
        options,
        tables=model.items.parts(),
        table_weight_decay=options.item_weight_decay,
        stage=stage,
        auxiliary=[*auxiliary.parameters(), *biases.parameters()],
        progress=progress,
        states=states,
    )
    validations: list[dict[str, float]] = []

    def loss_of(batch: Batch) -> Tensor:
        model.items.kept_rows = draw_kept(log.num_items, model.config.row_dropout)
        with_click = trainer.done_ratio >= CLICK_AFTER
        return batch_loss(
            model, auxiliary, biases, inputs, batch, labels, options, with_click=with_click
        )

    def score(averaged: HSTU) -> float:
        found = next_item_likelihood(validated, averaged, validation)
        log_score = (
            math.log(mean_reciprocal_rank(found.ranks))
            if scores_by_rank(log, options)
            else float(found.log_probabilities.mean())
        )
        validations.append({"log_score": log_score, "hr_at_10": hit_ratio(found.ranks, 10)})
        return math.exp(log_score)

    best = trainer.fit(
        lambda random: epoch(trained, options.window_tokens, options.batch_tokens, random),
        loss_of,
        score=score if validation and model.config.retrieval else None,
        found=validations,
        patience=options.patience,
        num_epochs=num_epochs,
        gives_up=lambda done: gives_up(done / options.epochs, validations[-1]["log_score"]),
    )
    best.model.eval().items.freeze()
    return Fitted(best.model, best.num_epochs, tuple(one["log_score"] for one in validations))


def check_reads_no_columns(config: HSTUConfig) -> None:
    """Check that a model reads no feature that is made of all events at once.

    Raises:
        ConfigError: it does.
    """
    if own := [feature.name for feature in config.features if feature.of != "item"]:
        raise ConfigError(
            f"train: {own[0]}: is made of all events in memory, and these are read from the disk: "
            "leave it out, or raise memory_events"
        )


def scores_by_rank(log: InteractionLog, options: TrainOptions) -> bool:
    """Whether the validation scores models by reciprocal ranks, not by the likelihood."""
    return log.num_items > options.max_softmax_items


def new_model(
    log: InteractionLog,
    item_features: Sequence[ItemValues],
    tasks: Sequence[Task],
    options: TrainOptions,
    features: Sequence[Feature] = (),
    codes: ItemCodes | None = None,
) -> HSTU:
    """Make a model for a log, and initialise its weights.

    An item's embedding starts near those of the items that it co-occurs with.

    Raises:
        ConfigError: the options do not make a model.
    """
    side_features = without_schema_features(item_features, features)
    tables = item_tables(log, side_features)
    values_of = {feature.name: tuple(feature.values) for feature in side_features}
    is_known = (
        bool(tables) or codes is not None or any(feature.of == "item" for feature in features)
    )
    try:
        config = HSTUConfig(
            num_items=log.num_items,
            item_features=tuple(
                ItemFeature(
                    name=name, num_values=padding, max_values=rows.shape[1], values=values_of[name]
                )
                for name, (rows, padding) in tables.items()
            ),
            item_codes=() if codes is None else codes.code_count,
            row_dropout=options.row_dropout if is_known else 0.0,
            features=tuple(features),
            actions=log.names_of_actions,
            tasks=tuple(task.name for task in tasks),
            shown_task=next(
                (t.name for t in tasks if t.shown and not options.attention_window_tokens), ""
            ),
            dim=options.dim,
            num_layers=options.num_layers,
            num_heads=options.num_heads,
            qk_dim=options.qk_dim,
            v_dim=options.v_dim,
            head_dim=options.head_dim,
            activation=options.activation,
            residual=options.residual,
            relative_bias=relative_bias(log, options),
            norm=options.norm,
            attention_window_tokens=options.attention_window_tokens,
            attention_first_tokens=options.attention_first_tokens,
            scaling_seqlen=options.scaling_seqlen,
            max_history_tokens=options.max_history_tokens,
            retrieval=any(task.is_next_item for task in tasks),
        )
    except ValueError as error:
        raise ConfigError(f"train: {error}") from error
    model = HSTU(config)
    for index, (rows, _) in enumerate(tables.values()):
        getattr(model, f"feature_ids_{index}").copy_(torch.from_numpy(rows))
    write_item_schema(model, log, item_features)
    with torch.no_grad():
        for part in (model.layers, model.head):
            for linear in part.modules():
                if isinstance(linear, nn.Linear):
                    nn.init.normal_(linear.weight, std=LINEAR_DEVIATION)
                    nn.init.zeros_(linear.bias)
        nn.init.normal_(model.action.weight, std=ACTION_DEVIATION)
        if options.item_init_norm:
            near = torch.from_numpy(
                item_vectors(log, [], options.dim, COOCCURRENCE_WINDOW, options.seed)
            )
            nn.init.normal_(model.item.weight, std=ITEM_NOISE)
            model.item.weight[:, : near.shape[1]] += options.item_init_norm * near
        if codes is not None:
            model.codes.start(codes.sids, model.item.weight)
    return model


def relative_bias(
    log: InteractionLog, options: TrainOptions
) -> Literal["position_time", "position", "none"]:
    """Choose the attention bias: without the time if the log has none.

    A request's time would be decades after the places that such a log has in place of seconds.
    """
    if options.relative_bias == "position_time" and not log.has_times:
        return "position"
    return options.relative_bias


SHORTER = 4  # times fewer epochs of the two trainings that choose `mf_score`
FIRST_LOOK = 0.25  # share of the epochs before which no trial is ended early
# log of the score below the best trial's, at the same share of the epochs, that ends a trial
BEHIND = 0.05

Train = Callable[[TrainOptions, str, GivesUp], Fitted]  # options, stage, when to end early


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedOptions:
    """The best settings of a search, and the model trained with them."""

    options: TrainOptions
    fitted: Fitted
    num_trials: int
    changes: dict[str, Any]  # option -> value, where it differs from the given options

    @property
    def reads_mf_score(self) -> bool:
        """Whether `mf_score` was chosen, not given."""
        return MF_SCORE in self.changes.get("computed", ())


def changes(options: TrainOptions, *, has_likes: bool = False) -> Iterator[dict[str, Any]]:
    """List the changes to try, those most likely to help first.

    Args:
        options: Options of the first trial.
        has_likes: Whether a task defines which events are likes, so that `mf_score` can be
            computed.
    """
    if has_likes and MF_SCORE not in options.computed:
        yield {"computed": (*options.computed, MF_SCORE)}
    yield {"dropout": options.dropout / 2}
    yield {"item_weight_decay": options.item_weight_decay * 4}
    yield {"window_tokens": max(2, options.window_tokens // 2)}
    yield {"item_init_norm": options.item_init_norm / 2}
    yield {"learning_rate": options.learning_rate / 2}
    yield {"click_weight": 0.0}
    yield {"task_weight": options.task_weight * 0.3}
    yield {"dim": options.dim * 2, "qk_dim": options.qk_dim * 2, "v_dim": options.v_dim * 2}
    yield {"num_layers": options.num_layers + 1}
    yield {"dropout": min(0.5, options.dropout * 1.5)}
    yield {"item_weight_decay": options.item_weight_decay / 4}
    yield {"epochs": options.epochs * 2}


def search(
    options: TrainOptions,
    train: Train,
    evaluate: Callable[[Fitted], F64],
    now: Callable[[], float] = time.monotonic,
    *,
    has_likes: bool = False,
    likes: Callable[[Fitted], F64] | None = None,
) -> SearchedOptions:
    """Choose `mf_score` if asked to, and search for better settings for `options.budget_s` seconds.

    The first trial always runs to its end, even beyond the budget.

    Args:
        options: Options of the first trial.
        train: Function that trains a trial; it ends early when its `gives_up` returns True.
        evaluate: Function that computes the score of each of the validation's events, the higher
            the better.
        now: Clock, in seconds.
        has_likes: Whether a task defines which events are likes; see `changes`.
        likes: Function that computes the log-probability of the labels of each of the validation's
            events; None = there are no labels or no validation.

    Raises:
        DataError, ConfigError: as `train`.
    """
    accepted: dict[str, Any] = {}
    if options.choose_mf_score and likes is not None and MF_SCORE not in options.computed:
        accepted = _mf_score(options, train, likes)
    options = msgspec.structs.replace(options, **accepted)
    ends_at = now() + options.budget_s
    best, fitted = options, train(options, "ranker: train", lambda *_: False)
    if not options.budget_s:
        return SearchedOptions(options=best, fitted=fitted, num_trials=1, changes=accepted)

    def both(of: Fitted) -> tuple[F64, F64]:
        return evaluate(of), np.zeros(1) if likes is None else likes(of)

    scores = both(fitted)
    num_trials = 1
    for change in changes(options, has_likes=has_likes):
        tried = msgspec.structs.replace(best, **change)
        if tried == best:
            continue
        if now() >= ends_at:
            break
        num_trials += 1
        found = train(tried, f"ranker: trial {num_trials}", _gives_up(best, fitted, ends_at, now))
        its = both(found)
        if _exceeds(its[0], scores[0]) and not _exceeds(scores[1], its[1]):
            best, fitted = tried, found
            scores = its
            accepted |= change
    return SearchedOptions(options=best, fitted=fitted, num_trials=num_trials, changes=accepted)


def _exceeds(one: F64, other: F64) -> bool:
    """Whether the mean is higher by more than a standard error, paired."""
    gap = one - other
    return bool(gap.mean() > gap.std() / np.sqrt(len(gap)))


def _mf_score(
    options: TrainOptions, train: Train, likes: Callable[[Fitted], F64]
) -> dict[str, Any]:
    """Return the change of the options that makes the labels likelier after a short training."""
    change = {"computed": (*options.computed, MF_SCORE)}
    short = msgspec.structs.replace(options, epochs=max(2, options.epochs // SHORTER))
    gap = [
        float(likes(train(tried, f"ranker: {words} mf_score", lambda *_: False)).mean())
        for words, tried in (
            ("without", short),
            ("with", msgspec.structs.replace(short, **change)),
        )
    ]
    return change if gap[1] > gap[0] else {}


def _gives_up(
    options: TrainOptions, best: Fitted, ends_at: float, now: Callable[[], float]
) -> GivesUp:
    """Make the function that ends a trial: it is behind the best one, or the budget is spent."""

    def decide(share: float, score: float) -> bool:
        place = min(max(1, round(share * options.epochs)), len(best.curve)) - 1
        return now() >= ends_at or (share >= FIRST_LOOK and score < best.curve[place] - BEHIND)

    return decide
