"""Converted logs hold what their sources say: times, returns and prefixes of the trace, histories of real users."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from npu_gr.cli.main import main
from npu_gr.core.errors import DataError
from npu_gr.features.interactions import Interactions
from npu_gr.replay.convert import (
    ModelVocabulary,
    MooncakeOptions,
    MooncakeRequest,
    from_mooncake,
    from_ratings,
    read_mooncake,
    users_of,
)
from npu_gr.replay.files import read
from npu_gr.replay.log import QueryRecord

NUM_USERS, NUM_ITEMS = 7, 400


def ratings() -> Interactions:
    """Users with 10 to 130 events."""
    random = np.random.default_rng(0)
    users = random.permutation(np.repeat(np.arange(NUM_USERS), np.arange(NUM_USERS) * 20 + 10))
    return Interactions(
        users.astype(np.int32),
        random.integers(0, NUM_ITEMS, len(users)),
        random.integers(1, 6, len(users)).astype(np.float64),
        np.sort(random.integers(800_000_000, 900_000_000, len(users))),
        [f"user-{i}" for i in range(NUM_USERS)],
    )


def trace(num: int = 300) -> list[MooncakeRequest]:
    """Sessions of 1 to 5 requests whose lengths grow, stamped in ticks of 3 s."""
    random = np.random.default_rng(1)
    made: Counter[int] = Counter()
    requests = []
    for i in range(num):
        session = int(random.integers(0, 120))
        made[session] += 1
        blocks = [0, 1000 + session, *range(2000 + i * 10, 2000 + i * 10 + made[session])]
        stamp = float(i // 9 * 3000)
        requests.append(MooncakeRequest(timestamp=stamp, input_length=500 * made[session] + 7, hash_ids=blocks))
    return requests


CATALOGUE = ModelVocabulary(item_ids=np.arange(NUM_ITEMS, dtype=np.int64), action_values=(1.0, 2.0, 3.0, 4.0, 5.0))


def converted(**values: object) -> list[QueryRecord]:
    options = msgspec.convert(values, MooncakeOptions)
    return list(from_mooncake(trace(), ratings(), CATALOGUE, options))


def test_arrivals_and_returns_are_the_traces() -> None:
    records = converted()
    assert [record.ts for record in records] == [request.timestamp / 1e3 for request in trace()]
    sessions = [request.hash_ids[1] for request in trace()]
    names: dict[int, str] = {}
    for session, record in zip(sessions, records, strict=True):
        assert names.setdefault(session, record.user_id) == record.user_id
    assert len(set(names.values())) == len(names)  # no two sessions are the same user


@pytest.mark.parametrize("lengths", ["real", "trace"])
def test_histories_are_real_users_and_each_visit_continues_the_one_before(lengths: str) -> None:
    real = dict(users_of(ratings()))
    last: dict[str, list[int]] = defaultdict(list)
    for record, request in zip(converted(lengths=lengths, scale=0.1), trace(), strict=True):
        assert record.history is not None
        events = record.history.events()
        items, part = events.items.tolist(), real[record.user_id.split(".")[0]]
        assert items[: len(last[record.user_id])] == last[record.user_id]
        last[record.user_id] = items
        assert items[: len(part)] == part.items[: len(items)].tolist()
        assert np.all(np.diff(events.timestamps) >= 0)
        if lengths == "trace":
            assert len(items) == round(request.input_length * 0.1)
        else:
            assert len(part) * 0.8 - 1 <= len(items) <= len(part)


def test_what_the_user_took_next_is_among_the_candidates_and_labelled() -> None:
    real = dict(users_of(ratings()))
    labelled = 0
    for record in converted(num_candidates=50):
        assert len(set(record.candidate_ids().tolist())) >= 45
        assert len(record.candidate_ids()) == 50
        if record.labels:
            labelled += 1
            assert record.history is not None
            part = real[record.user_id.split(".")[0]]
            clicked = [i for i, y in zip(record.candidate_ids().tolist(), record.labels["click"], strict=True) if y]
            start = len(record.history)
            assert sorted(clicked) == sorted(part.items[start : start + len(clicked)].tolist())
    assert labelled > 200


def test_the_same_seed_gives_the_same_log_and_another_one_does_not() -> None:
    assert converted(spread_s=3.0, seed=4) == converted(spread_s=3.0, seed=4)
    assert converted(seed=4) != converted(seed=5)


def test_spreading_moves_requests_within_their_tick_and_keeps_their_order() -> None:
    spread, plain = converted(spread_s=3.0), converted()
    moved = np.array([a.ts - b.ts for a, b in zip(spread, plain, strict=True)])
    assert moved.min() >= 0
    assert moved.max() < 3
    assert moved.mean() == pytest.approx(1.5, abs=0.2)
    assert [a.ts for a in spread] == sorted(a.ts for a in spread)


def test_ratings_become_ranks_with_their_histories_or_with_events_that_follow() -> None:
    log = ratings()
    old = np.arange(len(log)) < 300
    whole = from_ratings(log[~old], CATALOGUE, before=log[old])
    stored = from_ratings(log[~old], CATALOGUE)
    assert {record.kind for record in whole} == {"rank"}
    ranks = [record for record in stored if record.kind == "rank"]
    assert [r.candidate_ids().tolist() for r in ranks] == [r.candidate_ids().tolist() for r in whole]
    seen = {name: part.items.tolist() for name, part in users_of(log[old])}
    for rank, event in zip(whole, [r for r in stored if r.kind == "events"], strict=True):
        assert rank.history is not None
        assert event.events is not None
        assert rank.user_id == event.user_id
        assert rank.history.events().items.tolist() == seen.get(rank.user_id, [])
        seen.setdefault(rank.user_id, []).extend(event.events.events().items.tolist())
    strange = ModelVocabulary(item_ids=CATALOGUE.item_ids, action_values=(1.0,))
    with pytest.raises(DataError, match="none of the model's actions"):
        from_ratings(log[~old], strange)


def test_the_commands_write_logs_that_are_read_back(tmp_path: Path) -> None:
    log = ratings()
    lines = [
        f"{log.user_names[u]}\t{i}\t{v}\t{t}"
        for u, i, v, t in zip(log.users, log.items, log.values, log.timestamps, strict=True)
    ]
    header = "user_id:token\titem_id:token\trating:float\ttimestamp:float"
    (tmp_path / "r.inter").write_text("\n".join([header, *lines]))
    (tmp_path / "t.jsonl").write_bytes(b"\n".join(msgspec.json.encode(request) for request in trace()))
    files = {name: str(tmp_path / name) for name in ("r.inter", "t.jsonl", "m.jsonl.gz", "r.jsonl")}

    def convert(*words: str) -> None:
        done = CliRunner().invoke(main, ["replay", "convert", *words])
        assert done.exit_code == 0, done.output

    convert("mooncake", files["t.jsonl"], "--ratings", files["r.inter"], "--out", files["m.jsonl.gz"], "--spread", "3")
    convert("ratings", files["r.inter"], "--out", files["r.jsonl"], "--stored")
    assert len(list(read(Path(files["m.jsonl.gz"])))) == 300
    assert {record.kind for record in read(Path(files["r.jsonl"]))} == {"rank", "events"}


def test_a_bad_trace_is_named_by_line(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"timestamp": 0, "input_length": 5, "hash_ids": [1]}\n{"timestamp": -1}\n')
    with pytest.raises(DataError, match=r"t\.jsonl, line 2: "):
        read_mooncake(tmp_path / "t.jsonl")
