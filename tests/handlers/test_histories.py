"""A history's own fingerprint stands in for that of its tokens only where both are the same."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from npu_gr.core.feature_schema.columns import NO_COLUMNS, Columns
from npu_gr.core.history import Events
from npu_gr.handlers.histories import UserHistory
from tests.models import events

WINDOW = 20
SPENT = Columns({"spent": np.arange(12, dtype=np.float32)})


@pytest.mark.parametrize(
    ("history", "first_index", "of_user", "is_known"),
    [
        (events(12), 0, None, True),
        (events(WINDOW), 0, {}, True),
        (events(0), 0, None, True),
        (events(WINDOW + 1), 0, None, False),  # it is named by its newest events
        (events(12), 5, None, False),  # and by where they begin
        (events(12), 0, {"age": 30}, False),
        (replace(events(12), features=SPENT), 0, None, False),
    ],
)
def test_a_plain_fingerprint_is_that_of_the_events(
    history: Events, first_index: int, of_user: dict[str, int] | None, is_known: bool
) -> None:
    found = UserHistory.of(history, first_index, WINDOW, of_user)
    plain = replace(found.events, features=NO_COLUMNS).fingerprint()
    assert found.plain_fingerprint == (plain if is_known else "")
    assert (found.fingerprint == plain) == is_known
