"""What a connection has received and not handed on: where its next request ends."""

from __future__ import annotations

from npu_gr.server.entrance.framing import HEAD_END, MAX_HEAD_BYTES, Chunks, Head, parse_head


class HeadTooLarge(Exception):
    """A head is longer than `MAX_HEAD_BYTES`."""


class Incoming:
    """The bytes of one connection that wait, and what was read of the request that they begin with."""

    __slots__ = ("_chunks", "_searched_bytes", "data", "head")

    def __init__(self) -> None:
        """Nothing has come yet."""
        self.data: bytes | bytearray = b""
        self.head: Head | None = None  # of the present request, also when it was taken; None = the head is not whole
        self._searched_bytes = 0  # of a head that is not whole yet, in vain
        self._chunks: Chunks | None = None

    def add(self, data: bytes) -> None:
        """Append bytes to those that are here."""
        if isinstance(self.data, bytes):
            self.data = bytearray(self.data)
        self.data += data

    def read_head(self) -> Head | None:
        """Read the head of the next request; None = it is not whole.

        Raises:
            BadRequest: it is no HTTP/1.1.
            HeadTooLarge: it is too long, or will be.
        """
        end = self.data.find(HEAD_END, self._searched_bytes)
        if (len(self.data) if end < 0 else end) > MAX_HEAD_BYTES:
            raise HeadTooLarge
        if end < 0:
            self._searched_bytes = max(0, len(self.data) - len(HEAD_END) + 1)
            return None
        self._searched_bytes = 0
        self.head = parse_head(self.data, end + len(HEAD_END))
        self._chunks = Chunks(self.head.num_bytes) if self.head.is_chunked else None
        return self.head

    def take(self) -> tuple[bytes | bytearray | None, int]:
        """Cut off the request whose head was read; the head stays.

        Returns:
            Its bytes, None = they are not all here, and how many its body is known to have.

        Raises:
            BadRequest: its chunks cannot be read.
        """
        head = self.head
        assert head is not None
        data = self.data
        if self._chunks is None:
            body_bytes = head.body_bytes
            end: int | None = head.num_bytes + body_bytes
        else:
            end = self._chunks.end(data)
            body_bytes = (len(data) if end is None else end) - head.num_bytes
        if end is None or end > len(data):
            return None, body_bytes
        self.data = b"" if end == len(data) else data[end:]
        return data if end == len(data) else data[:end], body_bytes
