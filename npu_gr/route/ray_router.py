"""Ray Serve's request router with the placement of `npu_gr.route.placement`.

Ray makes one router per proxy; they share no state. A proxy chooses before it reads the body, so
the user must be in a header. Without it, the less loaded of two replicas gets the request, and a
rank may not follow its signal. Ray skips full replicas and drops dead ones.

This module imports Ray; `npu_gr.route.ray_serve` passes Ray the name of the class.
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
    """Orders the replicas for each request; Ray sends it to the first with room."""

    def initialize_state(self, *, user_header: str, t_life_s: float, max_remembered: int) -> None:
        """Store the settings; Ray calls this before `update_replicas`."""
        self._user_header = user_header.encode()
        self._signals = Signals(t_life_s, max_remembered)
        self._ring = Ring(())

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Update the ring; Ray calls this when the replicas change."""
        members = sorted(Member(replica.replica_id.unique_id) for replica in replicas)
        if members != list(self._ring.members):
            self._ring = Ring(members)
        super().update_replicas(replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order of tries, one per step."""
        if pending_request is None:
            return [candidate_replicas]
        # back off after a round in which all replicas were full
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
        """Remember the replica of a signal, which is not always the first choice."""
        routing, user = self._asked(pending_request)
        if routing is Routing.SIGNAL and user:
            self._signals.remember(user, replica_id.unique_id, time.monotonic())

    def _asked(self, request: PendingRequest) -> tuple[Routing | None, bytes]:
        """Read routing and user from the pickled ASGI scope that Ray's proxy sends."""
        try:
            packed = request.args[0]  # by Ray's own proxy, inside the cluster
            scope: dict[str, Any] = pickle.loads(packed).asgi_scope  # noqa: S301  # nosec B301
            user = next(
                (value for name, value in scope["headers"] if name == self._user_header), b""
            )
            return routing_of(scope["method"], scope["path"]), unquote_to_bytes(user)
        except (AttributeError, IndexError, KeyError, TypeError, pickle.UnpicklingError) as error:
            # if this raised, Ray would retry the request forever
            log.error(
                "the request is routed by load: its format is not that of Ray 2.60: %r", error
            )
            return None, b""
