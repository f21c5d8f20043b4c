"""Windows move in aligned steps; unknown items are counted or rejected; fingerprints are unique.

Every id finds its row, and nothing else does; dense and sparse ids alike.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.core.errors import Unprocessable
from npu_gr.core.feature_schema.columns import ModelFeatures
from npu_gr.core.feature_schema.schema import Feature
from npu_gr.core.history import Events
from npu_gr.model.history_tokenizer import UNKNOWN, ItemVocabulary, Tokens, tokenize, window_start
from tests.models import events

VOCABULARY = ItemVocabulary(np.arange(300, dtype=np.int64))


def made(
    history: Events,
    max_tokens: int = 100,
    step: int = 16,
    reject: bool = False,
    first_index: int = 0,
) -> Tokens:
    return tokenize(
        history,
        VOCABULARY,
        3,
        max_tokens=max_tokens,
        cut_step_tokens=step,
        reject_unknown=reject,
        first_index=first_index,
    )


@settings(deadline=None, derandomize=True)
@given(
    total=st.integers(0, 500),
    limit=st.integers(1, 100),
    step=st.integers(1, 64),
    read=st.integers(1, 600),
)
def test_the_window(total: int, limit: int, step: int, read: int) -> None:
    """Wherever reading began, the window is the same, aligned, and at most `limit` long."""
    first = max(0, total - max(read, limit + step))
    start = window_start(first, total - first, limit, step)
    assert first + start == window_start(0, total, limit, step)
    kept = total - first - start
    assert kept <= limit
    assert total <= limit or (first + start) % step == 0 or kept == 0
    assert kept >= min(total, limit - step)


def test_the_window_stands_still_between_steps() -> None:
    starts = {window_start(0, total, 100, 16) for total in range(101, 117)}
    assert starts == {16}


def test_a_cut_is_reported() -> None:
    tokens = made(events(130), max_tokens=100, step=16)
    assert tokens.report.cut_tokens == 32
    assert tokens.report.num_tokens == len(tokens) == 98
    assert np.array_equal(tokens.events.items, events(130).items[32:])


def test_unknown_items_are_left_out_and_counted() -> None:
    history = events(20)
    history.items[[3, 7]] = [999, 5_000_000_000]
    tokens = made(history)
    assert (tokens.report.unknown_items, len(tokens)) == (2, 18)
    assert np.array_equal(tokens.rows, np.delete(history.items, [3, 7]))
    with pytest.raises(Unprocessable, match=r"history\.items: 2 unknown, the first is 999"):
        made(history, reject=True)


@pytest.mark.parametrize("action", [3, -1])
def test_an_unknown_action_is_rejected(action: int) -> None:
    history = events(5)
    history.actions[2] = action
    with pytest.raises(Unprocessable, match=rf"history\.actions: {action} .*0\.\.2"):
        made(history)


def test_a_fingerprint_names_one_history() -> None:
    tokens = made(events(50))
    assert tokens.fingerprint(30) == made(events(50)[:30]).fingerprint(30)
    seen = {tokens.fingerprint(n) for n in range(51)}
    for field in ("items", "actions", "timestamps"):
        changed = events(50)
        values = getattr(changed, field)
        values[25] = (values[25] + 1) % 3 if field != "timestamps" else values[25] + 1
        seen.add(made(changed).fingerprint(50))
    assert len(seen) == 51 + 3


@pytest.mark.parametrize("num_events", [0, 1, 40, 130])
def test_a_fingerprint_that_is_known_is_not_computed_again(num_events: int) -> None:
    """It is believed of the whole history as it came, and of nothing that was cut."""
    history = events(num_events)
    tokens = tokenize(
        history,
        VOCABULARY,
        3,
        max_tokens=100,
        cut_step_tokens=16,
        reject_unknown=False,
        plain="known",
    )
    assert (tokens.fingerprint(len(tokens)) == "known") == (num_events <= 100)
    for part in (tokens[:1], tokens.newest(1)):
        assert part.fingerprint(len(part)) == part.events.fingerprint()


def with_new(vocabulary: ItemVocabulary, ids: list[int], stamps: list[int]) -> ItemVocabulary:
    return vocabulary.with_new(
        np.array(ids, np.int64), np.array(stamps, np.int64), np.arange(len(ids))
    )


def test_a_new_item_parts_the_fingerprint_once_it_is_known_and_by_its_content() -> None:
    history = Events.make([3, 900, 5], [1, 1, 1], [10, 20, 30])

    def read(vocabulary: ItemVocabulary) -> Tokens:
        return tokenize(
            history, vocabulary, 3, max_tokens=9, cut_step_tokens=1, reject_unknown=False
        )

    known = with_new(VOCABULARY, [900], [7])
    again = with_new(VOCABULARY, [900], [8])  # other features on the same row
    moved = with_new(VOCABULARY, [901, 900], [9, 7])  # the same on another row
    tokens = [read(vocabulary) for vocabulary in (VOCABULARY, known, again)]
    assert [len(one) for one in tokens] == [2, 3, 3]
    assert len({one.fingerprint(len(one)) for one in tokens}) == 3
    assert len({one.fingerprint(1) for one in tokens}) == 1  # what is before it is the same prefix
    assert read(moved).fingerprint(3) == tokens[1].fingerprint(3)
    # every part of a request keeps the rows that it has looked up
    for part in (tokens[1], tokens[1][:1], tokens[1].newest(1), tokens[0]):
        assert part.vocabulary is (known if part is not tokens[0] else VOCABULARY)


def test_the_users_token_stands_in_front_and_stays_when_old_events_go() -> None:
    features = ModelFeatures(
        [Feature(name="country", of="user", kind="category", values=("fr", "de"))]
    )

    def read(country: str) -> Tokens:
        vocabulary = ItemVocabulary(np.arange(10))
        events = Events.make(range(6), [0] * 6, range(10, 16))
        return tokenize(
            events, vocabulary, 1, max_tokens=6, cut_step_tokens=1, reject_unknown=True,
            features=features, user_features={"country": country},
        )  # fmt: skip

    tokens = read("fr")
    assert (len(tokens), tokens.report.num_tokens) == (7, 7)
    assert tokens.timestamps.tolist() == [10, 10, 11, 12, 13, 14, 15]
    assert (len(tokens[:1]), tokens[:1].num_user, len(tokens[:1].rows)) == (1, 1, 0)
    assert (len(tokens[3:]), tokens[3:].num_user, tokens[3:].rows.tolist()) == (4, 0, [2, 3, 4, 5])
    newest = tokens.newest(3)
    assert (newest.num_user, newest.rows.tolist(), newest.timestamps.tolist()) == (
        1,
        [4, 5],
        [14, 14, 15],
    )
    for num_tokens in range(1, 8):
        assert tokens.fingerprint(num_tokens) == tokens[:num_tokens].fingerprint(num_tokens)
        assert tokens.fingerprint(num_tokens) != read("de").fingerprint(num_tokens)


@settings(deadline=None, derandomize=True)
@given(
    ids=st.lists(st.integers(0, 2**62), min_size=1, max_size=50, unique=True),
    asked=st.lists(st.integers(-5, 2**62), max_size=20),
    dense_from=st.sampled_from([None, 0, 100_000, 2**62]),
)
def test_rows(ids: list[int], asked: list[int], dense_from: int | None) -> None:
    first = dense_from or 0
    if dense_from is not None:
        ids = list(dict.fromkeys(first + i % 997 for i in ids))
    vocabulary = ItemVocabulary(np.array(ids, np.int64))
    ends = [min(ids) - 1, max(ids) + 1, -(2**63), 2**63 - 1]
    questions = np.array([*ids, *asked, *ends, first + 1000, 2**62], np.int64)
    where = {value: row for row, value in enumerate(ids)}
    want = [where.get(int(q), UNKNOWN) for q in questions]
    assert vocabulary.rows(questions).tolist() == want
    assert len(vocabulary) == len(ids)


@settings(deadline=None, derandomize=True)
@given(
    num_trained=st.integers(1, 40),
    spread=st.sampled_from([1, 1_000_003]),
    rows=st.lists(st.integers(0, 9), max_size=12),
)
def test_new_items_have_the_row_where_they_are_found(
    num_trained: int, spread: int, rows: list[int]
) -> None:
    """Of several rows with one id, the last one counts here; the others have only the id."""
    trained = np.arange(num_trained, dtype=np.int64) * spread
    before = ItemVocabulary(trained)
    ids = [num_trained * spread + 1 + item for item in rows]
    last = {item: place for place, item in enumerate(ids)}
    known = np.array([*last.values()], np.int64)
    vocabulary = before.with_new(np.array(ids, np.int64), np.arange(len(ids)), known)
    questions = np.array([*trained, *last, -1, 2**61], np.int64)
    found = [*(num_trained + place for place in last.values()), UNKNOWN, UNKNOWN]
    assert vocabulary.rows(questions).tolist() == [*range(num_trained), *found]
    assert vocabulary.ids_of(np.arange(len(vocabulary))).tolist() == [*trained, *ids]
    assert vocabulary.number == before.number + 1
    # a request that has the one before sees no change
    assert before.rows(questions).tolist() == [*range(num_trained), *([UNKNOWN] * len(found))]


@pytest.mark.parametrize("spread", [1, 1_000_003])
def test_no_ids_no_rows(spread: int) -> None:
    vocabulary = ItemVocabulary(np.arange(10, dtype=np.int64) * spread)
    assert vocabulary.rows(np.empty(0, np.int64)).tolist() == []


def test_ids_that_follow_each_other_are_found_as_by_a_table() -> None:
    trained = np.arange(40, 240, dtype=np.int64)
    table, by_range = ItemVocabulary(trained), ItemVocabulary(trained, is_range=True)
    asked = np.array([39, 40, 41, 239, 240, 0, -1, 10**12])
    new = (np.array([7, 300]), np.array([1, 2]), np.array([0, 1]))
    for one, other in ((table, by_range), (table.with_new(*new), by_range.with_new(*new))):
        wanted = np.append(asked, [7, 300])
        assert other.rows(wanted).tolist() == one.rows(wanted).tolist()
        rows = np.arange(len(one))
        assert other.ids_of(rows).tolist() == one.ids_of(rows).tolist()
