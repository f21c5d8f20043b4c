"""A delta applied to its base is the result, bit for bit, and a wrong one is refused by name."""

from __future__ import annotations

import os
import random
import select
import signal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from npu_gr.core.errors import DeltaError
from npu_gr.handlers.deltas import as_received
from npu_gr.model.delta import (
    FORMAT,
    SUFFIX,
    Delta,
    Manifest,
    ModelIdentity,
    TensorChange,
    apply,
    check_fits,
    file_name,
    make_delta,
    read_delta,
    write_delta,
)
from npu_gr.model.delta_log import DeltaLog
from npu_gr.model.weights import Checkpoint, CheckpointWeights, read_weights, save
from tests.models import tiny_config, tiny_model

ACTIONS = ("skip", "click", "like")


def weights(version: str = "v0", seed: int = 0, **changes: Any) -> CheckpointWeights:
    model = tiny_model(seed=seed, num_items=40, **changes)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors["catalog.item_ids"] = torch.arange(40)
    return CheckpointWeights(model.config, ACTIONS, version, tensors)


def changed(was: CheckpointWeights, version: str, random_: random.Random) -> CheckpointWeights:
    """Change random rows of random tensors, or all of them; also no value, and only a sign."""
    tensors = {name: tensor.clone() for name, tensor in was.tensors.items()}
    for name in random_.sample(sorted(tensors), random_.randint(0, 6)):
        tensor = tensors[name]
        if name == "catalog.item_ids":
            continue
        rows = random_.sample(range(len(tensor)), random_.randint(1, len(tensor)))
        if tensor.is_floating_point():
            tensor[rows] = random_.choice([tensor[rows] + 1, -tensor[rows], tensor[rows] * 0.0])
        else:
            tensor[rows] = torch.randint_like(tensor[rows], 0, 7)
    return was._replace(version=version, tensors=tensors)


def the_same(a: CheckpointWeights, b: CheckpointWeights) -> bool:
    return all(
        a.tensors[name].numpy().tobytes() == b.tensors[name].numpy().tobytes() for name in a.tensors
    )


@given(seed=st.integers(0, 10**9))
@settings(max_examples=20, deadline=None)
def test_the_base_and_a_delta_give_the_result(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """Bit for bit, also of -0.0, through a file, and one after the other."""
    folder = tmp_path_factory.mktemp("deltas")
    now = served = weights()
    served = served._replace(tensors={k: v.clone() for k, v in served.tensors.items()})
    for number in (1, 2):
        new = changed(now, f"v{number}", random.Random(seed + number))
        delta = make_delta(now, new, number)
        write_delta(delta, folder / file_name(number))
        read = read_delta(folder / file_name(number))
        assert read.manifest == delta.manifest
        apply(read, served.tensors)
        assert the_same(served, new)
        now = new


def test_few_rows_are_a_small_file(tmp_path: Path) -> None:
    was = weights()
    now = was._replace(version="v1", tensors={k: v.clone() for k, v in was.tensors.items()})
    now.tensors["item.weight"][[3, 30]] += 1
    now.tensors["head.0.bias"][0] += 1
    delta = make_delta(was, now, 1)
    assert {name: change.rows is None for name, change in delta.changes.items()} == {
        "item.weight": False,
        "head.0.bias": False,
    }
    assert delta.num_rows == 3
    write_delta(delta, tmp_path / file_name(1))
    assert (tmp_path / file_name(1)).stat().st_size < 2000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_layers": 2}, "architecture: it is of a model with another architecture"),
        ({"item_features": ()}, "features: it is of a model with another schema of features"),
    ],
)
def test_another_model_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(DeltaError, match=words):
        make_delta(weights(), weights("v1", **change), 1)


def test_other_items_actions_and_keys_are_refused_by_name() -> None:
    was = weights()
    moved = was._replace(tensors=dict(was.tensors) | {"catalog.item_ids": torch.arange(40) + 1})
    with pytest.raises(DeltaError, match=r"catalog\.item_ids: the checkpoints have other items"):
        make_delta(was, moved, 1)
    with pytest.raises(DeltaError, match="architecture"):
        make_delta(was, was._replace(action_names=("skip", "like", "click")), 1)
    delta = make_delta(was, weights("v1", 1), 1, item_key=b"0123456789abcdef")
    with pytest.raises(DeltaError, match="item_key: it is of a model with another key"):
        ModelIdentity.of(was.model, ACTIONS, b"").check(delta.manifest)


