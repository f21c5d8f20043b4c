"""POST /v1/recommend from a ranker that also retrieves.

Items and scores are the same however the prefix was got.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp.test_utils import TestClient

from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import ConfigError, DeviceError
from npu_gr.engine.rank_engine import FindPass, NextItems, RankEngine, RankPass
from npu_gr.handlers.hooks import HookContext
from npu_gr.handlers.service import Service
from npu_gr.handlers.sources import SharedEncoderUse
from npu_gr.model.blend import OWN_OR_NEXT, own_or_next
from npu_gr.model.hstu import HSTU
from npu_gr.model.hstu_layer import Segment
from npu_gr.model.own_items import OwnItems
from npu_gr.model.weights import load
from npu_gr.vector_search import encoder_index
from npu_gr.vector_search.vectors import save as save_vectors
from tests.models import CPU, events, tiny_order
from tests.server.test_recommend_over_http import (
    HISTORY,
    SHOWN_AT,
    only_seen,
    post,
    recommend,
    results,
)
from tests.serving import FIRST_ID, columns, make_config, serving, until, write_checkpoint
from tests.vector_search.vectors import KNOWN, make_vectors

Client = TestClient[Any, Any]
NUM = 30  # items that the shared encoder is asked for


async def the_same(items: I64, _: HookContext) -> I64:
    return items


# a hook has a word between the two passes, so each is a job of its own
IN_TWO: dict[str, Any] = {"hook": f"{__name__}:the_same", "hook_budget_s": 10.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All tests share one shared encoder with a fitted order."""
    path = tmp_path_factory.mktemp("shared_encoder")
    write_checkpoint(path / "checkpoint", tiny_order(), retrieval=True)
    write_checkpoint(path / "plain")
    write_checkpoint(path / "unordered", retrieval=True)
    before = replace(
        tiny_order(),
        neighbours=None,
        weights={**tiny_order().weights, "popularity": 0.0, OWN_OR_NEXT: 0.0},
    )
    write_checkpoint(path / "older", before, retrieval=True)
    return path


def section(**changes: Any) -> dict[str, Any]:
    return {"recommend": {"sources": {"shared_encoder": NUM}, **changes}}


def history(count: int, seed: int = 0) -> dict[str, list[int]]:
    return columns(events(count, seed))


class ByHand:
    """The definition: two cold passes and a dense product.

    One pass is for u, then comes the product with every item, then a pass over the candidates.
    """

    def __init__(
        self, folder: Path, *, without_retrieval: bool = False, checkpoint: str = "checkpoint"
    ) -> None:
        loaded = load(folder / checkpoint)
        loaded.model.items.freeze()
        self.model: HSTU = loaded.model
        assert loaded.order is not None
        weights = dict(loaded.order.weights) | ({"retrieval": 0.0} if without_retrieval else {})
        self.order = replace(loaded.order, weights=weights)

    def run(
        self, candidates: I64, own: dict[str, list[int]], *, is_next: bool = False
    ) -> torch.Tensor:
        rows = np.array(own["items"], np.int64) - FIRST_ID
        segment = Segment(
            items=torch.from_numpy(rows),
            actions=torch.tensor(own["actions"], dtype=torch.int64) - 1,
            times=torch.tensor(own["timestamps"], dtype=torch.int64),
            candidates=torch.from_numpy(candidates),
            candidate_time=SHOWN_AT,
            is_next=is_next,
        )
        scores: torch.Tensor = self.model(CPU, [segment])[0]
        return scores

    def retrieval(self, own: dict[str, list[int]]) -> F32:
        vector = self.run(np.array([300]), own, is_next=True)[0]
        found: F32 = (self.model.items.vectors() @ vector).numpy()
        return found

    def found(self, own: dict[str, list[int]], denied: set[int], num: int = NUM) -> list[int]:
        best = np.argsort(-self.retrieval(own), kind="stable") + FIRST_ID
        return [item for item in best.tolist() if item not in denied][:num]

    def sums(self, items: list[int], own: dict[str, list[int]]) -> F32:
        rows = np.array(items, np.int64) - FIRST_ID
        mine = np.array(own["items"], np.int64) - FIRST_ID
        like = self.run(rows, own)[:, 1].numpy()
        counted = (
            self.order.transitions(mine, rows),
            self.order.alike(mine, rows),
            self.order.popular(rows),
        )
        more = own_or_next(self.order, OwnItems.of(mine), rows, mine, rows)
        of_own = self.order.own(mine, rows) + np.float32(self.order.weights[OWN_OR_NEXT]) * more
        return self.order.scores(self.retrieval(own)[rows], like, *counted, of_own)

    def ordered(self, items: list[int], own: dict[str, list[int]]) -> list[int]:
        return [items[place] for place in np.argsort(-self.sums(items, own), kind="stable")]


