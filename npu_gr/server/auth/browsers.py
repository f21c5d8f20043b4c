"""Requests that a page of another site makes a browser send: they carry the user's place in the network, not a key.

An operator's browser reaches an instance on loopback, or behind a firewall, that the page's author cannot reach. Two
ways lead there: a request across sites (CSRF), and a name of the author's that resolves to 127.0.0.1 (DNS rebinding).

Sources: Fetch Metadata (W3C), `Sec-Fetch-Site`; RFC 6454, Origin.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from functools import lru_cache
from urllib.parse import urlsplit

from npu_gr.core.errors import Forbidden

_OWN_SITE = ("same-origin", "none")  # none: the user typed the address
_LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost")


def refuse_foreign_pages(headers: Mapping[str, str], *, is_loopback: bool) -> None:
    """Check that no page of another site is behind a request. What is no browser sends none of these headers.

    Args:
        headers: of the request, found by any spelling of their names.
        is_loopback: it came to a loopback address, which no other name than a loopback one may mean.

    Raises:
        Forbidden: names the header.
    """
    site = headers.get("Sec-Fetch-Site")
    if site is not None and site.strip().lower() not in _OWN_SITE:
        raise Forbidden(f"Sec-Fetch-Site: {site[:32]!r}: a page of another site sent this request")
    host = headers.get("Host", "")
    origin = headers.get("Origin")
    if origin is not None and _authority(origin) != host.strip().lower():
        raise Forbidden(f"Origin: {origin[:64]!r} is not the address that the request was sent to")
    if is_loopback and host and not is_loopback_name(_name(host)):
        raise Forbidden(f"Host: {host[:64]!r} is no loopback name, and this is a loopback address")


@lru_cache(maxsize=64)
def is_loopback_name(name: str) -> bool:
    """Whether a host name or an address without a port can mean nothing but this machine."""
    if name.lower().rstrip(".") in _LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _authority(origin: str) -> str:
    """Return host and port of an origin; "" for an opaque one, which is nobody's."""
    try:
        return urlsplit(origin.strip()).netloc.lower()
    except ValueError:
        return ""


def _name(host: str) -> str:
    """Return a Host header without its port and brackets."""
    host = host.strip()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0] if host.count(":") == 1 else host
