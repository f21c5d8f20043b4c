"""One request of a gateway: from its head until it is answered, or nobody waits for it any more.

                 its headers name the user,
                 or nobody needs to know
      BEGUN ───────────────────────────────► PICKED ──────► ANSWERED
        │  the body may name the user          ▲   status of the instance's answer
        ├────────────────────► WAITING ────────┘
        │                         │  the whole body is here
        ▼ refused, or answered    ▼
      CLOSED ◄────────────────────┘

Where a request goes is decided by the router's own code, from the same ring, the same remembered signals and the same
health: `Router.place`. The end of its stream is the end of the request, so the bounded load and the times of answers
need no more. A gateway that shows the answer's headers too, and waits for it, feeds the circuit breakers as well.

Invariants:
  E1  the header and the metadata of a choice are equal, and name an instance that the gateway allows
  E2  in PICKED and ANSWERED, and in no other state, the request counts as in flight, at the router and at its instance
  E3  a body that is passed on in full duplex is passed on byte for byte, after the choice
"""

from __future__ import annotations

import asyncio
import time

from google.protobuf.message import DecodeError

from npu_gr.core.errors import DeadlineExceeded, NpuGrError, Unauthorized
from npu_gr.router.answers import Refused, problem_parts
from npu_gr.router.instance import InstanceState
from npu_gr.router.picker import external_processor_pb2 as pb
from npu_gr.router.picker import messages
from npu_gr.router.picker.addresses import Addresses
from npu_gr.router.picker.heads import head_of, name_by_body, names_read, status_of
from npu_gr.router.picker.streams import CallStatus, PickerStream
from npu_gr.router.request import RequestHead
from npu_gr.router.ring import Placement
from npu_gr.router.router import Router
from npu_gr.router.routes import READINESS, UNKNOWN, Handling, route_of
from npu_gr.server.auth.keys import Key

# Names of members: in Python 3.11 `Handling.FOLLOW` costs four times as much.
_FOLLOW = Handling.FOLLOW
_OWN = Handling.OWN
_EVERYWHERE = Handling.EVERYWHERE
_BY_USER = (Handling.FOLLOW, Handling.SIGNAL, Handling.ONCE)
_PLACED = (*_BY_USER, Handling.BY_LOAD)
_HOLDS_BODY = (pb.BUFFERED, pb.FULL_DUPLEX_STREAMED)  # modes in which the choice may wait for the whole body
_FAILURES = (502, 503)
_OVERLOADED = 429


class PickPhase:  # plain numbers, as in `frames.py`
    """The state of a request; the module's docstring draws how it changes."""

    BEGUN = 0
    WAITING = 1
    PICKED = 2
    ANSWERED = 3
    CLOSED = 4


class Picks:
    """What all requests of one picker share."""

    def __init__(self, router: Router, addresses: Addresses) -> None:
        """Read the names of headers from the configuration.

        Args:
            router: places the requests.
            addresses: of the instances.
        """
        config = router.config
        self.router = router
        self.addresses = addresses
        self.names = names_read(config)  # of headers
        self.user_header = config.user_header.encode()
        self.tenant_header = config.tenant_header.encode()


