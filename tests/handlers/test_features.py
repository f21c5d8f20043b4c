"""With random features, every path to a prefix equals full inference and the trainer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from npu_gr.core.errors import Unprocessable
from npu_gr.core.feature_schema.columns import Columns, OneRow, as_columns
from npu_gr.core.feature_schema.encode import encode
from npu_gr.core.feature_schema.schema import Feature, Of
from npu_gr.core.history import Events, HistoryRef, UserKey
from npu_gr.core.kinds import RANK, RECOMMEND, SIGNAL
from npu_gr.core.request import (
    Outcome,
    RankAnswer,
    RankRequest,
    Reason,
    RecommendAnswer,
    RecommendRequest,
    SignalRequest,
)
from npu_gr.handlers.service import Service
from npu_gr.model.feature_rows import FeatureValues
from npu_gr.model.hstu_layer import Segment
from npu_gr.model.weights import load
from npu_gr.relay.lookup import Inventory
from tests.features_of import every_feature, random_features, row, values
from tests.models import CPU
from tests.serving import FIRST_ID, serving, write_checkpoint

WINDOW, STEP = 65, 16  # with the user's token
BUDGET_S = 20.0
SECTIONS: dict[str, Any] = {"service": {"max_history_tokens": WINDOW, "cut_step_tokens": STEP}}
NOW = 1_800_000_000


class Asked:
    """One request's parts, as lists and as the service gets them."""

    def __init__(self, features: tuple[Feature, ...], num_events: int, seed: int) -> None:
        self.features = features
        random = np.random.default_rng(seed)
        self.columns = values(features, "event", num_events, random)
        self.events = Events.make(
            random.integers(0, 300, num_events) + FIRST_ID,
            random.integers(0, 3, num_events),
            1_700_000_000 + random.integers(0, 9999, num_events).cumsum(),
        )
        self.events = Events(
            self.events.items,
            self.events.actions,
            self.events.timestamps,
            features=self.of("event", self.columns),
        )
        self.user, self.late = row(features, "user", random), row(features, "request", random)
        self.candidates = random.integers(0, 300, 7) + FIRST_ID
        self.crossed = values(features, "cross", 7, random)

    def of(self, of: Of, columns: dict[str, list[Any]]) -> Columns:
        num_rows = len(next(iter(columns.values()), ()))
        return as_columns(
            {one.name: one for one in self.features if one.of == of}, columns, num_rows
        )

    def history(self, begin: int = 0, end: int | None = None, **more: Any) -> HistoryRef:
        return HistoryRef(events=self.events[begin:end], **{"user_features": self.user, **more})

    def request(self, user: str, ref: HistoryRef) -> RankRequest:
        return RankRequest(
            user=UserKey("", user),
            candidates=self.candidates,
            history=ref,
            timestamp=NOW,
            request_features=self.late,
            cross_features=self.of("cross", self.crossed),
        )

    def trained(self, folder: Path) -> np.ndarray[Any, Any]:
        """Compute the scores from the trainer's inputs of the same rows, in one forward pass."""
        model = load(folder).model
        model.items.freeze()

        def encoded(of: Of, columns: dict[str, Any], num_rows: int) -> FeatureValues | None:
            own = [one for one in self.features if one.of == of]
            return FeatureValues.of(encode(own, columns, num_rows)) if own else None

        def one_row(values: OneRow) -> dict[str, Any]:
            return {name: [value] for name, value in values.items()}

        user = encoded("user", one_row(self.user), 1)
        times = torch.from_numpy(self.events.timestamps)
        times = torch.cat([times[:1].expand(model.config.num_user_tokens), times])
        segment = Segment(
            items=torch.from_numpy(self.events.items - FIRST_ID),
            actions=torch.from_numpy(self.events.actions.astype(np.int64)),
            times=times,
            candidates=torch.from_numpy(self.candidates - FIRST_ID),
            candidate_time=NOW,
            user=user,
            events=encoded("event", self.columns, len(self.events)),
            request=encoded("request", one_row(self.late), 1),
            cross=encoded("cross", self.crossed, len(self.candidates)),
        )
        scores: np.ndarray[Any, Any] = model(CPU, [segment])[0].numpy()
        return scores


async def ranked(service: Service, request: RankRequest) -> RankAnswer:
    return await service.serve(RANK, request, budget_s=BUDGET_S)


def logits(answer: RankAnswer) -> np.ndarray[Any, Any]:
    return np.stack(list(answer.scores.values()), 1)


