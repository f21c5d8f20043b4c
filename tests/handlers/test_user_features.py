"""Fetched user features score as those in a request, and a change is never a wrong hit."""

from __future__ import annotations

import asyncio
import sys
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from npu_gr.core.errors import StoreFault
from npu_gr.core.history import HistoryRef, UserFeaturesOrigin, UserFeaturesSource, UserKey
from npu_gr.core.kinds import ERASE, EVENTS, RANK, RECOMMEND, SIGNAL
from npu_gr.core.request import (
    EraseRequest,
    EventsRequest,
    Outcome,
    RankAnswer,
    RankRequest,
    Reason,
    RecommendRequest,
    SignalRequest,
)
from npu_gr.handlers.service import Service
from tests.features_of import every_feature
from tests.handlers.test_features import NOW, SECTIONS, Asked, logits
from tests.serving import serving, write_checkpoint

BUDGET_S = 20.0
FR: dict[str, Any] = {"country": "fr", "tags": ("a", "b"), "age": 1.5}
FETCHED = UserFeaturesOrigin(UserFeaturesSource.SOURCE)
REMEMBERED = UserFeaturesOrigin(UserFeaturesSource.REMEMBERED)


class Online:
    """An online store of features; `said` None = it hangs."""

    def __init__(self) -> None:
        self.said: Mapping[str, Any] | None = FR
        self.num_calls = 0

    async def fetch(
        self, user: UserKey, names: Sequence[str], timeout_s: float
    ) -> Mapping[str, Any]:
        self.num_calls += 1
        if self.said is None:
            await asyncio.Event().wait()
        assert self.said is not None
        return self.said


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> Online:
    source = Online()
    made = types.ModuleType("an_online_store")
    vars(made)["fetch"] = source.fetch
    monkeypatch.setitem(sys.modules, "an_online_store", made)
    return source


def sections(**changes: Any) -> dict[str, Any]:
    source = {"entry": "an_online_store:fetch", "timeout_s": 5.0, **changes}
    return {**SECTIONS, "feature_store": source}


async def ranked(service: Service, one: Asked, user: str, ref: HistoryRef) -> RankAnswer:
    return await service.serve(RANK, one.request(user, ref), budget_s=BUDGET_S)


async def signalled(service: Service, user: str, ref: HistoryRef) -> str:
    sent = await service.serve(SIGNAL, SignalRequest(user=UserKey("", user), history=ref), BUDGET_S)
    await service.versions.ranker().relay.settled()
    return sent.history.fingerprint


async def test_they_are_those_of_a_request(tmp_path: Path, online: Online) -> None:
    """The same bits and the same prefix, by every way to a history.

    Who brings his own asks nobody.
    """
    write_checkpoint(tmp_path / "checkpoint", features=every_feature(), retrieval=True)
    cascade: dict[str, Any] = {"recommend": {"sources": {"shared_encoder": 20}}}
    async with serving(tmp_path, watched=False, **sections(), **cascade) as (_, service):
        one = Asked(every_feature(), 30, 0)
        whole, bare = one.history(user_features=FR), one.history(user_features=None)
        want = await ranked(service, one, "sent", whole)
        await signalled(service, "sent", whole)
        await ranked(service, one, "sent", one.history(user_features={}))
        assert online.num_calls == 0
        assert want.history.user_features is None

        fetched = await ranked(service, one, "fetched", bare)
        assert np.array_equal(logits(fetched), logits(want))
        assert fetched.history.fingerprint == want.history.fingerprint
        assert fetched.history.user_features == FETCHED
        assert not [
            name for name in fetched.missing_features if name in ("user.country", "user.age")
        ]
        for user, part in (("signal", bare), ("store", HistoryRef())):
            if user == "store":
                await service.serve(
                    EVENTS, EventsRequest(user=UserKey("", user), events=one.events), BUDGET_S
                )
            before = online.num_calls
            await signalled(service, user, part)
            hit = await ranked(service, one, user, part)
            assert (hit.outcome, hit.history.user_features) == (Outcome.HBM_HIT, REMEMBERED)
            assert np.array_equal(logits(hit), logits(want))
            assert online.num_calls == before + 1, "a signal fetches for its rank"
        base = await signalled(service, "base", one.history(0, 20, user_features=None))
        delta = await ranked(service, one, "base", HistoryRef(events=one.events[20:], base=base))
        assert np.array_equal(logits(delta), logits(want))
        assert delta.history.user_features is None, "a base remembers them"
        found = await service.serve(
            RECOMMEND,
            RecommendRequest(
                user=UserKey("", "rec"),
                history=bare,
                num_items=5,
                timestamp=NOW,
                request_features={},
            ),
            BUDGET_S,
        )
        assert found.history.user_features == FETCHED


