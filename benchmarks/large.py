"""`python -m benchmarks large`: from a CSV of a million events to a site, CPU seconds and memory.

A seeded log is written, `npu-gr prepare` and `npu-gr train all` run on it as a user runs them, and
a line is printed for each command and each model: CPU seconds, against what two cores have in an
hour, and the peak memory of the process.

The log: items belong to categories and are used by a Zipf law, users like three categories. An
event follows the item before by a rule, is of a liked category, or is drawn from all items.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np

from benchmarks.frame import COUNT, FILE, SEED, THREADS, Line, compared, option
from npu_gr.core.errors import DataError
from npu_gr.train.site.folder import REPORT
from npu_gr.train.site.report import SiteReport

OPTIONS = (
    option("--events", "num_events", default=1_000_000, type=COUNT, help="Events of the log."),
    option("--items", "num_items", default=100_000, type=COUNT, help="Items of the log."),
    option("--preset", default="full", help="Preset of `npu-gr train all`."),
    option("--folder", type=FILE, help="Keep log and site here; an interrupted run goes on."),
    SEED,
    THREADS,
)
HOUR_CPU_S = 7200.0  # of two cores
MOST_BYTES = 8e9
EVENTS_OF_USER = 10  # on average, at least `LEAST_EVENTS`
LEAST_EVENTS = 4
ITEMS_OF_CATEGORY = 250
LIKED = 3  # categories of a user
FOLLOWERS = 3  # items of which one follows an item
FOLLOWS, LIKES = 0.3, 0.5  # shares of events that follow the one before, and of liked categories
ZIPF = 0.8
START_S = 1_700_000_000


def lines(
    num_events: int,
    num_items: int,
    preset: str,
    folder: Path | None,
    seed: int,
    threads: int = 2,
) -> Iterator[Line]:
    """Write the log, prepare it, and make a site of it."""
    with TemporaryDirectory(prefix="npu-gr-large-") as scratch:
        place = folder or Path(scratch)
        place.mkdir(parents=True, exist_ok=True)
        log, data, site = place / "log.csv", place / "data", place / "site"
        if not log.exists():
            write_log(log, num_events, num_items, seed)
        case = f"{num_events:,} events, {num_items:,} items"
        if not data.exists():
            yield from _took(f"{case}: prepare", *_run(["prepare", str(log), "--out", str(data)]))
        threads_ = ["--threads", str(threads)]
        command = ["train", "all", str(data), "--out", str(site), "--preset", preset, *threads_]
        took = _run(command)
        report = msgspec.json.decode((site / REPORT).read_bytes(), type=SiteReport)
        for name, part in report.parts.items():
            yield from _took(f"{case}: {name}", part.cpu_s, part.peak_bytes)
        yield from _took(f"{case}: train all --preset {preset}", *took)


def _run(arguments: list[str]) -> tuple[float, int]:
    """Run a command of npu-gr; return its CPU seconds and the largest process's peak, in bytes.

    Raises:
        DataError: the command failed.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "npu_gr", *arguments]
    done = subprocess.run(command, stdout=sys.stderr, env=os.environ, check=False)
    if done.returncode:
        raise DataError(f"bench large: npu-gr {arguments[0]} ended with {done.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu_s, after.ru_maxrss * 1024


def _took(case: str, cpu_s: float, peak_bytes: int) -> Iterator[Line]:
    limits = (
        ("CPU s", "an hour of two cores", HOUR_CPU_S, cpu_s),
        (
            "bytes at its peak",
            "8 GB",
            MOST_BYTES,
            float(peak_bytes),
        ),
    )
    for unit, baseline, limit, value in limits:
        yield compared("large", case, value, unit, baseline, limit, limit / max(value, 1e-9), 1.0)


def write_log(path: Path, num_events: int, num_items: int, seed: int) -> None:
    """Write a log, CSV, of so many events; see the module. The same seed gives the same bytes."""
    random = np.random.default_rng(seed)
    num_users = 1 + num_events // EVENTS_OF_USER
    more = random.geometric(1 / (EVENTS_OF_USER - LEAST_EVENTS + 1), num_users) - 1
    counts = LEAST_EVENTS + more
    counts[: max(0, num_events - counts.sum())] += 1  # no fewer than asked for
    num_categories = max(1, num_items // ITEMS_OF_CATEGORY)
    category = random.integers(num_categories, size=num_items)
    by_category = np.argsort(category, kind="stable")
    first = np.searchsorted(category[by_category], np.arange(num_categories + 1))
    # places in a category are used by a Zipf law, and all items by their own
    followers = random.integers(num_items, size=(num_items, FOLLOWERS))
    liked = random.integers(num_categories, size=(num_users, LIKED))
    popularity = np.cumsum(np.arange(1, num_items + 1) ** -ZIPF)
    by_rank = random.permutation(num_items)
    users = np.arange(num_users)
    last = np.zeros(num_users, np.int64)
    at_s = START_S + random.integers(30 * 86_400, size=num_users)
    rows = []
    for step in range(int(counts.max())):
        users = users[counts[users] > step]
        n = len(users)
        popular = by_rank[np.searchsorted(popularity, random.random(n) * popularity[-1])]
        of = liked[users, random.integers(LIKED, size=n)]
        sizes = first[of + 1] - first[of]
        place = (sizes * random.random(n) ** 3).astype(np.int64)  # the first ones are liked more
        taste = np.where(
            sizes > 0, by_category[(first[of] + place).clip(max=num_items - 1)], popular
        )
        kind = random.random(n)
        item = np.where(kind < LIKES, taste, popular)
        follows = (kind > 1 - FOLLOWS) & (step > 0)
        item = np.where(follows, followers[last[users], random.integers(FOLLOWERS, size=n)], item)
        last[users] = item
        at_s[users] += random.integers(60, 86_400, size=n)
        rows.append(np.stack([users, item, at_s[users]], axis=1))
    table = np.concatenate(rows)
    table = table[np.argsort(table[:, 2], kind="stable")][:num_events]
    with path.open("w") as file:
        file.write("user_id,item_id,timestamp\n")
        file.writelines(f"u{user},i{item},{at}\n" for user, item, at in table.tolist())
