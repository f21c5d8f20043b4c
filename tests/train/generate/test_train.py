"""A generator learns a planted rule, is deterministic, and is evaluated as it is served."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from rich.console import Console

from npu_gr.core.errors import ConfigError, DataError
from npu_gr.model.decoder import Decoder
from npu_gr.train.baselines import Markov, Popularity
from npu_gr.train.data import NextItem, Window, batches, build_log
from npu_gr.train.generate.codes import item_vectors
from npu_gr.train.generate.nodes import CodeLoss, encode, next_logits
from npu_gr.train.generate.train import (
    COOCCURRENCE_WINDOW,
    DECODER,
    GenerateOptions,
    GeneratorEvaluator,
    TrainedGenerator,
    _fit,
    _new_model,
    train_generator,
)
from npu_gr.train.next_item import NO_RANKS, NextItemRanks, RetrievalFigures, baseline_figures
from npu_gr.train.rank.evaluate import evaluate_baseline
from npu_gr.train.steps import TrainingProgress
from tests.train.synthetic import NUM_ITEMS, planted

TINY = GenerateOptions(
    code_count=(6, 6),
    vector_dim=8,
    dim=32,
    num_kv_heads=1,
    head_dim=16,
    mlp_dim=64,
    history_items=12,
    epochs=15,
    batch_tokens=512,
    learning_rate=1e-2,
    dropout=0.0,
    ema_decay=0.9,
    validate_every=5,
    validation_users=40,
    refit=False,
)
ONE = msgspec.structs.replace(TINY, epochs=1)


@pytest.fixture(scope="module")
def trained() -> TrainedGenerator:
    return train_generator(planted(), [], TINY)


def test_codes_may_start_where_their_items_stand(trained: TrainedGenerator) -> None:
    """Initial embeddings of codes have the given length, and the directions of their means."""
    log, codes = trained.log, trained.codes
    options = msgspec.structs.replace(TINY, code_init_norm=0.5)
    moved = (
        _new_model(log, codes, options).embedding.weight
        - _new_model(log, codes, TINY).embedding.weight
    )
    means = codes.means(item_vectors(log, [], TINY.vector_dim, COOCCURRENCE_WINDOW, TINY.seed))
    for level, (start, want) in enumerate(
        zip(moved.detach().split(codes.code_count), means, strict=True)
    ):
        lengths = start.norm(dim=1)
        assert lengths[lengths > 1e-6].mean().item() == pytest.approx(0.5, rel=1e-4), level
        assert not start[:, TINY.vector_dim :].any()
        same = torch.cosine_similarity(start[:, : TINY.vector_dim], torch.from_numpy(want))
        assert same[lengths > 1e-6].min() > 0.999


def test_epochs_vary_the_log_and_repeat_bit_for_bit(trained: TrainedGenerator) -> None:
    log, codes = trained.log, trained.codes

    def weights(**changes: Any) -> torch.Tensor:
        options = msgspec.structs.replace(ONE, **changes)
        return _fit(log, codes, options, "train", lambda _: None).model.embedding.weight

    varied = {"skip_ratio": 0.2, "swap_ratio": 0.2}
    assert torch.equal(weights(**varied), weights(**varied))
    assert not torch.equal(weights(**varied), weights())
    assert trained.report.text().startswith("codes: 6 x 6, balance ")


def test_the_generator_learns_the_rule(trained: TrainedGenerator) -> None:
    report = trained.report
    popularity, markov, *_ = report.baselines
    assert report.own.hr_at_10 > popularity.hr_at_10 + 0.3
    assert report.own.hr_at_10 > markov.hr_at_10 - 0.1
    assert report.own.num_users == 60
    assert report.chosen["validation"]["num_users"] == 40
    assert report.num_trained == 60 * 28
    assert report.own.invalid_ratio == 0


def test_the_search_ranks_as_brute_force_over_the_catalogue(trained: TrainedGenerator) -> None:
    """A beam as wide as the catalogue ranks items by the sum of their log-probabilities."""
    log, codes, model = trained.log, trained.codes, trained.model
    tokens = torch.from_numpy(codes.sids + np.array([0, 6]))
    ranks, ranks_unseen = [], []
    for user, at in log.next_items():
        history, target = log.items[log.starts[user] : at], log.items[at]
        prompt = tokens[history[-TINY.history_items :]].flatten()
        every = torch.cat([prompt.expand(NUM_ITEMS, -1), tokens], dim=1)
        chances = next_logits(model, encode(model, every[:, :-1])).log_softmax(-1)[:, -2:]
        better = (scores := chances.gather(2, tokens[..., None]).sum((1, 2)).numpy()) > scores[
            target
        ]
        ranks.append(better.sum())
        others = sum(better[item] for item in range(NUM_ITEMS) if item not in history)
        ranks_unseen.append(np.inf if target in history else others)
    evaluate = GeneratorEvaluator(codes, log.item_ids, TINY.history_items, 50)
    found = evaluate.evaluate(model, log, log.next_items(), unseen=True)
    found_ranks = NextItemRanks(
        np.array(ranks, float), np.array(ranks_unseen, float), np.zeros(len(ranks), np.bool_)
    )
    assert found == RetrievalFigures.from_ranks(found_ranks, DECODER, 0.0)
    assert found == trained.report.own
    assert found.hr_at_10 == np.mean([rank < 10 for rank in ranks])
    assert math.isclose(
        found.ndcg_at_10, np.mean([rank < 10 and 1 / math.log2(rank + 2) for rank in ranks])
    )
    assert found.hr_at_10_unseen == np.mean([rank < 10 for rank in ranks_unseen])
    assert found.hr_at_50 == 1


def test_an_answer_that_the_catalogue_lacks_would_be_counted(trained: TrainedGenerator) -> None:
    evaluate = GeneratorEvaluator(trained.codes, trained.log.item_ids, TINY.history_items, 50)
    evaluate._sids[70] = [0, 99]
    asked = trained.log.next_items()[:5]
    assert math.isclose(
        evaluate.evaluate(trained.model, trained.log, asked).invalid_ratio, 1 / NUM_ITEMS
    )


def test_the_loss_is_the_mean_over_codes_of_real_items(trained: TrainedGenerator) -> None:
    """Padding counts for nothing: sequence by sequence, without it, the sum is the same."""
    tokens = torch.from_numpy(trained.codes.sids + np.array([0, 6]))
    log = trained.log
    parts = [Window(int(log.starts[user]), length) for user, length in enumerate((3, 7, 5))]
    (batch,) = batches(log, parts, 100)
    surprise = []
    for start, length in parts:
        sequence = tokens[log.items[start : start + length]].flatten()
        chances = next_logits(trained.model, encode(trained.model, sequence[None, :-1]))[
            0
        ].log_softmax(-1)
        surprise += (-chances.gather(1, sequence[1:, None])[:, 0]).tolist()
    assert len(surprise) == 2 * 15 - 3
    assert math.isclose(
        CodeLoss(trained.codes)(trained.model, batch, 0.0).item(), np.mean(surprise), rel_tol=1e-5
    )


def test_an_item_outside_the_beams_is_missed_and_no_users_have_no_figures() -> None:
    figures = RetrievalFigures.from_ranks(
        NextItemRanks(np.array([0, 9, 10, 49, 50, np.inf]), np.empty(0), np.zeros(6, np.bool_)), "m"
    )
    assert (figures.hr_at_10, figures.hr_at_50, figures.num_users) == (2 / 6, 4 / 6, 6)
    assert math.isclose(figures.interval, 1.96 * math.sqrt(1 / 3 * 2 / 3 / 6))
    assert math.isnan(RetrievalFigures.from_ranks(NO_RANKS, "m").hr_at_10)


def test_the_baselines_have_the_figures_of_the_rankers_protocol() -> None:
    log = build_log(planted(), [], "leave-one-out")
    for baseline in (Popularity(log), Markov(log)):
        mine, theirs = (
            baseline_figures(log, log.next_items(), baseline),
            evaluate_baseline(log, baseline, log.values >= 4, log.next_items()),
        )
        for name in ("hr_at_10", "ndcg_at_10", "hr_at_10_unseen", "ndcg_at_10_unseen"):
            assert getattr(mine, name) == getattr(theirs, name)


def test_two_runs_are_equal_bit_for_bit_and_another_seed_is_not() -> None:
    weights = [
        train_generator(
            planted(), [], msgspec.structs.replace(ONE, dropout=0.2, seed=seed)
        ).model.state_dict()
        for seed in (0, 0, 1)
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not torch.equal(weights[0]["embedding.weight"], weights[2]["embedding.weight"])


def test_neither_the_test_nor_the_validation_is_trained_on() -> None:
    """Other last two events give the same codes and, without a choice by them, weights."""
    events = planted()
    log = build_log(events, [], "leave-one-out")
    held = np.concatenate(
        [np.flatnonzero(events.users == user)[-2:] for user in range(log.num_users)]
    )
    items = events.items.copy()
    items[held] = np.roll(items[held], 7)
    changed = type(events)(events.users, items, events.values, events.timestamps, events.user_names)
    one, other = train_generator(events, [], ONE), train_generator(changed, [], ONE)
    assert np.array_equal(one.codes.sids, other.codes.sids)
    assert all(
        torch.equal(a, b)
        for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True)
    )
    assert one.report.own != other.report.own


def test_the_best_state_on_the_validation_is_kept_and_patience_ends_the_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Validations that get worse after the second one end the training two later."""
    scores = itertools.chain([0.1, 0.3, 0.2, 0.3, 0.9], itertools.repeat(0.0))
    states: list[torch.Tensor] = []

    def evaluate(
        _self: GeneratorEvaluator, model: Decoder, *_: object, **__: object
    ) -> RetrievalFigures:
        states.append(model.embedding.weight.clone())
        score = next(scores)
        return RetrievalFigures(
            model="m",
            num_users=1,
            hr_at_10=0.5,
            ndcg_at_10=0.5,
            hr_at_50=0.5,
            ndcg_at_10_unseen=score,
        )

    monkeypatch.setattr(GeneratorEvaluator, "evaluate", evaluate)
    options = msgspec.structs.replace(ONE, epochs=9, validate_every=1, patience=2)
    seen: list[TrainingProgress] = []
    found = train_generator(planted(), [], options, progress=seen.append)
    assert len(states) == 4 + 1  # and the test
    assert torch.equal(found.model.embedding.weight, states[1])
    assert not torch.equal(states[1], states[3])
    assert found.report.chosen["validation"]["score"] == 0.3
    assert max(step.done for step in seen) < 4


