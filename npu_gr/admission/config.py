"""Settings of admission control."""

from __future__ import annotations

from typing import Annotated

import msgspec

from npu_gr.core.settings import Count, Positive


class AdmissionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section `admission`: how much work is let in at once, and who waits for whom."""

    enabled: bool = True  # false = nothing waits at the door and nothing is refused there: for comparisons
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.35  # of a kind's objective: so much of its work is inside
    max_inflight: Count = 512  # requests that hold memory inside at once, those that wait for the store included
    tenant_weights: dict[str, Positive] = {}  # of all that tenants share where it is scarce; all others have 1