class Pick:
    """Implements `PickerCall`: the stream of one request."""

    # As a request begins. What never changes for a request is not written for it.
    phase = PickPhase.BEGUN
    _head: RequestHead | None = None
    _route = UNKNOWN
    _key: Key | None = None
    _mode: pb.BodySendMode = pb.NONE  # in which the gateway sends the request's body
    _answer_mode: pb.BodySendMode = pb.NONE
    _subset: set[str] | None = None
    _num_counted = 0  # bytes of `_body`
    _timer: asyncio.TimerHandle | None = None
    _instance: InstanceState | None = None
    _placement: Placement | None = None
    _picked_at = 0.0
    _status = 0  # that the client is sent; 0 = the gateway has not shown it

    def __init__(self, shared: Picks, stream: PickerStream) -> None:
        """Nothing is known of it yet.

        Args:
            shared: by all requests.
            stream: to the gateway.
        """
        self._shared = shared
        self._router = shared.router
        self._stream = stream
        self._body: list[bytes] = []  # of a request that waits

    # ---- what the connection calls

    def received(self, message: bytes) -> None:
        """Do what a message asks for."""
        try:
            request = pb.ProcessingRequest.FromString(message)
            kind = request.WhichOneof("request")
            if kind == "request_headers":
                self._on_headers(request)
            elif kind == "request_body":
                self._on_body(request.request_body)
            elif kind == "request_trailers":
                self._on_trailers()
            elif kind == "response_headers":
                self._on_answer(request)
            elif kind == "response_body":
                self._on_answer_body(request.response_body)
            elif kind == "response_trailers":
                self._stream.send(messages.ANSWER_TRAILERS_AS_THEY_WERE)
        except DecodeError:
            self._stream.end(CallStatus.INTERNAL, "that is no ProcessingRequest")
        except NpuGrError as error:
            self._refuse(error)

    def half_closed(self) -> None:
        """The gateway has sent all it wanted to."""
        self._stream.end()

    def dropped(self) -> None:
        """End the request."""
        if self._num_counted or self._timer is not None:
            self._forget_body()
        instance, head = self._instance, self._head
        now_at = time.monotonic()
        if instance is not None:
            instance.in_flight -= 1
            self._router.in_flight -= 1
            if self.phase == PickPhase.PICKED:
                instance.ended(now_at - self._picked_at, self._route.handling is _FOLLOW, now_at)
            self._instance = None
        if head is not None and (self._status or instance is not None):
            self._router.finished(self._route.handling, self._status, now_at - head.began_at)
        self.phase = PickPhase.CLOSED

    # ---- the request

    def _on_headers(self, request: pb.ProcessingRequest) -> None:
        if self.phase != PickPhase.BEGUN:
            raise Refused(400, "headers: given twice")
        self._mode, self._answer_mode = messages.modes(request.protocol_config)
        metadata, given = request.metadata_context, request.request_headers
        if metadata:
            self._subset = messages.subset(metadata)
        router, shared = self._router, self._shared
        self._head = head = head_of(given.headers, shared.names, router, self._stream.began_at)
        self._route = route = route_of(head.method, head.path)
        if route.handling not in _PLACED:
            self._answer_here(head)
            return
        budget_s = head.budget_s(router.config.default_budget_s, router.config.max_budget_s)
        self._key = router.access.check_key(head, route)
        if shared.user_header not in head.seen and self._needs_body(head) and not given.end_of_stream:
            self.phase = PickPhase.WAITING
            self._timer = asyncio.get_running_loop().call_later(budget_s, self._too_late)
            if self._mode == pb.BUFFERED:
                self._stream.send(messages.GO_ON)
            return
        self._pick(is_in_body=False)

    def _needs_body(self, head: RequestHead) -> bool:
        """Whether the request, whose headers name no user, is placed by one, and the gateway lets the choice wait."""
        handling = self._route.handling
        if handling not in _BY_USER or self._mode not in _HOLDS_BODY:
            return False
        return not (handling is _FOLLOW and head.seen.get(b"x-npugr-service") == b"normal")

    def _on_body(self, body: pb.HttpBody) -> None:
        if self._mode != pb.FULL_DUPLEX_STREAMED:
            if self.phase == PickPhase.WAITING:
                self._keep(body.body)
                self._name()
                self._pick(is_in_body=True)
            elif self.phase != PickPhase.CLOSED:
                self._stream.send(messages.BODY_AS_IT_WAS)
        elif self.phase == PickPhase.WAITING:
            self._keep(body.body)
            if body.end_of_stream:
                self._pick_and_pass_on(ends=True)
        elif self.phase != PickPhase.CLOSED:
            self._pass_on(body.body, body.end_of_stream)

    def _on_trailers(self) -> None:
        if self.phase == PickPhase.WAITING:
            self._pick_and_pass_on(ends=False)
        if self.phase != PickPhase.CLOSED:
            self._stream.send(messages.TRAILERS_AS_THEY_WERE)

    def _keep(self, piece: bytes) -> None:
        """Keep a piece of the body.

        Raises:
            Refused: the body is over its limit, or there is no room for it.
        """
        limit = self._router.config.limits.max_body_bytes
        if self._num_counted + len(piece) > limit:
            raise Refused(413, f"body: over the limit of {limit} bytes")
        self._router.kept.take(len(piece))
        self._num_counted += len(piece)
        self._body.append(piece)

    def _name(self) -> None:
        """Read from the whole body whose request it is."""
        assert self._head is not None
        name_by_body(self._head, b"".join(self._body), self._shared.user_header, self._shared.tenant_header)

    def _pick_and_pass_on(self, ends: bool) -> None:
        """Choose now that the whole body is here, and pass it on."""
        self._name()
        body = self._body.copy()
        self._pick(is_in_body=False)
        for i, piece in enumerate(body):
            self._pass_on(piece, ends and i == len(body) - 1)

    def _pass_on(self, piece: bytes, is_last: bool) -> None:
        for message in messages.streamed(piece, is_last, is_answer=False):
            self._stream.send(message)

    def _pick(self, is_in_body: bool) -> None:
        """Choose the instance and tell the gateway."""
        router, head = self._router, self._head
        handling = self._route.handling
        assert head is not None
        if self._timer is not None:
            self._forget_body()
        router.access.name(head, self._route, self._key)
        router.begin()
        endpoints, excluded = self._shared.addresses.reach(self._subset)
        try:
            choice, self._placement = router.place(head, handling, excluded)
        except NpuGrError:
            router.in_flight -= 1
            raise
        instance = choice.instance
        self._instance = instance
        self._picked_at = now_at = time.monotonic()
        chosen = endpoints[instance.name] or ""
        if handling is _FOLLOW and len(endpoints) > 1:  # nothing else may be sent again
            second = router.members.second(head.user, instance, now_at, excluded)
            if second is not None:
                chosen += f",{endpoints[second.name]}"
        instance.begun(now_at)
        router.metrics.placed.add(instance.name, choice.how)
        self.phase = PickPhase.PICKED
        skips_body = self._mode == pb.BUFFERED and not is_in_body
        self._stream.send(messages.picked(chosen, is_in_body, skips_body))

    # ---- the instance's answer

    def _on_answer(self, request: pb.ProcessingRequest) -> None:
        if self.phase != PickPhase.PICKED:  # an answer that the gateway gave itself
            self._stream.send(messages.answered(()))
            return
        assert self._instance is not None
        assert self._head is not None
        self.phase = PickPhase.ANSWERED
        self._status = status_of(request.response_headers.headers)
        instance = self._served(messages.served(request.metadata_context))
        self._learn(instance)
        headers = [("X-NpuGr-Instance", instance.name)]
        if self._placement is not None:
            headers.append(("X-NpuGr-Placement", self._placement.encode()))
        self._stream.send(messages.answered(tuple(headers)))

    def _served(self, endpoint: str) -> InstanceState:
        """Find out which instance answered; the one that was chosen, unless the gateway says another one.

        Then the chosen one failed, and a signal's ranks follow to where it was taken.
        """
        router, head = self._router, self._head
        chosen = self._instance
        assert chosen is not None
        assert head is not None
        endpoints = self._shared.addresses.endpoints()
        if not endpoint or endpoint == endpoints.get(chosen.name):
            return chosen
        for other in router.members.instances.values():
            if endpoints[other.name] == endpoint:
                router.failed(chosen, "lost", self._placement is not None)
                if self._placement is not None:
                    self._placement = Placement(other.name, router.members.ring.epoch, is_spilled=True)
                    router.signalled(head, self._placement)
                return other
        return chosen

    def _learn(self, instance: InstanceState) -> None:
        """Let the answer count for the instance's breaker and its load."""
        router, head = self._router, self._head
        assert head is not None
        now_at = time.monotonic()
        took_s = now_at - self._picked_at
        router.metrics.instance_s.observe(took_s, instance.name)
        if self._status in _FAILURES:
            router.failed(instance, str(self._status), self._placement is not None)
        elif self._status == _OVERLOADED:
            instance.refused(now_at)
        else:
            router.answered(instance, self._route.handling, head.path, took_s, now_at)

    def _on_answer_body(self, body: pb.HttpBody) -> None:
        if self._answer_mode == pb.FULL_DUPLEX_STREAMED:
            for message in messages.streamed(body.body, body.end_of_stream, is_answer=True):
                self._stream.send(message)
        else:
            self._stream.send(messages.ANSWER_BODY_AS_IT_WAS)

    # ---- without an instance

    def _answer_here(self, head: RequestHead) -> None:
        """Say how the router is, as no request without a key reaches an instance; refuse what nobody answers here."""
        if self._route.handling is _EVERYWHERE:
            raise Refused(501, "send this to every instance, or to the router's own address")
        if self._route.handling is not _OWN:
            raise Refused(404, "the service has no such route")
        is_ready, why = self._router.is_ready()
        if head.path in READINESS and not is_ready:
            raise Refused(503, why)
        self._immediate(200, [b"Content-Type: application/json"], b"{}")

    def _refuse(self, error: NpuGrError) -> None:
        """Answer with an error; one to a wrong key of too many waits a while."""
        head = self._head
        self._router.metrics.refused.add(self._route.handling, error.title)
        body, lines = problem_parts(error, head.request_id if head is not None else b"")
        self._forget_body()
        hold_s = self._router.access.throttle.hold_s() if isinstance(error, Unauthorized) else 0.0
        if hold_s:
            self.phase = PickPhase.CLOSED
            later = asyncio.get_running_loop().call_later
            self._timer = later(hold_s, self._immediate, error.status, lines, body)
        else:
            self._immediate(error.status, lines, body)

    def _immediate(self, status: int, lines: list[bytes], body: bytes) -> None:
        self._status = status
        self.phase = PickPhase.CLOSED
        self._stream.send(messages.immediate(status, lines, body))
        self._stream.end()

    def _too_late(self) -> None:
        self._refuse(DeadlineExceeded("body: not complete within the time budget"))

    def _forget_body(self) -> None:
        if self._num_counted:
            self._body.clear()
            self._router.kept.give_back(self._num_counted)
            self._num_counted = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
