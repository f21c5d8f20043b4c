"""User features are fetched once for concurrent requests, cached, bounded, and never a failure."""

from __future__ import annotations

import asyncio
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from npu_gr.core.errors import ConfigError, StoreFault
from npu_gr.core.feature_schema.schema import Feature
from npu_gr.core.history import UserFeaturesSource, UserKey
from npu_gr.feature_store.user_features import (
    AsyncSource,
    ThreadedSource,
    UserFeatures,
    as_row,
    open_source,
)
from npu_gr.history_store.store import FeatureStoreConfig
from tests.features_of import every_feature

READS: dict[str, Feature] = {one.name: one for one in every_feature() if one.of == "user"}
USER = UserKey("t", "u")
FR = {"country": "fr", "age": 2.5}
Found = tuple[Any, UserFeaturesSource, StoreFault | None]


class Counts:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.reads: list[str] = []

    def called(self, operation: str, result: str, took_s: float) -> None:
        self.calls.append(result)

    def read(self, source: UserFeaturesSource) -> None:
        self.reads.append(source.value)


class Source:
    """Returns given features, or waits, or fails."""

    def __init__(self) -> None:
        self.asked: list[tuple[UserKey, tuple[str, ...]]] = []
        self.says: Any = FR
        self.open = asyncio.Event()
        self.open.set()

    async def fetch(
        self, user: UserKey, names: Sequence[str], timeout_s: float
    ) -> Mapping[str, Any]:
        self.asked.append((user, tuple(names)))
        await self.open.wait()
        if isinstance(self.says, Exception):
            raise self.says
        said: Mapping[str, Any] = self.says
        return said


class Rig:
    def __init__(self, **changes: Any) -> None:
        self.now = 1000.0
        self.source, self.counts = Source(), Counts()
        config = FeatureStoreConfig(
            **{"entry": "x:y", "timeout_s": 5.0, "fresh_s": 30.0, "stale_s": 100.0, **changes}
        )
        self.users = UserFeatures(self.source, config, self.counts, lambda: self.now)

    async def get(self, user: UserKey = USER) -> Found:
        found = self.users.remembered(user, READS) or await self.users.fetch(user, READS)
        values, (source, fault) = found
        return values, source, fault


async def test_what_was_fetched_serves_until_it_is_old() -> None:
    rig = Rig()
    assert await rig.get() == (FR, UserFeaturesSource.SOURCE, None)
    assert rig.source.asked == [(USER, tuple(READS))]
    rig.source.says = {"country": "de"}
    rig.now += 29
    assert await rig.get() == (FR, UserFeaturesSource.REMEMBERED, None)
    rig.now += 2
    assert await rig.get() == ({"country": "de"}, UserFeaturesSource.SOURCE, None)
    assert await rig.get(UserKey("", "u")) == (
        {"country": "de"},
        UserFeaturesSource.SOURCE,
        None,
    ), "another tenant"
    assert (rig.counts.calls, rig.counts.reads) == (
        ["ok"] * 3,
        ["source", "remembered", "source", "source"],
    )


async def test_those_who_ask_together_get_one_answer() -> None:
    rig = Rig()
    rig.source.open.clear()
    asking = [asyncio.create_task(rig.get()) for _ in range(5)]
    await asyncio.sleep(0)
    asking[0].cancel()
    await asyncio.gather(asking[0], return_exceptions=True)
    rig.source.open.set()
    assert await asyncio.gather(*asking[1:]) == [(FR, UserFeaturesSource.SOURCE, None)] * 4
    assert len(rig.source.asked) == 1, "and who went away did not end it for the others"


async def test_a_failure_leaves_the_old_ones_and_then_none() -> None:
    rig = Rig(max_failures=3)
    await rig.get()
    rig.now += 50
    rig.source.says = OSError("away")
    assert await rig.get() == (FR, UserFeaturesSource.LAST_KNOWN, StoreFault.UNAVAILABLE)
    rig.now += 51
    assert await rig.get() == (None, UserFeaturesSource.NOTHING, StoreFault.UNAVAILABLE)
    assert await rig.get(UserKey("", "new")) == (
        None,
        UserFeaturesSource.NOTHING,
        StoreFault.UNAVAILABLE,
    )
    assert rig.users.lane.is_open
    assert await rig.get(UserKey("", "new")) == (
        None,
        UserFeaturesSource.NOTHING,
        StoreFault.UNAVAILABLE,
    )
    assert len(rig.source.asked) == 4, "the breaker makes no call"
    rig.now += 0.06
    rig.source.says = FR
    assert await rig.get() == (FR, UserFeaturesSource.SOURCE, None)
    assert not rig.users.lane.is_open


async def test_a_source_that_hangs_holds_its_places_and_nothing_else() -> None:
    rig = Rig(timeout_s=0.02, max_calls=2, max_queue=1, max_failures=100)
    config = FeatureStoreConfig(
        entry="x:y", timeout_s=0.02, max_calls=2, max_queue=1, max_failures=100
    )
    rig.users = UserFeatures(rig.source, config, rig.counts)
    rig.source.open.clear()
    answers = await asyncio.gather(*(rig.get(UserKey("", str(number))) for number in range(9)))
    faults = [fault for _, _, fault in answers]
    assert faults.count(StoreFault.SLOW) == 2
    assert faults.count(StoreFault.BUSY) == 7
    assert rig.users.lane.num_calls == 2
    assert rig.users.lane.waiting == 0
    await rig.users.close()
    assert rig.users.lane.num_calls == 0


