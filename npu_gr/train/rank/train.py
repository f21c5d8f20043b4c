"""Train the HSTU ranker from an interaction log. One pass over the histories trains every task.

Losses:
  binary task    binary cross-entropy at every event. An auxiliary head, which is not served, learns the same for every
                 threshold between the action values (ordinal regression: a rating of 5 says more than "liked"), or for
                 every event type
  the next item  sampled softmax of the event's item against items drawn from the catalogue, at a share of the events

Evaluated first, then refitted: the model that is served is trained anew on all events, with the same settings and as
many epochs. What is measured is the model of the older events; nothing is left to measure the served one on.

Deterministic: the same log, options and number of threads give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Literal

import msgspec
import numpy as np
import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from npu_gr.core.errors import ConfigError
from npu_gr.core.names import value_name
from npu_gr.core.settings import Count, Positive
from npu_gr.features.interactions import Interactions, ItemValues
from npu_gr.model.config import HSTUConfig, ItemFeature
from npu_gr.model.hstu import HSTU
from npu_gr.model.weights import Checkpoint
from npu_gr.train.baselines import Baseline, Markov, MatrixFactorisation, Means, Popularity
from npu_gr.train.data import Batch, InteractionLog, Split, batches, build_log, windows
from npu_gr.train.next_item import sample_targets
from npu_gr.train.options import Decay, DropoutRatio, Seed, Share, Weight
from npu_gr.train.rank.evaluate import Evaluation, evaluate_baseline, evaluate_ranker
from npu_gr.train.rank.forward import HistoryBatch, Moments, encode
from npu_gr.train.rank.tasks import ChosenTasks, Labels, Task, check_actions, choose_tasks, make_labels
from npu_gr.train.steps import EpochTrainer, TrainingProgress


class TrainOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides the result but the log and the number of threads."""

    name: Annotated[str, Meta(description="of the model, as answers and metrics show it")] = "hstu"
    seed: Annotated[Seed, Meta(description="of everything that is drawn: weights, batches, negatives")] = 0
    split: Annotated[
        Split,
        Meta(description="what the evaluation keeps: the newest fifth of each user or of the log, or each last event"),
    ] = "user-time"
    evaluate_on: Annotated[
        Literal["test", "validation"],
        Meta(description="validation: split the training part again, and train and evaluate on that"),
    ] = "test"
    test_users: Annotated[Count, Meta(description="most users of HR and NDCG, drawn at random")] = 1000
    refit: Annotated[
        bool, Meta(description="after the evaluation, train the served model anew on all events, the newest included")
    ] = True
    tasks: Annotated[
        tuple[Task, ...] | None,
        Meta(description="one logit each, e.g. [{name: click}, {name: buy, actions: [purchase]}]; null: by the log"),
    ] = None

    dim: Annotated[Count, Meta(description="width of a token")] = 64
    num_layers: Annotated[Count, Meta(description="attention layers")] = 2
    num_heads: Annotated[Count, Meta(description="attention heads")] = 2
    qk_dim: Annotated[Count, Meta(description="width of a query and a key, per head")] = 32
    v_dim: Annotated[Count, Meta(description="width of a value, per head")] = 32
    head_dim: Annotated[Count, Meta(description="hidden width before the task logits")] = 64
    activation: Annotated[Literal["uvqk", "u"], Meta(description="SiLU on all four projections, or on U alone")] = (
        "uvqk"
    )
    residual: Annotated[Literal["add", "concat"], Meta(description="how the attention's output joins a token")] = "add"
    norm: Annotated[
        Literal["layer", "group"], Meta(description="of the attention's output: over all heads, or each by itself")
    ] = "layer"
    scaling_seqlen: Annotated[Count, Meta(description="the constant attention scale is 1 / this")] = 64
    max_history_tokens: Annotated[Count, Meta(description="longest history that is served")] = 1024

    epochs: Annotated[Count, Meta(description="passes over the log")] = 6
    window_tokens: Annotated[Count, Meta(description="longest run of events trained on at once")] = 200
    batch_tokens: Annotated[Count, Meta(description="events of one step, padding included")] = 512
    learning_rate: Annotated[Positive, Meta(description="highest rate, at the end of the warm-up")] = 2e-3
    warm_up_ratio: Annotated[Share, Meta(description="share of the steps with a rising learning rate")] = 0.1
    weight_decay: Annotated[Weight, Meta(description="of matrices")] = 0.1
    item_weight_decay: Annotated[Weight, Meta(description="of item embeddings, which overfit first")] = 4.0
    dropout: Annotated[DropoutRatio, Meta(description="share of embeddings and updates that are dropped")] = 0.3
    average_decay: Annotated[Decay, Meta(description="of the moving average of the weights, which is served")] = 0.0
    num_negatives: Annotated[Count, Meta(description="sampled items beside the true one")] = 32
    num_seen_negatives: Annotated[int, Meta(ge=0, description="items sampled from the user's earlier ones")] = 0
    click_ratio: Annotated[Share, Meta(description="share of the events that get sampled items")] = 0.25
    click_weight: Annotated[Weight, Meta(description="of the sampled softmax in the loss")] = 0.3
    ordinal_weight: Annotated[Weight, Meta(description="of the auxiliary head in the loss")] = 0.5

    def __post_init__(self) -> None:
        if self.tasks is None:
            return
        if not self.tasks or len({task.name for task in self.tasks}) != len(self.tasks):
            raise ValueError("tasks: needs at least one, each name once")
        if sum(task.is_next_item for task in self.tasks) > 1:
            raise ValueError("tasks: at most one may have neither at_least nor actions")


