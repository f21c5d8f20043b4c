"""Features of the user are a token in front.

Those of the request and the candidates stay behind the cached prefix.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from npu_gr.core.feature_schema.encode import encode
from npu_gr.core.feature_schema.schema import OFS, Feature
from npu_gr.model.feature_rows import FeatureTable, FeatureValues
from npu_gr.model.hstu import HSTU
from npu_gr.model.hstu_layer import Segment
from npu_gr.model.weights import Checkpoint, load, save
from tests.models import CPU, NONE, Request, Store, tiny_model

FEATURES = tuple(
    feature
    for of in OFS
    for feature in (
        Feature(name="country", of=of, kind="category", values=("fr", "de")),
        Feature(name="tags", of=of, kind="hashed", num_buckets=11, max_values=3),
        Feature(name="age", of=of, kind="number", borders=(1.0, 2.0)),
        Feature(name="spent", of=of, kind="number", mean=1.0, scale=2.0),
    )
)


def values(of: str, num_rows: int, seed: int = 0) -> FeatureValues:
    random = np.random.default_rng([seed, num_rows, len(of)])
    columns: dict[str, Any] = {
        "country": [("fr", "de", "xx", None)[i] for i in random.integers(0, 4, num_rows)],
        "tags": [
            [f"t{j}" for j in random.integers(0, 9, random.integers(0, 4))] for _ in range(num_rows)
        ],
        "age": random.uniform(0, 3, num_rows),
        "spent": np.where(random.random(num_rows) < 0.2, np.nan, random.normal(size=num_rows)),
    }
    return FeatureValues.of(encode([f for f in FEATURES if f.of == of], columns, num_rows))


def part(given: FeatureValues, rows: slice) -> FeatureValues:
    return FeatureValues(given.codes[rows], given.numbers[rows])


class WithFeatures(Request):
    """A request with features, to be cut anywhere: token 0 is the user's."""

    def __init__(self, num_history: int, num_candidates: int, seed: int = 0) -> None:
        super().__init__(num_history, num_candidates, seed)
        self.user, self.request = values("user", 1, seed), values("request", 1, seed)
        self.events, self.cross = (
            values("event", num_history, seed),
            values("cross", num_candidates, seed),
        )
        self.token_times = torch.cat([self.times[:1], self.times])

    def tokens(
        self, start: int, stop: int | None = None, candidates: Any = None, **more: Any
    ) -> Segment:
        rows = slice(max(start - 1, 0), None if stop is None else stop - 1)
        scored: dict[str, Any] = (
            {} if candidates is NONE else {"request": self.request, "cross": self.cross}
        )
        made: dict[str, Any] = {
            "items": self.items[rows],
            "actions": self.actions[rows],
            "times": self.token_times[start:stop],
            "candidates": self.candidates if candidates is None else candidates,
            "candidate_time": self.shown_at,
            "user": None if start else self.user,
            "events": part(self.events, rows),
        }
        return Segment(**made | scored | more)

    def cached(self, model: HSTU, cut: int) -> torch.Tensor:
        store = Store()
        model(CPU, [self.tokens(0, cut, NONE, sink=store.write)])
        scores: torch.Tensor = model(
            CPU, [self.tokens(cut, past=store.past(self.token_times[:cut], 64))]
        )[0]
        return scores


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", [{}, {"positions": "start"}, {"retrieval": True}], ids=str)
def test_any_cut_and_any_company_give_the_same_bits(
    dtype: torch.dtype, variant: dict[str, Any]
) -> None:
    model = tiny_model(dtype, features=FEATURES, **variant)
    request = WithFeatures(130, 9)
    want = model(CPU, [request.tokens(0)])[0]
    for cut in (1, 2, 64, 131):
        assert torch.equal(request.cached(model, cut), want), cut
    plain = Request(20, 3, seed=1)
    batch = model(CPU, [plain.segment(), request.tokens(0), WithFeatures(7, 2, seed=2).tokens(0)])
    assert torch.equal(batch[1], want), "in a batch with users with and without features"
    assert torch.equal(batch[0], model(CPU, [plain.segment()])[0])


def test_each_group_counts_and_only_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(features=FEATURES)
    request = WithFeatures(20, 4)
    want = model(CPU, [request.tokens(0)])[0]

    def other(name: str, of: str, num_rows: int) -> torch.Tensor:
        monkeypatch.setattr(request, name, values(of, num_rows, seed=7))
        scores: torch.Tensor = model(CPU, [request.tokens(0)])[0]
        monkeypatch.undo()
        return scores

    for name, of, num_rows in (
        ("user", "user", 1),
        ("events", "event", 20),
        ("request", "request", 1),
    ):
        assert (other(name, of, num_rows) != want).any(1).all(), name
    cross = FeatureValues(*(x.clone() for x in request.cross))
    cross.codes[2], cross.numbers[2] = (
        values("cross", 1, seed=8).codes,
        values("cross", 1, seed=8).numbers,
    )
    monkeypatch.setattr(request, "cross", cross)
    changed = (model(CPU, [request.tokens(0)])[0] != want).any(1)
    assert changed.tolist() == [False, False, True, False], (
        "a candidate's cross features are its own"
    )


