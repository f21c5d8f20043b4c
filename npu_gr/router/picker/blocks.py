"""Blocks of request headers: put together, decoded once, and known by heart afterwards."""

from __future__ import annotations

import hpack

from npu_gr.router.picker.frames import BrokenHttp2, Code, Flag, unpadded

MAX_BLOCK_BYTES = 16_384  # decoding the worst ones takes 10 ms
_PRIORITY_BYTES = 5
_MAX_KNOWN = 64
_WHOLE = Flag.END_HEADERS
_SHAPE = Flag.END_HEADERS | Flag.PADDED | Flag.PRIORITY  # how a block lies in its frames


class HeaderBlocks:
    """The blocks of one connection, in their order. A block is read as the path in it, which is empty in trailers.

    Once the caller's table is empty and stays so, the same bytes mean the same headers.
    """

    def __init__(self) -> None:
        self._decoder = hpack.Decoder(max_header_list_size=MAX_BLOCK_BYTES)
        self._paths: dict[bytes, bytes] = {}  # block -> path in it
        self.is_open = False  # the next frame must go on with a block
        self.flags = 0  # of that block's frame HEADERS
        self._stream = 0
        self._begun = bytearray()  # of the open block

    def without_table(self) -> None:
        """Let the caller's next block begin with an empty table of size 0: it has confirmed our settings."""
        self._decoder.max_allowed_table_size = 0

    def begin(self, stream: int, flags: int, payload: bytes) -> bytes | None:
        """Read a frame HEADERS. Returns the path in its block, or None if the block goes on.

        Raises:
            BrokenHttp2: the headers cannot be read.
        """
        if flags & _SHAPE == _WHOLE:  # the usual case: the payload is the block
            path = self._paths.get(payload)
            return self._path(payload) if path is None else path
        payload = unpadded(payload, flags)
        self._stream = stream
        self.flags = flags
        self._begun = bytearray(payload[_PRIORITY_BYTES:] if flags & Flag.PRIORITY else payload)
        return self._end(flags)

    def go_on(self, stream: int, flags: int, payload: bytes) -> bytes | None:
        """Read a frame CONTINUATION; the rest is as for `begin`."""
        if not self.is_open or stream != self._stream:
            raise BrokenHttp2(Code.PROTOCOL_ERROR, "CONTINUATION of nothing")
        self._begun += payload
        if len(self._begun) > MAX_BLOCK_BYTES or not payload:
            raise BrokenHttp2(Code.ENHANCE_YOUR_CALM, f"headers over {MAX_BLOCK_BYTES} bytes, or in frames without any")
        return self._end(flags)

    def _end(self, flags: int) -> bytes | None:
        self.is_open = not flags & Flag.END_HEADERS
        if self.is_open:
            return None
        block = bytes(self._begun)
        self._begun = bytearray()
        return self._path(block)

    def _path(self, block: bytes) -> bytes:
        """Decode a block, and know it from now on."""
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