def test_a_file_that_is_torn_or_damaged_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / file_name(1)
    write_delta(make_delta(weights(), weights("v1", 1), 1), path)
    whole = path.read_bytes()
    random_ = random.Random(0)
    for cut in [0, 7, 8, 100, *random_.sample(range(len(whole)), 20), len(whole) - 1]:
        path.write_bytes(whole[:cut])
        with pytest.raises(DeltaError, match=SUFFIX):
            read_delta(path)
    # Any bit: the header, whose spaces are the only bytes without a meaning, or a value.
    header = 8 + int.from_bytes(whole[:8], "little")
    places = [place for place in range(header) if whole[place : place + 1] != b" "]
    for place in [*random_.sample(places, 200), *random_.sample(range(header, len(whole)), 50)]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << random_.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(DeltaError, match=SUFFIX):
            read_delta(path)
    path.write_bytes(whole)
    assert read_delta(path).manifest.result == "v1"
    with pytest.raises(DeltaError, match="no such file"):
        read_delta(tmp_path / "none")
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(DeltaError, match="is no delta: its metadata has no 'delta'"):
        read_delta(tmp_path / "other.safetensors")


@pytest.mark.parametrize(
    ("name", "rows", "values", "words"),
    [
        ("nothing", None, torch.zeros(1), "the model has no such tensor"),
        ("item.weight", [40], torch.zeros(1, 32), "below 40"),
        ("item.weight", [-1], torch.zeros(1, 32), "below 40"),
        ("item.weight", [3, 3], torch.zeros(2, 32), "each once"),
        ("item.weight", [3], torch.zeros(1, 31), r"the model needs torch.float32 \[1, 32\]"),
        ("item.weight", [3], torch.full((1, 32), torch.nan), "a value is not finite"),
        ("item.weight", [3], torch.full((1, 32), -torch.inf), "a value is not finite"),
        ("item.weight", [3], torch.zeros(1, 32, dtype=torch.int64), "int64"),
    ],
)
def test_a_change_that_no_model_can_have_is_refused(
    name: str, rows: list[int] | None, values: torch.Tensor, words: str
) -> None:
    was = weights()
    manifest = make_delta(was, was, 7).manifest
    change = TensorChange(None if rows is None else np.array(rows), values)
    with pytest.raises(DeltaError, match=words) as error:
        check_fits(Delta(manifest, {name: change}), was.tensors)
    assert str(error.value).startswith(f"delta 7: '{name}'")


# ---- a folder of deltas


def published(folder: Path, number: int, base: str, result: str) -> None:
    manifest = make_delta(weights(), weights(), number).manifest
    write_delta(
        Delta(msgspec.structs.replace(manifest, base=base, result=result), {}),
        folder / file_name(number),
    )


def test_a_folder_leads_from_any_checkpoint_on_its_way(tmp_path: Path) -> None:
    log = DeltaLog(tmp_path)
    assert log.way("v0") == []
    for number in (1, 2, 3):
        published(tmp_path, number, f"v{number - 1}", f"v{number}")

    def numbers(base: str, target: int | None = None) -> list[int]:
        return [link.sequence for link in log.way(base, target)]

    assert numbers("v0") == [1, 2, 3]
    assert numbers("v2") == [3]
    assert numbers("v3") == []
    assert numbers("v0", 2) == [1, 2]
    assert numbers("v0", 0) == []
    with pytest.raises(DeltaError, match="delta 4 is not kept; there are 1 to 3"):
        log.way("v0", 4)
    with pytest.raises(DeltaError, match=r"neither the checkpoint \(v9\) nor an older delta"):
        log.way("v9")
    log.roll_back(1)
    assert numbers("v0") == [1]
    published(tmp_path, 4, "v1", "v4")  # the next delta rests on what is served, and ends that
    assert numbers("v0") == [1, 4]
    (tmp_path / file_name(2)).unlink()
    (tmp_path / file_name(1)).unlink()
    assert numbers("v1") == [4]


