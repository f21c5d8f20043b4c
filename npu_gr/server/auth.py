"""API keys: `Authorization: Bearer KEY`.

The keys are in a file, one a line. They are compared in constant time, and read again when the file changes.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from pathlib import Path

from npu_gr.core.errors import ConfigError, Unauthorized

log = logging.getLogger(__name__)

LOOK_S = 0.5  # between two looks at the file


class ApiKeys:
    """The keys of one file. Without a file every request is authorised.

    Raises:
        ConfigError: the file cannot be read, or holds no key.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._stamp = 0
        self._keys: tuple[bytes, ...] = ()
        if path is not None:
            self._keys = self._read(path)

    def _read(self, path: Path) -> tuple[bytes, ...]:
        """Read the keys, and remember the file's time of change in `_stamp` (0 = unusable, already logged)."""
        try:
            self._stamp = path.stat().st_mtime_ns
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise ConfigError(f"server.api_keys_file: {path}: {error.strerror}") from error
        keys = tuple(key for line in lines if (key := line.strip()) and not key.startswith(b"#"))
        if not keys:
            raise ConfigError(f"server.api_keys_file: {path} holds no key")
        return keys

    def reload_if_changed(self) -> None:
        """Read the file again if it has changed. If it cannot be used, keep the old keys, and log that once."""
        if self._path is None:
            return
        try:
            if self._path.stat().st_mtime_ns == self._stamp:
                return
            self._keys = self._read(self._path)
        except ConfigError as error:
            log.error("the old keys stay in force: %s", error)
        except OSError as error:
            if self._stamp:
                log.error("the old keys stay in force: server.api_keys_file: %s", error.strerror)
            self._stamp = 0
        else:
            log.info("%d API keys loaded", len(self._keys))

    async def follow(self) -> None:
        """Look twice a second whether the file has changed, in a thread, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(self.reload_if_changed)

    def check(self, authorization: str | None) -> None:
        """Raise Unauthorized if the header has none of the keys. Compares every key, so the time tells nothing."""
        if self._path is None:
            return
        scheme, _, given = (authorization or "").partition(" ")
        offered = given.strip().encode(errors="surrogateescape")  # a header may hold any bytes
        matches = [hmac.compare_digest(offered, key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise Unauthorized("Authorization: needs `Bearer` and a valid API key")
