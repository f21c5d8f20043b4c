"""The approximate index of a ranker's items finds what the exact search finds, as items change."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from npu_gr.backend.best_items import Hidden
from npu_gr.core.arrays import I64
from npu_gr.core.errors import ConfigError
from npu_gr.engine.queue import SchedulerConfig
from npu_gr.engine.rank_engine import RankEngine
from npu_gr.engine.scheduler import Scheduler
from npu_gr.model.served_weights import Patch
from npu_gr.model.weight_stamps import WeightStamps
from npu_gr.vector_search import encoder_index
from npu_gr.vector_search.encoder_index import NUM_USERS, EncoderIndex
from npu_gr.vector_search.ivf import IvfIndex
from tests.model.test_item_rows import CODES, new_items
from tests.models import CPU, tiny_model

NUM, SPARE, K = 4000, 8, 50
RANDOM = np.random.default_rng(0)
CENTRES = 2 * RANDOM.standard_normal((100, 32)).astype(np.float32)  # of the items
USERS = torch.from_numpy(CENTRES[RANDOM.integers(0, 100, (NUM_USERS, 3))].sum(1))
NOTHING: I64 = np.empty(0, np.int64)
SEEN = [np.array([7, 3, 3, NUM + 1]), NOTHING, np.arange(1500)]


class Rig:
    """An engine of planted items, and its index."""

    def __init__(self) -> None:
        model = tiny_model(num_items=NUM, retrieval=True, item_codes=CODES, row_dropout=0.2)
        with torch.no_grad():
            model.item.weight += torch.from_numpy(CENTRES).repeat(NUM // 100, 1)
        model.items.freeze(SPARE)
        scheduler = Scheduler(SchedulerConfig())
        self.engine = RankEngine(model, CPU, scheduler, None)  # type: ignore[arg-type]
        self.index = EncoderIndex(self.engine)

    def serve(self, vectors: torch.Tensor) -> None:
        """Search for users, and wait until an index is built if one is begun."""
        self.search(vectors, [NOTHING] * len(vectors))
        if (builder := self.index._builder) is not None:
            builder.join()

    def search(self, vectors: torch.Tensor, hidden: list[I64], k: int = K) -> I64 | None:
        return self.index.search(vectors, k, hidden, self.engine.num_rows)

    def found(self, hidden: I64 = NOTHING) -> list[int]:
        rows = self.search(USERS[:1], [hidden])
        assert rows is not None
        found: list[int] = rows[0].tolist()
        return found

    def check(self) -> None:
        """Almost all of the best are found, in the order of the exact search, and none hidden."""
        table = self.engine.weights.table()[: self.engine.num_rows]
        hidden = Hidden.of([np.unique(own[own < len(table)]) for own in SEEN])
        want = CPU.best_items(USERS[:3], table, K, hidden).items.numpy()
        found = self.search(USERS[:3], SEEN)
        assert found is not None
        for mine, best, own in zip(found, want, SEEN, strict=True):
            assert len(np.intersect1d(mine, best)) >= 0.98 * K
            assert not np.isin(mine, own).any()
            assert len(np.unique(mine)) == K
            assert np.array_equal(mine[np.isin(mine, best)], best[np.isin(best, mine)])

    def delta(self, rows: I64, vectors: torch.Tensor) -> None:
        """Change the residuals of items, so that they have these vectors."""
        residuals = vectors - self.engine.model.items.fold(
            torch.from_numpy(rows), torch.zeros_like(vectors)
        )
        patch = Patch([], {}, rows, residuals, NOTHING, False, False, len(rows))
        self.engine.weights.write(patch, WeightStamps.none(NUM))


@pytest.fixture
def rig() -> Rig:
    pytest.importorskip("faiss", reason="faiss is not installed")
    return Rig()


def test_it_is_exact_until_users_are_known_and_then_finds_the_best(rig: Rig) -> None:
    rig.serve(USERS[1:])
    assert rig.search(USERS[:1], [NOTHING]) is None
    rig.serve(USERS[:1])
    rig.check()
    assert rig.search(torch.zeros(1, 32), [NOTHING]) is None
    serving = rig.index._serving
    assert serving is not None
    assert serving.near.num_probes < serving.near.num_lists
    assert rig.search(USERS[:2], [NOTHING, np.arange(NUM // 2 + 1)]) is None  # most is hidden
    assert rig.search(USERS[:1], [NOTHING], NUM) is None  # more than the lists have


def test_a_delta_leaves_no_old_vector_and_a_new_item_comes_with_its_row(rig: Rig) -> None:
    rig.serve(USERS)
    best, low = rig.found()[:5], np.setdiff1d(np.arange(NUM), rig.found())[:5]
    rows = np.union1d(best, low)
    rig.delta(rows, torch.where(torch.from_numpy(np.isin(rows, low))[:, None], USERS[0], -USERS[0]))
    assert set(rig.found()[:5]) == set(low)
    assert not np.isin(best, rig.found()).any()
    assert set(rig.found(low[:2])[:3]) == set(low[2:])
    still_best = np.sort(rig.found()[5:10])
    rig.delta(still_best, 1.01 * rig.engine.weights.table()[still_best])
    rig.check()
    new = np.array([NUM, NUM + 2])
    rig.engine.weights.write_items(new, new_items(2))
    rig.engine.model.items.write(torch.from_numpy(new), 2 * USERS[:1].repeat(2, 1))
    assert not np.isin(new, rig.found()).any()
    rig.engine.num_rows = NUM + 3
    found = rig.found(np.array([NUM, NUM + 1]))  # NUM + 1 is not in use
    assert (found[0], NUM in found) == (NUM + 2, False)
    rig.check()


def test_after_many_changes_it_is_built_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    def change(num: int) -> None:
        rows = np.sort(RANDOM.choice(NUM, num, replace=False))
        rig.delta(rows, torch.from_numpy(3 * RANDOM.standard_normal((num, 32), np.float32)))

    def interrupted(*arguments: Any) -> Any:
        go.wait(10)
        go.clear()
        made = IvfIndex(*arguments)
        change(20)  # while the index is built
        return made

    monkeypatch.setattr(encoder_index, "IvfIndex", interrupted)
    for many, is_exact in ((0, True), (NUM // 32, False), (NUM // 4, True)):
        change(many)
        assert (rig.search(USERS, [NOTHING] * NUM_USERS) is None) == is_exact
        if not is_exact:
            rig.check()
        go.set()
        rig.serve(USERS)
        assert rig.index._serving is not None
        assert len(rig.index._serving.changed) == 20
        rig.check()


def test_a_device_is_refused_by_name() -> None:
    device = SimpleNamespace(device=torch.device("meta"), name="cuda")
    with pytest.raises(ConfigError, match=r"recommend\.index: ivf .* backend cuda"):
        EncoderIndex(SimpleNamespace(backend=device))  # type: ignore[arg-type]
