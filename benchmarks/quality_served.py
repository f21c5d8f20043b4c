"""What a site's `recommend` answers over HTTP, after the three commands with their defaults.

The log is prepared, `npu-gr train all` makes a site, a service of its evaluated models is asked for
the last event of users who did not choose the cascade, and the ranks are compared with those of the
strongest baseline for the same users.

The zoo of repeats: synthetic logs in which an event is, for a share of them, one of the user's last
ten items again; of the other events half follow the item before by a rule, the rest are drawn.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.console import Console

from benchmarks.frame import Line
from npu_gr.dataset.build import prepare
from npu_gr.dataset.files import is_dataset, read_dataset
from npu_gr.tools.served_quality import served_ranks
from npu_gr.train.cascade import TOP, NextEventCase, next_events
from npu_gr.train.data import to_train_on
from npu_gr.train.metrics import F64, difference_of_users, hits, ndcg_of_each
from npu_gr.train.site.choose import selection_cases
from npu_gr.train.site.configuration import EVALUATED_CONFIG, SiteOptions
from npu_gr.train.site.make import train_site
from npu_gr.train.site.parts import EVALUATED
from npu_gr.train.site.verdict import NextItemTest

REPEATS = (0.0, 0.3, 0.46, 0.7)
MOST_USERS = 1000  # who are asked for; as many as choose the cascade are ranked in addition
START_S = 1_700_000_000
Ask = Callable[[Path, Sequence[str], Sequence[NextEventCase]], F64]


def served_lines(
    name: str, log: Path, preset: str, overrides: Sequence[str] = (), ask: Ask = served_ranks
) -> Iterator[Line]:
    """Make a site, ask its service, and yield HR@10 and NDCG@10.

    Args:
        name: Name of the log in the lines.
        log: A log that `npu-gr prepare` reads, or its dataset.
        preset: Preset of `npu-gr train all`.
        overrides: `section.key=value` of its options.
        ask: Asks a service of a configuration for the ranks of cases.

    Raises:
        DataError: The log cannot be read or trained on.
    """
    began_s = _cpu_s()
    with TemporaryDirectory(prefix="npu-gr-quality-") as scratch:
        data, site = log, Path(scratch) / "site"
        if not is_dataset(log):
            data = Path(scratch) / "data"
            prepare(log, data)
        asked = [f"rank.test_users={MOST_USERS + SiteOptions().selection_users}", *overrides]
        report = train_site(data, site, asked, 1, Console(file=sys.stderr), preset)
        took = f"{_cpu_s() - began_s:.0f} CPU s, at most {_most_gib():.1f} GiB a process"
        assert report.cascade is not None
        excludes = report.cascade.exclude_seen
        test = NextItemTest.read(site / "ranker" / EVALUATED, exclude_seen=excludes)
        assert test is not None
        cases = _cases(data, test)
        ranks = ask(site / EVALUATED_CONFIG, [], cases)
    row_of = {user: row for row, user in enumerate(test.users)}
    rows = np.array([row_of[case.user] for case in cases])
    baseline = test.strongest(rows)
    theirs = test.ranks[baseline][rows]
    of_what = "unseen" if excludes else "all items"
    for figure, each in (("HR@10", hits), ("NDCG@10", ndcg_of_each)):
        ours, simple = each(ranks, TOP), each(theirs, TOP)
        gap = difference_of_users(ours, simple)
        yield Line(
            bench="quality",
            case=f"served {name}: recommend, {of_what}, {len(cases):,} users, {took}, {figure}",
            ours=float(ours.mean()),
            unit=figure,
            baseline=baseline,
            baseline_value=float(simple.mean()),
            ratio=float(ours.mean() / simple.mean()) if simple.any() else float("nan"),
            target=1.0,
            ok=gap.high >= 0,
            low=gap.low,
            high=gap.high,
        )


def repeats_lines(num_users: int, preset: str, overrides: Sequence[str] = ()) -> Iterator[Line]:
    """Yield the lines of the zoo of repeats, each log with so many users."""
    for share in REPEATS:
        with TemporaryDirectory(prefix="npu-gr-repeats-") as scratch:
            log = Path(scratch) / "log.csv"
            log.write_text(repeating_log(share, num_users))
            yield from served_lines(f"{share:.0%} repeats", log, preset, overrides)


def repeating_log(share: float, num_users: int, num_items: int = 400, num_events: int = 24) -> str:
    """Write a log, CSV, in which a share of the events repeats one of the last ten items.

    Args:
        share: Probability that an event repeats.
        num_users: Users.
        num_items: Items, more than `num_events`.
        num_events: Events of each user.
    """
    draw = np.random.default_rng(0)
    lines = ["user,item,time"]
    for user in range(num_users):
        had: list[int] = []
        begins_at = START_S + 61 * user
        for at in range(num_events):
            follows = (had[-1] * 7 + 3) % num_items if had else 0
            if had and draw.random() < share:
                item = had[-1 - int(draw.integers(min(10, len(had))))]
            elif had and follows not in had and draw.random() < 0.5:
                item = follows
            else:
                item = int(draw.choice(np.setdiff1d(np.arange(num_items), had)))
            had.append(item)
            lines.append(f"u{user},i{item},{begins_at + at * 3600}")
    return "\n".join(lines) + "\n"


def _cases(data: Path, test: NextItemTest) -> list[NextEventCase]:
    """List the last events of tested users who did not choose the cascade."""
    log = read_dataset(data).interactions()
    known = to_train_on(log.users, log.timestamps, "leave-one-out")
    chose = {case.user for case in selection_cases(log, SiteOptions().selection_users, test.users)}
    asked = set(test.users) - chose
    return [case for case in next_events(log, known) if case.user in asked][:MOST_USERS]


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def _most_gib() -> float:
    """Return the peak memory of the largest process so far, this one or a child that has ended."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return max(one.ru_maxrss for one in used) / 2**20