def test_the_served_generator_is_refitted_on_all_events_for_the_epochs_of_the_best_validation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The epochs of the best validation, here the second one, and no more."""
    real = GeneratorEvaluator.evaluate
    scores = itertools.chain([0.1, 0.3], itertools.repeat(0.0))

    def evaluate(self: GeneratorEvaluator, *given: Any, **options: Any) -> RetrievalFigures:
        found = real(self, *given, **options)
        if len(given) == 4:  # the test, which shows its progress
            return found
        score = next(scores)
        return dataclasses.replace(found, ndcg_at_10=score, ndcg_at_10_unseen=score)

    monkeypatch.setattr(GeneratorEvaluator, "evaluate", evaluate)
    options = msgspec.structs.replace(ONE, epochs=4, validate_every=1, dropout=0.1)
    seen: list[TrainingProgress] = []
    evaluated = train_generator(planted(), [], options)
    scores = itertools.chain([0.1, 0.3], itertools.repeat(0.0))
    served = train_generator(
        planted(), [], msgspec.structs.replace(options, refit=True), progress=seen.append
    )
    assert served.report.own == evaluated.report.own
    assert (served.report.num_trained, served.report.num_served) == (60 * 28, 60 * 30)
    assert evaluated.report.num_served == 60 * 28
    assert served.log.num_trained.tolist() == [30] * 60
    parts = ["codes of the items", "train", "evaluate", "refit"]
    stages = [f"generator: {part}" for part in parts]
    assert list(dict.fromkeys(step.stage for step in seen)) == stages
    assert 1 < max(step.done for step in seen if step.stage == stages[3]) < 2
    assert not torch.equal(served.model.embedding.weight, evaluated.model.embedding.weight)


def test_an_item_of_the_newest_events_alone_is_generated_after_the_refit() -> None:
    """Every user's last item is a new one, so only the refitted generator can predict it."""
    events = planted()
    last = len(events) - 1 - np.unique(events.users[::-1], return_index=True)[1]
    items = events.items.copy()
    items[last] = 990
    events = dataclasses.replace(events, items=items)
    places = []
    for refit in (False, True):
        options = msgspec.structs.replace(TINY, refit=refit, epochs=6, validate_every=3)
        found = train_generator(events, [], options)
        log = found.log if refit else build_log(events, [], "leave-one-out")
        ends = [NextItem(user, int(log.starts[user + 1]) - 1) for user in range(log.num_users)]
        evaluate = GeneratorEvaluator(found.codes, log.item_ids, TINY.history_items, 50)
        places.append(evaluate.evaluate(found.model, log, ends).hr_at_10)
    assert places[1] > places[0] + 0.3


