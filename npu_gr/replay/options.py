"""What a replay does: where to, how fast, for how long, and what counts as in time."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

_Positive = Annotated[float, Meta(gt=0)]


class ReplayOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checked wherever it comes from. Raises ValueError with the field's name and limit."""

    base_url: Annotated[str, Meta(description="service or router, http or https; /v1/... is added")]
    api_key: Annotated[str | None, Meta(description="sent as a bearer token; never reported")] = None
    speed: Annotated[_Positive, Meta(description="log seconds per second; not together with rate")] = 1.0
    rate: Annotated[_Positive | None, Meta(description="ranks per second instead of the log's times")] = None
    arrival: Annotated[Literal["poisson", "constant"], Meta(description="gaps between ranks at rate")] = "poisson"
    signal_lead_s: Annotated[
        Annotated[float, Meta(ge=0, le=3600)] | None,
        Meta(description="s from signal to rank, where the log has no signal; None = send only the log's own"),
    ] = None
    limit: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="log records, oldest first; None = all")] = (
        None
    )
    duration_s: Annotated[_Positive | None, Meta(description="s of sending; None = the whole log")] = None
    timeout_s: Annotated[_Positive, Meta(description="budget in s of a request whose record has no deadline_ms")] = 1.0
    slo_s: Annotated[_Positive, Meta(description="s from due to answered that a good rank takes at most")] = 0.1
    seed: Annotated[int, Meta(ge=0, description="of the random arrivals")] = 0

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(self):  # msgspec itself checks what it decodes, not what is constructed
            try:
                msgspec.convert(getattr(self, field.name), field.type)
            except msgspec.ValidationError as error:
                raise ValueError(f"{field.name}: {error}") from None
        if self.rate is not None and self.speed != 1.0:
            raise ValueError(f"rate: {self.rate} together with speed {self.speed}; give one of them")
        url = urlsplit(self.base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError("base_url: expected http://host:port or https://host")
        if url.username or url.query or url.fragment:
            raise ValueError("base_url: no user, query or fragment; a key goes into api_key")
