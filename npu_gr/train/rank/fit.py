"""Fit a ranker to the trained events of a log, and stop at the best likelihood of the validation's next items.

Choose a ranker's settings on the validation of the log at hand, within some seconds.

The first trial is what was asked for. Each next one changes one thing of the best so far, and takes
its place if it makes the validation's events, their items and what users did with them, more likely
by more than chance. A trial that falls behind the best one's likelihood at the same share of its
epochs is given up. The test is never looked at.

How many trials there are depends on the machine, so a search does not repeat bit for bit; the
training of what it chose does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from npu_gr.train.data import Batch, InteractionLog, NextItem, batches, windows
from npu_gr.train.generate.codes import ItemCodes, item_vectors
from npu_gr.train.metrics import F64
from npu_gr.train.rank.inputs import LogInputs
from npu_gr.train.rank.losses import batch_loss, next_item_likelihood
from npu_gr.train.rank.options import Task, TrainOptions, make_labels
from npu_gr.train.rank.schema import beside_schema, factorise, item_tables, write_item_schema
from npu_gr.train.steps import EpochTrainer, TrainingProgress

# two items of a history stand near each other if they are at most so many events apart
NEIGHBOURS = 5
# of the weights of layers and head at the start: a layer begins as little more than nothing
LINEAR_DEVIATION = 0.02
ACTION_DEVIATION = 0.06  # standard deviation of the action embeddings at the start
ITEM_NOISE = 0.005  # standard deviation of what is added to the item embeddings at the start
# share of the training before which the retrieval's softmax says nothing yet to draw from
CLICK_AFTER = 0.1


# (share of the epochs, mean log-probability on the validation) -> end it
GivesUp = Callable[[float, float], bool]


class Fitted(NamedTuple):
    """A trained ranker, in evaluation mode."""

    model: HSTU
    num_epochs: int  # that it was trained for
    # mean log-probability of the validation's next items after each epoch; empty = none
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
) -> Fitted:
    """Train a model. The same arguments and number of threads give the same bits.

    Args:
        log: its trained events are trained on.
        item_features: side features of items.
        tasks: of the model.
        options: of the model and its training.
        validation: next items that are not trained on; the epoch that makes them most likely is the
            result. Empty = train to the end.
        stage: names the training in its progress.
        progress: called after every step.
        num_epochs: end after so many; the learning rate falls as if there were all. None = all.
        gives_up: asked after every epoch with a validation.
        features: what the model reads beside items, actions and times.
        codes: of the log's items, by row; None = the model reads none.

    Raises:
        DataError: a task has only one class, or the loss is not finite.
        ConfigError: the options do not make a model.
    """
    labels = make_labels(log, tasks)
    torch.manual_seed(options.seed)
    model = new_model(log, item_features, tasks, options, features, codes)
    folds = None
    if model.config.has_factors:
        served, folds = factorise(log, tasks, options.seed)
        model.factors_of_items.copy_(torch.from_numpy(served.items))
        model.factors_of_actions.copy_(torch.from_numpy(served.values))
    inputs = LogInputs(log, model, folds)
    random = np.random.default_rng(options.seed)
    # one action: there is none to learn
    auxiliary = nn.Linear(options.head_dim, max(1, labels.auxiliary.shape[1]))
    trainer = EpochTrainer(
        model,
        options,
        tables=model.items.parts(),
        table_weight_decay=options.item_weight_decay,
        stage=stage,
        auxiliary=[*auxiliary.parameters()],
        progress=progress,
    )
    curve: list[float] = []

    def loss_of(batch: Batch) -> Tensor:
        model.items.kept_rows = draw_kept(log.num_items, model.config.row_dropout)
        with_click = trainer.done_ratio >= CLICK_AFTER
        return batch_loss(model, auxiliary, inputs, batch, labels, options, with_click=with_click)

    def score(averaged: HSTU) -> float:
        curve.append(float(next_item_likelihood(inputs, averaged, validation).mean()))
        return math.exp(curve[-1])

    best = trainer.fit(
        lambda: list(
            batches(log, windows(log, options.window_tokens, random), options.batch_tokens, random)
        ),
        loss_of,
        score=score if validation and model.config.retrieval else None,
        patience=options.patience,
        num_epochs=num_epochs,
        gives_up=lambda done: gives_up(done / options.epochs, curve[-1]),
    )
    best.model.eval().items.freeze()
    return Fitted(best.model, best.num_epochs, tuple(curve))


def new_model(
    log: InteractionLog,
    item_features: Sequence[ItemValues],
    tasks: Sequence[Task],
    options: TrainOptions,
    features: Sequence[Feature] = (),
    codes: ItemCodes | None = None,
) -> HSTU:
    """Make a model for a log, with its start.

    An item starts where its neighbours in the trained histories are.

    Raises:
        ConfigError: the options do not make a model.
    """
    beside = beside_schema(item_features, features)
    tables = item_tables(log, beside)
    values_of = {feature.name: tuple(feature.values) for feature in beside}
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
            dim=options.dim,
            num_layers=options.num_layers,
            num_heads=options.num_heads,
            qk_dim=options.qk_dim,
            v_dim=options.v_dim,
            head_dim=options.head_dim,
            activation=options.activation,
            residual=options.residual,
            relative_bias=options.relative_bias,
            norm=options.norm,
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
            near = torch.from_numpy(item_vectors(log, [], options.dim, NEIGHBOURS, options.seed))
            nn.init.normal_(model.item.weight, std=ITEM_NOISE)
            model.item.weight[:, : near.shape[1]] += options.item_init_norm * near
        if codes is not None:
            model.codes.start(codes.sids, model.item.weight)
    return model


FIRST_LOOK = 0.25  # share of the epochs before which no trial is given up
BEHIND = 0.05  # nats below the best trial at the same share of the epochs that end a trial

Train = Callable[[TrainOptions, str, GivesUp], Fitted]  # options, stage, when to give up


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedOptions:
    """What a search chose."""

    options: TrainOptions
    fitted: Fitted
    num_trials: int
    changes: dict[str, Any]  # option -> value, where it is not what was asked for


def changes(options: TrainOptions, *, has_likes: bool = False) -> Iterator[dict[str, Any]]:
    """List what may be changed, the most telling first: each is tried alone, on the best settings so far.

    Args:
        options: what was asked for.
        has_likes: whether a task says which events are likes, so that they can be factorised.
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
) -> SearchedOptions:
    """Search for `options.budget_s` seconds.

    The first trial is never given up, however long it takes.

    Args:
        options: what was asked for.
        train: trains a trial; ends it where `gives_up` of (share of the epochs, likelihood) says
            so.
        evaluate: log-probability of each of the validation's events under a trial.
        now: seconds of a clock.
        has_likes: as of `changes`.

    Raises:
        DataError, ConfigError: as `train`.
    """
    ends_at = now() + options.budget_s
    best, fitted = options, train(options, "ranker: train", lambda *_: False)
    if not options.budget_s:
        return SearchedOptions(options=best, fitted=fitted, num_trials=1, changes={})
    likelihood = evaluate(fitted)
    kept: dict[str, Any] = {}
    num_trials = 1
    for change in changes(options, has_likes=has_likes):
        tried = msgspec.structs.replace(best, **change)
        if tried == best:
            continue
        if now() >= ends_at:
            break
        num_trials += 1
        found = train(tried, f"ranker: trial {num_trials}", _gives_up(best, fitted, ends_at, now))
        gap = evaluate(found) - likelihood
        if gap.mean() > gap.std() / np.sqrt(len(gap)):
            best, fitted = tried, found
            likelihood = likelihood + gap
            kept |= change
    return SearchedOptions(options=best, fitted=fitted, num_trials=num_trials, changes=kept)


def _gives_up(
    options: TrainOptions, best: Fitted, ends_at: float, now: Callable[[], float]
) -> GivesUp:
    """Decide by the best trial's likelihoods, and by the clock."""

    def decide(share: float, likelihood: float) -> bool:
        place = min(max(1, round(share * options.epochs)), len(best.curve)) - 1
        return now() >= ends_at or (share >= FIRST_LOOK and likelihood < best.curve[place] - BEHIND)

    return decide
