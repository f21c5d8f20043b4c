"""What the kernel knows of a connection's bytes, by one system call a question. Linux and TCP only."""

from __future__ import annotations

import fcntl
import socket
import sys
import termios
from typing import Any

_STATE = 0  # offset of tcpi_state in struct tcp_info of Linux
_HUNG_UP = (7, 8)  # TCP_CLOSE, TCP_CLOSE_WAIT: the other side has closed, and reads no answer
_LAST_DATA_RECV = 52  # offset of tcpi_last_data_recv: ms since data came
_JIFFY_S = 0.004  # its step


class KernelSocket:
    """The socket of a transport, asked beside it. Where there is none, nothing is ever in the kernel."""

    def __init__(self, of_transport: Any, *, is_tls: bool = False) -> None:
        """Take the transport's descriptor, which stays the transport's.

        Args:
            of_transport: its socket, as uvloop or asyncio show it; None = it has none.
            is_tls: its bytes are enciphered.
        """
        self.has_hung_up = False  # the other side had, when `received_ago_s` was asked last
        self.is_clear = False  # what comes are the caller's own bytes, not TLS's
        self._socket: socket.socket | None = None
        if of_transport is None or of_transport.family not in (socket.AF_INET, socket.AF_INET6):
            return
        if sys.platform.startswith("linux"):
            kind, protocol = of_transport.type, of_transport.proto
            self._socket = socket.socket(of_transport.family, kind, protocol, of_transport.fileno())
            self.is_clear = not is_tls

    @property
    def descriptor(self) -> int:
        """The transport's; -1 where there is none."""
        return -1 if self._socket is None else self._socket.fileno()

    def detach(self) -> None:
        """Let go of the descriptor, before the transport closes it."""
        if self._socket is not None:
            self._socket.detach()

    def received_ago_s(self) -> float:
        """Seconds that the newest data lay in the kernel before now: the loop was late, or reading was paused."""
        if self._socket is None:
            return 0.0
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_RECV + 4)
        self.has_hung_up = info[_STATE] in _HUNG_UP
        ms = int.from_bytes(info[_LAST_DATA_RECV:], sys.byteorder)
        return max(0.0, ms * 1e-3 - _JIFFY_S)

    def has_unsent(self) -> bool:
        """Whether the kernel holds bytes that the other side has not acknowledged."""
        return self._socket is not None and any(fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4)))
