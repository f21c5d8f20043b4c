"""One connection of a gateway: HTTP/2 with gRPC's calls in it, as much of both as a picker needs.

A gateway opens a call for every request and waits for its answer before the request goes on, so what a call costs is
added to every request. `grpcio` hands each call from thread to thread several times: around the same pick it takes more
than four times the processor time, and adds twice as much. `python -m benchmarks router --picker` measures both.

HPACK is the library `hpack`. We announce a header table of 0 bytes: from then on a block of headers means the same
whenever it comes, and is decoded once.

Invariants:
  G1  a call is told of its end exactly once, however it ended
  G2  nothing is sent over a window of the caller; what waits for it counts as kept, and is bounded with that
  G3  what the caller may send is bounded: streams, headers, a message, and with `limits.max_kept_bytes` all messages

Source: RFC 9113 (HTTP/2), RFC 7541 (HPACK), gRPC over HTTP/2. Every error of the caller's ends the connection with its
code; errors that concern one call end that call.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import cast

from npu_gr.router.answers import Refused
from npu_gr.router.picker.blocks import MAX_BLOCK_BYTES, HeaderBlocks
from npu_gr.router.picker.frames import (
    FIRST_WINDOW_BYTES,
    SETTING,
    U32,
    BrokenHttp2,
    Code,
    Flag,
    FrameReader,
    Http2Setting,
    SendWindow,
    Type,
    checked_window,
    frame,
    settings,
    unpadded,
    window_update,
)
from npu_gr.router.picker.streams import PREFIX, PREFIX_BYTES, CallStatus, PickerCall, PickerStream
from npu_gr.router.router import Router
from npu_gr.server.tls_listener import bound_read_ahead

log = logging.getLogger(__name__)
OpenCall = Callable[[bytes, PickerStream], PickerCall | None]
"""Opens a call by its path and what to answer on; None: there is no such method."""

STREAM_WINDOW_BYTES = 1 << 20  # that a caller may send of one call before we say that it may go on
_CONNECTION_WINDOW_BYTES = 1 << 24
_STREAM_UPDATE_BYTES = STREAM_WINDOW_BYTES // 2
_CONNECTION_UPDATE_BYTES = _CONNECTION_WINDOW_BYTES // 2
_MESSAGE_OVERHEAD_BYTES = 65_536  # of a message beside the body in it
_DATA = Type.DATA  # a member of a class costs more than a name
_HEADERS = Type.HEADERS
_RST_STREAM = Type.RST_STREAM
_END_STREAM = Flag.END_STREAM
_PADDED = Flag.PADDED
_MAX_BUDGETS = 2  # of `max_budget_s`, that a call may last: a gateway that forgets its calls holds no places


class GrpcConnection(asyncio.Protocol):
    """Implements `Sweepable` and `PickerWire`."""

    def __init__(self, router: Router, open_call: OpenCall) -> None:
        self.window = SendWindow()
        self._router = router
        self._open_call = open_call
        self._max_message_bytes = router.config.limits.max_body_bytes + _MESSAGE_OVERHEAD_BYTES
        self._transport: asyncio.Transport | None = None
        self._streams: dict[int, PickerStream] = {}
        self._half_closed: list[PickerStream] = []  # by what is being read
        self._heard_at = time.monotonic()
        self._pinged_at = 0.0  # since then nothing was heard; 0 = there is no such question
        self._out: list[bytes] = []
        self._is_reading = False  # what is written waits until everything that has arrived is read
        self._frames = FrameReader(self._frame)
        self._last_stream = 0
        self._says_goodbye = False  # GOAWAY is sent
        self._unacknowledged_bytes = 0
        self._blocks = HeaderBlocks()

    # ---- what the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Announce our settings; over the limit of connections, end."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        bound_read_ahead(transport)
        ours = {
            Http2Setting.HEADER_TABLE_SIZE: 0,
            Http2Setting.MAX_CONCURRENT_STREAMS: self._router.config.limits.max_inflight,
            Http2Setting.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
            Http2Setting.MAX_HEADER_LIST_SIZE: MAX_BLOCK_BYTES,
        }
        self.write(settings(ours) + window_update(0, _CONNECTION_WINDOW_BYTES - FIRST_WINDOW_BYTES))
        if not self._router.connections.add(self):
            self._router.metrics.refused_connections.add()
            self.end()

    def data_received(self, data: bytes) -> None:
        """Read frames, and write what the calls have answered."""
        self._is_reading = True
        self._heard_at, self._pinged_at = time.monotonic(), 0.0
        try:
            self._frames.feed(data)
            if self._half_closed:
                self._tell_half_closed()
        except BrokenHttp2 as error:
            log.debug("a gateway's connection ends: %s", error)
            self._is_reading = False  # what is written after `close` is lost
            self._goodbye(error.code)
            if self._transport is not None:
                self._transport.close()
        finally:
            self._is_reading = False
            if self._out:
                self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """End all calls."""
        self._router.connections.remove(self)
        self._transport = None
        for stream in list(self._streams.values()):
            self._drop(stream)

    def pause_writing(self) -> None:
        """Read nothing while the caller does not: all that we send answers what we have read."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Read on."""
        if self._transport is not None:
            self._transport.resume_reading()

    # ---- what the router calls

    @property
    def is_idle(self) -> bool:
        """Whether it has no call."""
        return not self._streams

    def sweep(self, now_at: float) -> None:
        """Tell the caller that its next call belongs elsewhere, if the router leaves; end what takes too long."""
        config = self._router.config
        if self._router.is_leaving:
            self._goodbye(Code.NO_ERROR)
            self._close_if_done()
        for stream in list(self._streams.values()):
            if now_at - stream.began_at > _MAX_BUDGETS * config.max_budget_s:
                self._refuse(stream, CallStatus.UNAVAILABLE, "the request lasts too long")
        if self._transport is None:
            return
        if not self.window.has_settings and now_at - self._heard_at > config.header_timeout_s:
            self._transport.abort()
        elif self._pinged_at and now_at - self._pinged_at > config.header_timeout_s:
            self._transport.abort()  # its host is gone
        elif not self._pinged_at and now_at - self._heard_at > config.idle_s:
            self._pinged_at = now_at
            self.write(frame(Type.PING, 0, 0, bytes(8)))

    def end(self) -> None:
        """Close after what was written."""
        self._goodbye(Code.NO_ERROR)
        if self._transport is not None:
            self._transport.close()

    # ---- what the streams call

    def write(self, data: bytes) -> None:
        """Send frames; while something is read, together with all others that it causes."""
        self._out.append(data)
        if not self._is_reading:
            self._flush()

    def ended(self, stream: PickerStream) -> None:
        """Forget a stream that has sent its last frame."""
        if not stream.is_half_closed:  # the caller may stop sending
            self.write(frame(Type.RST_STREAM, 0, stream.number, U32.pack(Code.NO_ERROR)))
        self._drop(stream)
        self._close_if_done()

    def _flush(self) -> None:
        if self._out and self._transport is not None:
            data = b"".join(self._out)
            self._out.clear()
            self._transport.write(data)

    def _goodbye(self, code: Code) -> None:
        if not self._says_goodbye:
            self._says_goodbye = True
            self.write(frame(Type.GOAWAY, 0, 0, U32.pack(self._last_stream) + U32.pack(code)))

    def _close_if_done(self) -> None:
        if self._says_goodbye and not self._streams and self._transport is not None:
            self._flush()
            self._transport.close()

    def _drop(self, stream: PickerStream) -> None:
        """Forget a stream, and tell its call (G1)."""
        if self._streams.pop(stream.number, None) is None:
            return
        if stream.num_counted or stream.num_kept:
            self._router.kept.give_back(stream.num_counted + stream.num_kept)
            stream.num_counted = stream.num_kept = 0
        call, stream.call = stream.call, None
        if call is not None:
            call.dropped()

    # ---- reading

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> bool:
        """Do what a frame asks for. False: the connection ends, and nothing more is read."""
        if not self.window.has_settings and (kind != Type.SETTINGS or flags & Flag.ACK):
            raise BrokenHttp2(Code.PROTOCOL_ERROR, "the first frame is no SETTINGS")
        if self._blocks.is_open and kind != Type.CONTINUATION:
            raise BrokenHttp2(Code.PROTOCOL_ERROR, "a frame inside a block of headers")
        if kind == _DATA:
            self._on_data(number, flags, payload)
        elif kind == _HEADERS:
            path = self._blocks.begin(number, flags, payload)
            if path is not None:
                self._on_block(number, flags, path)
        elif kind == _RST_STREAM:
            if len(payload) != 4:
                raise BrokenHttp2(Code.FRAME_SIZE_ERROR, "RST_STREAM has 4 bytes")
            if number > self._last_stream or not number:
                raise BrokenHttp2(Code.PROTOCOL_ERROR, "RST_STREAM of a stream that never was")
            if (stream := self._streams.get(number)) is not None:
                self._drop(stream)
                if self._says_goodbye:
                    self._close_if_done()
        elif kind == Type.CONTINUATION:
            path = self._blocks.go_on(number, flags, payload)
            if path is not None:
                self._on_block(number, self._blocks.flags, path)
        elif kind == Type.SETTINGS:
            self._on_settings(number, flags, payload)
        elif kind == Type.PING:
            if number or len(payload) != 8:
                raise BrokenHttp2(Code.FRAME_SIZE_ERROR, "PING has 8 bytes and no stream")
            if not flags & Flag.ACK:
                self.write(frame(Type.PING, Flag.ACK, 0, payload))
        elif kind == Type.WINDOW_UPDATE:
            self._on_window_update(number, payload)
        elif kind == Type.PUSH_PROMISE:
            raise BrokenHttp2(Code.PROTOCOL_ERROR, "callers promise nothing")
        # GOAWAY: the caller opens no more streams. PRIORITY, and what we do not know, mean nothing here.
        return self._transport is not None and not self._transport.is_closing()

    def _on_data(self, number: int, flags: int, payload: bytes) -> None:
        size = len(payload)
        self._unacknowledged_bytes += size
        if self._unacknowledged_bytes > _CONNECTION_UPDATE_BYTES:
            self.write(window_update(0, self._unacknowledged_bytes))
            self._unacknowledged_bytes = 0
        stream = self._streams.get(number)
        if stream is None:
            if number > self._last_stream or not number:
                raise BrokenHttp2(Code.PROTOCOL_ERROR, "DATA of a stream that never was")
            return  # it ended here while this was on its way
        if stream.is_half_closed:
            raise BrokenHttp2(Code.STREAM_CLOSED, "DATA after the end of a stream")
        stream.unacknowledged_bytes += size
        if stream.unacknowledged_bytes > STREAM_WINDOW_BYTES:
            raise BrokenHttp2(Code.FLOW_CONTROL_ERROR, "DATA over the window of a stream")
        if stream.unacknowledged_bytes > _STREAM_UPDATE_BYTES and not flags & _END_STREAM:
            self.write(window_update(number, stream.unacknowledged_bytes))
            stream.unacknowledged_bytes = 0
        if flags & _PADDED:
            payload = unpadded(payload, flags)
        if payload:
            self._deliver(stream, payload)
        if flags & _END_STREAM:
            self._half_close(stream)

    def _deliver(self, stream: PickerStream, data: bytes) -> None:
        """Pass whole messages on; of the one that has begun, count the bytes before they come (G3)."""
        size = len(data) - PREFIX_BYTES
        if not stream.buffer and size >= 0 and PREFIX.unpack_from(data) == (0, size):
            messages: Iterable[bytes] = (data[PREFIX_BYTES:],)  # the usual case: one frame, one message
        else:
            messages = stream.messages(data)
        for message in messages:
            if stream.num_counted:
                self._router.kept.give_back(stream.num_counted)
                stream.num_counted = 0
            if stream.call is None:
                return
            stream.call.received(message)
            if stream.pending:
                self._keep_pending(stream)
        if stream.call is None or len(stream.buffer) < PREFIX_BYTES or stream.num_counted:
            return
        num_bytes = stream.announced_bytes
        if stream.buffer[0]:
            self._refuse(stream, CallStatus.UNIMPLEMENTED, "compressed messages are not read here")
        elif num_bytes > self._max_message_bytes:
            text = f"a message of {num_bytes} bytes, limit {self._max_message_bytes}"
            self._refuse(stream, CallStatus.RESOURCE_EXHAUSTED, text)
        else:
            try:
                self._router.kept.take(num_bytes)
                stream.num_counted = num_bytes
            except Refused as error:
                self._refuse(stream, CallStatus.RESOURCE_EXHAUSTED, str(error))

    def _keep_pending(self, stream: PickerStream) -> None:
        """Count what waits for the caller's windows (G2)."""
        if len(stream.pending) > 2 * self._max_message_bytes:
            self._refuse(stream, CallStatus.RESOURCE_EXHAUSTED, "the caller reads too slowly")
            return
        try:
            self._router.kept.take(len(stream.pending) - stream.num_kept)
            stream.num_kept = len(stream.pending)
        except Refused as error:
            self._refuse(stream, CallStatus.RESOURCE_EXHAUSTED, str(error))

    def _refuse(self, stream: PickerStream, status: CallStatus, text: str) -> None:
        """End a call for what its caller does; one that cannot be told is cut off."""
        stream.end(status, text)
        if stream.number in self._streams:
            self.write(frame(Type.RST_STREAM, 0, stream.number, U32.pack(Code.ENHANCE_YOUR_CALM)))
            self._drop(stream)

    def _half_close(self, stream: PickerStream) -> None:
        stream.is_half_closed = True
        self._half_closed.append(stream)

    def _tell_half_closed(self) -> None:
        """Tell calls that their caller sends nothing more; most are reset in the same piece."""
        told, self._half_closed = self._half_closed, []
        for stream in told:
            if stream.call is not None:
                stream.call.half_closed()

    def _on_block(self, number: int, flags: int, path: bytes) -> None:
        """Open a stream, or end the caller's side of one."""
        if number <= self._last_stream:
            stream = self._streams.get(number)
            if stream is None:
                return  # trailers of a stream that ended here while they were on their way
            if not flags & Flag.END_STREAM or stream.is_half_closed:
                raise BrokenHttp2(Code.PROTOCOL_ERROR, "headers in the middle of a stream")
            self._half_close(stream)
            return
        if not number % 2:
            raise BrokenHttp2(Code.PROTOCOL_ERROR, "an even stream belongs to the server")
        self._last_stream = number
        if self._says_goodbye or len(self._streams) >= self._router.config.limits.max_inflight:
            self.write(frame(Type.RST_STREAM, 0, number, U32.pack(Code.REFUSED_STREAM)))
            return
        stream = PickerStream(self, number, self.window.of_stream, self._heard_at)
        self._streams[number] = stream
        stream.call = self._open_call(path, stream)
        if stream.call is None:
            stream.is_half_closed = bool(flags & Flag.END_STREAM)
            stream.end(CallStatus.UNIMPLEMENTED, "there is no such method")
        elif flags & Flag.END_STREAM:
            self._half_close(stream)

    def _on_settings(self, number: int, flags: int, payload: bytes) -> None:
        if number or len(payload) % SETTING.size or (flags & Flag.ACK and payload):
            raise BrokenHttp2(Code.FRAME_SIZE_ERROR, "SETTINGS of a stream, or of a wrong length")
        if flags & Flag.ACK:
            self._blocks.without_table()
            return
        more = self.window.set(payload)
        for stream in self._streams.values():
            stream.send_window = checked_window(stream.send_window + more)
        self.write(frame(Type.SETTINGS, Flag.ACK, 0))
        self._send_waiting()

    def _on_window_update(self, number: int, payload: bytes) -> None:
        if len(payload) != U32.size:
            raise BrokenHttp2(Code.FRAME_SIZE_ERROR, "WINDOW_UPDATE has 4 bytes")
        more = U32.unpack(payload)[0] & 0x7FFF_FFFF
        stream = self._streams.get(number)
        if number > self._last_stream or not more:
            raise BrokenHttp2(Code.PROTOCOL_ERROR, "WINDOW_UPDATE of nothing")
        if not number:
            self.window.num_bytes = checked_window(self.window.num_bytes + more)
        elif stream is not None:
            stream.send_window = checked_window(stream.send_window + more)
        self._send_waiting()

    def _send_waiting(self) -> None:
        for stream in list(self._streams.values()):
            if stream.pending:
                stream.flush()
                sent = max(0, stream.num_kept - len(stream.pending))
                self._router.kept.give_back(sent)
                stream.num_kept -= sent