async def test_an_erased_user_is_not_remembered_again() -> None:
    rig = Rig()
    await rig.get()
    assert rig.users.knows(USER)
    rig.users.forget(USER)
    assert not rig.users.knows(USER)
    rig.source.open.clear()
    asking = asyncio.create_task(rig.get())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    rig.users.forget(USER)
    rig.source.open.set()
    assert (await asking)[0] == FR
    assert not rig.users.knows(USER)


async def test_users_are_bounded() -> None:
    rig = Rig(max_users=3)
    for number in range(5):
        await rig.get(UserKey("", str(number)))
    assert [rig.users.knows(UserKey("", str(number))) for number in range(5)] == [
        False,
        False,
        True,
        True,
        True,
    ]


async def test_values_that_do_not_fit_are_dropped_and_reported() -> None:
    rig = Rig()
    rig.source.says = {
        "country": "fr",
        "age": "old",
        "tags": ["a", "b", "c", "d"],
        "spent": 1e300,
        "else": 7,
    }
    for source in (UserFeaturesSource.SOURCE, UserFeaturesSource.REMEMBERED):
        assert await rig.get() == ({"country": "fr"}, source, StoreFault.CORRUPT)
    rig.source.says = [1, 2]
    assert await rig.get(UserKey("", "v")) == (
        None,
        UserFeaturesSource.NOTHING,
        StoreFault.UNAVAILABLE,
    )


def test_values_are_read_as_a_request_brings_them() -> None:
    said = {
        "country": np.str_("fr"),
        "tags": np.array(["b", "a"]),
        "age": np.float32(1.5),
        "spent": float("nan"),
    }
    assert as_row(READS, said) == ({"country": "fr", "tags": ("b", "a"), "age": 1.5}, "")
    assert as_row(READS, {"tags": {"b", "a"}, "country": None}) == ({"tags": ("a", "b")}, "")
    assert as_row(READS, {"tags": [], "spent": np.int64(3)}) == ({"spent": 3}, "")
    row, bad = as_row(READS, {"country": "x" * 1025, "age": object()})
    assert row == {}
    assert bad


# ---- what the configuration names


def module(**members: Any) -> str:
    made = types.ModuleType("source_of_a_test")
    vars(made).update(members)
    sys.modules["source_of_a_test"] = made
    return "source_of_a_test"


async def test_functions_and_classes_are_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "source_of_a_test", types.ModuleType("x"))
    main = threading.get_ident()

    def blocks(
        user: UserKey, names: Sequence[str], timeout_s: float, country: str = ""
    ) -> dict[str, Any]:
        assert threading.get_ident() != main
        return {"country": country or user.user}

    async def waits(user: UserKey, names: Sequence[str], timeout_s: float) -> dict[str, Any]:
        return {"names": names}

    class Made:
        def __init__(self, table: dict[str, str]) -> None:
            self._table = table

        async def fetch(
            self, user: UserKey, names: Sequence[str], timeout_s: float
        ) -> dict[str, Any]:
            return {"country": self._table[user.user]}

    name = module(blocks=blocks, waits=waits, Made=Made, short=lambda user: {})
    threaded = open_source(
        FeatureStoreConfig(entry=f"{name}:blocks", options={"country": "fr"}, max_calls=2)
    )
    assert isinstance(threaded, ThreadedSource)
    answers = await asyncio.gather(*(threaded.fetch(USER, ("a",), 1.0) for _ in range(7)))
    assert answers == [{"country": "fr"}] * 7
    direct = open_source(FeatureStoreConfig(entry=f"{name}:waits"))
    assert isinstance(direct, AsyncSource)
    assert await direct.fetch(USER, ("a",), 1.0) == {"names": ("a",)}
    made = open_source(FeatureStoreConfig(entry=f"{name}:Made", options={"table": {"u": "de"}}))
    assert await made.fetch(USER, ("a",), 1.0) == {"country": "de"}
    for entry, said in (
        (f"{name}:none", "no attribute 'none'"),
        ("no.such:thing", "No module named 'no'"),
        ("nothing", "nothing"),
        (f"{name}:short", "TypeError: too many positional arguments"),
        (f"{name}:Made", "TypeError: .*'table'"),
    ):
        with pytest.raises(ConfigError, match=f"feature_store.*{said}"):
            open_source(FeatureStoreConfig(entry=entry))


async def test_a_thread_that_raises_or_hangs_serves_the_others() -> None:
    release = threading.Event()

    def fetch(user: UserKey, names: Sequence[str], timeout_s: float) -> dict[str, Any]:
        if user.user == "hang":
            release.wait(10)
        if user.user == "exit":
            raise SystemExit
        if user.user == "stop":
            raise StopIteration
        return {"country": user.user}

    source = ThreadedSource(fetch, 2)
    hanging = asyncio.create_task(source.fetch(UserKey("", "hang"), (), 1.0))
    await asyncio.sleep(0)
    assert await source.fetch(UserKey("", "fr"), (), 1.0) == {"country": "fr"}
    assert await source.fetch(UserKey("", "de"), (), 1.0) == {"country": "de"}
    release.set()
    assert await hanging == {"country": "hang"}
    # what ends a thread elsewhere is this call's failure alone
    users = UserFeatures(source, FeatureStoreConfig(entry="x:y", timeout_s=5.0), Counts())
    for name in ("exit", "stop"):
        assert (await users.fetch(UserKey("", name), READS)).origin.fault is StoreFault.UNAVAILABLE
    assert (await users.fetch(UserKey("", "fr"), READS)).values == {"country": "fr"}
