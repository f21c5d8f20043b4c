"""Read a request's headers: its id and its time budget."""

from __future__ import annotations

import re
from collections.abc import Mapping

from npu_gr.core.errors import BadRequest, DeadlineExceeded
from npu_gr.core.trace import random_id

REQUEST_ID = "X-Request-Id"
RETRY_AFTER_MS = "Retry-After-Ms"  # beside Retry-After, which has whole seconds
RETRY_MS = range(20, 96, 5)  # when a refused caller may come again; spread, so that all do not come at once
NOT_TAKEN = "X-NpuGr-Not-Taken"  # on a 503: the instance began nothing, so the router may send it to another one
_VALID_ID = re.compile(r"[!-~]{1,128}")
_GRPC_UNITS_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_GRPC_TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])")
TIMEOUT_MS = "X-Request-Timeout-Ms"
_MS_HEADERS = (TIMEOUT_MS, "x-envoy-expected-rq-timeout-ms")
BUDGET_HEADERS = (*_MS_HEADERS, "grpc-timeout")


def request_id(headers: Mapping[str, str]) -> str:
    """Return the caller's id if it is printable ASCII of at most 128 characters, else make a new one."""
    given = headers.get(REQUEST_ID, "")
    return given if _VALID_ID.fullmatch(given) else random_id(128)


def budget_s(headers: Mapping[str, str], default_s: float, max_s: float) -> float:
    """Return the seconds that the caller grants: the smallest value of the headers that are there.

    Args:
        headers: X-Request-Timeout-Ms, x-envoy-expected-rq-timeout-ms, grpc-timeout are read.
        default_s: where there is none of them.
        max_s: at most.

    Raises:
        BadRequest: a header cannot be read. DeadlineExceeded: nothing is left.
    """
    budgets = []
    for name in _MS_HEADERS:
        if (text := headers.get(name)) is not None:
            if not re.fullmatch(r"\d{1,9}(\.\d{1,6})?", text):
                raise BadRequest(f"{name}: expected milliseconds, got {text[:32]!r}")
            budgets.append(float(text) * 1e-3)
    if (text := headers.get("grpc-timeout")) is not None:
        match = _GRPC_TIMEOUT.fullmatch(text)
        if not match:
            raise BadRequest(f"grpc-timeout: expected up to 8 digits and a unit, got {text[:32]!r}")
        budgets.append(int(match[1]) * _GRPC_UNITS_S[match[2]])
    budget = min([*budgets, max_s] if budgets else [default_s, max_s])
    if budget <= 0:
        raise DeadlineExceeded("the time budget was spent before the request arrived")
    return budget