def same(answer: dict[str, Any], other: dict[str, Any]) -> bool:
    """Bit for bit, where the kernels promise it; else to the tolerance of a hit."""
    if answer["items"] != other["items"]:
        return False
    if CPU.arrangement(torch.float32, 64) == "tiles":
        return bool(answer["scores"] == other["scores"])
    return bool(np.allclose(answer["scores"], other["scores"], atol=1e-4))


async def test_it_is_the_definition_step_by_step(folder: Path) -> None:
    by_hand = ByHand(folder)
    found = by_hand.found(HISTORY, set(HISTORY["items"]))
    async with serving(folder, **section()) as (client, _):
        answer = await recommend(client, num_items=NUM)
        assert (answer["degraded"], results(answer)) == ([], {"shared_encoder": "ok", "rank": "ok"})
        assert (answer["order"], answer["verdict"], answer["outcome"]) == (
            "blended",
            None,
            "miss_full",
        )
        assert set(answer["origins"]) == {"shared_encoder"}
        assert answer["items"] == by_hand.ordered(found, HISTORY)
        np.testing.assert_allclose(
            answer["scores"], sorted(by_hand.sums(found, HISTORY), reverse=True), atol=1e-4
        )
        retrieved = await recommend(client, num_items=NUM, order="retrieval")
        assert (retrieved["items"], results(retrieved)) == (found, {"shared_encoder": "ok"})
        assert (retrieved["scores"], retrieved["outcome"]) == ([None] * NUM, None)
        by_click = await recommend(client, num_items=NUM, order="rank")
        click = by_hand.run(np.array(found) - FIRST_ID, HISTORY)[:, 0].numpy()
        assert by_click["items"] == [found[place] for place in np.argsort(-click, kind="stable")]
        assert (await recommend(client, num_items=NUM, order="fused"))["order"] == "fused"


async def test_seen_items_count_by_their_weight_where_they_may_come(folder: Path) -> None:
    by_hand = ByHand(folder)
    async with serving(folder, **section()) as (client, _):
        assert not only_seen(await recommend(client, num_items=NUM))
        denied = set(by_hand.found(HISTORY, set())[::2])
        answer = await recommend(
            client, num_items=NUM, exclude_seen=False, deny_items=sorted(denied)
        )
        found = by_hand.found(HISTORY, denied)
        assert only_seen(answer)
        assert answer["items"] == by_hand.ordered(found, HISTORY)


async def test_what_must_not_come_is_hidden_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = []
    find_all = RankEngine.find_all

    def listening(engine: RankEngine, works: Sequence[FindPass]) -> list[NextItems]:
        hidden.extend([work.hidden.tolist() for work in works])
        return find_all(engine, works)

    async with serving(folder, **section()) as (client, _):
        monkeypatch.setattr(RankEngine, "find_all", listening)
        denied = [*HISTORY["items"][:3], FIRST_ID + 7, FIRST_ID + 7, FIRST_ID + 10**6]
        await recommend(client, deny_items=denied)
    known = {*HISTORY["items"], FIRST_ID + 7}
    assert [set(own) for own in hidden] == [{item - FIRST_ID for item in known}]


