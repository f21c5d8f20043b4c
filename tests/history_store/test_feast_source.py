"""Feast's online store as a source: the row of a user, by the model's names of its features."""

from __future__ import annotations

import datetime
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from npu_gr.core.errors import ConfigError
from npu_gr.core.history import UserKey
from npu_gr.feature_store.user_features import open_source
from npu_gr.history_store.store import FeatureStoreConfig

FEATURES = {"country": "profile:country", "age": "profile:age", "visits": "weekly:country"}
NAMES = ("country", "age", "visits", "other")


class Answer:
    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self._columns = columns

    def to_dict(self) -> dict[str, list[Any]]:
        return self._columns


class FeatureStore:
    """In the form of Feast's answer: one column a feature, and the join keys."""

    asked: list[dict[str, Any]]

    def __init__(self, repo_path: str) -> None:
        if repo_path == "nowhere":
            raise FileNotFoundError("nowhere/feature_store.yaml")
        FeatureStore.asked = []

    def get_online_features(
        self,
        features: list[str],
        entity_rows: list[dict[str, Any]],
        full_feature_names: bool = False,
    ) -> Answer:
        FeatureStore.asked += entity_rows
        assert full_feature_names, "two of them are called country"
        known = {"profile__country": "fr", "profile__age": None, "weekly__country": 7}
        columns = {ref.replace(":", "__"): [known[ref.replace(":", "__")]] for ref in features}
        return Answer({**columns, **{key: [value] for key, value in entity_rows[0].items()}})


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    made = types.ModuleType("feast")
    vars(made)["FeatureStore"] = FeatureStore
    monkeypatch.setitem(sys.modules, "feast", made)


def config(**options: Any) -> FeatureStoreConfig:
    return FeatureStoreConfig(
        entry="feast", options={"repo": "shop", "features": FEATURES, **options}
    )


async def test_a_user_is_one_row(stand_in: None) -> None:
    source = open_source(config())
    said = await source.fetch(UserKey("t", "me"), NAMES, 1.0)
    assert said == {"country": "fr", "age": None, "visits": 7}
    source = open_source(config(user_key="customer", tenant_key="shop", user_is_number=True))
    await source.fetch(UserKey("t", "42"), NAMES, 1.0)
    assert await source.fetch(UserKey("t", "no number"), NAMES, 1.0) == {}
    assert await source.fetch(UserKey("t", "42"), ("other",), 1.0) == {}
    assert FeatureStore.asked == [{"customer": 42, "shop": "t"}], (
        "a call without features is not made"
    )


def test_what_cannot_be_opened_is_named(stand_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError,
        match=r"feature_store.options.repo: nowhere: "
        r"FileNotFoundError",
    ):
        open_source(config(repo="nowhere"))
    with pytest.raises(
        ConfigError,
        match=r"feature_store.options.features: 'age' is no "
        r"VIEW:FEATURE",
    ):
        open_source(config(features={"age": "age"}))
    monkeypatch.setitem(sys.modules, "feast", None)
    with pytest.raises(ConfigError, match=r"needs pip install 'npu_gr\[feast\]'"):
        open_source(config())


async def test_the_real_one(tmp_path: Path) -> None:
    """Where Feast is installed, which no extra of the tests brings."""
    feast = pytest.importorskip("feast", reason="pip install feast, in an environment of its own")
    pandas = pytest.importorskip("pandas")
    (tmp_path / "feature_store.yaml").write_text(
        f"project: shop\nregistry: {tmp_path}/registry.db\nprovider: "
        "local\nentity_key_serialization_version: 3\n"
        f"online_store:\n  type: sqlite\n  path: {tmp_path}/online.db\n"
    )
    now = datetime.datetime.now(datetime.UTC)
    rows = pandas.DataFrame(
        {
            "user_id": ["me"],
            "country": ["fr"],
            "age": [33.5],
            "tags": [["a", "b"]],
            "event_timestamp": [now],
        }
    )
    rows.to_parquet(tmp_path / "users.parquet")
    user = feast.Entity(name="user", join_keys=["user_id"], value_type=feast.ValueType.STRING)
    fields = {
        "country": feast.types.String,
        "age": feast.types.Float32,
        "tags": feast.types.Array(feast.types.String),
    }
    view = feast.FeatureView(
        name="profile",
        entities=[user],
        ttl=datetime.timedelta(days=1),
        schema=[feast.Field(name=name, dtype=dtype) for name, dtype in fields.items()],
        source=feast.FileSource(
            path=str(tmp_path / "users.parquet"), timestamp_field="event_timestamp"
        ),
    )
    store = feast.FeatureStore(repo_path=str(tmp_path))
    store.apply([user, view])
    store.write_to_online_store("profile", rows)
    source = open_source(
        config(repo=str(tmp_path), features={name: f"profile:{name}" for name in fields})
    )
    assert await source.fetch(UserKey("", "me"), tuple(fields), 1.0) == {
        "country": "fr",
        "age": 33.5,
        "tags": ["a", "b"],
    }
    assert await source.fetch(UserKey("", "you"), tuple(fields), 1.0) == dict.fromkeys(fields)
