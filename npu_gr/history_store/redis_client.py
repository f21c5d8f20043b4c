"""The servers of a history store on Redis, by the scheme of `history_store.url`.

    redis://HOST:6379/0, unix:///PATH               one master; its name is followed
    redis-sentinel://HOST:26379,HOST/0#MASTER       the master that Sentinels name
    redis-cluster://HOST:6379,HOST                  the masters of a cluster: each user has a slot

`rediss` instead of `redis` is over TLS, also to Sentinels. User and password are of the servers
with the data; Sentinels are asked without. No client repeats a command by itself, since an append
without an answer may have been done.
"""

from __future__ import annotations

import ipaddress
import ssl
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from npu_gr.core.errors import ConfigError
from npu_gr.core.secret import SecretUrl
from npu_gr.core.tls import TlsFiles
from npu_gr.history_store.redis_cluster import Cluster, OneServer

if TYPE_CHECKING:
    from redis.asyncio import Redis

Servers = OneServer | Cluster

SCHEMES = tuple(
    f"{name}{kind}" for kind in ("", "-sentinel", "-cluster") for name in ("redis", "rediss")
)
_SENTINEL_PORT, _PORT = 26379, 6379
_HOW = (
    "redis://, rediss:// or unix://, redis-sentinel://HOST,HOST/0#MASTER or "
    "redis-cluster://HOST,HOST, with / ? # @ : , of a password percent-encoded"
)


class _Place(NamedTuple):
    """What a URL of several hosts says."""

    hosts: list[tuple[str, int]]
    login: dict[str, str]  # username and password, those that there are
    database: int
    master: str  # "" = none


def make_servers(
    url: SecretUrl, timeout_s: float, max_connections: int, tls: TlsFiles | None
) -> Servers:
    """Make clients, which connect with their first command.

    Args:
        url: Address of the server or servers.
        timeout_s: Timeout of a connection, and of an answer.
        max_connections: Limit for each server; a command at the limit waits as long.
        tls: Certificate files for `rediss`.

    Raises:
        ConfigError: the package is missing, or the URL is invalid; the message shows no password.
    """
    try:
        from redis.asyncio import BlockingConnectionPool, Redis, SSLConnection
        from redis.asyncio.retry import Retry
        from redis.asyncio.sentinel import Sentinel
        from redis.backoff import NoBackoff
    except ImportError as error:
        raise ConfigError("history_store.kind: redis needs pip install 'npu_gr[redis]'") from error
    timeouts = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    options: dict[str, Any] = {
        **timeouts,
        "retry": Retry(NoBackoff(), 0),
        **tls_options(str(url), tls),
        **_unnamed(),
    }
    pooled = {"max_connections": max_connections, "timeout": timeout_s}
    try:
        parts = urlsplit(url.reveal())
        if parts.scheme in ("redis", "rediss", "unix"):
            pool = BlockingConnectionPool.from_url(url.reveal(), **pooled, **options)
            return OneServer(Redis.from_pool(pool))
        if parts.scheme not in SCHEMES:
            raise ValueError
        is_tls, is_cluster = parts.scheme.startswith("rediss"), parts.scheme.endswith("-cluster")
        place = _place(parts, _PORT if is_cluster else _SENTINEL_PORT)
        if is_cluster == bool(place.master) or (is_cluster and place.database):
            raise ValueError
    except ValueError:  # not shown, since its text may contain a part of the password
        raise ConfigError(f"history_store.url: {url} is no address of a Redis: {_HOW}") from None

    def node(host: str, port: int) -> Redis:
        made: dict[str, Any] = {"host": host, "port": port, **pooled, **place.login, **options}
        if is_tls:
            made["connection_class"] = SSLConnection
        return Redis.from_pool(BlockingConnectionPool(**made))

    if is_cluster:
        return Cluster(place.hosts, node)
    if is_tls:
        options["ssl"] = True
    asked = Sentinel(place.hosts, sentinel_kwargs=options)  # type: ignore[no-untyped-call]
    named: dict[str, Any] = {"db": place.database, **place.login, **options}
    # of each kind of call as many as `max_connections`; the bulkhead limits the calls
    return OneServer(asked.master_for(place.master, **named), asked.sentinels)


def _place(parts: SplitResult, port: int) -> _Place:
    """Read a URL of several hosts.

    Args:
        parts: The URL.
        port: Port of a host without one.

    Raises:
        ValueError: it is invalid.
    """
    login, _, hosts = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    found = []
    for one in hosts.split(","):
        host = urlsplit(f"//{one}")
        if not host.hostname or host.path or "?" in one:
            raise ValueError
        found.append((host.hostname, host.port or port))
    database = parts.path.removeprefix("/") or "0"
    if not database.isdecimal() or parts.query:
        raise ValueError
    named = {"username": unquote(user), "password": unquote(password)}
    return _Place(
        found, {key: text for key, text in named.items() if text}, int(database), parts.fragment
    )


def tls_options(url: str, tls: TlsFiles | None) -> dict[str, Any]:
    """Return the TLS options of redis-py for a URL; none if its scheme is not of TLS.

    The server's certificate and its name are always checked.

    Args:
        url: URL of the server.
        tls: Certificate files; None = the system's authorities, and no client certificate.
    """
    if not urlsplit(url).scheme.startswith("rediss"):
        return {}
    tls = tls or TlsFiles()
    return {
        "ssl_ca_certs": tls.ca,
        "ssl_certfile": tls.certificate,
        "ssl_keyfile": tls.key,
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
        "ssl_min_version": ssl.TLSVersion.TLSv1_2,
    }


def host_names(url: str) -> list[str]:
    """Return the hosts of a URL; none for a socket file."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return []
    places = parts.netloc.rpartition("@")[2].split(",")
    return [urlsplit(f"//{one}").hostname or "localhost" for one in places]


def is_in_clear(url: str) -> bool:
    """Return whether histories cross a network unencrypted: not over TLS, and not to localhost."""
    return not urlsplit(url).scheme.startswith("rediss") and not all(map(_is_here, host_names(url)))


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _unnamed() -> dict[str, Any]:
    """Return options that omit the library's name, which redis-py >= 7 reads from disk."""
    try:
        import redis.driver_info  # noqa: F401  (redis >= 7)
    except ImportError:
        return {}
    return {"driver_info": None}
