"""Fit a ranker to the trained events of a log, and stop at the best likelihood of the validation's next items."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from npu_gr.core.errors import ConfigError
from npu_gr.core.feature_schema.schema import Feature
from npu_gr.features.interactions import ItemValues
from npu_gr.model.config import HSTUConfig, ItemFeature
from npu_gr.model.feature_rows import draw_kept
from npu_gr.model.hstu import HSTU
from npu_gr.train.data import Batch, InteractionLog, NextItem, batches, windows
from npu_gr.train.generate.codes import ItemCodes, item_vectors
from npu_gr.train.rank.factors import factorise
from npu_gr.train.rank.inputs import LogInputs
from npu_gr.train.rank.item_schema import beside_schema, write_item_schema
from npu_gr.train.rank.losses import batch_loss
from npu_gr.train.rank.options import TrainOptions
from npu_gr.train.rank.schema import item_tables
from npu_gr.train.rank.tasks import Task, make_labels
from npu_gr.train.rank.validation import next_item_likelihood
from npu_gr.train.steps import EarlyStopping, EpochTrainer, TrainingProgress

NEIGHBOURS = 5  # two items of a history stand near each other if they are at most so many events apart
LINEAR_DEVIATION = 0.02  # of the weights of layers and head at the start: a layer begins as little more than nothing
ACTION_DEVIATION = 0.06  # standard deviation of the action embeddings at the start
ITEM_NOISE = 0.005  # standard deviation of what is added to the item embeddings at the start
CLICK_AFTER = 0.1  # share of the training before which the retrieval's softmax says nothing yet to draw from


GivesUp = Callable[[float, float], bool]  # (share of the epochs, mean log-probability on the validation) -> end it


class Fitted(NamedTuple):
    """A trained ranker, in evaluation mode."""

    model: HSTU
    num_epochs: int  # that it was trained for
    curve: tuple[float, ...]  # mean log-probability of the validation's next items after each epoch; empty = none


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
        validation: next items that are not trained on; the epoch that makes them most likely is the result. Empty =
            train to the end.
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
    auxiliary = nn.Linear(options.head_dim, max(1, labels.auxiliary.shape[1]))  # one action: there is none to learn
    trainer = EpochTrainer(
        model,
        options,
        tables=model.items.parts(),
        table_weight_decay=options.item_weight_decay,
        stage=stage,
        auxiliary=[*auxiliary.parameters()],
        progress=progress,
    )
    is_judged = bool(validation) and model.config.retrieval
    stopping = EarlyStopping(options.patience)
    curve: list[float] = []
    best, best_epochs = model, 0

    def loss_of(batch: Batch) -> Tensor:
        model.items.kept_rows = draw_kept(log.num_items, model.config.row_dropout)
        with_click = trainer.done_ratio >= CLICK_AFTER
        return batch_loss(model, auxiliary, inputs, batch, labels, options, with_click=with_click)

    for epoch in range(options.epochs if num_epochs is None else num_epochs):
        parts = list(batches(log, windows(log, options.window_tokens, random), options.batch_tokens, random))
        trainer.run_epoch(epoch, parts, loss_of)
        if is_judged:
            curve.append(float(next_item_likelihood(inputs, trainer.averaged.eval(), validation).mean()))
        if not is_judged or stopping.is_best(math.exp(curve[-1])):
            best, best_epochs = copy.deepcopy(trainer.averaged), epoch + 1
        if is_judged and (stopping.is_over or gives_up((epoch + 1) / options.epochs, curve[-1])):
            break
    best.eval().items.freeze()
    return Fitted(best, best_epochs, tuple(curve))


def new_model(
    log: InteractionLog,
    item_features: Sequence[ItemValues],
    tasks: Sequence[Task],
    options: TrainOptions,
    features: Sequence[Feature] = (),
    codes: ItemCodes | None = None,
) -> HSTU:
    """Make a model for a log, with its start. An item starts where its neighbours in the trained histories are.

    Raises:
        ConfigError: the options do not make a model.
    """
    beside = beside_schema(item_features, features)
    tables = item_tables(log, beside)
    values_of = {feature.name: tuple(feature.values) for feature in beside}
    is_known = bool(tables) or codes is not None or any(feature.of == "item" for feature in features)
    try:
        config = HSTUConfig(
            num_items=log.num_items,
            item_features=tuple(
                ItemFeature(name=name, num_values=padding, max_values=rows.shape[1], values=values_of[name])
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
        if options.item_length:
            near = torch.from_numpy(item_vectors(log, [], options.dim, NEIGHBOURS, options.seed))
            nn.init.normal_(model.item.weight, std=ITEM_NOISE)
            model.item.weight[:, : near.shape[1]] += options.item_length * near
        if codes is not None:
            model.codes.start(codes.sids, model.item.weight)
    return model
