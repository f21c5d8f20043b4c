"""The addresses that an instance listens on: what each serves, and the connections that came to it.

The administration's address has limits of its own. So it is answered while the public one is full.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from enum import StrEnum, auto
from typing import Protocol

from npu_gr.server.auth.browsers import is_loopback_name
from npu_gr.server.auth.rules import rules
from npu_gr.server.config import ServerConfig
from npu_gr.server.entrance.pacing import Paced

log = logging.getLogger(__name__)

KEPT_FILES = 128  # descriptors that are not for connections: stores, logs, listeners, models while they load
ADMIN_CONNECTIONS = 64
ADMIN_BODIES = 4  # of the largest size that may arrive at once


class State(StrEnum):
    """Where a connection is with its present request."""

    IDLE = auto()  # nothing of a request is here
    RECEIVING = auto()  # a part of one is
    HELD = auto()  # its key was wrong, and the 401 comes later
    WAITING = auto()  # a whole one waits at the door
    SERVED = auto()  # aiohttp has it; the answer is not written yet


class Visitor(Paced, Protocol):
    """A connection, as the entrance sees it."""

    transport: asyncio.Transport | None
    state: State
    began_at: float  # when the present request began; while idle, since when it is idle
    served: int  # requests that were answered
    is_trusted: bool  # it carries other callers' requests
    listener: Listener

    @property
    def has_unread_answer(self) -> bool:
        """Whether an answer was written that its caller has not read."""
        ...

    def limit_at(self) -> tuple[float, bytes | None]:
        """Say until when it may be as it is, and with which answer it ends then."""
        ...

    def end(self, answer: bytes) -> None:
        """Write an answer and close."""
        ...

    def force_close(self) -> None:
        """Close as soon as what was written has left."""
        ...

    def abort(self) -> None:
        """Close at once, whatever has not left."""
        ...


class Listener:
    """One address. Event loop only."""

    def __init__(
        self,
        host: str = "",
        port: int = 0,
        *,
        is_public: bool = True,
        is_admin: bool = True,
        refuses_foreign_hosts: bool = False,
        max_connections: int,
        max_receiving_bytes: int,
    ) -> None:
        """Nobody is connected yet.

        Args:
            host: to listen on; "" = known to whoever opens the socket.
            port: likewise.
            is_public: it serves what is for callers.
            is_admin: it serves what is for operators.
            refuses_foreign_hosts: requests must be sent to a name of this machine.
            max_connections: at once.
            max_receiving_bytes: of bodies that arrive or wait.
        """
        self.host = host
        self.port = port
        self.is_public = is_public
        self.refuses_foreign_hosts = refuses_foreign_hosts
        self.max_connections = max_connections
        self.max_receiving_bytes = max_receiving_bytes
        self.receiving_bytes = 0
        self.connections: set[Visitor] = set()
        served = {path: False for _, path in rules()}
        for (_, path), rule in rules().items():
            served[path] |= (is_public and rule.is_public) or (is_admin and rule.is_admin)
        self._elsewhere = frozenset(path for path, is_served in served.items() if not is_served)

    def serves(self, path: str) -> bool:
        """Whether it serves a route.

        Args:
            path: the route's pattern; where no route matched, the path of the request.
        """
        return path not in self._elsewhere

    def reserve(self, num_bytes: int) -> bool:
        """Count bytes of bodies that arrive, or give them back (negative); False = there is no room for them."""
        if num_bytes > 0 and self.receiving_bytes + num_bytes > self.max_receiving_bytes:
            return False
        self.receiving_bytes += num_bytes
        return True


def unix_listeners(config: ServerConfig) -> tuple[Listener, Listener]:
    """Make a public and an administration's listener for sockets that one proxy in the same process asks."""
    most, most_bytes = config.max_connections, config.max_receiving_bytes
    public = Listener(is_admin=False, max_connections=most, max_receiving_bytes=most_bytes)
    return public, Listener(is_public=False, max_connections=most, max_receiving_bytes=most_bytes)


def listeners(config: ServerConfig) -> list[Listener]:
    """Make what an instance listens on: the public address and the administration's, or one for both."""
    max_connections = _max_connections(config.max_connections)
    max_bytes = config.max_receiving_bytes
    public = Listener(
        config.host,
        config.port,
        is_admin=config.has_one_address,
        # another site's page has no key, so keys are enough here: the names of balancers are not known
        refuses_foreign_hosts=is_loopback_name(config.host) and not config.api_keys_file,
        max_connections=max_connections,
        max_receiving_bytes=max_bytes,
    )
    if config.has_one_address:
        return [public]
    admin = Listener(
        config.admin_host,
        config.admin_port,
        is_public=False,
        refuses_foreign_hosts=is_loopback_name(config.admin_host),
        max_connections=ADMIN_CONNECTIONS,
        max_receiving_bytes=min(max_bytes, ADMIN_BODIES * config.max_body_bytes),
    )
    return [public, admin]


def _max_connections(wanted: int) -> int:
    """How many connections the process may have open by its limit of descriptors, raised as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    kept = KEPT_FILES + ADMIN_CONNECTIONS
    if soft < wanted + kept:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted + kept, hard), hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    allowed = max(16, min(wanted, soft - kept))
    if allowed < wanted:
        log.warning("server.max_connections: %d, but the limit of open files allows %d", wanted, allowed)
    return allowed
