"""The arms of the ablation: simple baselines, SCCDR with its ingredients switched on and off, and what is served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from npu_gr.train.baselines.linear import PureSVD
from npu_gr.train.baselines.tune import log_popularity
from npu_gr.train.judge import Scores
from npu_gr.train.match.candidates import BASELINES, FittedLinear, fit_joint_svd
from npu_gr.train.match.domains import MatchData
from npu_gr.train.match.joined import join
from npu_gr.train.match.options import MatchOptions
from npu_gr.train.match.train import StageProgress, TrainedVectors, Trainer

POPULARITY = "popularity"  # the arm that trains nothing
EXPORT = "export"  # what is served: joint SVD, SCCDR and popularity
EXPORT_LESS = "export less SCCDR"
_PLAIN = {"stop_gradient": False, "curriculum": False}
_NO_INTER = {"aligned": False, "neighbour": False}
# Arm -> options that differ from the base, which is the whole of SCCDR.
TRAINED: dict[str, dict[str, Any]] = {
    "target only, no prior": {"schedule": "target-only", "prior": False},
    "target only": {"schedule": "target-only"},
    "shared user embedding": {"schedule": "mixed", "users": "shared", **_NO_INTER, **_PLAIN},
    # Its weights of the losses were tuned less than those of the other arms.
    "mixed": {"schedule": "mixed", "lambda_intra": 1.0, "lambda_inter": 0.1, **_PLAIN},
    "separated, not initialised": {"initialise": False, **_PLAIN},
    "initialised, no inter-domain loss": _NO_INTER,
    "separated": _PLAIN,
    "+ stop-gradient": {"curriculum": False},
    "+ curriculum": {},
}
SCCDR = "+ curriculum"
ARMS = (POPULARITY, *BASELINES, *TRAINED, EXPORT_LESS, EXPORT)


class FittedArm(NamedTuple):
    """An arm, fitted."""

    scores: Scores
    validation: float | None  # smooth HIT; None: nothing was validated
    settings: str  # what was chosen, in words


@dataclass(slots=True)
class Bench:
    """Fits arms to one split of the data, and keeps what they share."""

    data: MatchData
    base: MatchOptions
    seed: int
    progress: Callable[[str, StageProgress], None] = lambda _arm, _step: None
    _stages: dict[str, bytes] = field(default_factory=dict)
    _trained: dict[str, TrainedVectors] = field(default_factory=dict)
    _svd: FittedLinear[PureSVD] | None = None

    def fit(self, arm: str) -> FittedArm | None:
        """Fit an arm of `ARMS`; None = it is too large for this data."""
        if arm == POPULARITY:
            popularity = log_popularity(self.data.whole().target.degrees()[1])
            return FittedArm(lambda users: popularity.repeat(len(users), 1), None, "")
        if arm in TRAINED:
            trained = self.trained(arm)
            return FittedArm(trained.scores, trained.validation, f"step {trained.step} of stage {trained.stage}")
        if arm in BASELINES:
            fitted = self.svd() if arm == "PureSVD, both" else BASELINES[arm](self.data)
            if fitted is None:
                return None
            return FittedArm(fitted.served.scores, fitted.chosen.validation, fitted.chosen.settings)
        found = join(self.data, self.svd(), self.trained(SCCDR) if arm == EXPORT else None)
        return FittedArm(_products(found.users, found.items), found.validation, found.settings)

    def svd(self) -> FittedLinear[PureSVD]:
        """Decompose both domains side by side, once."""
        if self._svd is None:
            self._svd = fit_joint_svd(self.data)
        return self._svd

    def trained(self, arm: str) -> TrainedVectors:
        """Train an arm of `TRAINED`, once."""
        if arm not in self._trained:
            trainer = Trainer(self.data, options_of(self.base, arm, self.seed))
            self._trained[arm] = trainer.run(lambda step: self.progress(arm, step), shared=self._stages)
        return self._trained[arm]


def options_of(base: MatchOptions, arm: str, seed: int) -> MatchOptions:
    """Set the options of an arm.

    Args:
        base: options of the whole of SCCDR.
        arm: of `TRAINED`.
        seed: of the training.
    """
    return msgspec.structs.replace(base, seed=seed, **TRAINED[arm])


def _products(users: Tensor, items: Tensor) -> Scores:
    columns = items.T.contiguous()
    return lambda rows: torch.mm(users[rows], columns)
