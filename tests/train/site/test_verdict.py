"""One line says whether a site is worth serving, and the simple order is served where it is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from npu_gr.model.blend import DECAY, LAST_ALONE
from npu_gr.train.cascade import (
    EVALUATED_USERS,
    MISSED,
    CascadeWay,
    NextEventCase,
    choose_way,
)
from npu_gr.train.metrics import F64
from npu_gr.train.rank.train import train_rank
from npu_gr.train.site.choose import other_cases, selection_cases
from npu_gr.train.site.make import _without_choice
from npu_gr.train.site.report import SiteCascade
from npu_gr.train.site.verdict import (
    NextItemTest,
    keep,
    verdict_of,
    verdict_of_ranker,
)
from tests.train.rank.test_train import TINY
from tests.train.synthetic import planted

NUM_USERS = 200
USERS = [f"u{user}" for user in range(NUM_USERS)]


def cases(users: list[str] = USERS) -> list[NextEventCase]:
    return [
        NextEventCase(
            user=user,
            items=[1],
            values=[1.0],
            actions=[1.0],
            timestamps=[1],
            target=2,
            happened_at=2,
        )
        for user in users
    ]


def found(share: float) -> F64:
    """The item of a share of the users comes first, that of the others is missed."""
    return np.where(np.arange(NUM_USERS) % 100 < 100 * share, 0.0, MISSED)


def ranks_of(**shares: float) -> NextItemTest:
    return NextItemTest(users=USERS, ranks={name: found(share) for name, share in shares.items()})


def test_users_whom_the_baselines_ranked_choose_and_evaluate_first() -> None:
    log = planted(num_users=EVALUATED_USERS + 40, num_events=3)
    others = [case.user for case in selection_cases(log, 1000)]
    assert len(others) == 40
    tested = others[-9:]
    assert [case.user for case in selection_cases(log, 9, tested)] == tested
    assert [case.user for case in selection_cases(log, 12, tested)] == others[:3] + tested
    demo = [name for name in log.user_names if name not in others]  # never these
    assert not {case.user for case in selection_cases(log, 1000, demo)} & set(demo)
    # and the tested users who are not among these evaluate what is served, those of the demo too
    chose = selection_cases(log, 9, tested)
    users = [*demo[:5], *others[:3], *tested]
    assert {case.user for case in other_cases(log, users, chose)} == set(users) - set(tested)


def test_the_verdict_names_the_strongest_baseline_of_the_same_users() -> None:
    test = ranks_of(ranker=0.9, popularity=0.1, PureSVD=0.3)
    better = verdict_of(cases(), found(0.5), test)
    assert better.is_better
    assert better.text.startswith(
        "Verdict: serve this: recommend is better than PureSVD, the strongest baseline. HR@10 "
        "0.500 against 0.300"
    )
    worse = verdict_of(cases(), found(0.1), test)
    assert not worse.is_better
    assert worse.text.startswith("Verdict: do not serve this: PureSVD is better than recommend.")
    same = verdict_of(cases(), found(0.3), test)
    assert not same.is_better
    assert "recommend is not shown to be better than PureSVD" in same.text
    assert all("\n" not in one.text for one in (better, worse, same))
    assert all("too few" not in one.text for one in (better, worse, same))
    # the first users alone, for whom popularity is the best
    few = NextItemTest(users=USERS, ranks={"popularity": found(0.2)[::-1], "PureSVD": found(0.3)})
    last = list(range(NUM_USERS - 20, NUM_USERS))
    assert (
        verdict_of([cases()[user] for user in last], found(0.0)[last], few).baseline == "popularity"
    )


def test_a_verdict_of_few_users_is_not_certain_and_has_its_interval() -> None:
    test = ranks_of(ranker=0.9, popularity=0.1)
    few = verdict_of(cases()[:50], found(1.0)[:50], test)
    assert few.is_better
    assert few.text.startswith("Verdict: serve this for now: recommend is better than popularity")
    told = f"95 % interval {few.low:+.3f} to {few.high:+.3f}) for 50 held-out users, too few to"
    assert told in few.text


def test_of_too_few_users_there_is_no_verdict() -> None:
    test = ranks_of(ranker=0.9, popularity=0.1)
    for users in ([], USERS[:19], [f"other{user}" for user in range(50)]):
        verdict = verdict_of(cases(users), np.zeros(len(users)), test)
        assert verdict.text.startswith("Verdict: none.")
        assert not verdict.is_better


@pytest.mark.parametrize(
    ("ranker", "decay", "source"),
    [
        (0.5, DECAY, ""),
        (0.2, DECAY, "neighbours"),
        (0.31, DECAY, "neighbours"),
        (0.2, LAST_ALONE, "transitions"),
    ],
)
def test_without_a_choice_the_ranker_is_served_only_if_it_beats_every_baseline(
    ranker: float, decay: float, source: str
) -> None:
    own = "own recency and frequency"  # what a user had is left out of the answers
    shares = {"popularity": 0.1, "decayed transitions": 0.25, "ItemKNN": 0.3, own: 0.3}
    if not decay:  # then the source transitions is Markov counts
        shares |= {"Markov counts": 0.35}
    test = ranks_of(ranker=ranker, **shares)
    sources = {"shared_encoder": 200, "transitions": 100, "neighbours": 90, "history": 80}
    usual = SiteCascade(sources={"shared_encoder": 200}, order="blended")
    cascade = _without_choice(usual, sources, test, decay)  # type: ignore[arg-type]
    assert cascade.verdict == verdict_of_ranker(test, source)
    if source:
        assert cascade.verdict.text.startswith(f"Verdict: serve {source} alone, as configured: ")
        alone = {source: sources[source]}
        assert (cascade.sources, cascade.order) == (alone, "retrieval")
        assert "no model is shown to beat the baselines" in cascade.words[0]
    else:
        assert (cascade.sources, cascade.order) == (usual.sources, "blended")


def test_a_simple_source_that_is_as_good_replaces_the_configured_way() -> None:
    whole = CascadeWay(("shared_encoder", "transitions", "neighbours"), "blended")
    ways = {
        whole: found(0.3),
        CascadeWay(("shared_encoder",), "retrieval"): found(0.2),
        CascadeWay(("transitions",), "retrieval"): found(0.25),
        CascadeWay(("neighbours",), "retrieval"): found(0.3),
    }
    simple = CascadeWay(("neighbours",), "retrieval")
    assert choose_way(ways, whole).way == simple
    np.testing.assert_array_equal(choose_way(ways, whole).places, ways[simple])
    ways[whole] = found(0.31)  # of which no significance can be shown
    assert choose_way(ways, whole).way == whole


def test_the_ranks_lie_beside_the_evaluated_ranker(tmp_path: Path) -> None:
    assert NextItemTest.read(tmp_path, exclude_seen=True) is None
    log = planted(num_users=30, num_events=8)
    _, evaluation = train_rank(log, [], TINY)
    keep(evaluation, log.user_names, tmp_path)
    for exclude_seen in (True, False):
        test = NextItemTest.read(tmp_path, exclude_seen=exclude_seen)
        assert test is not None
        assert len(test.users) == evaluation.num_next
        assert set(test.users) <= set(log.user_names)
        for row in (evaluation.ranker, *evaluation.baselines):
            name = "ranker" if row is evaluation.ranker else row.model
            hits = test.ranks[name] < 10
            if exclude_seen:  # a repeat is never answered
                assert not hits[row.ranks.is_repeat].any()
            else:
                assert hits.mean() == row.hr_at_10
        assert verdict_of_ranker(test).baseline in test.ranks
