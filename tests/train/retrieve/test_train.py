"""Vectors of one log find what follows, beat popularity, and are served as evaluated."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.catalogue.names import ItemNames
from npu_gr.cli.main import main
from npu_gr.core.arrays import I64
from npu_gr.core.errors import DataError
from npu_gr.core.history import UserKey
from npu_gr.core.request import Basis
from npu_gr.history_store.interactions import Interactions
from npu_gr.train.data import build_log
from npu_gr.train.next_item import rank_next_items
from npu_gr.train.retrieve import (
    RetrieveOptions,
    TrainedRetriever,
    factorise,
    train_retriever,
    transitions,
)
from npu_gr.train.steps import TrainingProgress
from npu_gr.vector_search.fold import Folding
from npu_gr.vector_search.matcher import Matcher
from npu_gr.vector_search.vectors import load, save
from tests.train.synthetic import NUM_ITEMS, planted

SMALL = RetrieveOptions(dim=20, windows=(3,), powers=(0.3,), decays=(0.6, 0.3), refit=False)


@pytest.fixture(scope="module")
def evaluated() -> TrainedRetriever:
    return train_retriever(planted(), SMALL)


def matched(
    matcher: Matcher, user: str, history: I64, *, exclude_seen: bool = False
) -> tuple[Basis, list[int]]:
    query = matcher.search_for(UserKey("", user), NUM_ITEMS + 9, exclude_seen, None, None, history)
    [found] = matcher.run([query])
    return query.basis, matcher.vectors.item_ids[found.items].tolist()


def test_the_vectors_find_what_follows_and_beat_popularity(evaluated: TrainedRetriever) -> None:
    report = evaluated.report
    assert report.own.hr_at_10 > report.baselines[0].hr_at_10 + 0.3
    alone = [
        train_retriever(planted(), msgspec.structs.replace(SMALL, decays=(decay,)))
        for decay in SMALL.decays
    ]
    best = max(alone, key=lambda one: one.report.chosen["validation_ndcg_at_10"])
    assert report.chosen == best.report.chosen
    assert len({one.report.chosen["validation_ndcg_at_10"] for one in alone}) == 2
    comparison = report.comparison()
    assert comparison is not None
    assert "chosen on the validation: window 3" in report.text()
    assert report.as_dict()["settings"]["decay"] in SMALL.decays


def test_what_is_served_is_what_was_evaluated(evaluated: TrainedRetriever, tmp_path: Path) -> None:
    """The matcher, from the file, ranks every user's next item where the evaluation did."""
    save(evaluated.vectors, tmp_path)
    matcher = Matcher(load(tmp_path), "exact", CPUBackend())
    log = build_log(planted(), [], "leave-one-out")
    ranks = []
    for user, event in log.next_items():
        history = log.item_ids[log.items[log.starts[user] : event]]
        answers = [
            matched(matcher, name, sent)
            for name, sent in (
                (f"u{user}", np.empty(0, np.int64)),
                (f"u{user}", history),
                ("unknown", history),
            )
        ]
        assert [basis for basis, _ in answers] == [Basis.TARGET, Basis.TARGET, Basis.FOLDED]
        assert answers[0][1] == answers[1][1] == answers[2][1]
        ranks.append(answers[0][1].index(int(log.item_ids[log.items[event]])))
    assert ranks == evaluated.report.own.ranks.overall.tolist()


def test_a_new_event_moves_the_user_as_the_training_would_have(evaluated: TrainedRetriever) -> None:
    """A folded-in vector is the formula over trained and new events, however many are sent."""
    matcher = Matcher(evaluated.vectors, "exact", CPUBackend())
    log = build_log(planted(), [], "leave-one-out")
    own = log.items[log.starts[3] : log.starts[3] + log.num_trained[3]]
    new = np.array([17])
    folding = evaluated.vectors.folding
    assert isinstance(folding, Folding)
    assert folding.decay is not None
    weights = folding.decay ** np.arange(len(own), -1, -1.0)
    for sent, events in ((new, [*own[own != 17], 17]), (np.concatenate([own, new]), [*own, 17])):
        query = matcher.search_for(UserKey("", "u3"), 5, True, None, None, log.item_ids[sent])
        assert query.basis is Basis.FOLDED
        assert query.history is not None
        assert query.history.tolist() == events
        assert set(query.hidden) == {*own.tolist(), 17}
    want = (weights / weights.sum()) @ folding.states[0][[*own, 17]] / 2
    np.testing.assert_allclose(folding.vector(-1, np.array([*own, 17])), want, rtol=1e-5, atol=1e-8)
    # The same items in another order are another history.
    back = matcher.search_for(UserKey("", "u3"), 5, True, None, None, log.item_ids[own[::-1]])
    assert back.basis is Basis.FOLDED