DEMO = TrainOptions()
QUICK = TrainOptions(epochs=4, window_tokens=100, num_negatives=16)
"""Two CPU minutes for 100,000 events, the refit included."""
LONG = TrainOptions(
    split="leave-one-out", epochs=8, average_decay=0.999, num_seen_negatives=8, click_ratio=1.0, click_weight=0.5
)


def train_rank(
    interactions: Interactions,
    item_features: Sequence[ItemValues],
    options: TrainOptions,
    progress: Callable[[TrainingProgress], None] = lambda _: None,
    evaluated: Callable[[Checkpoint], None] = lambda _: None,
) -> tuple[Checkpoint, Evaluation]:
    """Train a ranker, evaluate it beside the baselines, and refit it on all events.

    Args:
        interactions: the whole log; `options.split` decides which events are trained on.
        item_features: side features of items; they help most for items with few events.
        options: the model and its training.
        progress: called after every step of training and every user of the evaluation, in this thread.
        evaluated: called with the evaluated ranker, before the refit.

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

    def fitted(on: InteractionLog, stage: str) -> HSTU:
        labels = make_labels(on, chosen.tasks)
        torch.manual_seed(options.seed)
        model = _new_model(on, item_features, chosen.tasks, options)
        _fit(model, on, labels, options, stage, progress)
        model.eval().freeze_items()
        return model

    model = fitted(log, "ranker: train")
    num_served = len(whole.items) if options.refit else int(log.trained.sum())
    evaluation = _evaluate(model, log, chosen, num_served, options, progress)
    checkpoint = Checkpoint(
        model=model,
        item_ids=log.item_ids,
        name=options.name,
        action_values=log.action_values,
        action_names=log.action_names,
        metrics={name: value for name, value in evaluation.as_dict().items() if "/" not in name},
    )
    evaluated(checkpoint)
    if options.refit:
        checkpoint = replace(checkpoint, model=fitted(whole.all_trained(), "ranker: refit"))
    return checkpoint, evaluation


def _new_model(
    log: InteractionLog, item_features: Sequence[ItemValues], tasks: Sequence[Task], options: TrainOptions
) -> HSTU:
    features = [f for f in item_features if f.values]
    try:
        config = HSTUConfig(
            num_items=log.num_items,
            item_features=tuple(
                ItemFeature(
                    name=f.name,
                    num_values=len(f.values),
                    max_values=max(1, *(len(values) for values in f.of_item.values())),
                )
                for f in features
            ),
            actions=log.action_names or tuple(map(value_name, log.action_values)),
            tasks=tuple(task.name for task in tasks),
            dim=options.dim,
            num_layers=options.num_layers,
            num_heads=options.num_heads,
            qk_dim=options.qk_dim,
            v_dim=options.v_dim,
            head_dim=options.head_dim,
            activation=options.activation,
            residual=options.residual,
            norm=options.norm,
            scaling_seqlen=options.scaling_seqlen,
            max_history_tokens=options.max_history_tokens,
        )
    except ValueError as error:
        raise ConfigError(f"train: {error}") from error
    model = HSTU(config)
    for index, feature in enumerate(features):
        table = getattr(model, f"feature_ids_{index}")
        for row, item in enumerate(log.item_ids.tolist()):
            values = feature.of_item.get(item, [])
            table[row, : len(values)] = torch.tensor(values, dtype=torch.int64)
    return model


def _fit(
    model: HSTU,
    log: InteractionLog,
    labels: Labels,
    options: TrainOptions,
    stage: str,
    progress: Callable[[TrainingProgress], None],
) -> None:
    """Train the model in place. The learning rate ends at nothing, so the last averaged weights are the result."""
    random = np.random.default_rng(options.seed)
    auxiliary = nn.Linear(options.head_dim, labels.auxiliary.shape[1])
    trainer = EpochTrainer(
        model,
        options,
        table=model.item.weight,
        table_weight_decay=options.item_weight_decay,
        stage=stage,
        auxiliary=[*auxiliary.parameters()],
        progress=progress,
    )
    for epoch in range(options.epochs):
        parts = list(batches(log, windows(log, options.window_tokens, random), options.batch_tokens, random))
        trainer.run_epoch(epoch, parts, lambda batch: _loss(model, auxiliary, log, batch, labels, options))
    model.load_state_dict(trainer.averaged.state_dict())


def _loss(
    model: HSTU, auxiliary: nn.Linear, log: InteractionLog, batch: Batch, labels: Labels, options: TrainOptions
) -> Tensor:
    """Sum the losses of the tasks, each a mean over the batch's events."""
    histories = HistoryBatch(items=batch.items, actions=batch.actions, times=batch.times)
    every = torch.arange(batch.items.shape[1]).expand_as(batch.items)
    own_items = Moments(at=every, candidates=batch.items[..., None])
    if labels.click_task is None:
        true = encode(model, histories, [own_items], options.dropout)[0][:, :, 0]
        return _binary_loss(model, auxiliary, true, batch, labels, options)
    some = _sample_places(batch.valid, options.click_ratio)
    drawn, log_weight = _negatives(batch, some, log.num_items, options)
    true, sampled = encode(model, histories, [own_items, Moments(at=some, candidates=drawn)], options.dropout)

    own = model.task_logits(true[:, :, 0])[..., labels.click_task].gather(1, some)
    others = model.task_logits(sampled)[..., labels.click_task] + log_weight
    surprise = torch.logsumexp(torch.cat([own[..., None], others], dim=-1), dim=-1) - own
    click = surprise[batch.valid.gather(1, some)].mean()
    return options.click_weight * click + _binary_loss(model, auxiliary, true[:, :, 0], batch, labels, options)


