"""The queue on a fake clock: passes are within limits, the earliest goes first, none starves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from npu_gr.core.errors import Overloaded
from npu_gr.engine.queue import Demand, Job, JobQueue, JobStep, SchedulerConfig

FAR = float("inf")


def rank(works: object) -> list[object]:
    return [works]


def generate(works: object) -> list[object]:
    return [works, works]


def job(order_at: float = FAR, tokens: int = 1, **more: object) -> Job:
    return Job(
        **{"run": rank, "shares": True, "demand": Demand(tokens), "order_at": order_at, **more}  # type: ignore[arg-type]
    )


def queue(**config: object) -> JobQueue:
    return JobQueue(SchedulerConfig(**config))  # type: ignore[arg-type]


def test_what_does_not_fit_is_passed_over() -> None:
    q = queue(max_batch_tokens=10)
    first, big, small = job(1.0, 4), job(1.1, 8), job(1.2, 6)
    for each in (first, big, small):
        q.put(each, 0.0)
    assert q.take(0.0).jobs == [first, small]
    assert q.take(0.0).jobs == [big]


def test_only_alike_share() -> None:
    q = queue()
    ranks, other, alone = [job(1.0), job(1.3)], job(1.1, run=generate), job(0.9, shares=False)
    for each in (*ranks, other, alone):
        q.put(each, 0.0)
    assert [q.take(0.0).jobs for _ in range(3)] == [[alone], ranks, [other]]


class Vectors:
    """Stands for one version of the vectors: a pass searches one of them."""

    def run(self, searches: Sequence[object]) -> list[object]:
        return list(searches)


def test_the_methods_of_two_objects_are_not_alike() -> None:
    q, old, new = queue(), Vectors(), Vectors()
    jobs = [job(float(order), run=each.run) for order, each in enumerate((old, new, old, new))]
    for each in jobs:
        q.put(each, 0.0)
    assert [q.take(0.0).jobs for _ in range(2)] == [jobs[::2], jobs[1::2]]


@pytest.mark.parametrize("max_requests", [1, 3, 9])
def test_a_run_may_have_a_limit_of_its_own(max_requests: int) -> None:
    """More or fewer requests a pass than `max_batch_requests`.

    The limits on demand hold all the same.
    """
    q = queue(max_batch_requests=2, max_batch_tokens=7, aging_s=99.0)
    matches = [job(float(n), run=generate, max_requests=max_requests) for n in range(8)]
    ranks = [job(20.0 + n) for n in range(3)]
    for each in (*matches, *ranks):
        q.put(each, 0.0)
    sizes = []
    while jobs := q.take(0.0).jobs:
        assert len({each.run for each in jobs}) == 1
        sizes.append(len(jobs))
    limit = min(max_requests, 7)
    assert sizes == [limit] * (8 // limit) + ([8 % limit] if 8 % limit else []) + [2, 1]


def test_a_run_with_a_limit_of_its_own_waits_for_company_up_to_it() -> None:
    q = queue(max_batch_requests=1, max_batch_wait_s=0.01)
    q.put(job(max_requests=2), 0.0)
    assert q.take(0.0).wait_s == pytest.approx(0.01)
    q.put(job(max_requests=2), 0.0)
    assert len(q.take(0.0).jobs) == 2


def test_every_demand_is_a_limit() -> None:
    for demand in (Demand(6), Demand(0, 6), Demand(0, 0, 6)):
        q = queue(max_batch_tokens=10, max_batch_rows=10, max_batch_logits=10)
        q.put(job(demand=demand), 0.0)
        q.put(job(demand=demand), 0.0)
        assert len(q.take(0.0).jobs) == 1


def test_hastened_it_goes_first_and_once() -> None:
    q = queue()
    late, early = job(1.5, shares=False), job(1.0, shares=False)
    q.put(late, 0.0)
    q.put(early, 0.0)
    q.hasten(late, 0.5)
    assert [q.take(0.0).jobs for _ in range(3)] == [[late], [early], []]


def test_a_full_queue_sheds_the_youngest_preemptible_for_one_that_is_not() -> None:
    q = queue(max_queue=3)
    old, young = job(preemptible=True), job(preemptible=True)
    q.put(job(), 0.0)
    q.put(old, 0.0)
    q.put(young, 0.0)
    with pytest.raises(Overloaded, match=r"3 jobs wait .* limit is 3"):
        q.put(job(preemptible=True), 0.0)
    assert q.put(job(), 0.0) is young
    assert q.put(job(), 0.0) is old
    with pytest.raises(Overloaded):
        q.put(job(), 0.0)
    q.put(job(), 0.0, force=True)
    assert len(q) == 4


def test_the_jobs_of_one_tenant_do_not_fill_the_queue_for_another() -> None:
    q = queue(max_queue=3)
    flood = [
        job(preemptible=True, shares=False, arrived_at=float(turn)) for turn in range(3)
    ]  # turns of the tenant's own
    for each in flood:
        q.put(each, 0.0)
    with pytest.raises(Overloaded):
        q.put(job(preemptible=True, arrived_at=3.0), 0.0)
    other = job(preemptible=True, shares=False, arrived_at=0.5)
    assert q.put(other, 0.5) is flood[-1]
    assert [q.take(0.5).jobs for _ in range(3)] == [[flood[0]], [other], [flood[1]]]


def test_it_waits_for_company_only_while_the_slack_allows() -> None:
    q = queue(max_batch_wait_s=0.010, max_batch_requests=2)
    q.put(job(deadline_at=1.0, estimate_s=0.1), 0.0)
    assert q.take(0.0).wait_s == pytest.approx(0.010)
    assert len(q.take(0.010).jobs) == 1
    q.put(job(deadline_at=2.0, estimate_s=0.996), 1.0)
    assert q.take(1.0).wait_s == pytest.approx(0.004)
    q.put(job(), 1.0)
    assert len(q.take(1.0).jobs) == 2


def test_a_request_waits_for_what_goes_before_it() -> None:
    q = queue(aging_s=100.0)
    first, second = job(1.0, estimate_s=0.1), job(2.0, estimate_s=0.3)
    pre_infer = job(estimate_s=5.0, preemptible=True)
    for each in (second, pre_infer, first):
        q.put(each, 0.0)
    assert [q.ahead_s(order_at) for order_at in (0.5, 1.0, 2.0)] == pytest.approx([0.0, 0.1, 0.4])
    q.hasten(pre_infer, 1.5)
    assert q.ahead_s(1.0) == pytest.approx(0.1)
    assert q.ahead_s(2.0) == pytest.approx(5.4)
    q.withdraw(second)
    assert q.ahead_s(2.0) == pytest.approx(5.1)
    pre_infer.rest = [JobStep(None, 0.5), JobStep(None, 0.4)]
    assert q.ahead_s(2.0) == pytest.approx(6.0)


def test_a_pass_makes_no_job_late() -> None:
    q = queue(max_batch_requests=8, aging_s=100.0)
    soon, small, large, later = [
        job(order, estimate_s=takes)
        for order, takes in ((1.0, 0.4), (1.1, 0.5), (1.2, 0.2), (9.0, 0.1))
    ]
    for each in (soon, small, large, later):
        q.put(each, 0.0)
    assert q.take(0.0).jobs == [soon, small, later]  # with `large`, `soon` would be done at 1.1
    late, lost, tight = job(2.0, estimate_s=3.0), job(2.1, estimate_s=3.0), job(9.0, estimate_s=4.0)
    q.drain()
    for each in (late, lost, tight):
        q.put(each, 0.0)
    assert q.take(1.9).jobs == [late, lost]  # late anyhow; with them `tight` would be, too
    q.slowdown.value = 2.0
    q.drain()
    for each in (soon, small):
        q.put(each, 0.0)
    assert q.take(0.0).jobs == [soon]


def test_what_is_preemptible_comes_last_until_it_is_hastened() -> None:
    q = queue(aging_s=1.0)
    old, young = (
        job(arrived_at=arrived_at, preemptible=True, shares=False, deadline_at=50.0)
        for arrived_at in (0.0, 1.0)
    )
    requests = [job(deadline_at=90.0, run=generate) for _ in range(2)]
    for each in (young, requests[0], old):
        q.put(each, 30.0)
    assert q.take(30.0).jobs == [requests[0]]
    q.put(requests[1], 30.0)
    q.hasten(young, 30.5)
    assert [q.take(30.0).jobs[0] for _ in range(3)] == [young, requests[1], old]


def test_the_steps_of_a_job_follow_each_other() -> None:
    q = queue()
    first, second = (
        job(
            arrived_at=arrived_at,
            preemptible=True,
            shares=False,
            work=0,
            rest=[JobStep(1, 0.1), JobStep(2, 0.2)],
        )
        for arrived_at in (0.0, 1.0)
    )
    for each in (second, first):
        q.put(each, 5.0)
    ran = []
    while jobs := q.take(5.0).jobs:
        ran += [(each, each.work, each.estimate_s) for each in jobs]
        assert q.put_next_step(jobs[0], 5.0) is (jobs[0].work != ran[-1][1])
    assert [row[1] for row in ran] == [0, 1, 2, 0, 1, 2]
    assert [row[2] for row in ran[:3]] == [0.0, 0.1, 0.2]
    assert {row[0] for row in ran[:3]} == {first}
    q.put(second, 5.0)
    second.rest = [JobStep(1, 0.1)]
    q.take(5.0)
    # a rank comes while a step runs: the next one must not wait behind other requests
    q.hasten(second, 4.0)
    q.put_next_step(second, 5.0)
    other = job(5.0, run=generate)
    q.put(other, 5.0)
    assert [q.take(5.0).jobs[0] for _ in range(2)] == [second, other]
    q.put(second, 5.0)
    second.rest = [JobStep(1, 0.1)]
    q.take(5.0)
    q.withdraw(second)
    assert not q.put_next_step(second, 5.0)


def test_the_pressure_counts_each_request_against_its_own_objective() -> None:
    q = queue()
    one, other = job(estimate_s=0.1, objective_s=0.05), job(estimate_s=0.1, objective_s=0.2)
    for each in (
        one,
        other,
        job(estimate_s=9.0),
        job(estimate_s=5.0, objective_s=0.1, preemptible=True),
    ):
        q.put(each, 0.0)
    assert q.pressure == pytest.approx(2.5)
    q.withdraw(one)
    assert q.pressure == pytest.approx(0.5)
    q.drain()
    assert q.pressure == 0.0


def test_nothing_starves() -> None:
    """A background job behind an endless stream of urgent ones is taken once it has aged."""
    q, background = queue(aging_s=1.0), job(shares=False)
    q.put(background, 0.0)
    now_at = 0.0
    for _ in range(200):
        q.put(job(now_at + 0.05, shares=False), now_at)
        if q.take(now_at).jobs == [background]:
            break
        now_at += 0.01
    assert 0.9 <= now_at <= 1.01


def test_who_has_less_than_its_share_goes_before_another_tenants_queue() -> None:
    q = queue(max_batch_requests=1)
    hot = [job(1.0 + n / 10, tenant="hot") for n in range(4)]
    for each in hot:
        q.put(each, 0.0)
    small = job(2.0, tenant="small")
    q.put(small, 0.5)
    later = job(0.9, tenant="hot")
    q.put(later, 0.6)
    assert [q.take(0.6).jobs[0] for _ in range(6)] == [small, later, *hot]


def test_tenants_with_as_much_each_go_by_when_they_are_due() -> None:
    q = queue(max_batch_requests=1)
    jobs = [job(2.0 - n / 10, tenant=name) for n, name in enumerate("abab")]
    for each in jobs:
        q.put(each, 0.0)
    assert [q.take(0.0).jobs[0] for _ in range(4)] == jobs[::-1]


def test_a_share_of_the_queue_is_by_weight() -> None:
    def first(weights: dict[str, float]) -> str:
        q = queue(max_batch_requests=1)
        q.shares.weights = weights
        for at, name in ((1.0, "a"), (1.1, "a"), (2.0, "b"), (2.1, "b")):
            q.put(job(at, tenant=name), 0.0)
        return q.take(0.0).jobs[0].tenant

    assert first({}) == "b"  # its first one came when it had less
    assert first({"b": 0.1}) == "a"
    assert first({"a": 9.0, "b": 9.0}) == "b"


def test_a_pass_that_is_ahead_for_a_share_has_no_tenant_over_its_share() -> None:
    q = queue(max_batch_requests=4)
    hot = [job(1.0 + n / 10, tenant="hot") for n in range(4)]
    for each in hot:
        q.put(each, 0.0)
    small = [job(2.0, tenant=name) for name in ("small", "other")]
    for each in small:
        q.put(each, 0.5)
    assert q.take(0.6).jobs == small
    assert q.take(0.6).jobs == hot


def test_the_newest_pass_is_a_part_of_the_share() -> None:
    q = queue(max_batch_requests=4)
    for _ in range(4):
        q.put(job(1.0, tenant="hot"), 0.0)
    assert len(q.take(0.0).jobs) == 4  # and it runs: nothing waits
    q.put(small := job(2.0, tenant="small"), 0.1)
    q.put(hot := job(1.0, tenant="hot"), 0.2)
    assert [q.take(0.3).jobs for _ in range(2)] == [[small], [hot]]


def test_a_background_job_is_no_pass_of_the_share() -> None:
    q = queue()
    q.put(job(1.0, tenant="hot"), 0.0)
    q.take(0.0)
    q.put(job(preemptible=True, shares=False, tenant="small"), 0.0)
    q.take(0.0)
    q.put(first := job(1.0, tenant="hot"), 0.1)
    assert not first.is_ahead
    q.put(job(2.0, tenant="hot"), 0.1)
    q.put(small := job(3.0, tenant="small"), 0.1)
    assert small.is_ahead


def test_what_left_the_queue_is_in_no_share() -> None:
    q = queue(max_batch_requests=1)
    gone = [job(1.0, tenant="hot") for _ in range(9)]
    for each in gone:
        q.put(each, 0.0)
    for each in gone:
        q.withdraw(each)
    q.put(one := job(1.0, tenant="hot"), 0.0)
    q.put(other := job(1.5, tenant="small"), 0.0)
    assert [q.take(0.0).jobs[0] for _ in range(2)] == [one, other]


class Steps(RuleBasedStateMachine):
    """Random steps against a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SchedulerConfig(
            max_queue=6, max_batch_requests=3, max_batch_tokens=10, aging_s=5.0
        )
        self.q, self.now_at = JobQueue(self.config), 0.0
        self.waiting: list[Job] = []
        self.left: list[Job] = []
        self.newest: list[Job] = []  # of the newest pass of requests

    def leave(self, each: Job) -> None:
        self.waiting.remove(each)
        self.left.append(each)

    @rule(
        wait_s=st.floats(0, 3),
        deadline_at=st.floats(0.1, 9),
        tokens=st.integers(1, 12),
        shares=st.booleans(),
        shed=st.booleans(),
        tenant=st.sampled_from("abc"),
    )
    def put(
        self, wait_s: float, deadline_at: float, tokens: int, shares: bool, shed: bool, tenant: str
    ) -> None:
        new = job(
            self.now_at + wait_s,
            tokens,
            shares=shares,
            preemptible=shed,
            deadline_at=self.now_at + deadline_at,
            tenant=tenant,
        )
        held = Counter(each.tenant for each in self.waiting if not each.preemptible)
        held += Counter(each.tenant for each in self.newest) + Counter([tenant])
        try:
            victim = self.q.put(new, self.now_at)
        except Overloaded:
            assert len(self.waiting) == 6
            assert shed or not any(each.preemptible for each in self.waiting)
            return
        if not shed:  # the share of a tenant, counted the slow way
            is_under = held[tenant] * len(held) < held.total()
            due_at = min(self.now_at + wait_s, new.deadline_at, self.now_at + 5.0)
            assert new.order_at == (self.now_at if is_under else due_at)
            assert new.is_ahead == is_under
        self.waiting.append(new)
        if victim:
            assert victim.preemptible
            self.leave(victim)

    @rule(by_s=st.floats(0, 2))
    def pass_time(self, by_s: float) -> None:
        self.now_at += by_s

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw_or_hasten(self, data: st.DataObject) -> None:
        each = data.draw(st.sampled_from(self.waiting))
        if data.draw(st.booleans()):
            assert self.q.withdraw(each)
            self.leave(each)
        else:
            self.q.hasten(each, self.now_at)

    @rule()
    def take(self) -> None:
        taken = self.q.take(self.now_at)
        for each in taken.expired:
            assert each.deadline_at <= self.now_at
            self.leave(each)
        if not taken.jobs:
            assert not self.waiting
            return
        first = taken.jobs[0]
        assert first.order_at == min(
            each.order_at for each in self.waiting if each.deadline_at > self.now_at
        )
        assert all(each.deadline_at > self.now_at for each in taken.jobs)
        assert all(each.order_at <= each.submitted_at + 5.0 for each in taken.jobs)
        if len(taken.jobs) > 1:
            assert sum(each.demand.tokens for each in taken.jobs) <= 10
            assert len(taken.jobs) <= 3
            assert all(each.shares for each in taken.jobs)
        if first.is_ahead:
            assert all(each.is_ahead for each in taken.jobs)
        if not first.preemptible:
            self.newest = taken.jobs
        for each in taken.jobs:
            self.leave(each)

    @invariant()
    def counted(self) -> None:
        assert len(self.q) == len(self.waiting) <= 6
        assert len(set(map(id, self.left))) == len(self.left)
        assert self.q.pressure == 0.0
        assert self.q.ahead_s(FAR) == 0.0


Steps.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSteps = Steps.TestCase
