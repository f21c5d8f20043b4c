"""The bytes of all bodies that arrive at the router or are kept for a second try: counted before they are read."""

from __future__ import annotations

from npu_gr.router.answers import Refused


class KeptBytes:
    """Bytes of bodies, of all requests together."""

    def __init__(self, max_bytes: int) -> None:
        """Begin with none.

        Args:
            max_bytes: at the same time.
        """
        self.num_bytes = 0
        self._max_bytes = max_bytes

    def take(self, num_bytes: int) -> None:
        """Count bytes that will arrive.

        Raises:
            Refused: there is no room for them; they are not counted.
        """
        if self.num_bytes + num_bytes > self._max_bytes:
            raise Refused(503, "the bodies in the router are over limits.max_kept_bytes; ask again")
        self.num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Count bytes that are no longer here."""
        self.num_bytes -= num_bytes
