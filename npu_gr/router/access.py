"""Who may use a router: the key file that its instances have as well, and what is counted about keys."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote_to_bytes

from npu_gr.core.errors import BadRequest
from npu_gr.core.kinds import ERASE, Scope
from npu_gr.router.config import RouterConfig
from npu_gr.router.metrics import RouterMetrics
from npu_gr.router.request import RequestHead
from npu_gr.router.routes import Handling, Route
from npu_gr.server.auth.key_ring import KeyRing
from npu_gr.server.auth.keys import Key
from npu_gr.server.auth.throttle import Throttle

_EVERYWHERE = Handling.EVERYWHERE
_ERASED_PREFIX = ERASE.path.partition("{")[0].encode()
MAX_NAME_BYTES = 512  # of a user or a tenant: instances take 128 characters


class Access:
    """The keys of one router, for requests and for its operators."""

    def __init__(self, config: RouterConfig, metrics: RouterMetrics) -> None:
        """Read the key file.

        Args:
            config: names the file, and the headers of user and tenant.
            metrics: count what is refused for its key.

        Raises:
            ConfigError: the file cannot be used.
        """
        self.ring = KeyRing(Path(config.api_keys_file) if config.api_keys_file else None)
        self.throttle = Throttle()
        self._user_header = config.user_header.encode()
        self._tenant_header = config.tenant_header.encode()
        self.ring.on_refused = metrics.keys_refused.add

    def key_of(self, authorization: bytes | None, scope: Scope | None) -> Key:
        """Find the key of a request, and count the request against its rate.

        Args:
            authorization: the header as it came.
            scope: that the key must have; None = any key will do.

        Raises:
            Unauthorized: there is no such key.
            Forbidden: the key lacks the scope.
            Overloaded: the key is over its rate.
        """
        key = self.ring.find(authorization)
        self.ring.spend(key)
        if scope is not None:
            self.ring.require(key, scope)
        return key

    def admit(self, head: RequestHead, route: Route) -> None:
        """Check that a request may be made, and find out whose it is: `check_key`, then `name`."""
        self.name(head, route, self.check_key(head, route) if self.ring.has_keys else None)

    def check_key(self, head: RequestHead, route: Route) -> Key | None:
        """Check that a request may be made; None: its route needs no key.

        Raises:
            Unauthorized: the route needs a key, and there is no such key.
            Forbidden: the key lacks the scope.
            Overloaded: the key is over its rate.
        """
        if self.ring.has_keys and route.needs_key:
            return self.key_of(head.seen.get(b"authorization"), route.scope)
        return None

    def name(self, head: RequestHead, route: Route, key: Key | None) -> None:
        """Find out whose a request is: `head.user`.

        Raises:
            Forbidden: the key is another tenant's.
            BadRequest: the name of a user or tenant is too long.
        """
        seen = head.seen
        if route.handling is _EVERYWHERE:
            user, tenant = _named_in_target(head.target)
        else:
            user, tenant = seen.get(self._user_header, b""), seen.get(self._tenant_header, b"")
            if b"%" in user:
                user = _unquoted(user)
            if b"%" in tenant:
                tenant = _unquoted(tenant)
        if key is not None:
            named = tenant.decode(errors="surrogateescape")
            tenant = self.ring.tenant_of(key, named).encode(errors="surrogateescape")
        if len(user) > MAX_NAME_BYTES or len(tenant) > MAX_NAME_BYTES:
            raise BadRequest(f"user, tenant: {max(len(user), len(tenant))} bytes, limit {MAX_NAME_BYTES}")
        head.user = placed_by(tenant, user) if user and tenant else user


def _unquoted(name: bytes) -> bytes:
    """Read a name from a header: clients quote what a header cannot hold, as a path does, or send the rest as it is."""
    plain = unquote_to_bytes(name)
    return name if b"\0" in plain else plain


def _named_in_target(target: bytes) -> tuple[bytes, bytes]:
    """Return the user in the path of an erasure, and the tenant in its query."""
    path, _, query = target.partition(b"?")
    named: dict[bytes, bytes] = {}
    for pair in query.replace(b"+", b" ").split(b"&"):
        name, _, value = pair.partition(b"=")
        named.setdefault(unquote_to_bytes(name), unquote_to_bytes(value))
    return unquote_to_bytes(path[len(_ERASED_PREFIX) :]), named.get(b"tenant", b"")


def placed_by(tenant: bytes, user: bytes) -> bytes:
    """Return the name by which a user of a tenant is placed. No header has a NUL, so no two of them have the same."""
    return b"%s\0%s" % (tenant, user) if tenant else user