def test_an_unused_item_is_no_history_and_an_unknown_user_gets_popular_items(
    evaluated: TrainedRetriever,
) -> None:
    matcher = Matcher(evaluated.vectors, "exact", CPUBackend())
    assert matched(matcher, "unknown", np.array([5]))[0] is Basis.POPULARITY
    assert matched(matcher, "unknown", np.empty(0, np.int64))[0] is Basis.POPULARITY


def test_the_refitted_vectors_know_the_newest_events_and_repeat_bit_for_bit(
    evaluated: TrainedRetriever,
) -> None:
    seen: list[TrainingProgress] = []
    options = msgspec.structs.replace(SMALL, refit=True)
    one, other = (
        train_retriever(planted(), options, seen.append),
        train_retriever(planted(), options),
    )
    assert one.report.own == evaluated.report.own
    assert (one.report.num_trained, one.report.num_served) == (60 * 29, 60 * 30)
    assert one.vectors.seen_starts[-1] == 1800
    assert np.array_equal(one.vectors.users, other.vectors.users)
    assert np.array_equal(one.vectors.items, other.vectors.items)
    assert not np.array_equal(one.vectors.users, evaluated.vectors.users)
    assert [*dict.fromkeys(step.stage for step in seen)] == [
        "vectors: choose",
        "vectors: evaluate",
        "vectors: refit",
    ]
    assert all(step.done <= step.total for step in seen)


def test_transitions_are_those_of_the_trained_events_within_the_window() -> None:
    log = build_log(planted(4, 6), [], "leave-one-out")
    want = np.zeros((log.num_items, log.num_items))
    for user in range(4):
        own = log.items[log.starts[user] : log.starts[user] + log.num_trained[user]].tolist()
        for place, item in enumerate(own):
            for apart, after in enumerate(own[place + 1 : place + 4]):
                want[item, after] += (1 - 1 / 3) ** apart
    np.testing.assert_allclose(transitions(log, 3).to_dense().numpy(), want, rtol=1e-6)


def test_the_ranks_are_the_ones_of_the_protocol(evaluated: TrainedRetriever) -> None:
    log = build_log(planted(), [], "leave-one-out")
    vectors = evaluated.vectors
    rows = (
        (vectors.items @ vectors.users[user]).astype(np.float64) for user, _ in log.next_items()
    )
    assert (
        rank_next_items(log, log.next_items(), rows).unseen.tolist()
        == evaluated.report.own.ranks.unseen.tolist()
    )


def test_a_log_that_is_too_small_is_rejected() -> None:
    with pytest.raises(DataError, match="leave-one-out split leaves"):
        train_retriever(planted(2, 2), SMALL)


def test_the_command_writes_a_folder_that_a_service_starts_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = planted()
    rows = zip(
        log.users.tolist(),
        log.items.tolist(),
        log.values.tolist(),
        log.timestamps.tolist(),
        strict=True,
    )
    lines = [
        "user_id:token\titem_id:token\trating:float\ttimestamp:float",
        *("\t".join(map(str, row)) for row in rows),
    ]
    (tmp_path / "log.inter").write_text("\n".join(lines) + "\n")
    out = tmp_path / "vectors"
    words = [part for word in ("dim=8", "windows=[3]") for part in ("--set", word)]
    main(
        ["train", "retrieve", str(tmp_path / "log.inter"), "--out", str(out), *words],
        standalone_mode=False,
    )
    text = capsys.readouterr().out
    assert "refitted on all 1,800" in text.replace("\n", " ")
    assert f"--set match.vectors={out} &\ncurl -s localhost:8080/v1/match" in text
    assert '{"user_id": "0", "num_items": 10}' in text
    assert ItemNames.load(out) is not None
    assert load(out).figures["num_served"] == 1800


def test_short_histories_without_transitions_still_rank_by_popularity() -> None:
    """Two trained events a user, and one in the validation, which has no transitions."""
    users = np.repeat(np.arange(50, dtype=np.int32), 3)
    items = np.tile([0, 1, 2], 50)
    items[::3] = np.arange(50) % 7 * 10
    log = Interactions(
        users, items, np.ones(150), np.arange(150), [f"u{user}" for user in range(50)]
    )
    trained = train_retriever(log, SMALL)
    vectors = trained.vectors
    assert np.isfinite(vectors.items).all()
    assert (np.diff(vectors.items[:, -1][np.argsort(vectors.popularity, kind="stable")]) >= 0).all()
    chosen_on = build_log(log, [], "leave-one-out").only_trained("leave-one-out")
    assert chosen_on.num_trained.max() == 1
    counted = transitions(chosen_on, 3)
    assert counted.values().numel() == 0
    popularity = factorise(chosen_on, counted, 0.3, 20, 0).popularity
    uses = np.bincount(chosen_on.items[chosen_on.trained], minlength=chosen_on.num_items)
    assert popularity.argmax() == uses.argmax()
    assert popularity.max() > 0
