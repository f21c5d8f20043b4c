"""Access rules: which address serves a route, and which scope its key needs.

Every route has a rule in one table. The public address serves the kinds of requests and their
metadata. Routes that change the instance or show its state are on the admin address. Health checks
are on both, without a key.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from urllib.parse import urlsplit

from npu_gr.core.errors import Forbidden
from npu_gr.core.kinds import KINDS, Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Where a route is served, and for whom."""

    scope: Scope | None  # scope that the key must have; None = no key is needed
    is_public: bool  # served on the public address
    is_admin: bool  # served on the admin address
    # most bytes of a body of octets; 0 = bodies are JSON or msgpack, up to `server.max_body_bytes`
    octets: int = 0


DELTA_BYTES = 1 << 29  # of a delta in a body, which is received whole; a folder takes larger ones

_HEALTH = Rule(scope=None, is_public=True, is_admin=True)
_READ = Rule(scope=Scope.INFER, is_public=True, is_admin=False)
_OBSERVE = Rule(scope=Scope.OBSERVE, is_public=False, is_admin=True)
# on both addresses, because the protocol's clients ask the public one
_STATISTICS = Rule(scope=Scope.OBSERVE, is_public=True, is_admin=True)
_PAGE = Rule(scope=None, is_public=False, is_admin=True)
_ADMIN = Rule(scope=Scope.ADMIN, is_public=False, is_admin=True)
_DELTA = Rule(scope=Scope.ADMIN, is_public=False, is_admin=True, octets=DELTA_BYTES)

# HTML pages without data, served without a key; their scripts fetch the data with a key. Pages of
# other sites must not embed them.
PAGES = ("/", "/debug/console")

_OTHERS: dict[tuple[str, str], Rule] = {
    ("GET", "/healthz"): _HEALTH,
    ("GET", "/readyz"): _HEALTH,
    ("GET", "/v2/health/live"): _HEALTH,
    ("GET", "/v2/health/ready"): _HEALTH,
    ("GET", "/v2"): _READ,
    ("GET", "/v2/models/{model}"): _READ,
    ("GET", "/v2/models/{model}/ready"): _READ,
    ("GET", "/v2/models/{model}/versions/{version}"): _READ,
    ("GET", "/v2/models/{model}/versions/{version}/ready"): _READ,
    ("GET", "/v2/models/stats"): _STATISTICS,
    ("GET", "/v2/models/{model}/stats"): _STATISTICS,
    ("GET", "/v2/models/{model}/versions/{version}/stats"): _STATISTICS,
    ("GET", "/openapi.json"): _READ,
    ("GET", "/v1/models"): _READ,
    ("GET", "/v1/items"): _READ,
    ("GET", "/v1/items/{item_id}/similar"): _READ,
    ("GET", "/v1/trending"): _READ,
    ("GET", "/v1/users/{user_id}"): _READ,
    ("GET", "/v1/catalog"): _READ,
    ("GET", "/v1/match/vectors"): _READ,
    ("GET", "/"): _PAGE,
    ("GET", "/metrics"): _OBSERVE,
    ("GET", "/debug/status"): _OBSERVE,
    ("GET", "/debug/runbooks"): _OBSERVE,
    ("GET", "/debug/openapi"): _OBSERVE,  # as /openapi.json, for the console
    ("GET", "/debug/console"): _PAGE,
    ("GET", "/debug/config"): _ADMIN,
    ("GET", "/debug/stacks"): _ADMIN,
    ("GET", "/debug/profile"): _ADMIN,
    ("GET", "/debug/bundle"): _ADMIN,
    ("POST", "/debug/user"): _ADMIN,
    ("GET", "/debug/record"): _ADMIN,
    ("POST", "/debug/record"): _ADMIN,
    ("DELETE", "/debug/record"): _ADMIN,
    ("POST", "/v1/models/delta"): _DELTA,
    ("POST", "/v1/models/reload"): _ADMIN,
    ("POST", "/v1/models/rollback"): _ADMIN,
    ("GET", "/v1/models/shadow"): _ADMIN,
    ("POST", "/v1/models/shadow"): _ADMIN,
    ("DELETE", "/v1/models/shadow"): _ADMIN,
    ("POST", "/v1/models/shadow/promote"): _ADMIN,
    ("POST", "/v1/catalog/items"): _ADMIN,
    ("POST", "/v1/catalog/reload"): _ADMIN,
    ("POST", "/v1/catalog/rollback"): _ADMIN,
    ("POST", "/v1/match/reload"): _ADMIN,
    ("POST", "/v1/match/rollback"): _ADMIN,
}


