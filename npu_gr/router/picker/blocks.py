"""Blocks of request headers: put together, decoded once, and known by heart afterwards."""

from __future__ import annotations

from typing import NamedTuple

import hpack

from npu_gr.router.picker.frames import BrokenHttp2, Code, Flag, unpadded

MAX_BLOCK_BYTES = 16_384  # decoding the worst ones takes 10 ms
_PRIORITY_BYTES = 5
_MAX_KNOWN = 64


class RequestBlock(NamedTuple):
    """The headers of one request, or its trailers."""

    stream: int
    ends_stream: bool
    path: bytes  # empty in trailers


class HeaderBlocks:
    """The blocks of one connection, in their order.

    Once the caller's table is empty and stays so, the same bytes mean the same headers.
    """

    def __init__(self) -> None:
        self._decoder = hpack.Decoder(max_header_list_size=MAX_BLOCK_BYTES)
        self._paths: dict[bytes, bytes] = {}  # block -> path in it
        self._stream = 0
        self._ends_stream = False
        self._begun: bytearray | None = None  # a block whose end has not come

    @property
    def is_open(self) -> bool:
        """Whether the next frame must go on with a block."""
        return self._begun is not None

    def without_table(self) -> None:
        """Let the caller's next block begin with an empty table of size 0: it has confirmed our settings."""
        self._decoder.max_allowed_table_size = 0

    def begin(self, stream: int, flags: int, payload: bytes) -> RequestBlock | None:
        """Read a frame HEADERS. Returns its block, or None if the block goes on.

        Raises:
            BrokenHttp2: the headers cannot be read.
        """
        payload = unpadded(payload, flags)
        self._stream = stream
        self._ends_stream = bool(flags & Flag.END_STREAM)
        self._begun = bytearray(payload[_PRIORITY_BYTES:] if flags & Flag.PRIORITY else payload)
        return self._end() if flags & Flag.END_HEADERS else None

    def go_on(self, stream: int, flags: int, payload: bytes) -> RequestBlock | None:
        """Read a frame CONTINUATION; the rest is as for `begin`."""
        if self._begun is None or stream != self._stream:
            raise BrokenHttp2(Code.PROTOCOL_ERROR, "CONTINUATION of nothing")
        self._begun += payload
        if len(self._begun) > MAX_BLOCK_BYTES or not payload:
            raise BrokenHttp2(Code.ENHANCE_YOUR_CALM, f"headers over {MAX_BLOCK_BYTES} bytes, or in frames without any")
        return self._end() if flags & Flag.END_HEADERS else None

    def _end(self) -> RequestBlock:
        assert self._begun is not None
        block = bytes(self._begun)
        self._begun = None
        path = self._paths.get(block)
        if path is None:
            path = self._path(block)
        return RequestBlock(self._stream, self._ends_stream, path)

    def _path(self, block: bytes) -> bytes:
        try:
            headers = self._decoder.decode(block, raw=True)
        except (hpack.HPACKError, UnicodeDecodeError) as error:
            raise BrokenHttp2(Code.COMPRESSION_ERROR, f"headers: {error}") from error
        path = next((value for name, value in headers if name == b":path"), b"")
        if self._decoder.header_table_size == 0:
            if len(self._paths) >= _MAX_KNOWN:
                self._paths.clear()
            self._paths[block] = path
        return path
