"""The list of erased users in a folder of recordings.

Every reader skips the records of these users until they are removed.

    {"salt": "..."}                     the first line
    {"who": "...", "at": 1.7e9}         erases records of this user up to this time

A line has a salted hash of the user id and tenant in the records, so that the list can be used
without the key of the recordings, and reveals no user ids. Writers hold a lock; readers need none.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from npu_gr.core.durable_files import replace_file
from npu_gr.core.errors import ConfigError, DataError
from npu_gr.core.file_permissions import make_private, open_private, warn_if_shared
from npu_gr.core.history import UserKey

KEY_FILE = "hash-key"  # default, in the folder of the recordings
MIN_KEY_BYTES = 16


def recorded_as(user: UserKey, key: bytes | None) -> UserKey:
    """Return user id and tenant as in a record; with a key, 32 hex digits of HMAC-SHA256 each.

    An empty tenant stays empty.
    """
    if key is None:
        return user
    return UserKey(
        _hashed(key, "tenant", user.tenant) if user.tenant else "", _hashed(key, "user", *user)
    )


def names_of(user: UserKey, folder: Path, key: bytes | None) -> list[UserKey]:
    """Return all pseudonyms that a user may have in a folder, also by earlier configurations."""
    keys = {None, key, _default_key(folder)}
    return [recorded_as(user, one) for one in keys]


def read_key(path: Path) -> bytes:
    """Read a key.

    Raises:
        ConfigError: the key cannot be read, or is too short.
    """
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"record.hash_key_file: {path}: {error.strerror}") from error
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(
            f"record.hash_key_file: {path} has {len(key)} bytes, the minimum is {MIN_KEY_BYTES}"
        )
    return key


def made_key(folder: Path) -> bytes:
    """Read the key of a folder, or create it; concurrent processes get the same key.

    Raises:
        ConfigError: the key cannot be used.
        OSError: it cannot be created.
    """
    path = folder / KEY_FILE
    if not path.exists():
        temporary = folder / f".{KEY_FILE}-{os.getpid()}"
        make_private(temporary)
        try:
            with temporary.open("w") as file:
                file.write(secrets.token_hex(32) + "\n")
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):
                path.hardlink_to(temporary)
        finally:
            temporary.unlink()
    warn_if_shared(path)
    return read_key(path)


def _default_key(folder: Path) -> bytes | None:
    try:
        return (folder / KEY_FILE).read_bytes().strip()
    except FileNotFoundError:
        return None


def _hashed(key: bytes, *parts: str) -> str:
    encoded = (part.encode("utf-8", "surrogatepass") for part in parts)
    message = b"".join(len(part).to_bytes(4, "little") + part for part in encoded)
    return hmac.new(key, message, hashlib.sha256).hexdigest()[:32]


# ---- the list

LIST = "erased.jsonl"
_LOCK = ".erased.lock"  # held briefly, to write one small file
_TRIES = 100
_TRY_S = 0.05


class _Salt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    salt: str


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    who: str
    at: float


class ErasedUsers:
    """The erased users of a folder, immutable."""

    def __init__(self, salt: str = "", until: Mapping[str, float] | None = None) -> None:
        self._salt = bytes.fromhex(salt)
        self.until: Mapping[str, float] = until or {}  # hash of a user -> unix seconds

    def hides(self, names: UserKey, ts: float) -> bool:
        """Whether a record of this user and time is erased."""
        if not self.until:
            return False
        return ts <= self.until.get(_who(self._salt, names), float("-inf"))


def read(folder: Path) -> ErasedUsers:
    """Read the list of a folder.

    An incomplete last line was never acknowledged, and is ignored.

    Raises:
        DataError: the list cannot be read, so no record may be read.
    """
    path = folder / LIST
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return ErasedUsers()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    if not lines:
        return ErasedUsers()
    until: dict[str, float] = {}
    try:
        salt = msgspec.json.decode(lines[0], type=_Salt).salt
        for text in lines[1:]:
            line = msgspec.json.decode(text, type=_Line)
            until[line.who] = max(line.at, until.get(line.who, line.at))
        return ErasedUsers(salt, until)
    except (msgspec.MsgspecError, ValueError) as error:
        raise DataError(
            f"{path}: {error}; without the list it is unknown whose records are erased, so none is "
            "read"
        ) from error


def add(folder: Path, names: Iterable[UserKey], at: float) -> None:
    """Add a user under all pseudonyms, durably.

    Raises:
        OSError: writing failed; the user may not be in the list.
        DataError: the list is damaged.
    """
    path = folder / LIST
    with _locked(folder):
        known = read(folder)
        salt = known._salt
        if not salt:
            salt = secrets.token_bytes(16)
            _replace(folder, salt.hex(), {})
        lines = b"".join(msgspec.json.encode(_Line(_who(salt, one), at)) + b"\n" for one in names)
        with path.open("r+b") as file:
            end = file.read().rfind(b"\n") + 1
            file.truncate(end)  # remove an incomplete last line
            file.seek(end)
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())


def drop(folder: Path, done: Mapping[str, float]) -> None:
    """Remove users whose records are gone, unless they were erased again later.

    Raises:
        OSError, DataError: the list is unchanged.
    """
    with _locked(folder):
        known = read(folder)
        left = {who: at for who, at in known.until.items() if at > done.get(who, float("-inf"))}
        if left:
            _replace(folder, known._salt.hex(), left)
        else:
            (folder / LIST).unlink(missing_ok=True)


def _who(salt: bytes, names: UserKey) -> str:
    parts = [part.encode("utf-8", "surrogatepass") for part in names]
    return hashlib.blake2b(
        len(parts[0]).to_bytes(4, "big") + b"".join(parts), digest_size=16, key=salt
    ).hexdigest()


def _replace(folder: Path, salt: str, until: Mapping[str, float]) -> None:
    lines = [
        msgspec.json.encode(_Salt(salt)),
        *(msgspec.json.encode(_Line(who, at)) for who, at in until.items()),
    ]
    replace_file(folder / LIST, b"".join(line + b"\n" for line in lines))


def _lock(handle: int, folder: Path) -> None:
    for _ in range(_TRIES):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(_TRY_S)
    raise DataError(
        f"{folder / LIST}: another process has locked it for over {_TRIES * _TRY_S:g} s"
    )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = open_private(folder / _LOCK)
    try:
        _lock(handle, folder)
        yield
    finally:
        os.close(handle)
