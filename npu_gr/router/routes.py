"""Which requests the router knows, and how it treats each: derived from the tables of kinds and of rules.

Every kind of `core/kinds.py` is routed as its entry there says. What else `access/rules.py` calls public, any instance
can answer; but what needs no key is health, and the router answers for itself, so that nobody without a key reaches an
instance. Everything else gets 404.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from npu_gr.core.kinds import KINDS, Routing, Scope
from npu_gr.server.auth.rules import Rule, rules


class Handling(StrEnum):
    """How the router treats a request. The value is the `kind` label of the router's metrics."""

    SIGNAL = "signal"  # by user; chooses the instance of the pair; sent again only if no instance has begun it
    FOLLOW = "rank"  # by user, to the instance that the signal chose; sent again if the first instance fails
    ONCE = "user"  # by user; sent once
    EVERYWHERE = "erase"  # to every instance
    BY_LOAD = "any"  # to an instance with little load; sent once
    OWN = "own"  # the router answers it
    UNKNOWN = "none"  # not routed: 404


class Route(NamedTuple):
    """How the router treats one kind of request."""

    handling: Handling
    needs_key: bool
    scope: Scope | None  # that the key must have; None = any key will do


_BY_ROUTING = {
    Routing.SIGNAL: Handling.SIGNAL,
    Routing.FOLLOW: Handling.FOLLOW,
    Routing.ONCE: Handling.ONCE,
    Routing.BY_LOAD: Handling.BY_LOAD,
    Routing.EVERYWHERE: Handling.EVERYWHERE,
}
_KINDS = {(kind.method, path): _BY_ROUTING[kind.routing] for kind in KINDS.values() for path in kind.paths}
READINESS = frozenset((b"/readyz", b"/v2/health/ready"))  # of the router's own routes; the others say that it lives


def _handling(at: tuple[str, str], rule: Rule) -> Handling:
    return _KINDS.get(at) or (Handling.OWN if rule.scope is None else Handling.BY_LOAD)


_ROUTES = {
    (at[0].encode(), at[1].encode()): Route(_handling(at, rule), rule.scope is not None, rule.scope)
    for at, rule in rules().items()
    if rule.is_public
}
UNKNOWN = Route(Handling.UNKNOWN, needs_key=True, scope=None)
_EXACT = {at: route for at, route in _ROUTES.items() if b"{" not in at[1]}
# A parameter in a path stands for the rest of the path, whatever is in it.
_PREFIXES = [(method, path.partition(b"{")[0], route) for (method, path), route in _ROUTES.items() if b"{" in path]
METHODS = tuple(dict.fromkeys((b"GET", b"POST", b"DELETE", *(method for method, _ in _ROUTES))))


def route_of(method: bytes, path: bytes) -> Route:
    """Find how a request is treated; `path` is without its query."""
    route = _EXACT.get((method, path))
    if route is not None:
        return route
    for other, prefix, prefixed in _PREFIXES:
        if method == other and path.startswith(prefix):
            return prefixed
    return UNKNOWN