def test_features_of_items_are_in_their_rows() -> None:
    model = tiny_model(features=FEATURES)
    before = model.items.embed(torch.arange(300))
    model.item_feature_numbers[5] = 1.0
    after = model.items.embed(torch.arange(300))
    assert (before != after).any(1).nonzero().ravel().tolist() == [5]


def test_next_reads_the_request_and_no_cross_features() -> None:
    model = tiny_model(features=FEATURES, retrieval=True)
    request = WithFeatures(20, 1)
    ask: dict[str, Any] = {"candidates": torch.tensor([300]), "is_next": True}
    u = model(CPU, [request.tokens(0, **ask)])[0]
    request.cross = values("cross", 1, seed=3)
    assert torch.equal(model(CPU, [request.tokens(0, **ask)])[0], u)
    request.request = values("request", 1, seed=3)
    assert not torch.equal(model(CPU, [request.tokens(0, **ask)])[0], u)


def test_a_row_is_the_mean_of_several_values_plus_the_numbers() -> None:
    table = FeatureTable([feature for feature in FEATURES if feature.of == "user"], 8)
    columns: dict[str, Any] = {
        "country": ["de"],
        "tags": [["x", "y"]],
        "age": [1.5],
        "spent": [3.0],
    }
    encoded = encode([feature for feature in FEATURES if feature.of == "user"], columns, 1)
    row = table(FeatureValues.of(encoded))[0]
    codes = [code for code in encoded.codes[0].tolist() if code != table.codes.num_embeddings - 1]
    weight = table.codes.weight
    first, second = codes[1:3]
    want = (
        weight[1]
        + (weight[first] + weight[second]) / 2
        + weight[codes[3]]
        + table.numbers.weight[:, 0]
    )
    assert torch.allclose(row, want, atol=1e-6)


def test_features_apart_are_the_parts_of_their_sum() -> None:
    """And a number of a row, as a contextual feature of other projects has it, reads that row."""
    own = [*(feature for feature in FEATURES if feature.of == "user")]
    own.insert(1, Feature(name="id", of="user", kind="number", num_buckets=5))
    table = FeatureTable(own, 8)
    for number, row in ((3.0, 3), (0.0, 0), (5.0, 5), (-1.0, 5), (1.5, 5), (None, 5)):
        columns: dict[str, Any] = {
            "country": ["de"],
            "id": [number],
            "tags": [["x", "y"]],
            "spent": [3.0],
        }
        encoded = encode(own, columns, 1)
        given = FeatureValues.of(encoded)
        apart = table.each(given)
        assert apart.shape == (1, len(own), 8)
        assert torch.allclose(apart.sum(1), table(given), atol=1e-6)
        assert torch.equal(apart[0, 1], table.codes.weight[4 + row]), (
            number
        )  # "de", "fr", unknown, missing, then its own
        assert torch.allclose(apart[0, 4], table.numbers.weight[:, 0], atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_of_the_user_give_the_same_bits_from_pages(dtype: torch.dtype) -> None:
    model = tiny_model(dtype, features=FEATURES, user_tokens="each", positions="start")
    assert model.config.num_user_tokens == 4
    request = WithFeatures(60, 5)
    request.token_times = torch.cat([request.times[:1].expand(4), request.times])
    whole = request.tokens(0)
    want = model(CPU, [whole])[0]
    store = Store()
    head = Segment(
        items=request.items[:30],
        actions=request.actions[:30],
        times=request.token_times[:34],
        candidates=NONE,
        user=request.user,
        events=part(request.events, slice(30)),
        sink=store.write,
    )
    model(CPU, [head])
    rest = request.tokens(
        31, past=store.past(request.token_times[:34], 16), times=request.token_times[34:]
    )
    assert torch.equal(model(CPU, [rest])[0], want)
    swapped = values("user", 1, seed=5)
    request.user = swapped
    assert not torch.equal(model(CPU, [request.tokens(0)])[0], want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_round_trip(tmp_path: Path, dtype: torch.dtype) -> None:
    model = tiny_model(dtype, features=FEATURES)
    model.item_feature_numbers.normal_()
    model.items.freeze()
    save(Checkpoint(model=model, item_ids=np.arange(300), name="tiny"), tmp_path)
    again = load(tmp_path).model
    again.items.freeze()
    assert again.config == model.config
    request = WithFeatures(20, 4)
    assert torch.equal(again(CPU, [request.tokens(0)])[0], model(CPU, [request.tokens(0)])[0])


def test_a_checkpoint_without_features_says_nothing_of_them(tmp_path: Path) -> None:
    save(Checkpoint(model=tiny_model(), item_ids=np.arange(300), name="tiny"), tmp_path)
    assert "features" not in (tmp_path / "config.json").read_text().replace("item_features", "")
    assert not [name for name in load(tmp_path).model.state_dict() if name.startswith("features.")]
