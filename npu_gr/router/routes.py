"""Which requests the router knows, and how it treats each: derived from the table of kinds.

Every kind of `core/kinds.py` is routed as its entry there says. Written here are only the paths that are no kind:
what any instance can answer, and what the router answers itself. Everything else gets 404.
"""

from __future__ import annotations

from enum import StrEnum

from npu_gr.core.kinds import KINDS, Routing


class Handling(StrEnum):
    """How the router treats a request. The value is the `kind` label of the router's metrics."""

    SIGNAL = "signal"  # by user; chooses the instance of the pair; sent again only if no instance has begun it
    FOLLOW = "rank"  # by user, to the instance that the signal chose; sent again if the first instance fails
    ONCE = "user"  # by user; sent once
    EVERYWHERE = "erase"  # to every instance
    BY_LOAD = "any"  # to an instance with little load; sent once
    OWN = "own"  # the router answers it
    UNKNOWN = "none"  # not routed: 404


_BY_ROUTING = {
    Routing.SIGNAL: Handling.SIGNAL,
    Routing.FOLLOW: Handling.FOLLOW,
    Routing.ONCE: Handling.ONCE,
    Routing.EVERYWHERE: Handling.EVERYWHERE,
}
_KINDS = {(kind.method, kind.path): _BY_ROUTING[kind.routing] for kind in KINDS.values()}
_OTHERS = {
    ("GET", "/v1/models"): Handling.BY_LOAD,
    ("GET", "/v1/catalog"): Handling.BY_LOAD,
    ("GET", "/openapi.json"): Handling.BY_LOAD,
    ("GET", "/v2{rest}"): Handling.BY_LOAD,  # the open inference protocol's health and metadata
    ("GET", "/healthz"): Handling.OWN,
    ("GET", "/readyz"): Handling.OWN,
}
_ROUTES = {(method.encode(), path.encode()): handling for (method, path), handling in (_OTHERS | _KINDS).items()}
_EXACT = {route: handling for route, handling in _ROUTES.items() if b"{" not in route[1]}
# A parameter in a path stands for the rest of the path, whatever is in it.
_PREFIXES = [
    (method, path.partition(b"{")[0], handling) for (method, path), handling in _ROUTES.items() if b"{" in path
]
METHODS = tuple(dict.fromkeys((b"GET", b"POST", b"DELETE", *(method for method, _ in _ROUTES))))


def handling_of(method: bytes, path: bytes) -> Handling:
    """Find how a request is treated; `path` is without its query."""
    handling = _EXACT.get((method, path))
    if handling is not None:
        return handling
    for other, prefix, prefixed in _PREFIXES:
        if method == other and path.startswith(prefix):
            return prefixed
    return Handling.UNKNOWN
