"""Factorise a log for the cross feature `mf_score`.

The served factors are of all trained events. Training reads others: the users are dealt into folds, and a user's score
comes of factors that the other folds' users made. Else the model would trust a score that knows the very values that it
is to predict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from npu_gr.core.errors import ConfigError
from npu_gr.core.feature_schema.factors import MF_SCORE, ItemFactors
from npu_gr.train.baselines import MatrixFactorisation
from npu_gr.train.data import InteractionLog
from npu_gr.train.rank.logged_cross import FoldFactors
from npu_gr.train.rank.tasks import Task, liking_values

NUM_FOLDS = 4


def factorise(log: InteractionLog, tasks: Sequence[Task], seed: int) -> tuple[ItemFactors, FoldFactors]:
    """Factorise the trained events: for service, and in folds for training.

    Args:
        log: its trained events count; at least one.
        tasks: the first one of actions or values says what an action is worth.
        seed: of the factors' start, and of the folds.

    Raises:
        ConfigError: no task says what an action is worth.
    """
    valued = replace(log, action_values=_worth(log, tasks), action_names=())
    fold_of = np.random.default_rng(seed).permutation(log.num_users) % NUM_FOLDS
    folds = [np.where(fold_of == fold, 0, log.num_trained) for fold in range(NUM_FOLDS)]
    folds = [kept if kept.any() else log.num_trained for kept in folds]
    served = _factors(valued, seed)
    return served, FoldFactors(tuple(_factors(replace(valued, num_trained=kept), seed) for kept in folds), fold_of)


def deviation(log: InteractionLog, tasks: Sequence[Task]) -> float:
    """Compute the standard deviation of what the trained events are worth; 1 of equal ones.

    Raises:
        ConfigError: no task says what an action is worth.
    """
    return float(np.array(_worth(log, tasks))[log.actions[log.trained]].std()) or 1.0


def _worth(log: InteractionLog, tasks: Sequence[Task]) -> tuple[float, ...]:
    liking = next((task for task in tasks if not task.is_next_item), None)
    if liking is None:
        raise ConfigError(f"train: computed {MF_SCORE}: no task says which events are likes")
    return liking_values(log, liking)


def _factors(valued: InteractionLog, seed: int) -> ItemFactors:
    found = MatrixFactorisation(valued, seed)
    return ItemFactors(found.items.astype(np.float32), (np.array(valued.action_values) - found.mean).astype(np.float32))
