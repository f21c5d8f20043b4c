"""Train a ranker on with new events, in the shape of its checkpoint: a delta leads to the result.

kept       items, actions, tasks, features, codes and the score blend. An event of an item that the
           checkpoint lacks is left out
windows    each user's new events, behind as many older ones as fit: the history that they had
losses     those of `train rank`, of the new events alone
changed    the rows of items that have new events, and all other weights; with `only_items` the rows
           alone, so a prefix that reads none of them stays valid

Deterministic, as `npu_gr.train.rank.train`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from npu_gr.core.arrays import I64
from npu_gr.core.errors import ConfigError, DataError
from npu_gr.core.text_format import quoted
from npu_gr.history_store.interactions import Interactions
from npu_gr.model.feature_rows import draw_kept
from npu_gr.model.weights import RESIDUALS, Checkpoint
from npu_gr.train.data import Batch, Bools, InteractionLog, batches, number_log
from npu_gr.train.rank.fit import CLICK_AFTER
from npu_gr.train.rank.inputs import LogInputs
from npu_gr.train.rank.losses import batch_loss
from npu_gr.train.rank.options import TrainOptions, choose_tasks, make_labels
from npu_gr.train.rank.shown import position_biases
from npu_gr.train.steps import EpochTrainer, TrainingProgress

STAGE = "ranker: continue"


class Continued(NamedTuple):
    """A ranker that was trained on."""

    checkpoint: Checkpoint  # without metrics: it was not evaluated
    num_events: int  # new events that it was trained on
    num_items: int  # items of these events
    num_unknown: int  # new events of items that the checkpoint lacks


def continue_ranker(
    old: Checkpoint,
    interactions: Interactions,
    since: int,
    options: TrainOptions,
    progress: Callable[[TrainingProgress], None] = lambda _: None,
    *,
    only_items: bool = False,
) -> Continued:
    """Train on; `old` is not changed.

    Args:
        old: Checkpoint that was loaded.
        interactions: New events, and older ones of the same users: their histories.
        since: Unix seconds; the events from then on are new.
        options: Options of the training; those of the model's shape do not count.
        progress: Callback after every step.
        only_items: Train the items' own rows alone.

    Raises:
        DataError: there is no new event, an action is unknown, or the loss is not finite.
        ConfigError: the tasks are other ones, or the items' ids do not ascend.
    """
    log, num_unknown = _log_of(old, interactions, since)
    is_new = log.times >= since
    if not is_new.any():
        raise DataError(f"no event of a known item at {since} or later")
    config = old.model.config
    tasks = choose_tasks(log).tasks if options.tasks is None else options.tasks
    if (names := tuple(task.name for task in tasks)) != config.tasks:
        raise ConfigError(
            f"tasks: {', '.join(names)}; the checkpoint has {', '.join(config.tasks)}: give the "
            "tasks that it was trained with"
        )
    # The auxiliary head is not served, so it is not kept: a new one would only disturb. Of a few
    # steps the first of a warm-up would change nothing.
    options = msgspec.structs.replace(options, ordinal_weight=0.0, warm_up_ratio=0.0)
    labels = make_labels(log, tasks)
    torch.manual_seed(options.seed)
    model = type(old.model)(config)
    model.load_state_dict(old.model.state_dict())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == RESIDUALS or not only_items)
    inputs, biases = LogInputs(log, model), position_biases()
    auxiliary = nn.Linear(config.head_dim, 1)
    trainer = EpochTrainer(
        model,
        options,
        tables=model.items.parts(),
        table_weight_decay=options.item_weight_decay,
        stage=STAGE,
        auxiliary=[*biases.parameters()],
        progress=progress,
    )
    parts, counted = new_windows(log, is_new, options.window_tokens), torch.from_numpy(is_new)

    def loss_of(batch: Batch) -> Tensor:
        model.items.kept_rows = draw_kept(config.num_items, config.row_dropout)
        return batch_loss(
            model,
            auxiliary,
            biases,
            inputs,
            replace(batch, counted=batch.valid & counted[batch.events]),
            labels,
            options,
            with_click=trainer.done_ratio >= CLICK_AFTER,
        )

    best = trainer.fit(lambda random: batches(log, parts, options.batch_tokens, random), loss_of)
    made = best.model.eval().requires_grad_(True)
    made.items.kept_rows = None
    items = np.unique(log.items[is_new])
    with torch.no_grad():
        is_other = torch.ones(config.num_items, dtype=torch.bool)
        is_other[torch.from_numpy(items)] = False
        made.item.weight[is_other] = old.model.item.weight[is_other]
    checkpoint = replace(old, model=made, metrics={})
    return Continued(checkpoint, int(is_new.sum()), len(items), num_unknown)


def new_windows(log: InteractionLog, is_new: Bools, window_tokens: int) -> I64:
    """Cut windows that end with new events, at most half of a window of them.

    Args:
        log: Log of the events.
        is_new: bool [n] new events; those of a user are the last ones.
        window_tokens: Most events of a window.

    Returns:
        int64 [windows, 2]: a `Window` in each row; each new event is in one or two of them.
    """
    half = max(1, window_tokens // 2)
    counts = np.bincount(log.users[is_new], minlength=log.num_users)
    found = []
    for user in np.flatnonzero(counts).tolist():
        begin, end = int(log.starts[user]), int(log.starts[user + 1])
        for last in range(end, end - int(counts[user]), -half):
            first = max(begin, last - window_tokens)
            found.append((first, last - first))
    return np.array(found, np.int64)


def _log_of(old: Checkpoint, interactions: Interactions, since: int) -> tuple[InteractionLog, int]:
    """Number a log by a checkpoint's items and actions; count the new events that are left out."""
    if (np.diff(old.item_ids) <= 0).any():
        raise ConfigError(
            "the ids of the checkpoint's items do not ascend: it was not trained here"
        )
    place = np.searchsorted(old.item_ids, interactions.items).clip(max=len(old.item_ids) - 1)
    is_known = old.item_ids[place] == interactions.items
    num_unknown = int((~is_known & (interactions.timestamps >= since)).sum())
    known, shown = interactions[is_known], interactions.impressions
    if shown is not None and shown.of_events is not None:
        shown = replace(shown, of_events=shown.of_events[is_known])
    log = number_log(replace(known, impressions=shown), old.item_ids)
    number = {name: place for place, name in enumerate(old.model.config.actions)}
    names = log.names_of_actions
    used = np.unique(log.actions).tolist()
    if missing := [names[one] for one in used if names[one] not in number]:
        raise DataError(f"action {quoted(missing[0])}: the checkpoint knows {', '.join(number)}")
    numbers = np.array([number.get(name, -1) for name in names], np.int64)
    values = old.action_values or tuple(map(float, range(len(number))))
    is_named = bool(log.action_names)
    return (
        replace(
            log.all_trained(),
            actions=numbers[log.actions],
            action_values=values,
            action_names=tuple(number) if is_named else (),
        ),
        num_unknown,
    )
