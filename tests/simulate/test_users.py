"""The traffic is what its settings say, and the fit finds them again."""

from itertools import pairwise

import msgspec
import numpy as np
import pytest

from npu_gr.core.errors import DataError
from npu_gr.core.history import Events
from npu_gr.replay.log import LoggedHistory, QueryRecord
from npu_gr.replay.plan import ReplayOptions
from npu_gr.simulate.config import Lognormal, UsersConfig
from npu_gr.simulate.fit import fit_mixture, fit_users, requests_of, zipf_exponent
from npu_gr.simulate.users import Zipf, normal_of, signals_and_ranks, visits

PLAIN = UsersConfig(num_users=1000, zipf=0.8, history_tokens=Lognormal(median=500, sigma=0.5))


@pytest.mark.parametrize("s", [0.0, 0.7, 1.0, 1.4])
def test_zipf_numbers_have_their_probabilities(s: float) -> None:
    n, count = 50, 200_000
    drawn = Zipf(s, n).draw(count, np.random.default_rng(1))
    expected = np.arange(1, n + 1) ** -s
    expected *= count / expected.sum()
    found = np.bincount(drawn, minlength=n + 1)[1:]
    assert found.sum() == count
    # chi square, 49 degrees: P(> 90) = 0.03 %
    assert ((found - expected) ** 2 / expected).sum() < 90.0


def test_a_hundred_million_users_are_drawn_from_all_over() -> None:
    drawn = Zipf(0.5, 10**8).draw(20_000, np.random.default_rng(0))
    # P(number <= x) = (x / n)^(1 - s): the median of s = 1/2 lies at a quarter
    assert np.median(drawn) == pytest.approx(0.25e8, rel=0.05)


def test_a_users_length_is_its_own_and_log_normal_over_users() -> None:
    users = np.arange(1, 50_001)
    first = normal_of(users, 0)
    assert (first == normal_of(users, 0)).all()
    assert (first.mean(), first.std()) == pytest.approx((0.0, 1.0), abs=0.02)
    assert abs(np.corrcoef(first, normal_of(users, 1))[0, 1]) < 0.02


def test_the_stream_is_poisson_at_its_rate_and_repeatable() -> None:
    found = list(visits(PLAIN, 500.0, 40.0, 7))
    gaps = np.diff([visit.arrived_at for visit in found])
    assert len(found) == pytest.approx(20_000, rel=0.03)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)
    assert found == list(visits(PLAIN, 500.0, 40.0, 7))
    assert found != list(visits(PLAIN, 500.0, 40.0, 8))


def test_returns_come_after_their_gaps() -> None:
    config = UsersConfig(
        num_users=10**9,  # so that no user returns by chance
        zipf=0.0,
        return_ratio=0.5,
        return_s=[Lognormal(median=5.0, sigma=0.5)],
        history_tokens=Lognormal(median=500, sigma=0.5),
        growth_tokens=10,
    )
    last: dict[int, tuple[float, int]] = {}
    gaps, late = [], []
    for visit in visits(config, 200.0, 120.0, 3):
        if visit.arrived_at > 60.0:
            late.append(visit.is_return)
        if visit.user in last:
            before_s, tokens = last[visit.user]
            gaps.append(visit.arrived_at - before_s)
            assert visit.num_tokens == tokens + 10
        last[visit.user] = visit.arrived_at, visit.num_tokens
    assert np.mean(late) == pytest.approx(0.5, abs=0.03)
    assert np.median(gaps) == pytest.approx(5.0, rel=0.05)
    assert np.log(gaps).std() == pytest.approx(0.5, rel=0.1)


def test_asks_are_in_order_and_every_rank_follows_its_signal() -> None:
    config = msgspec.structs.replace(PLAIN, dropout_ratio=0.25, lead_s=0.2, lead_sigma=0.5)
    found = list(signals_and_ranks(visits(config, 300.0, 20.0, 0), 7))
    assert all(a.due_at <= b.due_at for a, b in pairwise(found))
    signals, ranks = (
        [request for request in found if request.kind == kind] for kind in ("signal", "rank")
    )
    assert len(ranks) / len(signals) == pytest.approx(0.75, abs=0.03)
    assert {request.user for request in ranks} <= {request.user for request in signals}


def test_the_fit_finds_the_model_of_a_log_again() -> None:
    config = UsersConfig(
        num_users=2000,
        zipf=0.4,
        return_ratio=0.4,
        return_s=[
            Lognormal(weight=0.7, median=20, sigma=0.4),
            Lognormal(weight=0.3, median=600, sigma=0.6),
        ],
        history_tokens=Lognormal(median=100, sigma=0.4),
        growth_tokens=3,
        candidates=20,
    )
    # so few requests a second that Zipf visits of one user are hours apart
    records = (
        QueryRecord(
            ts=visit.arrived_at,
            kind="rank",
            user_id=str(visit.user),
            candidates=[1] * 20,
            history=LoggedHistory.of(Events.make(*[[0] * visit.num_tokens] * 3)),
        )
        for visit in visits(config, 0.05, 4e5, 5)
    )
    found = fit_users(records)
    assert found.num_users <= 2000
    assert found.zipf == pytest.approx(0.4, abs=0.1)
    assert found.return_ratio == pytest.approx(0.4, abs=0.1)
    assert (found.candidates, found.growth_tokens) == (20, 3)


def test_a_mixture_and_an_exponent_are_found_again() -> None:
    source = np.random.default_rng(0)
    logs = np.concatenate(
        [source.normal(np.log(10), 0.5, 6000), source.normal(np.log(1000), 0.8, 2000)]
    )
    short, long = sorted(fit_mixture(logs), key=lambda part: part.median)
    assert (short.median, short.sigma, short.weight) == pytest.approx((10, 0.5, 0.75), rel=0.1)
    assert (long.median, long.sigma) == pytest.approx((1000, 0.8), rel=0.15)
    counts = np.bincount(Zipf(1.1, 300).draw(100_000, source))[1:]
    assert zipf_exponent(sorted(counts.tolist(), reverse=True)) == pytest.approx(1.1, abs=0.02)


def test_too_few_ranks_are_an_error_in_words() -> None:
    with pytest.raises(DataError, match="at least two ranks"):
        fit_users([QueryRecord(ts=0.0, kind="signal", user_id="u")])


def test_a_log_is_asked_as_a_replay_sends_it() -> None:
    def columns(n: int) -> LoggedHistory:
        return LoggedHistory.of(Events.make(*[[0] * n] * 3))

    records = [
        QueryRecord(ts=0.0, kind="rank", user_id="a", candidates=[1, 2], history=columns(30)),
        QueryRecord(ts=1.0, kind="events", user_id="a", events=columns(5)),
        # matches are not simulated
        QueryRecord(ts=1.5, kind="match", user_id="a", history=columns(40)),
        QueryRecord(ts=2.0, kind="rank", user_id="a", candidates=[1, 2, 3]),
    ]
    found = list(requests_of(records, ReplayOptions(base_url="http://unused", signal_lead_s=0.5)))
    assert [(request.kind, request.num_tokens, request.num_candidates) for request in found] == [
        ("signal", 30, 2), ("rank", 30, 2), ("signal", 35, 3), ("rank", 35, 3),
    ]  # fmt: skip
    assert [request.due_at for request in found] == [0.0, 0.5, 2.0, 2.5]