@pytest.mark.parametrize("way", [{}, IN_TWO], ids=["one job", "two jobs"])
async def test_what_is_withdrawn_while_it_is_found_does_not_come(
    folder: Path, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was scored ahead are no longer the candidates, so they are ranked after all."""
    by_hand = ByHand(folder)
    found = by_hand.found(HISTORY, set(HISTORY["items"]))
    find = SharedEncoderUse.find
    async with serving(folder, **section(**way)) as (client, service):

        async def then_withdrawn(self: SharedEncoderUse, *given: Any) -> I64:
            items = await find(self, *given)
            service.versions.ranker().items.withdrawn = np.array([found[3]])
            return items

        monkeypatch.setattr(SharedEncoderUse, "find", then_withdrawn)
        answer = await recommend(client, num_items=NUM)
        rest = [item for item in found if item != found[3]]
        assert (answer["items"], answer["degraded"]) == (by_hand.ordered(rest, HISTORY), [])
        np.testing.assert_allclose(
            answer["scores"], sorted(by_hand.sums(rest, HISTORY), reverse=True), atol=1e-4
        )


async def test_a_denied_item_that_gets_another_row_meanwhile_does_not_come(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = SharedEncoderUse.find
    denied = FIRST_ID + 7
    async with serving(folder, **section()) as (client, service):

        async def then_found(self: SharedEncoderUse, *given: Any) -> I64:
            """The search knew the old row alone."""
            items = await find(self, *given)
            scored = service.versions.ranker().items
            scored.spare.vocabulary = copy(scored.vocabulary)
            return np.append(items, denied)

        monkeypatch.setattr(SharedEncoderUse, "find", then_found)
        answer = await recommend(client, num_items=NUM + 1, deny_items=[denied])
        assert len(answer["items"]) == NUM
        assert denied not in answer["items"]


async def test_popular_items_follow_the_few_of_a_user_without_history(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "popular.txt").write_text("".join(f"{FIRST_ID + row}\n" for row in range(200)))
    short = section(
        popular=str(tmp_path / "popular.txt"),
        sources={"shared_encoder": 5, "transitions": 5, "neighbours": 5},
    )
    async with serving(folder, **short) as (client, _):
        answer = await recommend(client, history=history(0), num_items=NUM)
    want = {
        "transitions": "cold",
        "neighbours": "cold",
        "shared_encoder": "ok",
        "popular": "ok",
        "rank": "ok",
    }
    assert results(answer) == want
    assert Counter(answer["origins"]) == {"shared_encoder": 5, "popular": NUM - 5}


@pytest.mark.parametrize(
    ("count", "sections"), [(0, {}), (3, {}), (40, {}), (150, {}), (150, {"keep_full": False})]
)
async def test_any_way_to_the_prefix_gives_the_same(
    folder: Path, count: int, sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cold, hit, extended, signalled, from DRAM, with no relay, and beside others: C5."""
    # a short prefix is computed as fast
    monkeypatch.setattr("npu_gr.relay.lookup.reload_pays", lambda *_: True)
    own = history(count, seed=count)
    async with serving(folder, relay={"enabled": False}, **section()) as (client, _):
        want = await recommend(client, history=own, num_items=NUM)
        assert (want["outcome"], want["reason"]) == ("miss_full", "disabled")
    async with serving(folder, relay=sections, **section()) as (client, service):
        answers = {"cold": await recommend(client, history=own, num_items=NUM)}
        answers["again"] = await recommend(client, history=own, num_items=NUM)
        if count >= 40 and not sections:
            assert answers["again"]["outcome"] == "hbm_hit"
            assert answers["again"]["prefix_tokens"] == count
        await post(client, "/v1/signal", 202, user_id="s", history=own)
        answers["signalled"] = await recommend(client, user_id="s", history=own, num_items=NUM)
        if count > 10:
            older = {name: column[:-7] for name, column in own.items()}
            newer = {name: column[-7:] for name, column in own.items()}
            first = await recommend(client, user_id="d", history=older, num_items=NUM)
            base = first["history"]["fingerprint"]
            answers["delta"] = await recommend(
                client, user_id="d", base=base, history=newer, num_items=NUM
            )
            await service.versions.ranker().relay.settled()
            pool = service.versions.ranker().relay.tiers.pool
            for entry in list(pool._found.values()):
                pool.drop(entry)
            answers["dram"] = await recommend(client, history=own, num_items=NUM)
            if not sections:
                assert answers["dram"]["outcome"] == "dram_hit"
        crowd = [
            recommend(client, user_id=f"c{n}", history=own if n % 2 else HISTORY, num_items=NUM)
            for n in range(8)
        ]
        crowd += [
            post(client, "/v1/rank", user_id="r", history=HISTORY, candidates=[FIRST_ID + 7] * 9)
        ]
        answers |= {
            f"crowd {n}": answer for n, answer in enumerate(await asyncio.gather(*crowd)) if n % 2
        }
        for way, answer in answers.items():
            assert same(answer, want), way
        await nothing_held(service)


async def test_what_other_sources_find_is_scored_by_the_same_vector(folder: Path) -> None:
    save_vectors(
        make_vectors(item_ids=np.arange(40, dtype=np.int64) + FIRST_ID), folder / "vectors"
    )
    by_hand = ByHand(folder)
    sources = {"shared_encoder": 9, "transitions": 9, "neighbours": 8, "match": 6}
    everything = section(sources=sources) | {"match": {"vectors": str(folder / "vectors")}}
    async with serving(folder, **everything) as (client, _):
        who: dict[str, Any] = {"user_id": KNOWN}
        answer = await recommend(client, num_items=100, **who)
        assert results(answer) == {**dict.fromkeys(sources, "ok"), "rank": "ok"}
        assert set(sources) == set(answer["origins"])
        alone = {
            name: (
                await recommend(client, num_items=100, sources=[name], order="retrieval", **who)
            )["items"]
            for name in sources
        }
        assert set(answer["items"]) == {item for items in alone.values() for item in items}
        assert alone["shared_encoder"] == by_hand.found(HISTORY, set(HISTORY["items"]), 9)
        rows = np.array(HISTORY["items"]) - FIRST_ID
        following = by_hand.order.top(rows, 300) + FIRST_ID
        assert (
            alone["transitions"]
            == [item for item in following.tolist() if item not in HISTORY["items"]][:9]
        )
        alike = by_hand.order.nearest(rows, 300) + FIRST_ID
        assert (
            alone["neighbours"]
            == [item for item in alike.tolist() if item not in HISTORY["items"]][:8]
        )
        merged = [
            alone[name][place] for place in range(9) for name in alone if place < len(alone[name])
        ]
        assert answer["items"] == by_hand.ordered(list(dict.fromkeys(merged)), HISTORY)
        # without the shared encoder among the sources its vector is still found: the sum needs it
        matched = await recommend(client, num_items=100, sources=["match"], **who)
        assert results(matched) == {"match": "ok", "shared_encoder": "ok", "rank": "ok"}
        assert matched["items"] == by_hand.ordered(alone["match"], HISTORY)
        assert ("sources: 'generate' is not configured") in (
            await recommend(client, 422, sources=["generate"])
        )["detail"]
        assert "at least one" in (await recommend(client, 422, sources=[]))["detail"]


async def test_neighbours_are_those_of_the_definition(folder: Path) -> None:
    """Denied and seen items are left out, and others take their places.

    A new user and new items have none.
    """
    by_hand = ByHand(folder)
    assert by_hand.order.neighbours is not None
    alone: dict[str, Any] = {"sources": ["neighbours"], "order": "retrieval", "num_items": 100}
    async with serving(folder, **section(sources={"shared_encoder": NUM, "neighbours": 10})) as (
        client,
        _,
    ):
        sums: Counter[int] = Counter()
        for item in set(HISTORY["items"][-5:]):
            row = item - FIRST_ID
            for own, similarity in zip(
                by_hand.order.neighbours.items[row].tolist(),
                by_hand.order.neighbours.similarity[row].tolist(),
                strict=True,
            ):
                sums[own + FIRST_ID] += similarity
        best = [item for item, _ in sorted(sums.items(), key=lambda pair: (-pair[1], pair[0]))]
        found = [item for item in best if item not in HISTORY["items"]]
        assert len(found) > 14
        answer = await recommend(client, **alone)
        assert (answer["items"], results(answer)) == (found[:10], {"neighbours": "ok"})
        assert (await recommend(client, **alone, deny_items=found[:4]))["items"] == found[4:14]
        assert (await recommend(client, **alone, exclude_seen=False))["items"] == best[:10]
        new = {name: column[:1] for name, column in HISTORY.items()} | {"items": [FIRST_ID + 10**6]}
        for own in (new, history(0)):
            answer = await recommend(client, **alone, history=own)
            assert (answer["items"], results(answer)) == ([], {"neighbours": "cold"})


async def test_own_items_are_those_of_the_definition(folder: Path) -> None:
    """A user's items by the sum of .97^age, the newer of equal ones first; nothing fills up."""
    had = [FIRST_ID + item for item in (7, 3, 3, 9, 1, 7, 4, 4, 2)]
    weights = dict.fromkeys(had[::-1], 0.0)
    for age, item in enumerate(had[::-1]):
        weights[item] += 0.97**age
    best = sorted(weights, key=lambda item: -weights[item])
    own = {name: column[: len(had)] for name, column in HISTORY.items()} | {"items": had}
    alone: dict[str, Any] = {"sources": ["history"], "order": "retrieval", "history": own}
    async with serving(folder, **section(sources={"shared_encoder": NUM, "history": 10})) as (
        client,
        _,
    ):
        answer = await recommend(client, **alone, exclude_seen=False)
        assert (answer["items"], results(answer)) == (best, {"history": "ok"})
        denied = await recommend(client, **alone, exclude_seen=False, deny_items=best[:2])
        assert denied["items"] == best[2:]
        assert (await recommend(client, **alone, exclude_seen=True))["items"] == []


async def test_an_older_order_serves_as_it_did(folder: Path) -> None:
    by_hand = ByHand(folder, checkpoint="older")
    found = by_hand.found(HISTORY, set(HISTORY["items"]))
    a, b, c, e = (
        by_hand.order.weights[name] for name in ("retrieval", "click", "transitions", "seen")
    )
    rows, mine = np.array(found) - FIRST_ID, np.array(HISTORY["items"]) - FIRST_ID
    sums = a * by_hand.retrieval(HISTORY)[rows] + b * by_hand.run(rows, HISTORY)[:, 1].numpy()
    sums += c * by_hand.order.transitions(mine, rows) + e * np.isin(rows, mine)
    async with serving(folder, checkpoint=str(folder / "older"), **section()) as (client, _):
        answer = await recommend(client, num_items=NUM)
        assert (answer["order"], answer["items"]) == (
            "blended",
            [found[at] for at in np.argsort(-sums, kind="stable")],
        )


async def test_a_ranker_without_an_order_orders_by_its_task(folder: Path) -> None:
    async with serving(folder, checkpoint=str(folder / "unordered"), **section()) as (client, _):
        answer = await recommend(client)
        assert (answer["order"], results(answer)) == (
            "rank",
            {"shared_encoder": "ok", "rank": "ok"},
        )
        assert "order: 'blended'" in (await recommend(client, 422, order="blended"))["detail"]
        old = await recommend(client, 422, order="fitted", sources=["trunk"])  # of earlier versions
        assert "order: 'blended'" in old["detail"]
        asked = await recommend(client, sources=["trunk"])
        assert (set(asked["origins"]), asked["stages"][0]["stage"]) == (
            {"shared_encoder"},
            "shared_encoder",
        )


# ---- failures


async def nothing_held(service: Service) -> None:
    assert service.admission.work.admitted == 0
    relay = service.versions.ranker().relay
    await relay.settled()
    assert relay.tiers.pool.reserved_bytes == 0
    assert not any(entry.leases for entry in relay.tiers.pool._found.values())


async def fails(*_: object) -> None:
    raise DeviceError("it broke")


async def hangs(*_: object) -> None:
    await asyncio.sleep(60)


async def test_a_failing_first_pass_leaves_the_other_sources(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "popular.txt").write_text("".join(f"{FIRST_ID + row}\n" for row in range(200)))
    with_popular = section(
        popular=str(tmp_path / "popular.txt"), sources={"shared_encoder": NUM, "transitions": 5}
    )
    by_hand = ByHand(folder, without_retrieval=True)
    async with serving(folder, **with_popular) as (client, service):
        service.versions.ranker().engine.find = fails  # type: ignore[method-assign,assignment]
        answer = await recommend(client, num_items=9)
        assert results(answer) == {
            "transitions": "ok",
            "shared_encoder": "failed",
            "popular": "ok",
            "rank": "ok",
        }
        assert answer["degraded"] == ["shared_encoder"]
        assert answer["items"] == by_hand.ordered(sorted(answer["items"]), HISTORY)
        await nothing_held(service)
    async with serving(folder, **section()) as (client, service):
        service.versions.ranker().engine.find = fails  # type: ignore[method-assign,assignment]
        assert (await recommend(client, 503))["detail"].startswith(
            "retrieval failed (shared_encoder failed)"
        )
        await nothing_held(service)


@pytest.mark.parametrize("way", [{}, IN_TWO], ids=["one job", "two jobs"])
async def test_a_failing_second_pass_keeps_the_order_of_the_retrieval(
    folder: Path, way: dict[str, Any]
) -> None:
    found = ByHand(folder).found(HISTORY, set(HISTORY["items"]))
    async with serving(folder, **section(**way)) as (client, service):

        def broken(_: Sequence[RankPass]) -> list[F32]:
            raise AssertionError("it broke")

        engine = service.versions.ranker().engine
        engine.backend.hstu_find = lambda _: None  # type: ignore[method-assign,assignment]  # it has one pass
        engine.forward = broken  # type: ignore[method-assign,assignment]
        answer = await recommend(client, num_items=NUM)
        assert answer["items"] == found
        assert (answer["outcome"], answer["order"], answer["degraded"]) == (
            None,
            "retrieval",
            ["rank"],
        )
        await nothing_held(service)


async def test_a_prefix_that_cannot_be_read_is_done_without(folder: Path) -> None:
    async with serving(folder, **section()) as (client, service):
        want = await recommend(client, num_items=NUM)
        engine = service.versions.ranker().engine
        find_all, forward = engine.find_all, engine.forward

        def broken_find(works: Any) -> Any:
            assert not works[0].history.cached, "a page is broken"
            return find_all(works)

        def broken_forward(passes: Any) -> Any:
            assert not passes[0].cached, "a page is broken"
            return forward(passes)

        engine.find_all, engine.forward = broken_find, broken_forward  # type: ignore[method-assign]
        answer = await recommend(client, num_items=NUM)
        assert (answer["reason"], answer["degraded"], same(answer, want)) == (
            "read_failed",
            [],
            True,
        )
        await nothing_held(service)


async def test_a_first_pass_out_of_time_leaves_the_rank_its_own(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "popular.txt").write_text("".join(f"{FIRST_ID + row}\n" for row in range(200)))
    patient = section(popular=str(tmp_path / "popular.txt"), min_rank_s=2.0)
    by_hand = ByHand(folder, without_retrieval=True)
    async with serving(folder, **patient) as (client, service):
        service.versions.ranker().engine.find = hangs  # type: ignore[method-assign,assignment]
        answer = await recommend(client, budget_ms=2500)
        assert results(answer) == {"shared_encoder": "out_of_time", "popular": "ok", "rank": "ok"}
        # the pages that the first pass left unwritten were not read
        assert answer["items"] == by_hand.ordered(sorted(answer["items"]), HISTORY)
        np.testing.assert_allclose(
            answer["scores"], by_hand.sums(answer["items"], HISTORY), atol=1e-4
        )
        await nothing_held(service)


async def test_a_second_pass_out_of_time_leaves_what_was_found(folder: Path) -> None:
    """The wait ended, but the job knew the items by then: the rank has its own time."""
    by_hand = ByHand(folder)
    async with serving(folder, **section(min_rank_s=2.0)) as (client, service):
        engine = service.versions.ranker().engine
        find = engine.find

        async def found_but_hangs(work: FindPass, *times: Any) -> NextItems:
            assert work.ahead is not None
            await find(work, *times)
            await asyncio.sleep(60)
            raise AssertionError

        engine.find = found_but_hangs  # type: ignore[method-assign,assignment]
        answer = await recommend(client, budget_ms=2500, num_items=NUM)
        assert results(answer) == {"shared_encoder": "ok", "rank": "ok"}
        assert answer["items"] == by_hand.ordered(
            by_hand.found(HISTORY, set(HISTORY["items"])), HISTORY
        )
        await nothing_held(service)


async def test_two_passes_are_one_job_where_nobody_has_a_word_between_them(folder: Path) -> None:
    both = section(sources={"transitions": 9, "neighbours": 4, "shared_encoder": NUM})
    wanted: list[dict[str, Any]] = [
        {},
        {"num_items": 39},
        {"num_candidates": 7},
        {"deny_items": HISTORY["items"][:9]},
    ]
    wanted += [
        {"sources": ["transitions"]},
        {"sources": ["neighbours"]},
        {"order": "rank"},
        {"order": "retrieval"},
        {"exclude_seen": False},
    ]
    async with serving(folder, **section(**both["recommend"], **IN_TWO)) as (client, _):
        others = [await recommend(client, **own) for own in wanted]
    async with serving(folder, **both) as (client, service):
        service.versions.ranker().engine.rank = fails  # type: ignore[method-assign,assignment]
        for own, other in zip(wanted, others, strict=True):
            answer = await recommend(client, **own)
            assert same(answer, other), own
            assert answer["origins"] == other["origins"]
            assert not answer["degraded"]


@pytest.mark.parametrize("way", [{}, IN_TWO], ids=["one job", "two jobs"])
async def test_some_of_its_ranks_are_checked(folder: Path, way: dict[str, Any]) -> None:
    async with serving(folder, **section(**way), service={"selfcheck_ratio": 1.0}) as (
        client,
        service,
    ):
        for _ in range(2):
            await recommend(client)
        checks = list(service.versions.ranker()._selfcheck._background)
        assert len(checks) == 1, "of the hit"
        await asyncio.gather(*checks)
        assert "npu_gr_selfcheck_failures_total 0.0" in await (await client.get("/metrics")).text()


@pytest.mark.parametrize("way", [{}, IN_TWO], ids=["one job", "two jobs"])
async def test_the_second_pass_reads_what_the_first_one_wrote(
    folder: Path, way: dict[str, Any]
) -> None:
    async with serving(folder, **section(**way)) as (client, service):
        engine, read = service.versions.ranker().engine, list[int]()
        engine.backend.hstu_find = lambda _: None  # type: ignore[method-assign,assignment]  # test_hstu_find.py has the one call
        forward = engine.forward

        def noted(passes: Sequence[RankPass]) -> list[F32]:
            read.extend(one.cached.num_tokens if one.cached else 0 for one in passes)
            return forward(passes)

        engine.forward = noted  # type: ignore[method-assign]
        cold = await recommend(client)
        assert (cold["outcome"], cold["prefix_tokens"], read) == ("miss_full", 0, [40])
        hit = await recommend(client)
        assert (hit["outcome"], hit["prefix_tokens"], read) == ("hbm_hit", 40, [40, 40])


@pytest.mark.parametrize("method", ["find", "rank"])
async def test_a_caller_who_leaves_leaves_nothing_behind(folder: Path, method: str) -> None:
    started = asyncio.Event()

    async def hangs_here(*_: object) -> None:
        started.set()
        await asyncio.sleep(60)

    async with serving(folder, **section(**IN_TWO)) as (client, service):
        setattr(service.versions.ranker().engine, method, hangs_here)
        task = asyncio.create_task(recommend(client))
        await started.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for _ in range(1000):
            await asyncio.sleep(0.01 if service.admission.work.admitted else 0)
        await nothing_held(service)


# ---- what cannot be configured


@pytest.mark.parametrize(
    ("checkpoint", "change", "detail"),
    [
        ("plain", {}, "recommend.sources.shared_encoder: the ranker"),
        ("unordered", {"order": "blended"}, "recommend.order: the ranker"),
        ("unordered", {"sources": {"transitions": 5}}, "recommend.sources.transitions: the ranker"),
        ("unordered", {"sources": {"neighbours": 5}}, "recommend.sources.neighbours: the ranker"),
        ("older", {"sources": {"neighbours": 5}}, "recommend.sources.neighbours: the ranker"),
    ],
)
async def test_a_ranker_that_cannot_do_it_is_told_at_the_start(
    folder: Path, checkpoint: str, change: dict[str, Any], detail: str
) -> None:
    with pytest.raises(ConfigError) as error:
        async with serving(folder, checkpoint=str(folder / checkpoint), **section(**change)):
            pass
    assert detail in str(error.value)


async def test_versions_answer_from_their_own_tables_and_a_plain_ranker_is_rejected(
    folder: Path, tmp_path: Path
) -> None:
    old = write_checkpoint(tmp_path / "checkpoint", tiny_order(), retrieval=True)
    config = make_config(tmp_path, **section())
    async with serving(tmp_path, watched=False, read=lambda: config, **section()) as (
        client,
        service,
    ):
        before = await recommend(client, num_items=NUM)
        new = write_checkpoint(tmp_path / "checkpoint", tiny_order(seed=1), retrieval=True, seed=1)
        await service.on_reload()
        after = await recommend(client, num_items=NUM)
        assert (before["model_version"], after["model_version"]) == (old, new)
        assert after["items"] != before["items"]
        assert after["items"] == ByHand(tmp_path).ordered(
            ByHand(tmp_path).found(HISTORY, set(HISTORY["items"])), HISTORY
        )
        assert same(await recommend(client, num_items=NUM, model_version=old), before)
        write_checkpoint(tmp_path / "checkpoint", seed=2)
        async with client.post("/v1/models/reload") as response:
            assert response.status != 200
        assert same(await recommend(client, num_items=NUM), after)


async def test_an_approximate_index_takes_over_and_is_checked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("faiss", reason="faiss is not installed")
    monkeypatch.setattr(encoder_index, "NUM_USERS", 8)
    found = ByHand(folder).found(HISTORY, set(HISTORY["items"]))
    async with serving(folder, **section(index="ivf")) as (client, service):
        ranking = service.versions.ranker()
        ranking._recall_checks._every = 1
        search: Any = ranking.engine.search
        for seed in range(8):
            assert (await recommend(client, num_items=NUM, order="retrieval"))["items"] == found
            if seed:
                await recommend(client, user_id=f"u{seed}", history=history(20, seed))
            await until(lambda: search.__self__._builder is None)
        assert search.__self__._serving is not None
        for order in ("retrieval", "blended"):
            answer = await recommend(client, num_items=NUM, order=order)
            assert len(set(answer["items"]) & set(found)) >= 0.9 * NUM
            assert not only_seen(answer)
        metrics = service.parts.metrics.registry
        labels = {"index": "recommend"}
        checked = partial(metrics.get_sample_value, "npu_gr_match_checked_items_total", labels)
        await until(lambda: (checked() or 0) >= NUM)
        one = await recommend(client, allow_items=found[5:9], num_items=NUM, order="retrieval")
        assert one["items"] == found[5:9]
