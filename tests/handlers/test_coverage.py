"""A change with coverage under the minimum and worse than now is rejected, others are measured."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.core.arrays import I64
from npu_gr.core.errors import ConfigError
from npu_gr.handlers.cascade_plan import RecommendConfig
from npu_gr.handlers.scored_items import Coverage, CoverageRule
from npu_gr.model.history_tokenizer import ItemVocabulary


def ids(*items: int) -> I64:
    return np.array(items, np.int64)


@settings(derandomize=True, deadline=None)
@given(known=st.sets(st.integers(0, 40), min_size=1), items=st.sets(st.integers(0, 40)))
def test_coverage_is_counted_by_hand(known: set[int], items: set[int]) -> None:
    found = Coverage.of(ItemVocabulary(ids(*known)), ids(*items))
    assert found == (len(known & items), len(items))
    assert found.ratio == (len(known & items) / len(items) if items else 1.0)


class Cascade:
    """A ranker and two limited sources, and a list that is measured alone."""

    def __init__(self, min_ratio: float = 0.5) -> None:
        self.ranker = ItemVocabulary(ids(*range(10)))
        self.items = {
            "generate": ids(0, 1, 2, 3),
            "match": ids(0, 1, 2, 13),
            "popular": ids(11, 12, 13, 3),
        }
        self.measured_ratios: dict[str, float] = {}
        listed = {name: (lambda name=name: self.items[name]) for name in self.items}
        self.rule = CoverageRule(
            RecommendConfig(
                sources={"generate": 1, "match": 1}, min_coverage=min_ratio, popular="popular.txt"
            ),
            lambda: self.ranker,
            listed,
            lambda *measured_ratios: self.measured_ratios.update([measured_ratios]),
        )


async def test_all_is_measured_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    it = Cascade()
    await it.rule.start()
    assert it.measured_ratios == {"generate": 1.0, "match": 0.75, "popular": 0.25}
    assert it.rule.now("match") == (3, 4)
    assert [record.getMessage() for record in caplog.records] == [
        "recommend: the ranker knows 3 of the 4 items of match",
        "recommend: the ranker knows 1 of the 4 items of popular",
    ]


async def test_too_few_at_the_start_are_rejected_in_words() -> None:
    it = Cascade(0.9)
    with pytest.raises(ConfigError) as error:
        await it.rule.start()
    assert str(error.value) == (
        "recommend: the ranker knows 3 of the 4 items of match (75 %); recommend.min_coverage "
        "is 0.9"
    )
    assert not it.measured_ratios


async def test_nothing_is_too_few_where_the_limit_is_0() -> None:
    it = Cascade(0.0)
    it.items["generate"] = ids(100, 101)
    await it.rule.start()
    assert it.measured_ratios["generate"] == 0.0


async def test_a_share_is_never_rounded_up() -> None:
    it = Cascade(0.9)
    it.ranker = ItemVocabulary(ids(*range(899)))
    it.items = dict.fromkeys(it.items, ids(*range(1000)))
    with pytest.raises(ConfigError, match=r"899 of the 1000 items of .*89 %"):
        await it.rule.start()


async def test_a_new_ranker_must_know_every_source() -> None:
    it = Cascade()
    await it.rule.start()
    with pytest.raises(ConfigError, match="1 of the 4 items of generate"):
        await it.rule.check(ItemVocabulary(ids(0, 13)))
    # an empty ranker is one, too
    with pytest.raises(ConfigError, match="0 of the 4 items of match"):
        await it.rule.check(ItemVocabulary(ids(8)), {"generate": lambda: ids()})
    assert it.measured_ratios["generate"] == 1.0


async def test_what_is_no_worse_than_now_is_not_rejected() -> None:
    it = Cascade()
    await it.rule.start()
    it.items["match"] = ids(0, 20, 21, 22)  # items came one by one
    async with it.rule.replacing("match", is_limited=False) as before:
        await before(lambda: it.items["match"])
    assert it.measured_ratios["match"] == 0.25
    await it.rule.check()  # a reload of the settings alone
    # a better ranker, though not good enough
    await it.rule.check(ItemVocabulary(ids(0, 1, 2, 3, 20)))
    with pytest.raises(ConfigError):
        await it.rule.check(ItemVocabulary(ids(1, 2, 3)))


async def test_a_new_source_concerns_itself_alone() -> None:
    it = Cascade()
    await it.rule.start()
    with pytest.raises(ConfigError, match="1 of the 3 items of generate"):
        async with it.rule.replacing("generate") as before:
            await before(lambda: ids(1, 20, 21))
    assert it.measured_ratios["generate"] == 1.0
    it.items["match"] = ids(30)  # not looked at
    async with it.rule.replacing("generate") as before:
        await before(lambda: ids(1, 2, 21))
    assert it.measured_ratios == {"generate": pytest.approx(2 / 3), "match": 0.75, "popular": 0.25}


async def test_a_source_that_the_cascade_does_not_ask_is_not_measured() -> None:
    listed = {"generate": lambda: ids(5), "popular": lambda: ids(5)}
    rule = CoverageRule(
        RecommendConfig(sources={"match": 1}),
        lambda: ItemVocabulary(ids(1)),
        listed,
        lambda *_: pytest.fail("measured"),
    )
    await rule.start()
    async with rule.replacing("generate") as before:
        await before(lambda: ids(5))


async def test_another_section_has_other_sources_and_another_minimum() -> None:
    it = Cascade()
    await it.rule.start()
    it.items["match"] = ids(0, 1, 12, 13)
    with pytest.raises(ConfigError, match=r"2 of the 4 items of match .*min_coverage is 0.8"):
        await it.rule.check(
            ItemVocabulary(ids(0, 1)),
            config=RecommendConfig(sources={"match": 1}, min_coverage=0.8),
        )
    only = RecommendConfig(sources={"match": 1})
    it.rule.accept(await it.rule.measure(config=only), only)
    assert it.measured_ratios["match"] == 0.5
    assert np.isnan(it.measured_ratios["generate"])
    assert np.isnan(it.measured_ratios["popular"])
    async with it.rule.replacing("generate") as before:
        await before(lambda: ids(20))
    assert np.isnan(it.measured_ratios["generate"])


async def test_ranker_and_sources_change_one_after_the_other() -> None:
    it = Cascade()
    await it.rule.start()
    async with it.rule.replacing("generate") as before:
        assert it.rule.changing.locked()
        await before(lambda: ids(1))
    assert not it.rule.changing.locked()