@pytest.mark.parametrize(("seed", "user_tokens"), [(0, "sum"), (1, "sum"), (2, "sum"), (0, "each")])
async def test_every_way_to_a_prefix_gives_the_bits_of_a_full_inference(
    tmp_path: Path, seed: int, user_tokens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Served scores equal the trainer's, since both use the same encoder."""
    monkeypatch.setattr(Inventory, "reload_pays", lambda *_: True)
    features = random_features(np.random.default_rng(seed)) if seed else every_feature()
    version = write_checkpoint(tmp_path / "checkpoint", features=features, user_tokens=user_tokens)
    num_user = sum(one.of == "user" for one in features) if user_tokens == "each" else 1
    async with serving(tmp_path, watched=False, **SECTIONS) as (_, service):
        relay = service.versions.ranker().relay
        layout = relay.tiers.pool.arena.layout.layout_id
        batch: list[tuple[RankRequest, Any]] = []
        for turn in range(4):
            random = np.random.default_rng(turn)
            one = Asked(features, int(random.integers(6, WINDOW + 1 - num_user)), 10 * seed + turn)
            cut = int(random.integers(4, len(one.events)))
            cold = await ranked(service, one.request(f"{turn} cold", one.history()))
            assert cold.outcome is Outcome.MISS_FULL
            want = logits(cold)
            assert np.abs(want - one.trained(tmp_path / "checkpoint")).max() <= 1e-5 * want.std()

            def same(answer: RankAnswer, outcome: Outcome, want: Any = want) -> None:
                assert answer.outcome is outcome
                assert np.array_equal(logits(answer), want)

            user = UserKey("", f"{turn} hit")
            sent = await service.serve(
                SIGNAL, SignalRequest(user=user, history=one.history()), BUDGET_S
            )
            await relay.settled()
            same(await ranked(service, one.request(user.user, one.history())), Outcome.HBM_HIT)
            by_name = HistoryRef(base=sent.history.fingerprint)
            same(await ranked(service, one.request(user.user, by_name)), Outcome.HBM_HIT)
            await relay.settled()  # it is in DRAM too
            for entry in relay.tiers.pool.find(user, version, layout):
                relay.tiers.pool.drop(entry)
            same(await ranked(service, one.request(user.user, one.history())), Outcome.DRAM_HIT)

            user = UserKey("", f"{turn} delta")
            older = await service.serve(
                SIGNAL, SignalRequest(user=user, history=one.history(0, cut)), BUDGET_S
            )
            await relay.settled()
            delta = HistoryRef(events=one.events[cut:], base=older.history.fingerprint)
            same(await ranked(service, one.request(user.user, delta)), Outcome.HBM_HIT)
            batch += [(one.request(f"{turn} {way}", one.history()), want) for way in ("a", "b")]
        plain = Asked((), 9, 5).request("plain", HistoryRef(events=Asked((), 9, 5).events))
        answers = await asyncio.gather(
            *(ranked(service, request) for request, _ in batch), ranked(service, plain)
        )
        for answer, (_, want) in zip(answers, batch, strict=False):
            assert np.array_equal(logits(answer), want), (
                "beside others, and one without any feature"
            )
        lacking = {f"{one.of}.{one.name}" for one in features if one.of != "item"}
        assert set(answers[-1].missing_features) == lacking


@pytest.mark.parametrize("user_tokens", ["sum", "each"])
async def test_the_users_features_are_a_part_of_the_prefix(
    tmp_path: Path, user_tokens: str
) -> None:
    write_checkpoint(tmp_path / "checkpoint", features=every_feature(), user_tokens=user_tokens)
    async with serving(tmp_path, watched=False, **SECTIONS) as (_, service):
        relay = service.versions.ranker().relay
        one = Asked(every_feature(), 20, 0)
        signal = SignalRequest(
            user=UserKey("", "u"), history=one.history(user_features={"country": "fr"})
        )
        sent = await service.serve(SIGNAL, signal, BUDGET_S)
        await relay.settled()
        other = await ranked(
            service, one.request("u", one.history(user_features={"country": "de"}))
        )
        assert (other.outcome, other.reason) == (Outcome.MISS_FULL, Reason.FINGERPRINT_MISMATCH)
        without = await ranked(service, one.request("u", one.history(user_features=None)))
        assert without.reason is Reason.FINGERPRINT_MISMATCH
        replaced = HistoryRef(base=sent.history.fingerprint, user_features={"country": "de"})
        again = await ranked(service, one.request("u", replaced))
        assert again.history.fingerprint == other.history.fingerprint, (
            "given beside a base, they take its place"
        )
        assert np.array_equal(logits(again), logits(other))
        assert not np.array_equal(logits(without), logits(other))
        late = replace(
            one.request("u", one.history(user_features={"country": "fr"})),
            request_features={"age": 9.0},
        )
        assert (await ranked(service, late)).outcome is Outcome.HBM_HIT, "the request's are not"


async def test_a_user_without_events_has_features(tmp_path: Path) -> None:
    """A user token without events has the time of the candidates, as in training."""
    write_checkpoint(tmp_path / "checkpoint", features=every_feature())
    async with serving(tmp_path, watched=False, **SECTIONS) as (_, service):
        one = Asked(every_feature(), 0, 0)
        answer = await ranked(
            service, one.request("u", one.history(user_features={"country": "fr"}))
        )
        assert answer.history.num_tokens == 1
        other = await ranked(
            service, one.request("u", one.history(user_features={"country": "de"}))
        )
        assert not np.array_equal(logits(answer), logits(other))
        later = replace(
            one.request("u", one.history(user_features={"country": "fr"})), timestamp=NOW + 10**8
        )
        assert np.array_equal(logits(await ranked(service, later)), logits(answer))


async def test_what_is_computed_is_what_counting_by_hand_gives(tmp_path: Path) -> None:
    """Of the history and the time of the request, by the names of the schema alone.

    Nobody may send it.
    """
    features = (
        Feature(name="seen", of="cross", kind="number", computed="events"),
        Feature(name="liked", of="cross", kind="number", computed="events", actions=("like",)),
        Feature(name="ago", of="cross", kind="number", computed="recency", borders=(10.0, 18.0)),
        Feature(
            name="hour",
            of="request",
            kind="category",
            values=tuple(map(str, range(24))),
            computed="hour",
        ),
    )
    write_checkpoint(tmp_path / "checkpoint", features=features)
    async with serving(tmp_path, watched=False, **SECTIONS) as (_, service):
        one = Asked((), 40, 3)
        one.features = features
        one.candidates = np.concatenate([one.events.items[[3, 7, 3]], one.candidates])
        items, actions, times = one.events.items, one.events.actions, one.events.timestamps
        answer = await ranked(service, one.request("u", one.history()))
        assert answer.missing_features == ()
        same = [items == candidate for candidate in one.candidates]
        one.crossed = {
            "seen": [float(np.log1p(own.sum())) for own in same],
            "liked": [float(np.log1p((own & (actions == 2)).sum())) for own in same],
            "ago": [float(np.log1p(NOW - times[own].max())) if own.any() else None for own in same],
        }
        one.late = {"hour": NOW % 86_400 // 3600}
        want = one.trained(tmp_path / "checkpoint")
        assert np.abs(logits(answer) - want).max() <= 1e-5 * want.std()
        assert np.ptp(want, 0).min() > 0


async def test_a_cascade_over_one_shared_encoder_reads_the_request(tmp_path: Path) -> None:
    """NEXT and the candidates read it.

    What the caller cannot say of items that it does not know is missing.
    """
    seen = Feature(name="ago", of="cross", kind="number", computed="recency_by:genre")
    hour = Feature(name="hour", of="request", kind="category", values=("7", "8"), computed="hour")
    features = (*every_feature(), seen, hour)
    write_checkpoint(tmp_path / "checkpoint", features=features, retrieval=True)
    sections = {**SECTIONS, "recommend": {"sources": {"shared_encoder": 30}}}
    async with serving(tmp_path, watched=False, **sections) as (_, service):
        one = Asked(every_feature(), 30, 0)

        async def recommended(late: OneRow) -> RecommendAnswer:
            request = RecommendRequest(
                user=UserKey("", "u"),
                history=one.history(),
                num_items=30,
                timestamp=NOW,
                request_features=late,
            )
            return await service.serve(RECOMMEND, request, budget_s=BUDGET_S)

        found = await recommended({"country": "fr"})
        request = replace(
            one.request("v", one.history()),
            request_features={"country": "fr"},
            cross_features=Columns(),
        )
        scored = await ranked(service, replace(request, candidates=found.item_ids))
        assert np.array_equal(found.scores, scored.scores["click"])
        assert found.missing_features == scored.missing_features
        assert {one.partition(".")[0] for one in found.missing_features} >= {"cross"}
        other = await recommended({"country": "de"})
        assert not np.array_equal(other.scores, found.scores)


async def test_what_does_not_fit_is_rejected(tmp_path: Path) -> None:
    """The handler checks too, since the model may change after the codec's check."""
    write_checkpoint(tmp_path / "checkpoint", features=every_feature())
    async with serving(tmp_path, watched=False, **SECTIONS) as (_, service):
        one = Asked(every_feature(), 9, 0)
        with pytest.raises(Unprocessable, match=r"features\.user\.colour: unknown feature"):
            await ranked(service, one.request("u", one.history(user_features={"colour": 1})))
        with pytest.raises(Unprocessable, match=r"features\.request\.age: row 0 is a text"):
            await ranked(
                service, replace(one.request("u", one.history()), request_features={"age": "old"})
            )
        async with asyncio.timeout(1):
            await service.versions.ranker().use.wait_free()
