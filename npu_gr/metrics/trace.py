"""The W3C trace context of the request in progress: parsed, passed on, put into exemplars and log lines.

Source: W3C Trace Context, level 1.
"""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar
from typing import NamedTuple

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class Trace(NamedTuple):
    """One request's place in a trace; ids are lower-case hex."""

    trace_id: str  # 32 digits
    span_id: str  # 16 digits: ours
    parent_id: str | None  # 16 digits: the caller's; None = the trace begins here
    is_sampled: bool

    @property
    def header(self) -> str:
        """The `traceparent` for whomever we call, and for the answer."""
        return f"00-{self.trace_id}-{self.span_id}-{self.is_sampled:02x}"


def begin(traceparent: str | None) -> Trace:
    """Our span in the caller's trace; of a missing or invalid header, as the standard says, a new trace."""
    span_id = secrets.token_hex(8)
    match = _TRACEPARENT.fullmatch(traceparent or "")
    if match is None or (match[0].startswith("00") and match[4]):  # version 00 has four fields and no more
        return Trace(secrets.token_hex(16), span_id, None, False)
    return Trace(match[1], span_id, match[2], bool(int(match[3], 16) & 1))


CURRENT: ContextVar[Trace | None] = ContextVar("npu_gr_trace", default=None)


def exemplar() -> dict[str, str] | None:
    """The labels that tie a histogram's bucket to the request in progress."""
    trace = CURRENT.get()
    return None if trace is None else {"trace_id": trace.trace_id}
