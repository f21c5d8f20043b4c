"""A log in mapped files is the log in memory: its events, batches and weights, bit for bit.

Memory does not grow with its events.
"""

from __future__ import annotations

import csv
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.cli.main import main
from npu_gr.core.errors import ConfigError
from npu_gr.dataset import PrepareOptions, add, prepare
from npu_gr.dataset.files import Dataset
from npu_gr.history_store.interactions import Interactions
from npu_gr.train import data, epochs, store_events, stored_log
from npu_gr.train.data import InteractionLog, Split, build_log, count_trained
from npu_gr.train.epochs import epoch
from npu_gr.train.generate import codes
from npu_gr.train.generate.publish import catalogue_lines
from npu_gr.train.generate.train import GenerateOptions, train_generator
from npu_gr.train.rank.fit import fit
from npu_gr.train.rank.options import TrainOptions, choose_tasks
from npu_gr.train.store_events import store
from npu_gr.train.stored_log import StoredLog
from tests.train.synthetic import planted

START = 1_700_000_000
EVERY = 10**9  # most events of a sample that is the whole log
SMALL = TrainOptions(
    epochs=1, dim=8, num_layers=1, num_heads=1, qk_dim=8, v_dim=8, head_dim=8, batch_tokens=512,
    window_tokens=16, dropout=0.1, max_softmax_items=10, num_negatives=8,
)  # fmt: skip
GENERATOR = GenerateOptions(
    epochs=1, code_count=(8, 8), vector_dim=8, dim=16, num_layers=1, num_heads=1, num_kv_heads=1,
    head_dim=16, mlp_dim=16, history_items=8, validation_users=20, test_users=20, skip_ratio=0.1,
    swap_ratio=0.3,
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the blocks of passes over a log smaller than the logs of these tests."""
    for module in (data, stored_log, store_events):
        monkeypatch.setattr(module, "BLOCK_EVENTS", 300)
    monkeypatch.setattr(store_events, "_READ_ROWS", 250)
    monkeypatch.setattr(epochs, "BLOCK_EVENTS", 300)
    monkeypatch.setattr(epochs.epoch, "__defaults__", (300, 64))


def dataset(folder: Path, column: str, seed: int = 0) -> Dataset:
    """Prepare a log in two files whose times overlap, with ties; ratings or event types."""
    random = np.random.default_rng(seed)
    made = None
    for number in (0, 1):
        path = folder / f"{number}.csv"
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["user_id", "item_id", "timestamp", column])
            for _ in range(900 - 600 * number):
                kind = random.choice(["1", "4", "5"] if column == "rating" else ["view", "buy"])
                user, item = random.integers(40) ** 2 // 40, random.integers(30)
                writer.writerow([f"u{user}", f"i{item}", START + random.integers(200), kind])
        if number:
            made = add(path, folder / "data")
        else:
            prepare(path, folder / "data", PrepareOptions())
    assert made is not None
    return made.dataset


@pytest.mark.parametrize("column", ["rating", "event_type"])
@pytest.mark.parametrize("split", ["user-time", "time", "leave-one-out"])
def test_the_files_hold_the_log(column: str, split: Split, tmp_path: Path) -> None:
    made = dataset(tmp_path, column)
    want = build_log(made.interactions(), [], split)
    found = store(made, [], tmp_path / "files", EVERY).split(split)
    assert isinstance(found.items, np.memmap)
    same(found, want)
    sample, users = store(made, [], tmp_path / "files", 200).sample(found, 0)
    assert 100 < len(sample.items) <= 200
    assert not isinstance(sample.items, np.memmap)
    for row, user in enumerate(users.tolist()):
        one, all_ = (
            slice(log.starts[at], log.starts[at + 1]) for log, at in ((sample, row), (want, user))
        )
        assert np.array_equal(sample.items[one], want.items[all_])
        assert sample.num_trained[row] == want.num_trained[user]


def same(found: InteractionLog, want: InteractionLog) -> None:
    for name in ("items", "actions", "times", "starts", "num_trained", "item_ids"):
        assert np.array_equal(getattr(found, name), getattr(want, name)), name
    for name in ("action_values", "action_names", "item_key"):
        assert getattr(found, name) == getattr(want, name), name


def in_files(log: InteractionLog, folder: Path) -> InteractionLog:
    """Put the events of a log into mapped files."""
    folder.mkdir(exist_ok=True)
    columns = {}
    for name in stored_log.COLUMNS:
        np.save(folder / f"{name}.npy", getattr(log, name))
        columns[name] = np.load(folder / f"{name}.npy", mmap_mode="r")
    return replace(log, **columns)


def log_of(num_users: int, mean: int, seed: int = 0) -> InteractionLog:
    """Make a log whose users have a few or many events."""
    random = np.random.default_rng(seed)
    counts = 1 + random.geometric(1 / mean, num_users)
    users = np.repeat(np.arange(num_users, dtype=np.int32), counts)
    random.shuffle(users)
    n = len(users)
    raw = Interactions(
        users,
        random.integers(0, 50, n),
        random.integers(0, 2, n).astype(np.float64),
        START + np.arange(n),
        [f"u{user}" for user in range(num_users)],
        ("view", "buy"),
    )
    return build_log(raw, [], "leave-one-out")


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 60), st.integers(1, 30), st.integers(1, 900), st.integers(1, 200),
       st.integers(0, 99))  # fmt: skip
def test_batches_do_not_depend_on_where_the_events_are(
    tmp_path_factory: pytest.TempPathFactory,
    num_users: int,
    mean: int,
    block_events: int,
    piece_events: int,
    seed: int,
) -> None:
    log = log_of(num_users, mean, seed)
    mapped = in_files(log, tmp_path_factory.mktemp("log"))
    made = [
        epoch(one, 8, 64, np.random.default_rng(seed), block_events, piece_events)
        for one in (log, mapped)
    ]
    assert len(made[0]) == len(made[1])
    seen = []
    for one, other in zip(*made, strict=True):
        for name in ("items", "actions", "times", "valid", "events"):
            assert torch.equal(getattr(one, name), getattr(other, name))
        seen += one.events[one.valid].tolist()
    assert sorted(seen) == np.flatnonzero(log.trained).tolist()
    left = made[1][len(made[1]) // 2 :]  # as an interrupted epoch goes on
    for place, one in enumerate(left, len(made[1]) // 2):
        assert torch.equal(one.events, made[0][place].events)
    counts = np.bincount(log.items[log.trained], minlength=log.num_items)
    assert np.array_equal(count_trained(mapped, mapped.items, log.num_items), counts)


def test_blocks_mix_the_users_of_the_whole_log() -> None:
    log = log_of(400, 5)
    random = np.random.default_rng(0)
    made = epoch(log, 8, 64, random, 300, 20)
    first = np.concatenate([made[place].events[:, 0].numpy() for place in range(12)])
    quarters = np.bincount(first * 4 // len(log.items), minlength=4)
    assert quarters.min() > 0
    again = epoch(log, 8, 64, random, 300, 20)
    assert not torch.equal(made[0].events, again[0].events[: len(made[0].events)])


def test_a_training_has_the_same_bits(tmp_path: Path) -> None:
    log = build_log(planted(), [], "leave-one-out")
    tasks = choose_tasks(log).tasks
    targets = log.next_items()[:20]
    states, curves = [], []
    for whole in (None, in_files(log, tmp_path / "files")):
        found = fit(log, [], tasks, SMALL, targets, "rank", lambda _: None, whole=whole)
        states.append(found.model.state_dict())
        curves.append(found.curve)
    assert curves[0] == curves[1]
    for name, one in states[0].items():
        assert torch.equal(one, states[1][name]), name


@pytest.mark.parametrize("column", ["rating", "event_type"])
def test_a_generator_has_the_same_bits(column: str, tmp_path: Path) -> None:
    """Codes, weights, figures and catalogue, with varied epochs and the refit."""
    made = dataset(tmp_path, column)
    on_disk = store(made, [], tmp_path / "files", EVERY)
    options = msgspec.structs.replace(GENERATOR, code_init_norm=0.5, dropout=0.1)
    one, other = (train_generator(log, [], options) for log in (made.interactions(), on_disk))
    assert isinstance(other.log.items, np.memmap)
    assert np.array_equal(one.codes.sids, other.codes.sids)
    for name, weight in one.model.state_dict().items():
        assert torch.equal(weight, other.model.state_dict()[name]), name
    assert one.report.as_dict() == other.report.as_dict()
    assert catalogue_lines(one, []) == catalogue_lines(other, [])
    assert "validation, baselines and figures are of a sample: 30 of 30" in other.report.text()


def test_pairs_beyond_the_most_are_the_rarest(monkeypatch: pytest.MonkeyPatch) -> None:
    log = build_log(planted(200), [], "leave-one-out")
    one, other, count = codes._count_pairs(log, 2)
    assert len(one) > 100
    monkeypatch.setattr(codes, "MOST_PAIRS", 90)
    few = codes._count_pairs(log, 2)
    assert len(few[0]) == 90
    best = np.argsort(-count)[:30]  # the planted successors, 90 % of the events
    found = set(zip(few[0].tolist(), few[1].tolist(), strict=True))
    assert set(zip(one[best].tolist(), other[best].tolist(), strict=True)) <= found


class _Enough(Exception):
    pass


def rank(whole: InteractionLog) -> None:
    """Make a ranker and take three steps."""
    sample, steps = log_of(100, 40), iter(range(3))

    def show(_: Any) -> None:
        if next(steps, None) is None:
            raise _Enough

    with pytest.raises(_Enough):
        fit(sample, [], choose_tasks(sample).tasks, SMALL, [], "rank", show, whole=whole)


def generate(whole: InteractionLog) -> None:
    """Train a generator: codes, one epoch, evaluation, refit."""
    train_generator(StoredLog(log=whole, made_from="", most_events=4000), [], GENERATOR)


@pytest.mark.parametrize("train", [rank, generate])
def test_memory_does_not_grow_with_the_events(
    train: Callable[[InteractionLog], None], tmp_path: Path
) -> None:
    """The most memory of numpy is the same for ten times the events."""
    small, large = log_of(100, 40), log_of(100, 400)
    peaks = []
    for log in (small, small, large):  # the first one loads modules too
        whole = in_files(log, tmp_path / str(len(log.items)))
        tracemalloc.start()
        train(whole)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    _, once, tenfold = peaks
    assert len(large.items) > 9 * len(small.items)
    events_bytes = large.items.nbytes - small.items.nbytes  # of one column
    assert tenfold - once < events_bytes / 4


@pytest.mark.parametrize(
    ("model", "own"), [("rank", ["window_tokens=16"]), ("generate", ["code_count=[6, 6]"])]
)
def test_a_dataset_beyond_the_option_is_trained_on_whole(
    model: str, own: list[str], tmp_path: Path
) -> None:
    made = dataset(tmp_path, "event_type")
    out = tmp_path / "out"
    options = ["memory_events=500", "epochs=1", "dim=8", "refit=true", *own]
    words = [word for option in options for word in ("--set", option)]
    done = CliRunner().invoke(
        main, ["train", model, str(made.folder), "--out", str(out), "--threads", "1", *words]
    )
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "baselines and figures are of a sample:" in said
    assert f"of {made.manifest['events']:,} events" in said
    assert (out / "serve.yaml").exists()
    assert not [path for path in out.iterdir() if path.name.startswith(".events")]


def test_features_of_events_are_rejected_by_name(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    rows = [f"u{n % 5},i{n % 7},{START + n},{n % 3}" for n in range(60)]
    path.write_text("\n".join(["user_id,item_id,timestamp,place", *rows]) + "\n")
    made = prepare(path, tmp_path / "data", PrepareOptions(event_features=("place",)))
    folder, stored = made.dataset.folder, store_events.stored
    rejected = pytest.raises(ConfigError, match="without its log_features")
    with rejected, stored(folder, [], 10, tmp_path / "files"):
        pass
    with stored(folder, [], 10, tmp_path / "files", leaves_out=True) as found:  # by the generator
        assert found is not None
        assert len(found.log.items) == 60
    log = build_log(planted(), [], "leave-one-out")
    asked = TrainOptions(computed=("hour",))
    from npu_gr.train.rank.schema import choose_features

    tasks = choose_tasks(log).tasks
    read = choose_features(log, [], tasks, asked)
    with pytest.raises(ConfigError, match="hour: is made of all events"):
        fit(log, [], tasks, asked, [], "rank", lambda _: None, features=read, whole=log)


def test_a_stored_log_says_what_it_was_made_from(tmp_path: Path) -> None:
    made = dataset(tmp_path, "rating")
    with store_events.stored(made.folder, [], 10, tmp_path / "files") as found:
        assert isinstance(found, StoredLog)
        assert all(one["digest"] in found.made_from for one in made.event_files)
    assert not (tmp_path / "files").exists()
    with store_events.stored(made.folder, [], EVERY, tmp_path / "files") as found:
        assert found is None
