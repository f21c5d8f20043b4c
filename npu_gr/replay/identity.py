"""The names that users have in recordings: a keyed hash, or where the configuration says so their own.

With the key a user can be found again, which an erasure needs; without it a recording names nobody.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from contextlib import suppress
from pathlib import Path

from npu_gr.core.errors import ConfigError
from npu_gr.core.history import UserKey
from npu_gr.core.private import make_private, warn_if_shared

KEY_FILE = "hash-key"  # in the folder of the recordings, where the configuration names no other
MIN_KEY_BYTES = 16


def recorded_as(user: UserKey, key: bytes | None) -> UserKey:
    """Return the names that a record has; with a key each is 32 hex digits of HMAC-SHA256. No tenant stays none."""
    if key is None:
        return user
    return UserKey(_hashed(key, "tenant", user.tenant) if user.tenant else "", _hashed(key, "user", *user))


def names_of(user: UserKey, folder: Path, key: bytes | None) -> list[UserKey]:
    """Return every name that the user may have in the recordings of a folder, whatever its configuration was before."""
    keys = {None, key, _key_beside(folder)}
    return [recorded_as(user, one) for one in keys]


def read_key(path: Path) -> bytes:
    """Read a key.

    Raises:
        ConfigError: there is none, or it is too short.
    """
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"record.hash_key_file: {path}: {error.strerror}") from error
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(f"record.hash_key_file: {path} holds {len(key)} bytes, at least {MIN_KEY_BYTES} are needed")
    return key


def made_key(folder: Path) -> bytes:
    """Read the key of a folder, and make it if it is missing. Processes that do so at the same time get one key.

    Raises:
        ConfigError: it cannot be used. OSError: it cannot be made.
    """
    path = folder / KEY_FILE
    if not path.exists():
        beside = folder / f".{KEY_FILE}-{os.getpid()}"
        make_private(beside)
        try:
            with beside.open("w") as file:
                file.write(secrets.token_hex(32) + "\n")
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):
                path.hardlink_to(beside)
        finally:
            beside.unlink()
    warn_if_shared(path)
    return read_key(path)


def _key_beside(folder: Path) -> bytes | None:
    try:
        return (folder / KEY_FILE).read_bytes().strip()
    except FileNotFoundError:
        return None


def _hashed(key: bytes, *parts: str) -> str:
    encoded = (part.encode("utf-8", "surrogatepass") for part in parts)
    message = b"".join(len(part).to_bytes(4, "little") + part for part in encoded)
    return hmac.new(key, message, hashlib.sha256).hexdigest()[:32]
