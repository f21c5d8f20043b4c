"""How a connection to Redis is secured."""

from __future__ import annotations

import ipaddress
import ssl
from typing import Any
from urllib.parse import urlsplit

from npu_gr.features.base import RedisTlsConfig

_SCHEME = "rediss"


def tls_options(url: str, tls: RedisTlsConfig | None) -> dict[str, Any]:
    """Return what redis-py needs for a URL; the server's certificate and its name are always checked.

    Args:
        url: `rediss://` or another one, which needs nothing.
        tls: None = the authorities that the system trusts, and no certificate of ours.
    """
    if urlsplit(url).scheme != _SCHEME:
        return {}
    tls = tls or RedisTlsConfig()
    return {
        "ssl_ca_certs": tls.ca,
        "ssl_certfile": tls.certificate,
        "ssl_keyfile": tls.key,
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
        "ssl_min_version": ssl.TLSVersion.TLSv1_2,
    }


def is_in_clear(url: str) -> bool:
    """Whether histories cross a network in clear: not over TLS, and not to this machine."""
    parts = urlsplit(url)
    if parts.scheme != "redis":
        return False
    host = parts.hostname or "localhost"
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def tls_trouble(error: BaseException) -> str:
    """Return what TLS says in an error of a connection, or nothing; it names no address and no password."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ssl.SSLError):
            return f" ({seen.reason or type(seen).__name__})"
        seen = seen.__cause__ or seen.__context__
    return ""
