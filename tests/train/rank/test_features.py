"""A ranker trains on features of every kind as the server computes them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.core.errors import ConfigError, DataError
from npu_gr.core.feature_schema.computed import OF_HISTORY, CrossFeatures, ItemValueTable
from npu_gr.core.feature_schema.encode import encode
from npu_gr.core.feature_schema.schema import Feature
from npu_gr.history_store.interactions import FeatureColumn, Interactions, ItemValues
from npu_gr.model.feature_rows import FeatureValues, NewItems
from npu_gr.model.hstu import HSTU
from npu_gr.model.hstu_input import cross_features
from npu_gr.model.hstu_layer import Segment
from npu_gr.model.weights import Checkpoint, load, save
from npu_gr.train.data import InteractionLog, batches, build_log, windows
from npu_gr.train.rank.evaluate import evaluated_logits
from npu_gr.train.rank.fit import new_model
from npu_gr.train.rank.forward import EncodedHistories
from npu_gr.train.rank.inputs import LoggedCross, LogInputs
from npu_gr.train.rank.losses import user_vectors
from npu_gr.train.rank.options import LIKE, NEXT, TrainOptions
from npu_gr.train.rank.schema import choose_features, factorise, number_feature
from npu_gr.train.rank.train import train_rank
from tests.models import CPU
from tests.train.synthetic import NUM_ITEMS, planted

GENRES = [
    ItemValues(
        "genre",
        ["a", "b", "c"],
        {item * 10: [item % 3, 2][: 1 + item % 2] for item in range(NUM_ITEMS)},
    )
]
OF_HISTORIES = (
    "events",
    "share_by:genre",
    "likes_by:genre",
    "rate_by:genre",
    "recency_by:genre",
    "mf_score",
)
COMPUTED = (*OF_HISTORIES, "hour", "weekday")
OPTIONS = TrainOptions(
    split="leave-one-out",
    dim=16,
    qk_dim=8,
    v_dim=8,
    head_dim=16,
    epochs=1,
    window_tokens=16,
    batch_tokens=256,
    refit=False,
    computed=COMPUTED,
)
KINDS: dict[str, dict[str, Any]] = {
    "country": {"kind": "category", "values": ("de", "fr")},
    "tags": {"kind": "hashed", "num_buckets": 7, "max_values": 3},
    "age": {"kind": "number", "borders": (20.0, 40.0)},
    "spent": {"kind": "number", "mean": 1.0, "scale": 2.0},
}
EVERY = tuple(
    Feature(name=f"{of}_{name}", of=of, **kind)
    for of in ("user", "event", "request", "cross")
    for name, kind in KINDS.items()
)


def of_kind(name: str, num: int, random: np.random.Generator) -> np.ndarray[Any, Any]:
    if name == "country":
        found: list[Any] = [("fr", "de", "xx", None)[at] for at in random.integers(0, 4, num)]
    elif name == "tags":
        found = [
            [f"t{tag}" for tag in random.choice(9, random.integers(0, 4), replace=False)]
            for _ in range(num)
        ]
    else:
        numbers = random.uniform(0, 60, num) if name == "age" else random.normal(size=num)
        return np.where(random.random(num) < 0.2, np.nan, numbers)
    return np.fromiter(found, np.object_, num)


def with_columns(log: Interactions, features: tuple[Feature, ...] = EVERY) -> Interactions:
    random = np.random.default_rng(3)
    columns = []
    for feature in features:
        num = len(log.user_names) if feature.of == "user" else len(log)
        values = of_kind(feature.name.partition("_")[2], num, random)
        assert feature.of != "item"
        columns.append(FeatureColumn(name=feature.name, of=feature.of, values=values))
    return dataclasses.replace(log, columns=tuple(columns))


def model_of(
    log: InteractionLog,
    options: TrainOptions = OPTIONS,
    features: tuple[Feature, ...] | None = EVERY,
) -> HSTU:
    options = msgspec.structs.replace(options, features=features)
    found = choose_features(log, GENRES, (NEXT, LIKE), options)
    torch.manual_seed(0)
    model = new_model(log, GENRES, (NEXT, LIKE), options, found)
    if model.config.has_factors:
        model.factors_of_items.normal_()
        model.factors_of_actions.copy_(torch.tensor([-1.5, 2.5]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.25)
    model.eval().items.freeze()
    return model


def asked(log: InteractionLog, model: HSTU, event: int, *, is_next: bool = False) -> torch.Tensor:
    """Ask the model as the service does, from the plain values of a caller."""
    user = int(np.searchsorted(log.starts, event, "right")) - 1
    history = slice(int(log.starts[user]), event)
    candidates = np.array([log.num_items]) if is_next else log.items[event : event + 1]
    config = model.config

    def values(of: Any, places: list[int], computed: dict[str, Any]) -> FeatureValues | None:
        features = config.features_of(of)
        columns: dict[str, Any] = {
            column.name: [
                None if value != value else value
                for value in (column.values[place] for place in places)
            ]
            for column in log.columns
            if column.of == of
        }
        return (
            FeatureValues.of(encode(features, columns | computed, len(places)))
            if features
            else None
        )

    shown_at = int(log.times[event])
    cross = cross_features(model).columns(
        log.items[history], log.actions[history], log.times[history], candidates, shown_at
    )
    clock = {"hour": [shown_at // 3600 % 24], "weekday": [(shown_at // 86400 + 3) % 7]}
    clock = {
        feature.name: clock[feature.name]
        for feature in config.features_of("request")
        if feature.computed
    }
    first = log.times[history.start : history.start + 1]  # without events, of the request
    has_user = bool(config.features_of("user"))
    segment = Segment(
        items=torch.from_numpy(log.items[history]),
        actions=torch.from_numpy(log.actions[history]),
        times=torch.from_numpy(
            np.concatenate([first if has_user else log.times[:0], log.times[history]])
        ),
        candidates=torch.from_numpy(candidates),
        candidate_time=shown_at,
        is_next=is_next,
        user=values("user", [user], {}),
        events=values("event", list(range(history.start, event)), {}),
        request=values("request", [event], clock),
        cross=None if is_next else values("cross", [event], cross),
    )
    answer: torch.Tensor = model(CPU, [segment])[0]
    return answer


@pytest.mark.parametrize("of", ["user", "event", "request", "cross", "every"])
def test_what_is_trained_is_what_is_served_for_every_kind(of: str) -> None:
    features = tuple(feature for feature in EVERY if of in (feature.of, "every"))
    options = OPTIONS if of in ("cross", "every") else msgspec.structs.replace(OPTIONS, computed=())
    log = build_log(with_columns(planted(3, 12), features), GENRES, "leave-one-out")
    model = model_of(log, options, features)
    inputs = LogInputs(log, model)
    whole = windows(log.all_trained(), 64, np.random.default_rng(0))
    with torch.no_grad():
        for batch in batches(log, whole, 64):
            encoded = EncodedHistories(model, inputs.histories(batch))
            candidates = torch.stack(
                [batch.items, torch.full_like(batch.items, log.num_items)], dim=-1
            )
            rows = encoded.rows(
                candidates, None, inputs.request(batch.events), inputs.cross(batch.events)
            )
            logits, u = model.task_logits(rows[:, :, 0]), model.user_vectors(rows[:, :, 1])
            for b, event in torch.nonzero(batch.valid).tolist():
                place = int(batch.events[b, event])
                torch.testing.assert_close(
                    logits[b, event], asked(log, model, place)[0], atol=1e-5, rtol=0
                )
                torch.testing.assert_close(
                    u[b, event], asked(log, model, place, is_next=True)[0], atol=1e-5, rtol=0
                )


ITEM_SCHEMA = (
    Feature(name="price", of="item", kind="number", mean=20.0, scale=15.0),
    Feature(name="year", of="item", kind="number", borders=(1990.0, 2000.0)),
    Feature(name="genre", of="item", kind="category", values=("a", "b"), max_values=2),
)
ITEM_DATA = [
    *GENRES,
    ItemValues(
        "price",
        ["price<=15", "price>15"],
        {item * 10: [int(item > 10)] for item in range(1, NUM_ITEMS)},
        {item * 10: item * 1.5 for item in range(1, NUM_ITEMS)},
    ),
    ItemValues(
        "year", ["1985", "1995", "2005"], {item * 10: [item % 3] for item in range(NUM_ITEMS)}
    ),
]


def test_numbers_of_items_are_trained_on_as_they_are_served() -> None:
    """In histories, among candidates, and of an item that comes later with the same values."""
    log = build_log(planted(3, 12), ITEM_DATA, "leave-one-out")
    options = msgspec.structs.replace(
        OPTIONS, computed=("rate_by:genre",), features=ITEM_SCHEMA, row_dropout=0.2
    )
    found = choose_features(log, ITEM_DATA, (NEXT, LIKE), options)
    model = new_model(log, ITEM_DATA, (NEXT, LIKE), options, found)
    assert [one.name for one in model.config.item_features] == ["genre"], (
        "others are read by the schema alone"
    )
    assert model.config.scores_new_items
    with torch.no_grad():
        for parameter in model.features["item"].parameters():
            parameter.normal_(std=0.5)
    price = dict(zip(log.item_ids.tolist(), model.item_feature_numbers.tolist(), strict=True))
    assert price[20] == pytest.approx([(3.0 - 20) / 15, 0.0])
    assert price[0] == [0.0, 1.0], "missing"
    model.eval().items.freeze()
    inputs = LogInputs(log, model)
    whole = windows(log.all_trained(), 64, np.random.default_rng(0))
    num_compared = 0
    with torch.no_grad():
        for batch in batches(log, whole, 64):
            encoded = EncodedHistories(model, inputs.histories(batch))
            rows = encoded.rows(batch.items[..., None], None, None, inputs.cross(batch.events))
            logits = model.task_logits(rows[:, :, 0])
            for b, event in torch.nonzero(batch.valid).tolist():
                served = asked(log, model, int(batch.events[b, event]))[0]
                torch.testing.assert_close(logits[b, event], served, atol=1e-5, rtol=0)
                num_compared += 1
        row = log.item_ids.tolist().index(20)
        own = encode(ITEM_SCHEMA, {"price": [3.0], "year": [2005], "genre": [["c"]]}, 1)
        new = NewItems((np.array([[2, 3]]),), np.empty((1, 0), np.int32), own)
        common = model.items.embed(torch.tensor([row]))[0] - model.item.weight[row]
        torch.testing.assert_close(model.items.new_vectors(new)[0], common, atol=1e-6, rtol=0)
    assert num_compared == 36


def test_numbers_of_items_that_are_none_are_named() -> None:
    log = build_log(planted(3, 12), ITEM_DATA, "leave-one-out")

    def made(*features: Feature) -> HSTU:
        return new_model(log, ITEM_DATA, (NEXT,), OPTIONS, features)

    with pytest.raises(
        ConfigError,
        match=r"features\.weight: no item feature .* are genre, "
        r"price, year",
    ):
        made(Feature(name="weight", of="item", kind="number"))
    with pytest.raises(
        DataError, match=r"features\.genre: item \d+ has 'a', which is not a number"
    ):
        made(Feature(name="genre", of="item", kind="number"))
    with pytest.raises(
        DataError, match="features of item: genre: row 1 has 2 values, the limit is 1"
    ):
        made(Feature(name="genre", of="item", kind="category", values=("a",)))


def test_the_evaluation_reads_the_same_and_so_do_lists() -> None:
    log = build_log(with_columns(planted(6, 25)), GENRES, "user-time")
    model = model_of(log)
    inputs = LogInputs(log, model)
    targets = log.next_items()
    evaluated = dict(
        zip(
            np.flatnonzero(~log.trained).tolist(),
            evaluated_logits(inputs, model, 1).tolist(),
            strict=True,
        )
    )
    for (_, event), u in zip(targets, user_vectors(inputs, model, targets), strict=True):
        assert evaluated[event] == pytest.approx(float(asked(log, model, event)[0, 1]), abs=1e-5)
        torch.testing.assert_close(u, asked(log, model, event, is_next=True)[0], atol=1e-5, rtol=0)
        own = torch.from_numpy(log.items[event : event + 1])
        shown = model(CPU, [inputs.segment(event, own, is_shown=True)])[0]
        torch.testing.assert_close(shown, asked(log, model, event), atol=1e-6, rtol=0)


def test_candidates_that_were_not_shown_have_what_is_computed_and_nothing_else() -> None:
    log = build_log(with_columns(planted(6, 25)), GENRES, "leave-one-out")
    model = model_of(log)
    inputs = LogInputs(log, model)
    events = torch.tensor([[20, 24], [70, 149]])
    candidates = torch.arange(12).view(2, 2, 3)
    found = inputs.cross_of(events, candidates)
    assert found is not None
    cross = cross_features(model)
    for row in np.ndindex(2, 2):
        event = int(events[row])
        history = slice(int(log.starts[event // 25]), event)
        columns = cross.columns(
            log.items[history],
            log.actions[history],
            log.times[history],
            candidates[row].numpy(),
            int(log.times[event]),
        )
        want = encode(model.config.features_of("cross"), columns, 3)
        assert np.array_equal(found.codes[row].numpy(), want.codes)
        np.testing.assert_allclose(found.numbers[row].numpy(), want.numbers, atol=1e-6)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data(), max_events=st.integers(1, 9))
def test_logged_crosses_are_those_of_a_request(data: st.DataObject, max_events: int) -> None:
    lengths = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=3).filter(sum))
    num = sum(lengths)
    draw = np.random.default_rng(data.draw(st.integers(0, 99)))
    starts = np.concatenate([[0], np.cumsum(lengths)])
    log = InteractionLog(
        items=draw.integers(0, 6, num),
        actions=draw.integers(0, 3, num),
        times=np.concatenate([np.sort(draw.integers(0, 50, length)) for length in lengths]),
        starts=starts,
        num_trained=np.array(lengths),
        item_ids=np.arange(6),
        action_values=(1.0, 2.0, 3.0),
    )
    genres = {
        "genre": ItemValueTable(np.array([[0, 1], [1, 4], [4, 4], [2, 3], [3, 0], [0, 4]]), 4)
    }
    features = [
        Feature(
            name=f"{what}{by}{actions}",
            of="cross",
            kind="number",
            computed=what + by,
            actions=actions,
        )
        for what in OF_HISTORY
        for by in ("", "_by:genre", "_by:*")
        for actions in ((), ("2", "3"))
    ]
    cross = CrossFeatures(features, log.names_of_actions, genres)
    events = np.arange(num)
    candidates = draw.integers(0, 6, (num, 4))
    found = LoggedCross(log, cross, max_events).columns(events, candidates)
    for event, user in enumerate(log.users.tolist()):
        history = slice(max(int(starts[user]), event - max_events), event)
        want = cross.columns(
            log.items[history],
            log.actions[history],
            log.times[history],
            candidates[event],
            int(log.times[event]),
        )
        for name, column in want.items():
            np.testing.assert_allclose(found[name][event], column, rtol=0, err_msg=name)


def test_a_training_reads_columns_and_learns_from_them() -> None:
    """Whether a user likes an item is what the request says, and nothing else."""
    log = planted(40, 20)
    random = np.random.default_rng(1)
    likes = random.random(len(log)) < 0.5
    says = np.where(likes, "yes", "no").astype(np.object_)
    given = FeatureColumn(name="mood", of="request", values=says)
    log = dataclasses.replace(log, values=np.where(likes, 5.0, 1.0))
    options = msgspec.structs.replace(
        OPTIONS, epochs=6, dropout=0.0, learning_rate=1e-2, computed=("hour",)
    )
    blind = train_rank(log, [], options)[1].ranker.auc
    checkpoint, found = train_rank(dataclasses.replace(log, columns=(given,)), [], options)
    assert found.ranker.auc > 0.95 > blind + 0.2
    assert [feature.name for feature in checkpoint.model.config.features] == ["mood", "hour"]


def test_what_a_user_did_does_not_shape_the_factors_of_its_own_training() -> None:
    log = build_log(planted(9), [], "leave-one-out")
    plain, before = factorise(log, (NEXT, LIKE), 0)
    for user in (0, 4, 8):
        own = log.users == user
        changed = dataclasses.replace(log, actions=np.where(own, 1 - log.actions, log.actions))
        served, after = factorise(changed, (NEXT, LIKE), 0)
        fold = before.fold_of[user]
        assert np.array_equal(before.folds[fold].items, after.folds[fold].items)
        assert not np.array_equal(served.items, plain.items)
    assert sorted(np.bincount(before.fold_of).tolist()) == [2, 2, 2, 3]


def test_training_reads_the_factors_of_the_folds_and_service_those_of_the_model() -> None:
    log = build_log(planted(9), GENRES, "leave-one-out")
    model = model_of(log, features=())
    served, folds = factorise(log, (NEXT, LIKE), 0)
    model.factors_of_items.copy_(torch.from_numpy(served.items))
    model.factors_of_actions.copy_(torch.from_numpy(served.values))
    cross = cross_features(model)
    events, candidates = np.arange(len(log.items)), np.tile(np.arange(4), (len(log.items), 1))
    of_folds = LoggedCross(log, cross, 20, folds).columns(events, candidates)["mf_score"]
    for event in range(0, len(log.items), 7):
        user = log.users[event]
        history = slice(max(int(log.starts[user]), event - 20), event)
        want = folds.folds[folds.fold_of[user]].scores(
            log.items[history], log.actions[history], candidates[event]
        )
        np.testing.assert_allclose(of_folds[event], want, atol=1e-6)
    of_model = LoggedCross(log, cross, 20).columns(events, candidates)["mf_score"]
    assert not np.allclose(of_folds, of_model)


def test_factors_keep_their_precision_in_a_checkpoint(tmp_path: Path) -> None:
    log = build_log(planted(3), GENRES, "leave-one-out")
    model = model_of(log, features=())
    kept = model.factors_of_items.clone()
    half = model.cast(torch.bfloat16)
    save(
        Checkpoint(model=half, item_ids=log.item_ids, name="x", action_values=log.action_values),
        tmp_path,
    )
    loaded = load(tmp_path).model
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.factors_of_items, kept)


def test_a_training_with_every_feature_repeats_bit_for_bit() -> None:
    log = with_columns(planted(20))
    one, other = (train_rank(log, GENRES, OPTIONS)[0].model.state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert one["factors_of_items"].abs().max() > 0
    # values 1 and 5
    assert one["factors_of_actions"].tolist() == pytest.approx([-2.0, 2.0], abs=0.5)


def test_columns_become_features_by_what_the_trained_part_holds() -> None:
    log = planted(4, 30)
    num = len(log)
    place = np.arange(num)
    late = place == num - 1  # tested, not trained
    names = np.where(
        late, "late", np.where(place == 0, "once", np.where(place % 2, "odd", "even"))
    ).astype(np.object_)
    lists = np.fromiter((["x", "y"] if at % 2 else None for at in range(num)), np.object_, num)
    columns = (
        FeatureColumn(name="name", of="event", values=names),
        FeatureColumn(name="tags", of="request", values=lists),
        FeatureColumn(
            name="many",
            of="event",
            values=np.array([f"v{at}" for at in range(num)], np.object_),
            kind="hashed",
        ),
        FeatureColumn(name="few", of="request", values=np.where(late, 9.0, place % 3)),
        FeatureColumn(
            name="wide", of="event", values=np.where(place % 4 > 0, 0.0, place.astype(float))
        ),
        FeatureColumn(name="age", of="user", values=np.array([20.0, 30.0, np.nan, 30.0])),
        FeatureColumn(name="near", of="cross", values=(place % 2).astype(float)),
    )
    logged = build_log(dataclasses.replace(log, columns=columns), GENRES, "leave-one-out")
    found = {
        feature.name: feature
        for feature in choose_features(logged, GENRES, (NEXT, LIKE), TrainOptions())
    }
    assert found["name"].values == ("even", "odd")
    assert (found["tags"].values, found["tags"].max_values) == (("x", "y"), 2)
    assert (found["many"].kind, found["many"].num_buckets) == ("hashed", 2 * 116)
    assert found["few"].borders == (0.5, 1.5)
    assert found["wide"].borders[0] == 4.0  # three of four are 0: a bucket by itself
    assert found["age"].borders == (25.0,)
    assert found["near"].is_dense
    assert (found["near"].mean, found["near"].scale) == pytest.approx((0.5, 0.5), abs=1e-2)
    computed = choose_features(logged, GENRES, (NEXT, LIKE), OPTIONS)[-len(COMPUTED) :]
    assert [
        (feature.name, feature.computed, feature.actions) for feature in computed if feature.actions
    ] == [
        ("likes_by:genre", "events_by:genre", ("5",)),
        ("rate_by:genre", "rate_by:genre", ("5",)),
    ]


def test_a_number_without_spread_is_dense() -> None:
    plain = Feature(name="x", of="user", kind="number")
    assert number_feature(plain, np.full(9, 3.0)) == plain
    borders = number_feature(plain, np.random.default_rng(0).normal(size=1000)).borders
    assert 15 <= len(borders) <= 16
    assert list(borders) == sorted(set(borders))


@pytest.mark.parametrize(
    ("computed", "message"),
    [
        (("visits",), r"computed: 'visits' must be one of events, .* or one of likes, hour, week"),
        (("rate_by:maker",), r"no item feature 'maker'; there are genre"),
    ],
)
def test_what_cannot_be_computed_is_named(computed: tuple[str, ...], message: str) -> None:
    log = build_log(planted(4), GENRES, "leave-one-out")
    with pytest.raises(ConfigError, match=message):
        choose_features(log, GENRES, (NEXT, LIKE), TrainOptions(computed=computed))


def test_likes_need_a_task_that_says_which() -> None:
    for name in ("likes", "mf_score"):
        with pytest.raises(
            ConfigError, match=f"computed {name}: needs a task with at_least or actions"
        ):
            choose_features(
                build_log(planted(4), [], "time"), [], (NEXT,), TrainOptions(computed=(name,))
            )


def test_a_column_without_a_value_and_one_that_does_not_fit_are_named() -> None:
    log = planted(4)
    empty = FeatureColumn(name="age", of="user", values=np.full(4, np.nan))
    logged = build_log(dataclasses.replace(log, columns=(empty,)), [], "time")
    with pytest.raises(DataError, match="feature age of user: no value in the trained part"):
        choose_features(logged, [], (NEXT,), TrainOptions())
    given = Feature(name="age", of="user", kind="number", borders=(1.0,))
    texts = FeatureColumn(name="age", of="user", values=np.array(["x"] * 4, np.object_))
    logged = build_log(dataclasses.replace(log, columns=(texts,)), [], "time")
    with pytest.raises(DataError, match="features of user: age: row 0 is a text"):
        LogInputs(logged, new_model(logged, [], (NEXT,), TrainOptions(), (given,)))