async def test_features_that_change_are_another_prefix(tmp_path: Path, online: Online) -> None:
    """Between a signal and its rank too: a miss that says why, and the scores of the new ones."""
    write_checkpoint(tmp_path / "checkpoint", features=every_feature())
    async with serving(tmp_path, watched=False, **sections(fresh_s=0)) as (_, service):
        one = Asked(every_feature(), 30, 1)
        bare, other = one.history(user_features=None), {"country": "de"}
        want = await ranked(service, one, "sent", one.history(user_features=other))
        base = await signalled(service, "u", bare)
        online.said = other
        answer = await ranked(service, one, "u", bare)
        assert (answer.outcome, answer.reason) == (Outcome.MISS_FULL, Reason.FINGERPRINT_MISMATCH)
        assert np.array_equal(logits(answer), logits(want))
        assert answer.history.fingerprint != base
        by_name = await ranked(service, one, "u", HistoryRef(base=base))
        assert by_name.outcome is Outcome.HBM_HIT, "whoever names the signal's gets the signal's"
        assert np.array_equal(
            logits(by_name), logits(await ranked(service, one, "v", one.history(user_features=FR)))
        )


async def test_a_source_that_hangs_costs_its_time_and_no_slot(
    tmp_path: Path, online: Online
) -> None:
    write_checkpoint(tmp_path / "checkpoint", features=every_feature())
    tight = {"timeout_s": 0.02, "max_calls": 2, "max_failures": 2, "fresh_s": 0}
    async with serving(
        tmp_path, watched=False, admission={"max_inflight": 1}, **sections(**tight)
    ) as (_, service):
        one = Asked(every_feature(), 30, 2)
        bare = one.history(user_features=None)
        await ranked(service, one, "known", bare)
        online.said = None
        shorter = one.history(0, 20, user_features=None)
        known, new = await asyncio.gather(
            ranked(service, one, "known", shorter), ranked(service, one, "new", bare)
        )
        stale = UserFeaturesOrigin(UserFeaturesSource.LAST_KNOWN, StoreFault.SLOW)
        assert known.history.user_features == stale
        assert new.history.user_features == UserFeaturesOrigin(
            UserFeaturesSource.NOTHING, StoreFault.SLOW
        )
        assert "user.country" in new.missing_features
        assert np.array_equal(
            logits(new), logits(await ranked(service, one, "x", one.history(user_features={})))
        )
        answers = await asyncio.gather(
            *(ranked(service, one, f"u{number}", bare) for number in range(6))
        )
        faults = {
            answer.history.user_features.fault for answer in answers if answer.history.user_features
        }
        assert faults <= {StoreFault.SLOW, StoreFault.BUSY}
        assert len(answers) == 6
        base = new.history.fingerprint
        online.said = FR
        async with asyncio.timeout(10):
            while (
                again := await ranked(service, one, "new", HistoryRef(base=base))
            ).history.user_features != FETCHED:
                await asyncio.to_thread(time.sleep, 0.01)  # until the breaker tries again
        assert np.array_equal(
            logits(again), logits(await ranked(service, one, "y", one.history(user_features=FR)))
        ), "a base whose source failed asks again"
        online.said = {"country": "de"}
        newer = await ranked(service, one, "known", HistoryRef(base=known.history.fingerprint))
        assert newer.history.user_features == FETCHED, "and one that had old ones"
        assert not np.array_equal(logits(newer), logits(known))
        follows = await ranked(service, one, "new", HistoryRef(base=again.history.fingerprint))
        assert np.array_equal(logits(follows), logits(again))


async def test_an_erased_user_has_none(tmp_path: Path, online: Online) -> None:
    write_checkpoint(tmp_path / "checkpoint", features=every_feature())
    async with serving(tmp_path, watched=False, **sections()) as (_, service):
        one = Asked(every_feature(), 9, 3)
        await ranked(service, one, "u", one.history(user_features=None))
        user = UserKey("", "u")
        assert (await service.knows(user))["histories"]
        await service.serve(ERASE, EraseRequest(user=user), BUDGET_S)
        assert not (await service.knows(user))["histories"]


async def test_a_model_without_features_of_users_asks_nobody(
    tmp_path: Path, online: Online
) -> None:
    write_checkpoint(tmp_path / "checkpoint", features=every_feature(("event", "cross")))
    async with serving(tmp_path, watched=False, **sections()) as (_, service):
        one = Asked(every_feature(("event", "cross")), 9, 3)
        request = RankRequest(
            user=UserKey("", "u"), candidates=one.candidates, history=HistoryRef(events=one.events)
        )
        answer = await service.serve(RANK, replace(request, timestamp=NOW), budget_s=BUDGET_S)
        assert answer.history.user_features is None
        assert online.num_calls == 0
