"""API keys: scopes, tenant, rate limit and expiry of each client.

A key is a long random text that a client sends as `Authorization: Bearer KEY`. The file holds its
SHA-256 and never the key itself, so the file is of no use to an attacker. A hash without salt is
enough, because 256 random bits cannot be guessed. `npu-gr keys new|list|revoke` writes the file:

    keys:
    - name: ranking                   # appears in logs and metrics
      sha256: 0f3a...                 # hash of the key
      tenant: shop                    # '*' = the tenant that each request names
      scopes: [infer, ingest]         # infer | ingest | erase | observe | admin
      rate_per_s: 500.0               # requests; absent = no limit
      expires: '2027-01-31T00:00:00Z' # absent = never
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum, auto
from pathlib import Path
from typing import Annotated

import msgspec
import yaml

from npu_gr.core.errors import ConfigError, Forbidden, Overloaded, Rejection, Unauthorized
from npu_gr.core.health import Worker
from npu_gr.core.kinds import Scope
from npu_gr.core.logs import ThrottledLog
from npu_gr.core.settings import Positive, parse
from npu_gr.core.shares import TokenBucket

MIN_CHARACTERS = 24  # of a key: 144 bits if they are random letters and digits
ANY_TENANT = "*"


class KeyEntry(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One entry of the key file."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    tenant: Annotated[str, msgspec.Meta(max_length=128)]
    scopes: Annotated[list[Scope], msgspec.Meta(min_length=1)]
    rate_per_s: Positive | None = None
    expires: datetime | None = None

    def __post_init__(self) -> None:
        if self.expires is not None and self.expires.tzinfo is None:
            raise ValueError(
                f"expires: {self.expires.isoformat()} has no time zone; end it with Z for UTC"
            )
        if self.expires is not None and not 1970 <= self.expires.year < 9999:
            raise ValueError(
                f"expires: {self.expires.isoformat()} is outside of the years 1970 to 9998"
            )


class KeyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a key file."""

    keys: list[KeyEntry] = []

    def __post_init__(self) -> None:
        for field in ("name", "sha256"):
            seen: set[str] = set()
            for key in self.keys:
                value = getattr(key, field)
                if value in seen:
                    raise ValueError(f"keys: {field} {value} is given twice")
                seen.add(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """The rights of a client."""

    name: str
    tenant: str | None  # None = the tenant that each request names
    scopes: frozenset[Scope]
    rate_per_s: float | None = None
    expires_at: float = float("inf")  # seconds since 1970

    @classmethod
    def of(cls, entry: KeyEntry) -> Key:
        """Convert an entry of the file."""
        return cls(
            name=entry.name,
            tenant=None if entry.tenant == ANY_TENANT else entry.tenant,
            scopes=frozenset(entry.scopes),
            rate_per_s=entry.rate_per_s,
            expires_at=entry.expires.timestamp() if entry.expires else float("inf"),
        )

    def require(self, scope: Scope) -> None:
        """Raise Forbidden if the key lacks the scope."""
        if scope not in self.scopes:
            has = ", ".join(sorted(self.scopes))
            raise Forbidden(f"the key {self.name!r} has the scopes {has}; needs {scope.value}")

    def tenant_of(self, named: str) -> str:
        """Return the tenant of a request.

        Args:
            named: The tenant that the request names; "" = none.

        Raises:
            Forbidden: The request names another tenant than the key's.
        """
        if self.tenant is None:
            return named
        if named not in ("", self.tenant):
            raise Forbidden(f"tenant: the key {self.name!r} is for the tenant {self.tenant!r} only")
        return self.tenant


# The key of every client of an instance without a key file: all scopes, any tenant.
ANONYMOUS = Key(name="anybody", tenant=None, scopes=frozenset(Scope))


def hash_of(key: bytes) -> str:
    """Return the SHA-256 of a key as hex, as the key file has it."""
    return hashlib.sha256(key).hexdigest()


def parse_keys(text: str, where: str) -> KeyFile:
    """Parse the YAML text of a key file; an empty text has no keys.

    Args:
        text: Content of the file.
        where: Prefix of error messages, such as the path of the file.

    Raises:
        ConfigError: A field is unknown, missing or out of range.
    """
    if not text.strip():
        return KeyFile()
    if not re.search(r"^keys:", text, re.MULTILINE):
        raise ConfigError(f"{where}: the list `keys` is missing; `npu-gr keys new` writes it")
    return parse(text, KeyFile, where)


def read_keys(path: Path) -> KeyFile:
    """Read a key file.

    Raises:
        ConfigError: The file cannot be read, or a field is wrong.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or 'not UTF-8'}") from error
    return parse_keys(text, str(path))


def to_yaml(file: KeyFile) -> str:
    """Return the YAML text of a key file."""
    table = msgspec.to_builtins(file)
    text: str = yaml.safe_dump(table, sort_keys=False, default_flow_style=None, width=200)
    return text


def in_utc(entry: KeyEntry) -> str:
    """Return when a key expires as text, in UTC; "never" = it does not."""
    return (
        "never"
        if entry.expires is None
        else entry.expires.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    )


log = logging.getLogger(__name__)

LOOK_S = 0.5  # period of the checks whether the file has changed
BURST_S = 1.0  # burst size of a key's rate limit, in seconds of its rate
_SCHEME = b"bearer "


class KeyRejection(StrEnum):
    """Why a request was rejected because of its key; values of the metric label `reason`."""

    MISSING = auto()  # no Authorization header, or another scheme than Bearer
    SHORT = auto()  # shorter than MIN_CHARACTERS
    UNKNOWN = auto()
    EXPIRED = auto()
    SCOPE = auto()  # the key lacks the scope
    TENANT = auto()  # the request names another tenant than the key's
    RATE = auto()  # the key is over its rate limit


class KeyRing:
    """The keys of one file, and their rate limits. Without a file every client has all rights."""

    def __init__(
        self,
        path: Path | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Read the file.

        Args:
            path: Key file; None = clients need no key.
            clock: Monotonic clock in seconds, for rate limits.
            wall_clock: Unix time in seconds, for expiry.

        Raises:
            ConfigError: The file cannot be used, or holds no key.
        """
        self._path = path
        self.has_keys = path is not None  # clients need one
        self._clock = clock
        self._wall_clock = wall_clock
        self._read: bytes | None = None
        self._keys: dict[bytes, Key] = {}  # by SHA-256
        self._buckets: dict[str, TokenBucket] = {}
        self.is_stale = False  # the file has changed but cannot be used; the old keys apply
        self.on_rejected: Callable[[KeyRejection], None] = lambda _reason: None
        self._rejections = ThrottledLog(log)
        self._wrong_keys = Throttle()
        if path is not None:
            try:
                self._use(path.read_bytes())
            except OSError as error:
                raise ConfigError(f"api_keys_file: {path}: {error.strerror}") from error
            if not self._keys:
                raise ConfigError(f"api_keys_file: {path} holds no key; `npu-gr keys new` adds one")

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
                buckets[key.name] = (
                    old if old and same else TokenBucket(key.rate_per_s, BURST_S * key.rate_per_s)
                )
        self._buckets = buckets

    def reload_if_changed(self) -> None:
        """Read the file again, and use its keys from now on if it has changed.

        A file that cannot be used changes nothing.
        """
        if self._path is None:
            return
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            content = b""
        except OSError as error:
            if not self.is_stale:
                log.error(
                    "api_keys_file: %s: %s; the old keys still apply", self._path, error.strerror
                )
            self.is_stale = True
            self._read = None  # so that reading the same content again resets `is_stale`
            return
        if content == self._read:
            return
        try:
            self._use(content)
        except ConfigError as error:
            self.is_stale = True
            log.error("%s; the old keys still apply", error)
        else:
            self.is_stale = False
            level = logging.INFO if self._keys else logging.ERROR
            log.log(level, "api_keys_file: read %d API keys", len(self._keys))

    async def follow(self, worker: Worker) -> None:
        """Call `reload_if_changed` in a thread every LOOK_S, until cancelled."""
        async for _ in worker.turns(LOOK_S):
            await asyncio.to_thread(self.reload_if_changed)

    # ---- requests

    def find(self, authorization: bytes | None) -> Key:
        """Find the key that a client has sent.

        Args:
            authorization: Value of the Authorization header; None = there is no such header.

        Raises:
            Unauthorized: No valid key was sent. `on_rejected` has received the reason.
        """
        if self._path is None:
            return ANONYMOUS
        if authorization is None or authorization[: len(_SCHEME)].lower() != _SCHEME:
            raise self._rejection(KeyRejection.MISSING)
        sent = authorization[len(_SCHEME) :].strip()
        if len(sent) < MIN_CHARACTERS:
            raise self._rejection(KeyRejection.SHORT)
        # looking up the hash of the sent text: its timing reveals nothing about a valid key
        key = self._keys.get(hashlib.sha256(sent).digest())
        if key is None:
            raise self._rejection(KeyRejection.UNKNOWN)
        if self._wall_clock() >= key.expires_at:
            raise self._rejection(KeyRejection.EXPIRED)
        return key

    async def of_client(self, sent: str | None) -> Key:
        """Find the key of a client as `find` does; delay the rejection while keys are guessed."""
        try:
            return self.find(None if sent is None else sent.encode(errors="surrogateescape"))
        except Unauthorized:
            await asyncio.sleep(self._wrong_keys.hold_s())
            raise

    def spend(self, key: Key) -> None:
        """Count one request against a key's rate limit.

        Raises:
            Overloaded: The key is over its rate limit.
        """
        bucket = self._buckets.get(key.name)
        if bucket is None or bucket.take(self._clock()):
            return
        self._rejected(KeyRejection.RATE, key)
        raise Overloaded(
            f"the key {key.name!r} is over its limit of {bucket.rate_per_s:g} requests a second",
            retry_after_s=1.0,
            reason=Rejection.RATE,
        )

    def require(self, key: Key, scope: Scope) -> None:
        """Raise Forbidden if the key lacks the scope; `on_rejected` receives the reason."""
        try:
            key.require(scope)
        except Forbidden:
            self._rejected(KeyRejection.SCOPE, key)
            raise

    def tenant_of(self, key: Key, named: str) -> str:
        """Return the tenant of a request.

        Args:
            key: The client's key.
            named: The tenant that the request names; "" = none.

        Raises:
            Forbidden: The request names another tenant than the key's. `on_rejected` has received
                the reason.
        """
        try:
            return key.tenant_of(named)
        except Forbidden:
            self._rejected(KeyRejection.TENANT, key)
            raise

    def _rejected(self, reason: KeyRejection, key: Key | None = None) -> None:
        self.on_rejected(reason)
        whose = "" if key is None else f" {key.name!r}"
        cause = f"a request was rejected for its API key{whose}: {reason.value}"
        self._rejections.warning(cause, cause)

    def _rejection(self, reason: KeyRejection) -> Unauthorized:
        self._rejected(reason)
        return Unauthorized("Authorization: send `Bearer` and a valid API key")


RATE_PER_S = 10.0  # wrong keys a second that are answered at once
BURST = 20.0
HOLD_S = 1.0  # delay of the other answers
# Answers delayed at once; each occupies a connection, so more of them are not delayed.
MAX_HELD = 1000


class Throttle:
    """Slows down the guessing of keys: delays the rejections over `RATE_PER_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without rejections; `clock` is monotonic, in seconds."""
        self._clock = clock
        self._bucket = TokenBucket(RATE_PER_S, BURST)
        self._held: deque[float] = deque()  # when each delayed answer is sent, in order

    def hold_s(self) -> float:
        """Count one wrong key, and return the delay of its answer in seconds."""
        now_at = self._clock()
        while self._held and self._held[0] <= now_at:
            self._held.popleft()
        if self._bucket.take(now_at) or len(self._held) >= MAX_HELD:
            return 0.0
        self._held.append(now_at + HOLD_S)
        return HOLD_S