def _binary_loss(
    model: HSTU, auxiliary: nn.Linear, true: Tensor, batch: Batch, labels: Labels, options: TrainOptions
) -> Tensor:
    """Sum the losses of the served tasks and of the auxiliary head.

    Args:
        model: has the served tasks.
        ordinal: the auxiliary head.
        true: float32 [B, N, dim] final rows of the events' own items.
        batch: the events.
        labels: of all events of the log.
        options: weight of the auxiliary head.
    """
    if not labels.served_tasks:
        return true.new_zeros(())
    events = batch.events[batch.valid]
    hidden = model.head[:-1](model.norm_head(true[batch.valid]))
    served = binary_cross_entropy_with_logits(model.head[-1](hidden)[:, labels.served_tasks], labels.served[events])
    if not (options.ordinal_weight and labels.auxiliary.shape[1]):
        return served
    return served + options.ordinal_weight * binary_cross_entropy_with_logits(
        auxiliary(hidden), labels.auxiliary[events]
    )


def _negatives(batch: Batch, some: Tensor, num_items: int, options: TrainOptions) -> tuple[Tensor, Tensor]:
    """Draw negatives for some events from two strata: the whole catalogue, and the user's earlier items.

    Each draw counts for the number of items that it represents, (items of the stratum) / (draws from it), so that the
    softmax over the draws estimates the softmax over the catalogue whatever the strata. The second stratum lets the
    model see often enough whether items come again.

    Args:
        batch: the events.
        some: int64 [B, T] index of the events to draw for.
        num_items: of the catalogue.
        options: draws from each stratum.

    Returns:
        int64 [B, T, C] item rows, and float32 [B, T, C] the log of the number of items that each draw represents:
        -inf for a draw that does not count.
    """
    shape = (*some.shape, options.num_negatives)
    true = batch.items.gather(1, some)[..., None]
    drawn = torch.randint(num_items, shape)
    if not options.num_seen_negatives:
        weight = torch.full(shape, math.log((num_items - 1) / options.num_negatives))
        return drawn, weight.masked_fill(drawn == true, -math.inf)
    places = (torch.rand(*some.shape, options.num_seen_negatives) * some[..., None]).long()
    seen = batch.items.gather(1, places.flatten(1)).view_as(places)
    before = torch.arange(batch.items.shape[1]) < some[..., None]  # [B, T, N]
    is_earlier = ((drawn[..., None] == batch.items[:, None, None, :]) & before[:, :, None, :]).any(-1)
    of_catalogue = torch.full(shape, math.log(num_items / options.num_negatives))
    of_catalogue = of_catalogue.masked_fill(is_earlier | (drawn == true), -math.inf)
    of_earlier = (some / options.num_seen_negatives).log()[..., None].masked_fill(seen == true, -math.inf)
    return torch.cat([drawn, seen], dim=-1), torch.cat([of_catalogue, of_earlier], dim=-1)