def rules() -> dict[tuple[str, str], Rule]:
    """Map (method, pattern) of each route to its rule; those of the kinds follow from `KINDS`."""
    kinds = {
        (kind.method, path): Rule(scope=kind.scope, is_public=True, is_admin=False)
        for kind in KINDS.values()
        for path in kind.paths
    }
    return kinds | _OTHERS


@cache
def _spelling(route: str) -> re.Pattern[str]:
    fixed = map(re.escape, re.split(r"\{\w+\}", route))
    return re.compile(".+".join(fixed), re.DOTALL)


def is_exact(route: str, sent: str) -> bool:
    """Whether a request target spells a route as the table does.

    Parsers read `/v1/%72ank`, `//v1/rank` and `http://host/v1/rank` differently. HAProxy and the
    picker compare raw paths, so an instance serves no other spelling. Values of variables may be
    percent-encoded.
    """
    path = sent.partition("?")[0]
    return path == route or ("{" in route and _spelling(route).fullmatch(path) is not None)


class Address:
    """An address that an instance listens on, and the routes that it serves."""

    def __init__(
        self, *, is_public: bool = True, is_admin: bool = True, rejects_foreign_hosts: bool = False
    ) -> None:
        """Choose the routes.

        Args:
            is_public: Serve the routes for clients.
            is_admin: Serve the routes for operators.
            rejects_foreign_hosts: Reject requests whose Host header is no loopback name, against
                DNS rebinding.
        """
        self.is_public = is_public
        self.rejects_foreign_hosts = rejects_foreign_hosts
        served: dict[str, bool] = {}
        for (_, path), rule in rules().items():
            serves = (is_public and rule.is_public) or (is_admin and rule.is_admin)
            served[path] = served.get(path, False) or serves
        self._elsewhere = frozenset(path for path, is_served in served.items() if not is_served)

    def serves(self, path: str) -> bool:
        """Whether it serves a route, given its pattern (or the path where no route matches)."""
        return path not in self._elsewhere


_OWN_SITE = ("same-origin", "none")  # "none": the user typed the address
_LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost")


def reject_foreign_pages(headers: Mapping[str, str], *, is_loopback: bool) -> None:
    """Reject requests that a browser sends for a page of another site.

    Clients other than browsers send none of the headers checked here, except Host.

    Args:
        headers: Headers of the request; names in any case.
        is_loopback: The request came to a loopback address, so Host must be a loopback name.

    Raises:
        Forbidden: A header shows another site; the message names it.
    """
    site = headers.get("Sec-Fetch-Site")
    if site is not None and site.strip().lower() not in _OWN_SITE:
        raise Forbidden(f"Sec-Fetch-Site: {site[:32]!r}: a page of another site sent this request")
    host = headers.get("Host", "")
    origin = headers.get("Origin")
    if origin is not None and _authority(origin) != host.strip().lower():
        raise Forbidden(f"Origin: {origin[:64]!r} is not the host that the request was sent to")
    if is_loopback and host and not is_loopback_name(_name(host)):
        raise Forbidden(f"Host: {host[:64]!r} is not a loopback name, but the address is loopback")


@lru_cache(maxsize=64)
def is_loopback_name(name: str) -> bool:
    """Whether a host name or an address (without port) is a loopback one."""
    if name.lower().rstrip(".") in _LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _authority(origin: str) -> str:
    """Return host and port of an origin; "" = an opaque origin, which equals no host."""
    try:
        return urlsplit(origin.strip()).netloc.lower()
    except ValueError:
        return ""


def _name(host: str) -> str:
    """Return a Host header without its port and brackets."""
    host = host.strip()
    if host.startswith("["):
        name, _, port = host[1:].partition("]")
        return host if port and port[0] != ":" else name
    return host.partition(":")[0] if host.count(":") == 1 else host
