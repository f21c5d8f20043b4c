"""A valid traceparent is continued under a span of ours.

Anything else begins a trace of its own.
"""

from __future__ import annotations

import pytest

from npu_gr.core.logs import begin

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("flags", "is_sampled"), [("00", False), ("01", True), ("02", False), ("03", True)]
)
def test_a_valid_one_is_continued(flags: str, is_sampled: bool) -> None:
    trace = begin(f"00-{TRACE}-{PARENT}-{flags}")
    assert (trace.trace_id, trace.parent_id, trace.is_sampled) == (TRACE, PARENT, is_sampled)
    assert len(trace.span_id) == 16
    assert trace.span_id != PARENT
    again = begin(trace.header)
    assert (again.trace_id, again.parent_id, again.is_sampled) == (TRACE, trace.span_id, is_sampled)


def test_a_later_version_may_say_more() -> None:
    assert begin(f"01-{TRACE}-{PARENT}-01-more").trace_id == TRACE
    assert begin(f"00-{TRACE}-{PARENT}-01-more").trace_id != TRACE


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "00-0-0-0",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}",
    ],
)
def test_anything_else_begins_anew(header: str | None) -> None:
    first, second = begin(header), begin(header)
    assert first.parent_id is None
    assert not first.is_sampled
    assert first.trace_id not in (TRACE, "0" * 32, second.trace_id)