def _sample_places(valid: Tensor, ratio: float) -> Tensor:
    """Sample a share of the columns, without repetition: int64 [B, T]; padding is taken only where events run out."""
    order = torch.rand(valid.shape).masked_fill(~valid, 2.0).argsort(dim=1)
    return order[:, : max(1, round(ratio * valid.shape[1]))]


def _evaluate(
    model: HSTU,
    log: InteractionLog,
    chosen: ChosenTasks,
    num_served: int,
    options: TrainOptions,
    progress: Callable[[TrainingProgress], None],
) -> Evaluation:
    labels = make_labels(log, chosen.tasks)
    first = labels.served_tasks[0] if labels.served_tasks else None
    likes = labels.served[:, 0].numpy() > 0 if first is not None else np.zeros(len(log.items), np.bool_)
    valued = log
    if first is not None and chosen.tasks[first].actions:  # an index is no value; being a positive is
        valued = replace(log, action_values=(0.0, 1.0), action_names=(), actions=likes.astype(np.int64))
    fitted: list[Baseline] = [Popularity(log), Markov(log), Means(valued), MatrixFactorisation(valued, options.seed)]
    targets = sample_targets(log.next_items(), options.test_users, options.seed)
    return Evaluation(
        split=options.split,
        num_trained=int(log.trained.sum()),
        num_served=num_served,
        num_judged=int((~log.trained).sum()),
        num_next=len(targets),
        tasks=chosen.reason,
        auc_task="" if first is None else chosen.tasks[first].name,
        ranker=evaluate_ranker(
            log,
            model,
            likes,
            targets,
            click_task=labels.click_task,
            like_task=first,
            done=lambda done, total: progress(TrainingProgress("ranker: evaluate", done, total)),
        ),
        baselines=tuple(evaluate_baseline(valued, baseline, likes, targets) for baseline in fitted),
    )
