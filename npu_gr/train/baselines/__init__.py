"""Baselines that a trained model has to beat; `fit_baselines` fits those of the next item."""

from __future__ import annotations

from npu_gr.train.baselines.choose import FittedBaselines, fit_baselines
from npu_gr.train.baselines.counts import Baseline, DecayedTransitions, Markov, MatrixFactorisation, Means, Popularity

__all__ = [
    "Baseline",
    "DecayedTransitions",
    "FittedBaselines",
    "Markov",
    "MatrixFactorisation",
    "Means",
    "Popularity",
    "fit_baselines",
]
