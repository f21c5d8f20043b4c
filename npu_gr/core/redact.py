"""Take credentials out of texts that leave the process, as in the URL of a store."""

from __future__ import annotations

import re

_USERINFO = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s\"']*@", re.IGNORECASE)
_PASSWORD = re.compile(r"([?&](?:password|username|token|key)=)[^&\s\"']*", re.IGNORECASE)


def redacted(text: str) -> str:
    """Replace user and password of every URL by `***`."""
    return _PASSWORD.sub(r"\1***", _USERINFO.sub(r"\1***@", text))
