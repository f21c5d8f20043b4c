"""Constrained types that the options of several trainers share, beside those of `npu_gr.core.settings`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Seed = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]  # of a whole, which may be nothing or all of it
Weight = Annotated[float, Meta(ge=0.0)]  # of a term of the loss; 0 leaves the term out
DropoutRatio = Annotated[float, Meta(ge=0.0, lt=1.0)]
Decay = Annotated[float, Meta(ge=0.0, lt=1.0)]  # of a moving average; 0 = no average
