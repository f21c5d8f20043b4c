"""What is served is one inner product: its parts by their weights.

Folding is the training's formula; 0 leaves out.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.core.history import UserKey
from npu_gr.core.request import Basis
from npu_gr.train.evaluate import HeldOut, smooth_hit, unique_edges
from npu_gr.train.linear import PureSVD
from npu_gr.train.match import joined
from npu_gr.train.match.domains import Domains, MatchData, split
from npu_gr.train.match.joined import (
    BASELINES,
    FittedLinear,
    JoinedVectors,
    export,
    fit_joint_svd,
    join,
)
from npu_gr.train.match.train import TrainedVectors, Trainer, log_odds
from npu_gr.vector_search.matcher import Matcher
from npu_gr.vector_search.vectors import load, save
from tests.train.match.synthetic import domains, quick

Made = tuple[Domains, MatchData, FittedLinear[PureSVD], TrainedVectors]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    both = domains(tmp_path_factory.mktemp("data"))
    data = split(both, 0.8, 60, 0)
    return both, data, fit_joint_svd(data), Trainer(data, quick(seed=1)).run()


def with_all_parts(made: Made, monkeypatch: pytest.MonkeyPatch) -> JoinedVectors:
    monkeypatch.setattr(joined, "ENCODER_WEIGHTS", (0.5,))
    monkeypatch.setattr(joined, "POPULARITY_WEIGHTS", (0.2,))
    return join(*made[1:])


def test_it_is_the_weighted_sum_of_its_parts(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    _, data, (_, svd), trained = made
    degrees = data.with_validation().target.degrees()
    found = with_all_parts(made, monkeypatch)
    assert found.items.shape[1] == svd.model.num_values + 16 + 1
    users = torch.from_numpy(np.flatnonzero(degrees[0]))
    sample = torch.from_numpy(data.evaluator().held_out.users[:256])
    spectral = svd.model.scores(users) * svd.factors
    encoder = trained.scores(users) / trained.scores(sample).square().mean().sqrt()
    popularity = torch.from_numpy(np.log(degrees[1] + 0.5)).float()
    popularity = popularity - popularity.mean()
    want = spectral + 0.5 * encoder + 0.2 * popularity / popularity.square().mean().sqrt()
    torch.testing.assert_close(found.users[users] @ found.items.T, want, atol=1e-3, rtol=1e-3)


def test_a_part_that_does_not_help_is_left_out(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "ENCODER_WEIGHTS", (0.0,))
    monkeypatch.setattr(joined, "POPULARITY_WEIGHTS", (0.0,))
    found = join(*made[1:])
    assert found.items.shape[1] == made[2].served.model.num_values
    assert found.folding.encoder is None


def test_folding_is_the_trainings_formula(
    made: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    both, data, _, _ = made
    found = with_all_parts(made, monkeypatch)
    save(export(both, data, found, {}), tmp_path)
    folding = load(tmp_path).folding
    assert folding is not None
    of_target, of_source = data.with_validation().target, data.source
    for user in range(0, 160, 7):
        items, owned = (graph.items[graph.users == user] for graph in (of_target, of_source))
        if len(items):
            np.testing.assert_allclose(
                folding.vector(user, items, owned), found.users[user], atol=1e-4
            )


def test_who_is_served_how(made: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    both, data, _, _ = made
    monkeypatch.setattr(joined, "ENCODER_WEIGHTS", (0.5,))
    cold = data.target.users[0]  # loses every target edge
    kept = data.target.users != cold
    target = type(data.target)(
        data.target.users[kept], data.target.items[kept], 160, data.target.num_items
    )
    kept = data.validation.users != cold
    held_out = HeldOut(data.validation.users[kept], data.validation.items[kept])
    data = MatchData(data.source, target, held_out, data.owned_near_duplicates)
    found = join(data, fit_joint_svd(data), made[3])
    save(export(both, data, found, {}), tmp_path)
    matcher = Matcher(load(tmp_path), "exact", CPUBackend())
    assert both.ids_are_apart
    name = both.users[int(cold)]

    def asked(user: UserKey, *ids: int) -> tuple[Basis, list[int]]:
        query = matcher.search_for(user, 240, False, None, None, np.array(ids, np.int64))
        (answer,) = matcher.run([query])
        return query.basis, answer.items.tolist()

    assert asked(name)[0] is Basis.SOURCE
    unknown_user = UserKey("", "unknown_user")
    assert asked(unknown_user)[0] is Basis.POPULARITY
    owned = both.source_ids[both.source.items[both.source.users == cold]]
    basis, items = asked(unknown_user, *owned.tolist())
    assert basis is Basis.FOLDED  # by source items alone
    assert items[:20] == asked(name)[1][:20]
    degrees = data.with_validation().target.degrees()
    sold = both.target_ids[np.argmax(degrees[1])]
    assert asked(unknown_user, int(sold))[0] is Basis.FOLDED
    other = next(user for user in range(160) if user != cold and degrees[0][user])
    assert asked(both.users[other])[0] is Basis.TARGET
    assert (
        asked(both.users[other], *both.source_ids[both.source.items[both.source.users == other]])[0]
        is Basis.TARGET
    )
    new = np.setdiff1d(
        both.source_ids, both.source_ids[both.source.items[both.source.users == other]]
    )[0]
    assert asked(both.users[other], int(new))[0] is Basis.FOLDED


def test_what_is_served_knows_the_edges_of_the_validation_and_is_chosen_without_them(
    made: Made,
) -> None:
    _, data, svd, trained = made
    full = data.with_validation()
    pairs = {*zip(data.target.users, data.target.items, strict=True)}
    added = {*zip(full.target.users, full.target.items, strict=True)} - pairs
    assert added == {*zip(*data.validation, strict=True)}
    assert len(full.target.users) == len(pairs) + len(added)
    # An item that the validation alone asks for can be scored by what is served, not by what was
    # chosen.
    unknown = np.setdiff1d(data.validation.items, data.target.items)
    users = torch.from_numpy(data.validation.users[np.isin(data.validation.items, unknown)])
    for model, is_known in ((svd.chosen, False), (svd.served, True)):
        scores = model.model.scores(users)[:, unknown]
        assert bool((scores.abs().amax(0) > 1e-4).all()) is is_known
    assert svd.served.settings == svd.chosen.settings
    assert svd.served.validation == svd.chosen.validation
    for name, fit in BASELINES.items():
        fitted = fit(data)
        assert fitted is not None, name
        assert fitted.chosen.settings == fitted.served.settings
        asked = data.evaluator()
        held = [smooth_hit(asked.ranks_by(model.scores)) for model in fitted]
        assert held[0] == pytest.approx(fitted.chosen.validation)
        assert held[1] > held[0], name
    # The encoder: the same weights pass messages over all edges.
    again = trained.validated
    assert smooth_hit(data.evaluator().ranks_by(again.scores)) == pytest.approx(trained.validation)
    changed = (trained.users != again.users).any(1).numpy()
    assert changed[data.validation.users].all()
    assert trained.folding.degrees.tolist() == full.target.degrees()[1].tolist()
    user = int(data.validation.users[0])
    items = full.target.items[full.target.users == user]
    np.testing.assert_allclose(trained.folding.vector(user, items), trained.users[user], atol=1e-5)


def test_the_prior_is_the_best_logit_that_knows_no_user() -> None:
    """The cross-entropy is least at log(P / (k Q)): no step from there improves it."""
    k = 4
    random = np.random.default_rng(0)
    graph = unique_edges(
        random.integers(0, 50, 400), (20 * random.random(400) ** 2).astype(np.int64), 50, 20
    )
    degrees = graph.degrees()[1].astype(float)
    assert (degrees > 0).all()
    positives, drawn = degrees / degrees.sum(), np.full(20, 1 / 20)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        own, others = (torch.from_numpy(p) for p in (positives, drawn))
        plus = torch.nn.functional.softplus
        return (own * plus(-logits) + k * others * plus(logits)).sum()

    prior = log_odds(graph, k).double().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(prior), prior)
    flat = torch.zeros(20, dtype=torch.float64, requires_grad=True)
    (before,) = torch.autograd.grad(loss(flat), flat)
    assert gradient.abs().max() < 0.05 * before.abs().max()  # what is left is the half edge
