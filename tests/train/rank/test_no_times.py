"""A log without times: a request of today, and later events with real times, change nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from npu_gr.core.arrays import I64
from npu_gr.train.data import InteractionLog, build_log
from npu_gr.train.rank.fit import new_model
from npu_gr.train.rank.inputs import LogInputs
from npu_gr.train.rank.losses import user_vectors
from npu_gr.train.rank.options import NEXT
from tests.train.rank.test_train import TINY
from tests.train.synthetic import planted

NOW = 1_790_000_000


@pytest.fixture(scope="module")
def places() -> InteractionLog:
    log = planted(num_users=20, num_events=12)
    order = (log.timestamps - 1_600_000_000) // 3600
    return build_log(replace(log, timestamps=order + 1), [], "leave-one-out")


def vectors(log: InteractionLog, times: I64, trained_on: InteractionLog) -> torch.Tensor:
    torch.manual_seed(0)
    model = new_model(trained_on, [], [NEXT], TINY).eval()
    with torch.no_grad():  # as training would
        for layer in model.layers:
            for name, table in layer.named_parameters():
                if name.endswith("_bias"):
                    table.normal_()
    model.items.freeze()
    changed = replace(log, times=times)
    return user_vectors(LogInputs(changed, model), model, changed.next_items())


def later(log: InteractionLog) -> list[I64]:
    """The asked time is today; so are the times of the last five events of each user."""
    age = log.starts[log.users + 1] - 1 - np.arange(len(log.items))
    return [np.where(age < count, NOW - age, log.times) for count in (1, 5)]


def test_without_times_no_time_is_read(places: InteractionLog) -> None:
    want = vectors(places, places.times, places)
    for times in later(places):
        assert torch.equal(vectors(places, times, places), want)


def test_with_times_they_are_read(places: InteractionLog) -> None:
    """Else the test above could not fail."""
    dated = replace(places, times=places.times * 3600 + 1_600_000_000)
    want = vectors(places, places.times, dated)
    for times in later(places):
        assert not torch.allclose(vectors(places, times, dated), want, atol=1e-3)
