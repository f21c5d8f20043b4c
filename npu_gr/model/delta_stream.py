"""The deltas of a fleet in a Redis stream, and the copy of them in an instance's folder.

    NAME           stream: entry 42-0 has delta 42 whole, as the field `file`
    NAME:served    after a rollback: the content of `served.json`

Redis takes an entry only above its newest one, so each number is given once, also by two writers.
An instance copies the entries that its folder lacks, in order and checked, and serves from the
folder (`delta_log.py`): one that joins later catches up, and one that finds no Redis starts with
what it has. A delta is in the stream before it is in the folder of the instance that took it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from npu_gr.core.durable_files import replace_file
from npu_gr.core.errors import ConfigError, DeltaError, Unavailable
from npu_gr.core.secret import SecretUrl
from npu_gr.model.delta import Manifest, file_name, publish, read_delta
from npu_gr.model.delta_log import SERVED, DeltaLog, Link, ServedNumber

if TYPE_CHECKING:
    from redis import Redis

NAME = "npu_gr:deltas"  # where the URL has none after #
SCHEMES = ("redis://", "rediss://", "unix://")
TIMEOUT_S = 5.0  # of a connection, and of an answer


class DeltaStream(DeltaLog):
    """A folder of deltas that follows a stream. Its methods block; call them in a thread."""

    def __init__(self, folder: Path, url: SecretUrl) -> None:
        """Connect to nothing yet.

        Args:
            folder: The instance's own folder.
            url: redis://HOST:6379/0#NAME, also rediss:// and unix:///PATH.

        Raises:
            ConfigError: the URL is none of these, or the package is missing.
        """
        super().__init__(folder)
        where, _, name = url.reveal().partition("#")
        if not where.startswith(SCHEMES):
            raise ConfigError(f"models.deltas_stream: {url} must be {', '.join(SCHEMES)}")
        try:
            import redis
        except ImportError as error:
            raise ConfigError("models.deltas_stream needs pip install 'npu_gr[redis]'") from error
        try:
            self._redis: Redis = redis.Redis.from_url(
                where, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S
            )
        except ValueError:  # its text may have a part of the password
            raise ConfigError(f"models.deltas_stream: {url} is no address of a Redis") from None
        self._name = name or NAME
        self._failed = redis.RedisError
        self._rejected = redis.ResponseError
        self._one_at_a_time = threading.Lock()

    def pull(self) -> None:
        """Copy what the stream has and the folder lacks.

        Raises:
            DeltaError: an entry is torn or not the next one, or the stream lacks what the folder
                has; the entries before it are copied.
            Unavailable: Redis does not answer, or the disk failed.
        """
        with self._one_at_a_time, self._asking():
            newest = self._newest()
            while found := self._entries(newest):
                number, body = found
                if newest and number != newest + 1:
                    raise DeltaError(
                        f"delta {number}: gap: {newest + 1} is not in the stream {self._name}, and "
                        f"the newest of {self.folder} is {newest}"
                    )
                self._copy(number, body)
                newest = number
            if newest and not self._redis.exists(self._name):
                raise DeltaError(
                    f"the stream {self._name} has no delta, and {self.folder} has up to {newest}: "
                    "Redis has lost it; add the files again, in order"
                )
            served: Any = self._redis.get(f"{self._name}:served")
        if served is not None:
            self._follow(served)

    def check_next(self, delta: Manifest, served: str) -> None:
        """Check as `DeltaLog`, against the stream too.

        Raises:
            Unavailable: Redis does not answer.
        """
        self.pull()
        super().check_next(delta, served)

    def add(self, made: Path, delta: Manifest) -> Link:
        """Add a complete, checked file to the stream, and then to the folder.

        Raises:
            DeltaError: another writer was first, or the disk failed.
            Unavailable: Redis did not answer; the stream may have it, and then it will be served.
        """
        with self._one_at_a_time:
            with self._asking():
                try:
                    entry: Any = {"file": made.read_bytes()}
                    self._redis.xadd(self._name, entry, id=f"{delta.sequence}-0")
                except self._rejected as error:
                    raise DeltaError(
                        f"delta {delta.sequence}: not in the stream {self._name}, which may have "
                        f"it from another instance: {error}"
                    ) from error
            return super().add(made, delta)

    def roll_back(self, target: int) -> None:
        """Name the served delta, for the fleet and in the folder.

        Raises:
            DeltaError: the disk failed.
            Unavailable: Redis did not answer.
        """
        served = ServedNumber(target, self._newest())
        with self._asking():
            self._redis.set(f"{self._name}:served", msgspec.json.encode(served))
        super().roll_back(target)

    # ---- parts

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except self._failed as error:
            raise Unavailable(f"the stream {self._name} of deltas: {error}") from error
        except OSError as error:
            raise Unavailable(f"{self.folder}: {error.strerror}") from error

    def _newest(self) -> int:
        files = self.files()
        return files[-1].sequence if files else 0

    def _entries(self, after: int) -> tuple[int, bytes] | None:
        """Read the first entry above a number."""
        found: Any = self._redis.xread({self._name: f"{after}-0"}, count=1)
        if not found:
            return None
        [(_, [(entry, fields)])] = found
        return int(entry.partition(b"-")[0]), fields.get(b"file", b"")

    def _copy(self, number: int, body: bytes) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        made = self.folder / f".stream-{os.getpid()}.tmp"
        try:
            made.write_bytes(body)
            made.chmod(0o644)  # as the other files
            try:
                found = read_delta(made).manifest.sequence
            except DeltaError as error:
                raise DeltaError(f"delta {number} of the stream {self._name}: {error}") from error
            if found != number:
                raise DeltaError(f"entry {number} of the stream {self._name} has delta {found}")
            publish(made, self.folder / file_name(number))
        finally:
            made.unlink(missing_ok=True)

    def _follow(self, served: bytes) -> None:
        path = self.folder / SERVED
        try:
            msgspec.json.decode(served, type=ServedNumber)
            if not path.exists() or path.read_bytes() != served:
                replace_file(path, served)
        except (OSError, msgspec.MsgspecError) as error:
            raise DeltaError(f"{self._name}:served: {error}") from error
