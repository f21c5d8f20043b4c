"""The keys of a file in force: found by what a caller sends, read again when the file's content changes.

the file changes            the new keys are in force within LOOK_S
it is emptied or deleted    no key is in force any more
it cannot be parsed         the old keys stay; `is_stale` and the log say so
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from enum import StrEnum, auto
from pathlib import Path

from npu_gr.core.bucket import TokenBucket
from npu_gr.core.errors import ConfigError, Forbidden, Overloaded, Refusal, Unauthorized
from npu_gr.core.kinds import Scope
from npu_gr.core.logs import SeldomLog
from npu_gr.server.auth.keys import ANYBODY, MIN_CHARACTERS, Key, parse_keys

log = logging.getLogger(__name__)

LOOK_S = 0.5  # between two looks at the file
BURST_S = 1.0  # of a key's rate that may come at once
_SCHEME = b"bearer "


class KeyRefusal(StrEnum):
    """Why a request was refused for its key; the value of the metric label `reason`."""

    MISSING = auto()  # no key, or one of another scheme
    SHORT = auto()  # too short to be one
    UNKNOWN = auto()
    EXPIRED = auto()
    SCOPE = auto()  # the key does not allow this
    TENANT = auto()  # the key is another tenant's
    RATE = auto()  # the key is over its rate


class KeyRing:
    """The keys of one file. Without a file everybody may do everything."""

    def __init__(
        self,
        path: Path | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Read the file.

        Args:
            path: of the file; None = there are no keys.
            clock: seconds that never go back, for rates.
            wall_clock: seconds since 1970, for expiry.

        Raises:
            ConfigError: the file cannot be used, or holds no key.
        """
        self._path = path
        self.has_keys = path is not None  # callers need one
        self._clock = clock
        self._wall_clock = wall_clock
        self._read: bytes | None = None
        self._keys: dict[bytes, Key] = {}  # by SHA-256
        self._buckets: dict[str, TokenBucket] = {}
        self.is_stale = False  # the file cannot be used; the keys are older than it
        self.on_refused: Callable[[KeyRefusal], None] = lambda _reason: None
        self.on_spent: Callable[[str], None] = lambda _name: None  # a request of a key that has a rate
        self._refusals = SeldomLog(log)
        if path is not None:
            try:
                self._use(path.read_bytes())
            except OSError as error:
                raise ConfigError(f"api_keys_file: {path}: {error.strerror}") from error
            if not self._keys:
                raise ConfigError(f"api_keys_file: {path} holds no key")

    def __len__(self) -> int:
        now_at = self._wall_clock()
        return sum(now_at < key.expires_at for key in self._keys.values())

    # ---- the file

    def _use(self, content: bytes) -> None:
        self._read = content
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"api_keys_file: {self._path}: not UTF-8") from error
        entries = parse_keys(text, f"api_keys_file: {self._path}").keys
        self._keys = {bytes.fromhex(entry.sha256): Key.of(entry) for entry in entries}
        buckets: dict[str, TokenBucket] = {}
        for key in self._keys.values():
            if key.rate_per_s is not None:
                old = self._buckets.get(key.name)
                same = old is not None and old.rate_per_s == key.rate_per_s
                buckets[key.name] = old if old and same else TokenBucket(key.rate_per_s, BURST_S * key.rate_per_s)
        self._buckets = buckets

    def reload_if_changed(self) -> None:
        """Read the file again; other content is in force at once. A file that cannot be parsed changes nothing."""
        if self._path is None:
            return
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            content = b""
        except OSError as error:
            if not self.is_stale:
                log.error("the old keys stay in force: api_keys_file: %s: %s", self._path, error.strerror)
            self.is_stale = True
            self._read = None  # so that the same content ends this state
            return
        if content == self._read:
            return
        try:
            self._use(content)
        except ConfigError as error:
            self.is_stale = True
            log.error("the old keys stay in force: %s", error)
        else:
            self.is_stale = False
            level = logging.INFO if self._keys else logging.ERROR
            log.log(level, "%d API keys are in force", len(self._keys))

    async def follow(self) -> None:
        """Look twice a second whether the file has changed, in a thread, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(self.reload_if_changed)

    # ---- a caller

    def find(self, authorization: bytes | None) -> Key:
        """Find the key that a caller has sent.

        Args:
            authorization: the header's value as it came; None = there is no such header.

        Raises:
            Unauthorized: it is none of the keys in force. `on_refused` was told why.
        """
        if self._path is None:
            return ANYBODY
        if authorization is None or authorization[: len(_SCHEME)].lower() != _SCHEME:
            raise self._refusal(KeyRefusal.MISSING)
        sent = authorization[len(_SCHEME) :].strip()
        if len(sent) < MIN_CHARACTERS:
            raise self._refusal(KeyRefusal.SHORT)
        # what is looked up is the hash of what was sent: how long that takes tells nothing of a key
        key = self._keys.get(hashlib.sha256(sent).digest())
        if key is None:
            raise self._refusal(KeyRefusal.UNKNOWN)
        if self._wall_clock() >= key.expires_at:
            raise self._refusal(KeyRefusal.EXPIRED)
        return key

    def spent_elsewhere(self, name: str, num: int) -> None:
        """Count requests that came with the key of this name to another process of the instance."""
        if (bucket := self._buckets.get(name)) is not None:
            bucket.owe(num)

    def spend(self, key: Key) -> None:
        """Count one request against a key's rate.

        Raises:
            Overloaded: the key is over its rate.
        """
        bucket = self._buckets.get(key.name)
        if bucket is None:
            return
        if bucket.take(self._clock()):
            self.on_spent(key.name)
        else:
            self._refused(KeyRefusal.RATE, key)
            raise Overloaded(
                f"the key {key.name!r} may send {bucket.rate_per_s:g} requests a second",
                retry_after_s=1.0,
                reason=Refusal.RATE,
            )

    def require(self, key: Key, scope: Scope) -> None:
        """Check that a key allows something.

        Raises:
            Forbidden: it does not. `on_refused` was told.
        """
        try:
            key.require(scope)
        except Forbidden:
            self._refused(KeyRefusal.SCOPE, key)
            raise

    def tenant_of(self, key: Key, named: str) -> str:
        """Decide whose data a request is about.

        Args:
            key: of the caller.
            named: the tenant that the request names; "" = none.

        Raises:
            Forbidden: it names another one than the key's. `on_refused` was told.
        """
        try:
            return key.tenant_of(named)
        except Forbidden:
            self._refused(KeyRefusal.TENANT, key)
            raise

    def _refused(self, reason: KeyRefusal, key: Key | None = None) -> None:
        self.on_refused(reason)
        whose = "" if key is None else f" {key.name!r}"
        cause = f"a request was refused for its API key{whose}: {reason.value}"
        self._refusals.warning(cause, cause)

    def _refusal(self, reason: KeyRefusal) -> Unauthorized:
        self._refused(reason)
        return Unauthorized("Authorization: needs `Bearer` and a valid API key")
