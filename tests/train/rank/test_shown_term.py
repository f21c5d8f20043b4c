"""The term of shown items holds what the trained pages tell about items and tastes, and no more."""

from __future__ import annotations

import numpy as np
import torch

from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.core.history import Events, HistoryReport
from npu_gr.engine.rank_engine import RankPass
from npu_gr.model.history_tokenizer import Tokens
from npu_gr.model.shown_term import SCORES, ShownTerm
from npu_gr.train.data import InteractionLog, batches, build_log, windows
from npu_gr.train.rank.fit import fit, new_model
from npu_gr.train.rank.forward import EncodedHistories
from npu_gr.train.rank.inputs import LogInputs
from npu_gr.train.rank.options import NEXT, SHOWN
from npu_gr.train.rank.shown import position_biases, shown_logits, shown_loss
from npu_gr.train.rank.shown_term import fit_term, item_odds, pages
from tests.backend.cpu.test_hstu_pass import engine
from tests.train.rank.test_shown import TINY, Page, logged

NUM_ITEMS = 16


def planted(taste: float, num_users: int = 120) -> InteractionLog:
    """Items of two kinds; each user likes one of them, and nothing else tells what is clicked."""
    random = np.random.default_rng(0)
    rows = []
    for user in range(num_users):
        for page in range(10):
            items = random.choice(NUM_ITEMS, 4, replace=False)
            logit = taste * np.where(items % 2 == user % 2, 1, -1)
            clicked = random.random(4) < 1 / (1 + np.exp(-logit))
            rows.append(Page(user, page * 3600 + user, items.tolist(), clicked.tolist()))
    return build_log(logged(rows), [], "user-time")


def test_a_taste_is_found_where_there_is_one_and_chance_gives_nothing() -> None:
    table = fit_term(planted(2.0), 1024)
    own, other = (ShownTerm(0, table)(np.arange(4) * 2 + of, np.arange(NUM_ITEMS)) for of in (0, 1))
    even = np.arange(NUM_ITEMS) % 2 == 0
    assert own[even].min() > own[~even].max() + 0.5
    assert other[~even].min() > other[even].max() + 0.5
    by_chance = fit_term(planted(0.0), 1024)
    assert np.abs(by_chance[:, 0]).max() < 0.15
    assert np.abs(ShownTerm(0, by_chance)(np.arange(4) * 2, np.arange(NUM_ITEMS))).max() < 0.2


def test_an_item_gets_nothing_for_its_place() -> None:
    random = np.random.default_rng(0)
    rows = []
    for page in range(900):
        items = [*random.permutation(4).tolist(), *(random.permutation(4) + 4).tolist()]
        if random.random() < 0.2:  # sometimes upside down
            items = items[::-1]
        clicked = random.random(8) < [0.6, 0.6, 0.6, 0.6, 0.15, 0.15, 0.15, 0.15]
        rows.append(Page(page % 60, page // 60 * 3600 + page % 60, items, clicked.tolist()))
    log = build_log(logged(rows), [], "user-time")
    found = pages(log, log.trained)
    by_place, without = (
        np.abs(np.diff(item_odds(of, 8).reshape(2, 4).mean(1)))[0]
        for of in (found, found._replace(places=np.zeros_like(found.places)))
    )
    assert by_place < 0.3 * without, (by_place, without)


def test_nothing_of_the_held_out_events_is_read() -> None:
    log = planted(2.0)
    items = np.where(log.trained, log.items, 0)
    changed = InteractionLog(**{**{f: getattr(log, f) for f in log.__slots__}, "items": items})
    np.testing.assert_array_equal(fit_term(log, 1024), fit_term(changed, 1024))


def test_the_loss_has_the_term_so_the_rest_learns_what_it_lacks() -> None:
    log = planted(2.0)
    model = new_model(log, [], (NEXT, SHOWN), TINY)
    (batch, *_) = batches(log, windows(log, 20, np.random.default_rng(0)), 512)
    losses = []
    for table in (np.zeros_like(model.factors_of_shown), fit_term(log, 1024)):
        model.factors_of_shown.copy_(torch.from_numpy(table))
        inputs = LogInputs(log, model)
        encoded = EncodedHistories(model, inputs.histories(batch))
        torch.manual_seed(0)
        loss = shown_loss(model, encoded, inputs, 1, position_biases(), batch, TINY)
        losses.append(float(loss.detach()))
    assert losses[1] < losses[0] - 0.02, losses


def test_service_adds_the_term_that_training_and_evaluation_add() -> None:
    log = planted(2.0, 40)
    made = fit(log, [], (NEXT, SHOWN), TINY, [], "test", lambda _: None).model
    assert made.config.shown_task == "click"
    assert made.factors_of_shown[:, SCORES].abs().max() > 0
    one = engine(made, CPUBackend("off"), arrangement="natural")
    events, candidates = np.flatnonzero(~log.trained)[:12], np.arange(NUM_ITEMS)
    found = shown_logits(
        log, made, np.repeat(events, NUM_ITEMS), np.tile(candidates, len(events)), [0, 1]
    )
    users = log.users
    for event, logits in zip(events.tolist(), found.reshape(-1, NUM_ITEMS, 2), strict=True):
        past = slice(int(log.starts[users[event]]), event)
        history = Events(
            log.item_ids[log.items[past]], log.actions[past].astype(np.int16), log.times[past]
        )
        read = Tokens(history, log.items[past], HistoryReport(fingerprint="", num_tokens=0))
        work = RankPass(read, 0, candidates, int(log.times[event]))
        np.testing.assert_allclose(one.forward([work])[0], logits, atol=1e-4)
    # a ranker without such a task has none
    plain = new_model(log, [], (NEXT,), TINY)
    assert not plain.config.shown_task
    assert "factors_of_shown" not in dict(plain.named_buffers())
    assert torch.isfinite(made.factors_of_shown).all()
