"""Ray Serve's request router with our placement.

Ray makes one in each of its proxies, which share no state.

A proxy chooses before it reads the body, so the user stands in a header; without it the less loaded
of two replicas gets the request, and signal and rank may part. Ray passes a replica over that is
full, and forgets one that died.

Imports Ray; `npu_gr.route.ray_serve` gives Ray the name of the class.
"""

from __future__ import annotations

import logging
import pickle
import time
from typing import Any
from urllib.parse import unquote_to_bytes

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from npu_gr.core.kinds import Routing
from npu_gr.route.placement import Member, Ring, Signals, order, routing_of

log = logging.getLogger(__name__)


class PlacementRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Orders the replicas for each request; Ray sends it to the first that has room."""

    def initialize_state(self, *, user_header: str, t_life_s: float, max_remembered: int) -> None:
        """Take the settings: Ray calls this before it tells of replicas."""
        self._user_header = user_header.encode()
        self._signals = Signals(t_life_s, max_remembered)
        self._ring = Ring(())

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take over the list of replicas."""
        members = sorted(Member(replica.replica_id.unique_id) for replica in replicas)
        if members != list(self._ring.members):
            self._ring = Ring(members)
        super().update_replicas(replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which they are to be tried, one a step."""
        if pending_request is None:
            return [candidate_replicas]
        # after a round in which all were full
        pending_request.routing_context.should_backoff = True
        routing, user = self._asked(pending_request)
        able = {replica.replica_id.unique_id: replica for replica in candidate_replicas}

        def in_flight(name: str) -> int:
            return self.replica_queue_len_cache.get(able[name].replica_id) or 0

        names = order(
            self._ring, routing, user, able, in_flight, self._signals.find(user, time.monotonic())
        )
        return [[able[name]] for name in names]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        """Remember which replica took a signal: not always the first one."""
        routing, user = self._asked(pending_request)
        if routing is Routing.SIGNAL and user:
            self._signals.remember(user, replica_id.unique_id, time.monotonic())

    def _asked(self, request: PendingRequest) -> tuple[Routing | None, bytes]:
        """Read a request's kind and user from what the proxy sends to the replica: a pickled ASGI scope."""
        try:
            scope: dict[str, Any] = pickle.loads(request.args[0]).asgi_scope  # noqa: S301  # of Ray's own proxy
            user = next(
                (value for name, value in scope["headers"] if name == self._user_header), b""
            )
            return routing_of(scope["method"], scope["path"]), unquote_to_bytes(user)
        except (AttributeError, IndexError, KeyError, TypeError, pickle.UnpicklingError) as error:
            # A request that this raises for would wait forever.
            log.error(
                "placed by load: not a request of an HTTP proxy as Ray 2.60 sends it: %r", error
            )
            return None, b""
