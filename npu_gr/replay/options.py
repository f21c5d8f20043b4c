"""The options of a replay: which service, how fast, for how long, and what counts as in time."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from npu_gr.core.settings import Count, Positive, Seconds

ProcessCount = Annotated[int, Meta(ge=1, le=64)]  # of the load generator
_Gap = Annotated[float, Meta(ge=0, le=3600)]


class ReplayOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options, checked also where they are constructed in code. Raises ValueError with the field's name and limit.

    Arrivals are the log's own (`speed`); or made (`rate`, which may grow to `ramp_to` over `ramp_s`); or there are none
    and a fixed number of requests is in flight (`closed`).
    """

    base_url: Annotated[str, Meta(description="service or router, http or https; /v1/... is added")]
    admin_url: Annotated[str | None, Meta(description="admin address of the instance, for its memory tiers")] = None
    api_key: Annotated[str | None, Meta(description="sent as a bearer token; never reported")] = None
    speed: Annotated[Positive, Meta(description="log seconds per second; not together with rate")] = 1.0
    rate: Annotated[Positive | None, Meta(description="ranks per second instead of the log's times")] = None
    arrival: Annotated[Literal["poisson", "constant"], Meta(description="gaps between ranks at rate")] = "poisson"
    ramp_to: Annotated[Positive | None, Meta(description="ranks per second that rate has grown to after ramp_s")] = None
    ramp_s: Annotated[Seconds, Meta(description="s from rate to ramp_to; it stays there")] = 60.0
    closed: Annotated[Count | None, Meta(description="requests in flight, the next when one is over")] = None
    signal_lead_s: Annotated[
        _Gap | None, Meta(description="s from signal to rank, where the log has no signal; None = only the log's own")
    ] = None
    rank_delay_s: Annotated[
        _Gap | None,
        Meta(description="where the log has neither signal nor delay_ms: signal at arrival, rank this median later"),
    ] = None
    rank_delay_p99_s: Annotated[_Gap | None, Meta(description="its P99 (log-normal); None = always the median")] = None
    histories: Annotated[
        Literal["logged", "whole", "delta"], Meta(description="how histories are sent; logged = as the log has them")
    ] = "logged"
    skip: Annotated[int, Meta(ge=0, description="log records to leave out at the start")] = 0
    start_s: Annotated[float, Meta(ge=0, description="log seconds to leave out at the start")] = 0.0
    limit: Annotated[Count | None, Meta(description="log records, oldest first; None = all")] = None
    sample_users: Annotated[float, Meta(gt=0, le=1, description="share of the users to replay, by hash")] = 1.0
    duration_s: Annotated[Seconds | None, Meta(description="s of sending; None = the whole log")] = None
    warmup_s: Annotated[float, Meta(ge=0, description="s of sending at the start that are not counted")] = 0.0
    timeout_s: Annotated[Seconds, Meta(description="budget in s of a request whose record has no deadline_ms")] = 1.0
    slo_s: Annotated[Seconds, Meta(description="s from due to answered that a good rank takes at most")] = 0.1
    processes: Annotated[ProcessCount, Meta(description="clients, each with its share of the users")] = 1
    bad_lines: Annotated[Literal["fail", "skip"], Meta(description="a line of the log that is no record")] = "fail"
    seed: Annotated[int, Meta(ge=0, description="of random arrivals and delays")] = 0

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(self):  # msgspec checks what it decodes, but not what code constructs
            try:
                msgspec.convert(getattr(self, field.name), field.type)
            except msgspec.ValidationError as error:
                raise ValueError(f"{field.name}: {error}") from None
        if self.rate is not None and self.speed != 1.0:
            raise ValueError(f"rate: {self.rate} together with speed {self.speed}; give one of them")
        if self.closed is not None and (self.rate is not None or self.speed != 1.0):
            raise ValueError(f"closed: {self.closed} has no arrivals; give neither rate nor speed")
        if self.ramp_to is not None and self.rate is None:
            raise ValueError("ramp_to: needs rate, where the ramp starts")
        if self.signal_lead_s is not None and self.rank_delay_s is not None:
            raise ValueError("rank_delay_s: together with signal_lead_s; one of them says which end the log's time is")
        if self.rank_delay_p99_s is not None and not 0 < (self.rank_delay_s or 0) <= self.rank_delay_p99_s:
            raise ValueError("rank_delay_p99_s: needs 0 < rank_delay_s <= rank_delay_p99_s")
        for name, text in (("base_url", self.base_url), ("admin_url", self.admin_url)):
            if text is None:
                continue
            url = urlsplit(text)
            if url.scheme not in ("http", "https") or not url.hostname:
                raise ValueError(f"{name}: expected http://host:port or https://host")
            if url.username or url.query or url.fragment:
                raise ValueError(f"{name}: no user, query or fragment; a key goes into api_key")
