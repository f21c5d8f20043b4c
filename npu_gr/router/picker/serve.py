"""The picker's two gRPC services on one address: Envoy's external processing, and gRPC's health checks."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from npu_gr.router.picker import external_processor_pb2 as pb
from npu_gr.router.picker.addresses import Addresses
from npu_gr.router.picker.connection import GrpcConnection
from npu_gr.router.picker.pick import Pick, Picks
from npu_gr.router.picker.streams import CallStatus, PickerCall, PickerStream
from npu_gr.router.router import Router

_EXTERNAL_PROCESSOR = "envoy.service.ext_proc.v3.ExternalProcessor"
_PROCESS = f"/{_EXTERNAL_PROCESSOR}/Process".encode()
_CHECK = b"/grpc.health.v1.Health/Check"
_ALIVE = ("", "liveness")  # the process lives
_READY = ("readiness", _EXTERNAL_PROCESSOR)  # and an instance is up


class Picker:
    """Makes the connections of one router's picker."""

    def __init__(self, router: Router, addresses: Addresses) -> None:
        self._router = router
        self._picks = Picks(router, addresses)

    def connection(self) -> GrpcConnection:
        """Make the protocol of a connection that a gateway has opened."""
        return GrpcConnection(self._router, self._open)

    def _open(self, path: bytes, stream: PickerStream) -> PickerCall | None:
        if path == _PROCESS:
            return Pick(self._picks, stream)
        return PickerHealth(self._router, stream) if path == _CHECK else None


class PickerHealth:
    """Implements `PickerCall`: one question about the picker's health."""

    def __init__(self, router: Router, stream: PickerStream) -> None:
        self._router = router
        self._stream = stream

    def received(self, message: bytes) -> None:
        """Answer."""
        try:
            service = pb.HealthCheckRequest.FromString(message).service
        except DecodeError:
            self._stream.end(CallStatus.INTERNAL, "that is no HealthCheckRequest")
            return
        if service not in (*_ALIVE, *_READY):
            self._stream.end(CallStatus.NOT_FOUND, "there is no such service")
            return
        serves = service in _ALIVE or self._router.is_ready()[0]
        status = pb.HealthCheckResponse.SERVING if serves else pb.HealthCheckResponse.NOT_SERVING
        self._stream.send(pb.HealthCheckResponse(status=status).SerializeToString())
        self._stream.end()

    def half_closed(self) -> None:
        """End a call without a question."""
        self._stream.end(CallStatus.INTERNAL, "no message")

    def dropped(self) -> None:
        """Nothing waits."""