@pytest.mark.parametrize(
    ("number", "base", "words"),
    [
        (2, "v1", "delta 2: duplicate: it is applied already; the newest is 2"),
        (1, "v9", "delta 1: duplicate: another delta has this number or a later; the newest is 2"),
        (4, "v2", "delta 4: gap: the newest is 2, so 3 must come first"),
        (3, "v1", "delta 3: wrong base: it changes the weights v1, and v2 are served"),
    ],
)
def test_what_is_not_the_next_delta_is_refused_by_name(
    tmp_path: Path, number: int, base: str, words: str
) -> None:
    log = DeltaLog(tmp_path)
    for each in (1, 2):
        published(tmp_path, each, f"v{each - 1}", f"v{each}")
    wanted = log.files()[1].manifest
    wanted = msgspec.structs.replace(wanted, sequence=number, base=base)
    with pytest.raises(DeltaError) as error:
        log.check_next(wanted, "v2")
    assert str(error.value) == words
    log.check_next(msgspec.structs.replace(wanted, sequence=3, base="v2"), "v2")


def test_a_number_is_given_once(tmp_path: Path) -> None:
    published(tmp_path, 1, "v0", "v1")
    with pytest.raises(DeltaError, match="a sequence number is never used twice"):
        published(tmp_path, 1, "v0", "v2")
    (tmp_path / file_name(1)).rename(tmp_path / file_name(2))
    with pytest.raises(DeltaError, match="has delta 1; its name must be"):
        DeltaLog(tmp_path).files()


def test_checkpoints_in_folders(tmp_path: Path) -> None:
    for name, seed in (("old", 0), ("new", 1)):
        made = Checkpoint(model=tiny_model(seed=seed), item_ids=np.arange(300), name=name)
        save(made, tmp_path / name)
    was, now = (read_weights(tmp_path / name) for name in ("old", "new"))
    assert was.model == tiny_config()
    delta = make_delta(was, now, 1)
    assert (delta.manifest.base, delta.manifest.result) == (was.version, now.version)
    before = load_file(tmp_path / "old" / "model.safetensors")
    apply(delta, before)
    assert the_same(was._replace(tensors=before), now)
    # the file of the old checkpoint is as it was
    assert read_weights(tmp_path / "old").version == was.version


# ---- kill -9


def test_a_kill_leaves_the_old_delta_or_the_new_one(tmp_path: Path) -> None:
    """What was answered is there, at most one more is, and every file is whole.

    `NPU_GR_KILLS` sets how many processes are killed, at random instants.
    """
    random_ = random.Random(0)
    last = 0
    log = DeltaLog(tmp_path / "served")
    for _ in range(int(os.environ.get("NPU_GR_KILLS", "10"))):
        bodies = [_body(tmp_path / "sent", number) for number in range(last + 1, last + 9)]
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            try:
                _add(log, bodies, writer)
                signal.pause()  # all are added
            finally:
                os._exit(1)
        os.close(writer)
        with os.fdopen(reader) as answers:
            assert answers.readline()  # it is at work
            select.select([], [], [], random_.uniform(0, 0.01))
            os.kill(child, signal.SIGKILL)
            assert os.waitpid(child, 0)[1] == signal.SIGKILL
            answered = [last + 1, *map(int, answers.read().split())][-1]
        way = log.way("v0")
        assert [link.sequence for link in way] == list(range(1, way[-1].sequence + 1))
        assert way[-1].sequence in (answered, answered + 1)
        for link in way[last:]:
            assert read_delta(link.path).manifest.sequence == link.sequence
        last = way[-1].sequence
    assert last >= int(os.environ.get("NPU_GR_KILLS", "10"))


def _body(path: Path, number: int) -> bytes:
    manifest = Manifest(
        format=FORMAT,
        sequence=number,
        base=f"v{number - 1}",
        result=f"v{number}",
        architecture="",
        features="",
    )
    change = TensorChange(np.arange(1000), torch.arange(4000.0).view(-1, 4) * number)
    write_delta(Delta(manifest, {"a": change}), path)
    body = path.read_bytes()
    path.unlink()
    return body


def _add(log: DeltaLog, bodies: list[bytes], writer: int) -> None:
    """Add deltas as an instance does, and tell the number of each that is durable."""
    for body in bodies:
        made = as_received(log.folder, body)
        manifest = read_delta(made).manifest
        log.check_next(manifest, manifest.base)
        log.add(made, manifest)
        made.unlink()
        os.write(writer, f"{manifest.sequence}\n".encode())
