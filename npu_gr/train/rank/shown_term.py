"""Fit the term of shown items, see `npu_gr/model/shown_term.py`, on the trained pages of a log.

    items     log-odds of a click by item and place, each item's shrunk towards the mean by the
              variance of the items' (empirical Bayes): where chance explains the spread, all are
              equal, and what mostly stands on top gets nothing for it
    tastes    the singular vectors of D_u^-1/2 X D_i^-1/2 but the first, which is popularity alone
              (correspondence analysis); X are the users' trained events
    weight    of the tastes, and the number of vectors, by the likelihood of the clicks of a quarter
              of the users, whose events made neither. No held-out event is read

n = shown items, clicked or not.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from npu_gr.core.arrays import F32, I64
from npu_gr.model.shown_term import NUM_COLUMNS, NUM_TASTES, SCORES, TASTES
from npu_gr.train.data import Bools, InteractionLog
from npu_gr.train.evaluate import unique_edges
from npu_gr.train.linear import spectrum
from npu_gr.train.metrics import F64
from npu_gr.train.rank.inputs import pages_of, tastes_of

FOLDS = 4  # one of them chooses the weight
NUM_STEPS = 20  # of Newton's method
COUNTS_OF_TASTES = (4, 8, NUM_TASTES)
RIDGE = 4.0  # keeps the weight small where there are few pages


class Pages(NamedTuple):
    """The items that were shown, clicked or not."""

    events: I64  # [n] the clicked event, or the one just before which the item was shown
    items: I64  # [n]
    places: I64  # [n] place on the page, from 1; 0 = not known
    clicked: Bools  # [n]


def pages(log: InteractionLog, among: Bools) -> Pages:
    """List the shown items of some events, bool [events], of a log with impressions."""
    shown = log.shown
    assert shown is not None
    own = np.flatnonzero(among & ((shown.of_events >= 0) | ~(shown.of_events >= 0).any()))
    others = among[shown.events]
    events = np.concatenate([own, shown.events[others]])
    return Pages(
        events,
        np.concatenate([log.items[own], shown.items[others]]),
        np.concatenate([shown.of_events[own], shown.positions[others]]) + 1,
        np.arange(len(events)) < len(own),
    )


def fit_term(log: InteractionLog, max_events: int) -> F32:
    """Fit the term.

    Args:
        log: Log with impressions.
        max_events: Most events of a history that are read.

    Returns:
        float32 [num_items, NUM_COLUMNS].
    """
    is_choosing = log.users % FOLDS == 0
    chosen, others = (pages(log, log.trained & among) for among in (is_choosing, ~is_choosing))
    odds = item_odds(others, log.num_items)[chosen.items]
    read, scored = _tastes(log, ~is_choosing)
    tastes = tastes_of(log, read, max_events)[pages_of(log)[chosen.events]]
    products = tastes * scored[chosen.items]
    _, weight, count = min(
        (*_weight(chosen, odds, products[:, :count].sum(1)), count) for count in COUNTS_OF_TASTES
    )
    read, scored = _tastes(log, log.trained)
    table = np.zeros((log.num_items, NUM_COLUMNS), np.float32)
    table[:, 0] = item_odds(pages(log, log.trained), log.num_items)
    table[:, TASTES][:, :count] = read[:, :count]
    table[:, SCORES][:, :count] = weight * scored[:, :count]
    return table


def item_odds(rows: Pages, num_items: int) -> F64:
    """Compute each item's log-odds of a click less the mean item's: float64 [num_items]."""
    odds, variance = np.zeros(num_items), 1.0
    of_places = np.zeros(int(rows.places.max(initial=0)) + 1)
    counts = np.bincount(rows.items, minlength=num_items)
    curvature = np.ones(num_items)
    for _ in range(NUM_STEPS):
        for terms, of, ridge in ((of_places, rows.places, 1e-3), (odds, rows.items, 1 / variance)):
            chance = 1 / (1 + np.exp(-odds[rows.items] - of_places[rows.places]))
            slope = _sums(of, rows.clicked - chance, terms) - ridge * terms
            curvature = _sums(of, chance * (1 - chance), terms) + ridge
            terms += (slope / curvature).clip(-1, 1)
        # the last curvature is that of the items
        spread = (np.square(odds) + 1 / curvature)[counts > 0]
        variance = max(1e-6, float(spread.mean())) if len(spread) else 1.0
    return odds


def _tastes(log: InteractionLog, among: Bools) -> tuple[F64, F64]:
    """Decompose which users have which items in the trained ones among events, bool [events].

    Returns:
        float64 [num_items, NUM_TASTES] r and q; zeros where there are fewer singular values.
    """
    kept = log.trained & among
    graph = unique_edges(log.users[kept], log.items[kept], log.num_users, log.num_items)
    found = spectrum(graph, 0.5, NUM_TASTES + 1)
    vectors = found.items[:, 1:].double().numpy()
    shares = graph.degrees()[1].clip(min=1) / max(1, len(graph.items))
    read, scored = np.zeros((2, log.num_items, NUM_TASTES))
    read[:, : vectors.shape[1]] = vectors / np.sqrt(shares)[:, None]
    scored[:, : vectors.shape[1]] = vectors * found.values[1:].double().numpy() ** 2
    return read, scored


def _weight(rows: Pages, odds: F64, tastes: F64) -> tuple[float, float]:
    """Fit the weight of the tastes, by place: the penalised -log likelihood, and the weight."""
    scale = float(tastes.std()) or 1.0
    tastes = tastes / scale
    weight, of_places = 0.0, np.zeros(int(rows.places.max(initial=0)) + 1)
    for _ in range(NUM_STEPS):
        chance = 1 / (1 + np.exp(-odds - weight * tastes - of_places[rows.places]))
        gap, curvature = rows.clicked - chance, chance * (1 - chance)
        of_places += _sums(rows.places, gap, of_places) / (
            _sums(rows.places, curvature, of_places) + RIDGE
        )
        slope = float(tastes @ gap) - RIDGE * weight
        weight = max(0.0, weight + slope / (float(tastes**2 @ curvature) + RIDGE))
    logits = odds + weight * tastes + of_places[rows.places]
    loss = np.logaddexp(0, logits).sum() - logits[rows.clicked].sum() + RIDGE / 2 * weight**2
    return float(loss), weight / scale


def _sums(keys: I64, values: F64, of: F64) -> F64:
    found: F64 = np.bincount(keys, values, len(of)).astype(np.float64)
    return found
