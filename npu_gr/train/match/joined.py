"""Join what was trained into the vectors that are served: one inner product of a user's and an item's row.

    item   [ V d^g     | z_i   | p_i  ]     U, s, V: singular values of both domains side by side (`fit_joint_svd`)
    user   [ U s^power | w z_u | beta ]     z: vectors of the trained graph encoder;  p: log popularity

Each part is scaled to scores with a root mean square of 1. The weights are those with the best smooth HIT on the
validation. 0 is among them, and the columns of a part that does not help are left out. What is joined knows all edges,
the validation's among them.

A user's U s^power is a sum over all items known of him in both domains (`JoinedFolding`), so any user has one: also one
who has source items alone, or who comes later. The encoder knows users of the target only: the others' z_u is 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from npu_gr.matching.fold import JoinedFolding
from npu_gr.train.baselines.linear import PureSVD
from npu_gr.train.baselines.tune import SCALE_USERS, Tuned, log_popularity, root_mean_square
from npu_gr.train.judge import smooth_hit
from npu_gr.train.match.candidates import FittedLinear
from npu_gr.train.match.domains import MatchData
from npu_gr.train.match.train import TrainedVectors, Validated

ENCODER_WEIGHTS = (0.0, 0.25, 0.5, 1.0, 2.0)
POPULARITY_WEIGHTS = (0.0, 0.2, 0.5, 1.0)


class Weights(NamedTuple):
    """Weights of the parts, each scaled to scores with a root mean square of 1; the spectral part has 1."""

    encoder: float
    popularity: float


@dataclass(frozen=True, slots=True, eq=False)
class JoinedVectors:
    """Vectors to serve. U = users, I = items of the target, d = dimensions."""

    users: Tensor  # float32 [U, d]
    items: Tensor  # float32 [I, d]
    folding: JoinedFolding
    settings: str  # what the validation chose, in words
    validation: float  # smooth HIT


def join(data: MatchData, fitted: FittedLinear[PureSVD] | None, trained: TrainedVectors | None) -> JoinedVectors:
    """Choose the weights, and join.

    Args:
        data: that both were made of.
        fitted: the joint spectral part; None: there is none.
        trained: the encoder's part; None: there is none.
    """
    validated = None if trained is None else trained.validated
    chosen, validation = _choose(data, None if fitted is None else fitted.chosen, validated)
    target = data.whole().target
    degrees = target.degrees()
    svd = None if fitted is None else fitted.served
    popularity = log_popularity(degrees[1])
    beta = chosen.popularity / root_mean_square(popularity)
    users, items = [], []
    target_states = source_states = None
    if svd is not None:
        states = _states(svd.model)
        target_states, source_states = (part.numpy() for part in states.split([len(popularity), data.source.num_items]))
        both = target.beside(data.source)
        roots = np.maximum(both.degrees()[0], 1).astype(np.float32) ** np.float32(-0.5)
        users.append(both.to_users(roots[both.users]).times(states))
        items.append(svd.model.found.items[: len(popularity), : svd.model.num_values] * svd.factors[:, None])
    weight = 0.0 if trained is None else chosen.encoder / (1.0 if svd is None else _size(data, trained))
    if trained is not None and weight:
        in_target = torch.from_numpy(degrees[0] > 0)
        users.append(trained.users * (weight * in_target[:, None]))
        items.append(trained.items)
        beta += 0.0 if trained.prior is None else weight
    if beta:
        users.append(torch.full((data.target.num_users, 1), beta))
        items.append(popularity[:, None])
    folding = JoinedFolding(
        target_states=target_states,
        source_states=source_states,
        encoder=trained.folding if trained is not None and weight else None,
        encoder_weight=weight,
        popularity=beta,
        degrees=degrees[1],
    )
    words = f"encoder {chosen.encoder:g}, popularity {chosen.popularity:g}"
    settings = words if svd is None else f"spectral 1 ({svd.settings}), {words}"
    return JoinedVectors(torch.cat(users, 1), torch.cat(items, 1), folding, settings, validation)


def _choose(data: MatchData, svd: Tuned[PureSVD] | None, trained: Validated | None) -> tuple[Weights, float]:
    """Choose the weights; of equals the first. An encoder without a spectral part has no weights to choose."""
    judge = data.judge()
    if svd is None:
        assert trained is not None, "there is a part"
        return Weights(1.0, 0.0), smooth_hit(judge.ranks_by(trained.scores))
    popularity = log_popularity(data.target.degrees()[1])
    popularity = popularity / root_mean_square(popularity)
    encoder_unit = 1.0 if trained is None else 1 / _size(data, trained)
    grid = [Weights(*w) for w in product(ENCODER_WEIGHTS if trained else (0.0,), POPULARITY_WEIGHTS)]

    def tables(rows: Tensor) -> Iterator[Tensor]:
        base = svd.model.scores(rows) * svd.factors
        encoder = trained.scores(rows) * encoder_unit if trained else torch.zeros(1)
        return (torch.add(base + popularity * w.popularity, encoder, alpha=w.encoder) for w in grid)

    hits = [smooth_hit(ranks) for ranks in judge.ranks_of_each(tables)]
    best = int(np.argmax(hits))
    return grid[best], hits[best]


def _size(data: MatchData, vectors: TrainedVectors | Validated) -> float:
    """Compute the root mean square of the scores of some users."""
    return root_mean_square(vectors.scores(torch.from_numpy(data.judge().held_out.users[:SCALE_USERS])))


def _states(model: PureSVD) -> Tensor:
    """Compute what each item adds to its users' rows: U s^power = Du^-1/2 X F, F = columns V s^(power - 1)."""
    k = model.num_values
    found = model.found
    return found.columns[:, None] * found.items[:, :k] * found.values[:k] ** (model.power - 1)