def test_some_users_stand_for_all_where_a_test_would_take_too_long() -> None:
    report = train_generator(planted(), [], msgspec.structs.replace(ONE, test_users=7)).report
    assert {row.num_users for row in (report.own, *report.baselines)} == {7}


def test_progress_runs_through_training_and_test() -> None:
    seen: list[TrainingProgress] = []
    train_generator(planted(), [], ONE, progress=seen.append)
    parts = {"codes of the items", "train", "evaluate"}
    assert {step.stage for step in seen} == {f"generator: {part}" for part in parts}
    assert seen[-1].done == seen[-1].total == 60
    assert all(math.isfinite(step.loss) for step in seen if step.stage == "generator: train")


def test_ready_made_codes_are_used(tmp_path: Path) -> None:
    table = {str(item * 10): [item % 5, item // 5, 1] for item in range(NUM_ITEMS)}
    (tmp_path / "index.json").write_text(json.dumps(table))
    options = msgspec.structs.replace(ONE, given_tokens="codes")
    found = train_generator(planted(), [], options, tmp_path / "index.json")
    assert found.codes.code_count == (5, 6, 2)
    assert found.model.config.vocab_size == 13
    assert found.codes.sids.tolist() == list(table.values())


def test_the_report_is_a_table_and_json(trained: TrainedGenerator) -> None:
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(trained.report.table())
    text = console.export_text()
    assert f"{trained.report.own.hr_at_10:.4f}" in text
    assert "+-" in text
    figures = json.loads(json.dumps(trained.report.as_dict(), allow_nan=False))
    assert figures["test"]["hr_at_10"] == trained.report.own.hr_at_10
    names = [row["model"] for row in figures["baselines"]]
    assert names[:3] == ["popularity", "Markov counts", "own recency and frequency"]
    assert names[3:] == ["decayed transitions", "ItemKNN", "EASE", "PureSVD"]


def test_what_cannot_be_trained_is_explained() -> None:
    with pytest.raises(ConfigError, match=r"code_count: \[2, 2\] make 4 semantic IDs, 30 needed"):
        train_generator(planted(), [], msgspec.structs.replace(ONE, code_count=(2, 2)))
    with pytest.raises(ConfigError, match="train: num_heads: 2 is no multiple of num_kv_heads 3"):
        train_generator(planted(), [], msgspec.structs.replace(ONE, num_kv_heads=3))
    with pytest.raises(DataError, match=r"the loss is (nan|inf) in epoch"):
        train_generator(planted(), [], msgspec.structs.replace(ONE, learning_rate=1e30, epochs=3))
    with pytest.raises(DataError):
        train_generator(planted(2, 2), [], ONE)  # nothing is left to validate with
