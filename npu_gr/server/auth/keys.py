"""API keys: who may do what, for which tenant, how often and until when.

A key is a long random text that a caller sends as `Authorization: Bearer KEY`. The file holds its SHA-256 and never the
key itself, so whoever reads the file can call nobody. A hash without salt is enough because a key is random: nobody
can try its 256 bits. `npu-gr keys new|list|revoke` writes the file:

    keys:
    - name: ranking                   # in logs and metrics; never the key
      sha256: 0f3a...                 # of the key
      tenant: shop                    # '*' = the one that each request names
      scopes: [infer, ingest]         # infer | ingest | erase | observe | admin
      rate_per_s: 500.0               # requests; absent = no limit
      expires: '2027-01-31T00:00:00Z' # absent = never
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import yaml

from npu_gr.core.errors import ConfigError, Forbidden
from npu_gr.core.kinds import Scope
from npu_gr.core.settings import Positive, parse

MIN_CHARACTERS = 24  # of a key: 144 bits if they are random letters and digits
ANY_TENANT = "*"


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One key, as the file has it."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    tenant: Annotated[str, msgspec.Meta(max_length=128)]
    scopes: Annotated[list[Scope], msgspec.Meta(min_length=1)]
    rate_per_s: Positive | None = None
    expires: datetime | None = None

    def __post_init__(self) -> None:
        if self.expires is not None and self.expires.tzinfo is None:
            raise ValueError(f"expires: {self.expires.isoformat()} has no time zone; end it with Z for UTC")
        if self.expires is not None and not 1970 <= self.expires.year < 9999:
            raise ValueError(f"expires: {self.expires.isoformat()}: the limits are the years 1970 and 9998")


class KeyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of keys."""

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
    """What a caller may do."""

    name: str
    tenant: str | None  # None = the one that each request names
    scopes: frozenset[Scope]
    rate_per_s: float | None = None
    expires_at: float = float("inf")  # seconds since 1970

    @classmethod
    def of(cls, entry: KeyEntry) -> Key:
        """Make the key of an entry of the file."""
        return cls(
            name=entry.name,
            tenant=None if entry.tenant == ANY_TENANT else entry.tenant,
            scopes=frozenset(entry.scopes),
            rate_per_s=entry.rate_per_s,
            expires_at=entry.expires.timestamp() if entry.expires else float("inf"),
        )

    def require(self, scope: Scope) -> None:
        """Check that the key allows something.

        Raises:
            Forbidden: it does not.
        """
        if scope not in self.scopes:
            has = ", ".join(sorted(self.scopes))
            raise Forbidden(f"the key {self.name!r} has the scopes {has}; this needs {scope.value}")

    def tenant_of(self, named: str) -> str:
        """Decide whose data a request is about.

        Args:
            named: the tenant that the request names; "" = none.

        Raises:
            Forbidden: it names another one than the key's.
        """
        if self.tenant is None:
            return named
        if named not in ("", self.tenant):
            raise Forbidden(f"tenant: the key {self.name!r} is for the tenant {self.tenant!r} alone")
        return self.tenant


# Who calls an instance that has no key file: everybody may do everything.
ANYBODY = Key(name="anybody", tenant=None, scopes=frozenset(Scope))


def hash_of(key: bytes) -> str:
    """Return what the file has of a key."""
    return hashlib.sha256(key).hexdigest()


def parse_keys(text: str, where: str) -> KeyFile:
    """Read the text of a key file; an empty one has no keys.

    Args:
        text: YAML.
        where: names the file in errors.

    Raises:
        ConfigError: names the field and the limit.
    """
    if not text.strip():
        return KeyFile()
    if not re.search(r"^keys:", text, re.MULTILINE):
        raise ConfigError(f"{where}: needs a list `keys`; `npu-gr keys new` writes one")
    return parse(text, KeyFile, where)


def read_keys(path: Path) -> KeyFile:
    """Read a key file.

    Raises:
        ConfigError: it cannot be read, or a field is wrong.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or 'not UTF-8'}") from error
    return parse_keys(text, str(path))


def written(file: KeyFile) -> str:
    """Write a key file as text."""
    table = msgspec.to_builtins(file)
    text: str = yaml.safe_dump(table, sort_keys=False, default_flow_style=None, width=200)
    return text


def in_utc(entry: KeyEntry) -> str:
    """Say when a key expires."""
    return "never" if entry.expires is None else entry.expires.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
