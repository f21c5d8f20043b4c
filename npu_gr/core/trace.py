"""The W3C trace context of the request in progress. Its ids go to callees, exemplars and log lines.

Source: W3C Trace Context, level 1.
"""

from __future__ import annotations

import random
import re
from contextvars import ContextVar
from typing import NamedTuple

_RANDOM = random.Random()  # noqa: S311  (ids; nobody else seeds it)


def random_id(num_bits: int) -> str:
    """Make an id that no other request has, in hex, without a system call."""
    return f"{_RANDOM.getrandbits(num_bits):0{num_bits // 4}x}"


_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class Trace(NamedTuple):
    """The place of one request in a trace. Ids are lower-case hex."""

    trace_id: str  # 32 digits
    span_id: str  # 16 digits; the span of this process
    parent_id: str | None  # 16 digits; the span of the caller; None = the trace begins here
    is_sampled: bool

    @property
    def header(self) -> str:
        """The value of the header `traceparent`, for callees and for the answer."""
        return f"00-{self.trace_id}-{self.span_id}-{self.is_sampled:02x}"


def begin(traceparent: str | None) -> Trace:
    """Begin a span in the trace of the caller; without a valid header begin a new trace, as the standard asks."""
    span_id = random_id(64)
    match = _TRACEPARENT.fullmatch(traceparent or "")
    if match is None or (match[0].startswith("00") and match[4]):  # version 00 has four fields and no more
        return Trace(random_id(128), span_id, None, False)
    return Trace(match[1], span_id, match[2], bool(int(match[3], 16) & 1))


CURRENT: ContextVar[Trace | None] = ContextVar("npu_gr_trace", default=None)


def exemplar() -> dict[str, str] | None:
    """The labels that link a histogram bucket to the request in progress; None outside of a request."""
    trace = CURRENT.get()
    return None if trace is None else {"trace_id": trace.trace_id}
