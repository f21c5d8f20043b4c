"""A stream of deltas on a real Redis: numbers once, in order, checked; what fails is named."""

from __future__ import annotations

import shutil
from pathlib import Path
from threading import Thread

import pytest
import torch
from redis import Redis

from npu_gr.core.errors import ConfigError, DeltaError, Unavailable
from npu_gr.core.secret import SecretUrl
from npu_gr.model.delta import file_name, read_manifest
from npu_gr.model.delta_log import DeltaLog, write_next
from npu_gr.model.delta_stream import NAME, DeltaStream
from tests.history_store.redis_server import redis_path
from tests.server.test_deltas_over_http import changed
from tests.serving import write_checkpoint

COUNT = 4


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Deltas of a head, each on the one before."""
    folder = tmp_path_factory.mktemp("made")
    write_checkpoint(folder / "v0")
    for number in range(COUNT):

        def change(tensors: dict[str, torch.Tensor]) -> None:
            tensors["head.0.bias"] += 1

        old, new = folder / f"v{number}", folder / f"v{number + 1}"
        changed(old, new, change)
        write_next(folder / "deltas", old, new)
    return sorted((folder / "deltas").iterdir())


def numbers(log: DeltaLog) -> list[int]:
    return [link.sequence for link in log.files()]


def add(log: DeltaStream, file: Path) -> None:
    """As an instance does: the file is checked, under no name yet."""
    log.folder.mkdir(exist_ok=True)
    given = log.folder / f".received-{file.name}"
    shutil.copy(file, given)
    try:
        log.add(given, read_manifest(given))
    finally:
        given.unlink()


def test_who_joins_later_has_the_same_files(made: list[Path], tmp_path: Path) -> None:
    with redis_path(tmp_path) as path:
        url = SecretUrl(f"unix://{path}")
        first, second = DeltaStream(tmp_path / "a", url), DeltaStream(tmp_path / "b", url)
        for file in made[:2]:
            add(first, file)
        second.pull()
        add(second, made[2])
        first.pull()
        late = DeltaStream(tmp_path / "c", url)
        late.pull()
        assert [numbers(one) for one in (first, second, late)] == [[1, 2, 3]] * 3
        assert (tmp_path / "c" / made[2].name).read_bytes() == made[2].read_bytes()
        # a rollback is a fleet's too, until the next delta
        late.roll_back(1)
        base = read_manifest(made[0]).base
        for one in (first, second, late):
            one.pull()
            assert [link.sequence for link in one.way(base)] == [1]
        add(first, made[3])
        second.pull()
        assert [link.sequence for link in second.way(base)] == [1, 2, 3, 4]
        assert not [path for path in (tmp_path / "b").iterdir() if path.suffix == ".tmp"]


def test_a_number_is_given_once(made: list[Path], tmp_path: Path) -> None:
    with redis_path(tmp_path) as path:
        url = SecretUrl(f"unix://{path}#other")
        logs = [DeltaStream(tmp_path / str(n), url) for n in range(6)]
        failed: list[DeltaError] = []

        def work(log: DeltaStream) -> None:
            try:
                add(log, made[0])
            except DeltaError as error:
                failed.append(error)

        threads = [Thread(target=work, args=(log,)) for log in logs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(failed) == len(logs) - 1
        assert "may have it from another instance" in str(failed[0])
        redis = Redis(unix_socket_path=path)
        assert (redis.xlen("other"), redis.exists(NAME)) == (1, 0)
        redis.close()


def test_what_is_wrong_in_the_stream_is_named_and_not_copied(
    made: list[Path], tmp_path: Path
) -> None:
    with redis_path(tmp_path) as path:
        log = DeltaStream(tmp_path / "a", SecretUrl(f"unix://{path}"))
        redis = Redis(unix_socket_path=path)

        def entry(number: int, file: bytes) -> None:
            redis.delete(NAME)
            redis.xadd(NAME, {"file": file}, id=f"{number}-0")

        whole = [one.read_bytes() for one in made]
        add(log, made[0])
        for number, file, words in (
            (2, whole[1][:-9], "delta 2 of the stream npu_gr:deltas: .* is torn"),
            (2, whole[2], "entry 2 of the stream npu_gr:deltas has delta 3"),
            (3, whole[2], "delta 3: gap: 2 is not in the stream"),
        ):
            entry(number, file)
            with pytest.raises(DeltaError, match=words):
                log.pull()
        redis.delete(NAME)
        with pytest.raises(DeltaError, match="Redis has lost it; add the files again"):
            log.pull()
        assert numbers(log) == [1]
        redis.xadd(NAME, {"file": whole[0]}, id="1-0")
        redis.set(f"{NAME}:served", b"{}")
        with pytest.raises(DeltaError, match="npu_gr:deltas:served"):
            log.pull()
        redis.close()
    with pytest.raises(Unavailable, match="the stream npu_gr:deltas of deltas"):
        log.pull()
    assert numbers(log) == [1]  # what it has is served without Redis
    with pytest.raises(Unavailable):
        log.roll_back(0)
    assert not (tmp_path / "a" / "served.json").exists()
    for url in ("http://x", "redis://x:port"):
        with pytest.raises(ConfigError, match=r"deltas_stream: \*\*\*|deltas_stream: "):
            DeltaStream(tmp_path, SecretUrl(url))


def test_a_copy_that_was_killed_leaves_no_file_with_a_name(
    made: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with redis_path(tmp_path) as path:
        url = SecretUrl(f"unix://{path}")
        add(DeltaStream(tmp_path / "a", url), made[0])
        log = DeltaStream(tmp_path / "b", url)

        def killed(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("npu_gr.model.delta_stream.publish", killed)
        with pytest.raises(KeyboardInterrupt):
            log.pull()
        assert not (tmp_path / "b" / file_name(1)).exists()
        monkeypatch.undo()
        log.pull()
        assert numbers(log) == [1]
