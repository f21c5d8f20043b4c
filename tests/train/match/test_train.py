"""SCCDR uses the source, is the seed's, and each switch does what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from npu_gr.train.match.domains import split
from npu_gr.train.match.train import TrainedVectors, Trainer
from npu_gr.train.metrics import hit_ratio
from tests.train.match.synthetic import QUICK, data, domains, quick


def same(one: TrainedVectors, two: TrainedVectors) -> bool:
    return torch.equal(one.users, two.users) and torch.equal(one.items, two.items)


def test_the_planted_taste_is_carried_over(tmp_path: Path) -> None:
    both = domains(tmp_path)
    seen, evaluator = split(both, 0.6, 60, 0), both.evaluator()
    hits = {}
    for schedule in ("target-only", "separated"):
        result = Trainer(seen, quick(schedule=schedule)).run()
        hits[schedule] = hit_ratio(evaluator.ranks_by(result.scores), 20)
    assert hits["separated"] > 1.3 * hits["target-only"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"stop_gradient": False},
        {"curriculum": False},
        {"schedule": "initialised"},
        {"schedule": "target-only"},
    ],
)
def test_every_schedule_trains_and_the_seed_decides(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    seen = data(tmp_path)
    short = quick(source_steps=4, target_steps=6, inter_steps=6, evaluate_every=3, **changes)
    one, again = (Trainer(seen, short).run() for _ in range(2))
    assert same(one, again)
    assert torch.isfinite(one.users).all()
    assert not same(one, Trainer(seen, msgspec.structs.replace(short, seed=2)).run())


@pytest.mark.parametrize("stops", [True, False])
def test_stop_gradient_keeps_the_source_still(stops: bool, tmp_path: Path) -> None:
    seen = data(tmp_path)
    # an inter-domain stage without intra-domain losses: only what crosses the domains could move
    # the source
    trainer = Trainer(
        seen, quick(stop_gradient=stops, lambda_intra=0.0, patience=0, evaluate_every=5)
    )
    before: list[torch.Tensor] = []
    trainer.run(progress=lambda step: before.append(trainer.source.items.detach().clone()))
    last_of_source, last = before[QUICK.source_steps - 1], before[-1]
    assert torch.equal(last_of_source, last) is stops


def test_the_curriculum_is_paced_by_validations_not_by_the_longest_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    def note(done: float) -> float:
        seen.append(done)
        return 1.0

    monkeypatch.setattr("npu_gr.train.match.train.share", note)
    Trainer(
        data(tmp_path),
        quick(
            source_steps=2,
            target_steps=2,
            inter_steps=9,
            evaluate_every=3,
            curriculum_validations=2,
        ),
    ).run()
    assert seen == [step / 6 for step in range(6)] + [1.0] * 3


def test_ranks_are_the_brute_force_ones(tmp_path: Path) -> None:
    both = domains(tmp_path)
    evaluator = both.evaluator_with_near_duplicates()
    random = np.random.default_rng(0)
    users = torch.from_numpy(random.integers(-2, 3, (both.target.num_users, 4)).astype(np.float32))
    items = torch.from_numpy(random.integers(-2, 3, (both.target.num_items, 4)).astype(np.float32))
    known = set(zip(both.target.users.tolist(), both.target.items.tolist(), strict=True))
    found = evaluator.ranks(users, items)
    for user, goal, rank in zip(*both.test, found, strict=True):
        scores = (items @ users[int(user)]).tolist()
        others = [
            s for item, s in enumerate(scores) if item != goal and (int(user), item) not in known
        ]
        assert (
            rank
            == sum(s > scores[goal] for s in others) + sum(s == scores[goal] for s in others) / 2
        )
