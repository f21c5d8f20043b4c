"""Sections `recommend` and `match` change with a reload, to the `serve.yaml` of another site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from npu_gr.vector_search.vectors import save
from tests.server.test_recommend_over_http import (
    Client,
    post,
    recommend,
    results,
)
from tests.server.test_recommend_over_http import section as generating
from tests.service.test_reload import File
from tests.service.test_rollback import change
from tests.serving import FIRST_ID, serving
from tests.vector_search.vectors import make_vectors

DENIED = FIRST_ID + 299


class Sites(File):
    """Two sites: other models, vectors, popular items, sources and order."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.versions = {name: self.add(name, seed) for seed, name in enumerate(("one", "two"))}
        self.generate = generating(folder)["generate"]
        for seed, name in enumerate(self.versions):
            ids = np.arange(40, dtype=np.int64) + FIRST_ID + 100 * seed
            save(make_vectors(seed=seed, item_ids=ids), folder / f"vectors {name}")
            lines = range(FIRST_ID + 299 - 100 * seed, FIRST_ID + 199 - 100 * seed, -1)
            (folder / f"popular {name}").write_text("".join(f"{item}\n" for item in lines))
        self.serve("one")

    def serve(self, name: str, **changes: Any) -> None:
        of_site: dict[str, dict[str, Any]] = {
            "one": {"sources": {"generate": 30}, "order": "rank"},
            "two": {"sources": {"match": 9}, "order": "retrieval", "exclude_seen": False},
        }
        chosen = of_site[name]
        chosen["popular"] = str(self.folder / f"popular {name}")
        if (recommend := changes.pop("recommend", {})) is not None:
            recommend = chosen | recommend
        sections: dict[str, Any] = {
            "relay": {"t_life_s": 60.0},
            "generate": self.generate,
            "match": {"vectors": str(self.folder / f"vectors {name}")},
            "recommend": recommend,
        }
        self.use(name, **sections | changes)


async def popular(client: Client) -> list[int]:
    """The popular items for a user of whom nothing is known."""
    empty: dict[str, Any] = {"items": [], "actions": [], "timestamps": []}
    answer = await recommend(client, num_items=20, history=empty, order="retrieval")
    origins = zip(answer["items"], answer["origins"], strict=True)
    return [item for item, origin in origins if origin == "popular"]


async def coverage(client: Client) -> dict[str, float]:
    start = 'npu_gr_catalogue_coverage_ratio{source="'
    lines = (await (await client.get("/metrics")).text()).splitlines()
    found = [line.removeprefix(start).split('"} ') for line in lines if line.startswith(start)]
    return {name: float(ratio) for name, ratio in found if ratio != "NaN"}


async def test_another_site_is_served_and_its_predecessor_comes_back(tmp_path: Path) -> None:
    file = Sites(tmp_path)
    rules = {"recommend": {"rules": {"deny": {"items": [DENIED]}}}}
    async with serving(tmp_path, read=file.read, **file.sections) as (client, _):
        first = await recommend(client, num_items=5)
        assert (first["order"], results(first)) == ("rank", {"generate": "ok", "rank": "ok"})
        assert (await popular(client))[0] == DENIED
        assert await coverage(client) == {"generate": 1.0, "popular": 1.0}

        file.serve("two", **rules)
        await change(client, "reload")
        second = await recommend(client, num_items=5)
        assert second["model_version"] == file.versions["two"]
        assert (second["order"], results(second)) == ("retrieval", {"match": "ok"})
        assert (await popular(client))[:5] == [FIRST_ID + 199 - n for n in range(5)]
        assert await coverage(client) == {"match": 1.0, "popular": 1.0}
        found = await post(client, "/v1/match", user_id="known", num_items=5)
        assert min(found["items"]) >= FIRST_ID + 100
        # who began with the version that drains gets its order, and the rules of now
        named = await recommend(client, num_items=5, model_version=file.versions["one"])
        assert (named["order"], named["items"]) == ("rank", first["items"])

        await change(client, "rollback")
        again = await recommend(client, num_items=5)
        assert (again["order"], again["items"]) == ("rank", first["items"])
        assert (await popular(client))[0] == DENIED - 1  # the rule is the operator's, and stays
        assert (await coverage(client)).keys() == {"generate", "popular"}
        config = await (await client.get("/debug/config")).json()
        assert config["recommend"]["sources"] == {"generate": 30}
        assert config["recommend"]["rules"]["deny"]["items"] == [DENIED]
        await change(client, "rollback")  # undone
        assert (await recommend(client, num_items=5))["items"] == second["items"]


async def test_a_rule_alone_needs_no_model(tmp_path: Path) -> None:
    file = Sites(tmp_path)
    async with serving(tmp_path, read=file.read, **file.sections) as (client, service):
        ranker = service.versions.ranker()
        first = (await recommend(client, num_items=2))["items"]
        file.serve("one", recommend={"rules": {"deny": {"items": first[:1]}}})
        await change(client, "reload")
        assert service.versions.ranker() is ranker
        assert first[0] not in (await recommend(client, num_items=20))["items"]
        detail = (await change(client, "rollback", 422))["detail"]
        assert "no previous version" in detail


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("one", {"recommend": {"order": "blended"}}, "recommend.order: the ranker "),
    ("two", {"recommend": {"order": "blended"}}, "recommend.order: the ranker "),
    ("one", {"recommend": {"sources": {"shared_encoder": 5}}}, "shared_encoder: the ranker "),
    ("two", {"recommend": {"popular": "nowhere"}}, "recommend.popular: nowhere"),
    ("two", {"recommend": {"hook": "nowhere:hook"}}, "recommend.hook: 'nowhere:hook'"),
    (
        "two",
        {"recommend": {"rules": {"deny": {"attributes": {"brand": ["acme"]}}}}},
        "recommend.rules.deny: filter: no attribute 'brand'",
    ),
    ("two", {"match": {"vectors": "nowhere"}}, "match.vectors: nowhere"),
    ("two", {"recommend": {"index": "ivf"}}, "recommend.index: cannot change while"),
    ("one", {"match": None}, "match: cannot be added or removed while the instance runs"),
    ("one", {"recommend": None}, "recommend: cannot be added or removed"),
    (
        "two",
        {"history_store": {"path": "other.db"}},
        "history_store: cannot change while the instance runs; restart it. All sites that an "
        "instance serves have one history store: start it with --set history_store.path=",
    ),
]


async def test_what_cannot_be_served_changes_nothing(tmp_path: Path) -> None:
    file = Sites(tmp_path)
    async with serving(tmp_path, read=file.read, **file.sections) as (client, service):
        before = service.parts.settings.config
        first = await recommend(client, num_items=5)
        for name, changes, why in WRONG:
            file.serve(name, **changes)
            assert why in (await change(client, "reload", 422))["detail"]
            assert service.parts.settings.config is before
            again = await recommend(client, num_items=5)
            assert (again["order"], again["items"]) == (first["order"], first["items"])
            assert again["model_version"] == first["model_version"]
            found = await post(client, "/v1/match", user_id="known", num_items=5)
            assert max(found["items"]) < FIRST_ID + 100
        file.serve("two")
        await change(client, "reload")
