"""Secret settings, which are shown as `***`; only `reveal` returns the text.

In a configuration file such a setting is the text itself, or refers to it:

    url: redis://redis:6379/0
    url: {file: /run/secrets/redis-url}   # without the line end
    url: {env: REDIS_URL}

`redacted` removes credentials from other texts, as in the URL of a store.
"""

from __future__ import annotations

import base64
import os
import re
from pathlib import Path
from typing import Self
from urllib.parse import unquote, urlsplit, urlunsplit

_USERINFO = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s\"']*@", re.IGNORECASE)
_PASSWORD = re.compile(r"([?&](?:password|username|token|key)=)[^&\s\"']*", re.IGNORECASE)


def redacted(text: str) -> str:
    """Replace user and password of every URL by `***`."""
    return _PASSWORD.sub(r"\1***", _USERINFO.sub(r"\1***@", text))


SHOWN = "***"


class Secret:
    """A text that does not appear in dumps, log lines or errors."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    @classmethod
    def read(cls, given: object) -> Self:
        """Parse a value of a configuration file.

        Raises:
            ValueError: it has none of the three forms, or the file or variable does not exist; the
                message has no part of the secret.
        """
        match given:
            case str():
                return cls(given)
            case {"file": str(path), **others} if not others:
                try:
                    text = Path(path).read_text()
                except OSError as error:
                    raise ValueError(f"file {path}: {error.strerror}") from None
                except UnicodeDecodeError:
                    raise ValueError(f"file {path}: not UTF-8") from None
                return cls(text.rstrip("\r\n"))
            case {"env": str(name), **others} if not others:
                if (found := os.environ.get(name)) is None:
                    raise ValueError(f"env {name}: the variable is not set")
                return cls(found)
        raise ValueError("expected a text, {file: PATH} or {env: NAME}")

    def reveal(self) -> str:
        """Return the text."""
        return self._text

    def __str__(self) -> str:
        return SHOWN

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)


class SecretUrl(Secret):
    """A URL that may have user and password; the rest of it is shown."""

    __slots__ = ()

    def __str__(self) -> str:
        scheme, mark, rest = self._text.partition("://")
        if not mark:
            return redacted(self._text) if "@" not in self._text else SHOWN
        # a password may have any character, so everything before the last @ is hidden
        user, at, place = rest.rpartition("@")
        return redacted(f"{scheme}://{SHOWN if at or user else ''}{at}{place}")

    def without_user(self) -> tuple[str, str | None]:
        """Split off user and password, as a value of the header `Authorization`.

        Raises:
            ValueError: the URL is invalid; the message has no part of it.
        """
        try:
            parts = urlsplit(self._text)
            name, password = unquote(parts.username or ""), unquote(parts.password or "")
        except ValueError:
            raise ValueError(
                "not a URL; percent-encode the characters / ? # @ : of the password"
            ) from None
        if not name and not password:
            return self._text, None
        place = parts.netloc.rpartition("@")[2]
        basic = base64.b64encode(f"{name}:{password}".encode()).decode()
        return urlunsplit(parts._replace(netloc=place)), f"Basic {basic}"
