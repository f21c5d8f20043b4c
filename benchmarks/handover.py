"""`python -m benchmarks handover`: what an instance that leaves costs the users that it had.

Three real instances behind HAProxy, with the file of `npu-gr route`, and a real Mooncake Store on
loopback. Users send a signal and, `--lead` later, a rank with the same history, at a fixed rate.
After `--seconds` of that one instance is stopped (`planned`, SIGTERM) or killed (`killed`, SIGKILL)
and does not come back; the load goes on for as long again. The same without the pool takes turns.

A hit is a rank whose prefix was found: neither the rank nor its signal has computed it. Each score
is compared, bit for bit, with the first one of its user, and some of those with the reference
model's.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import aiohttp
import numpy as np

from benchmarks.frame import COUNT, SEED, SET, SHIPPED_CONFIG, Line, compared, only, option, tell
from benchmarks.servers import (
    Process,
    Traffic,
    behind,
    check,
    make_checkpoint,
    proxy,
    running,
)
from npu_gr.core.errors import ConfigError
from npu_gr.core.request import Fetched, Outcome, Verdict
from npu_gr.model.weights import load
from tests.engine.kv_cache.mooncake_nodes import NEEDS, mooncake
from tests.ports import free_port

EVENTS = {"planned": signal.SIGTERM, "killed": signal.SIGKILL}
OPTIONS = (
    SHIPPED_CONFIG,
    option("--tokens", default=2048, type=COUNT, help="Events of a history."),
    option("--layers", default=3, type=COUNT),
    option("--users", default=240, type=COUNT, help="Users, whose prefixes fit in HBM."),
    option("--rate", default=8.0, help="Ranks a second."),
    option("--seconds", default=60.0, help="Seconds before the event, and after it."),
    option("--lead", default=0.1, help="Seconds from a signal to its rank."),
    only(tuple(EVENTS)),
    SET,
    SEED,
)
SIZE = 3
TIER_BYTES = 3 << 27  # of each tier of an instance
POOL_BYTES = 1 << 30
BUDGET_S = 2.0  # of a request
WARM = 4  # users at a time, before anything is timed
ROUNDS = 2  # pairs of each of them
CHECKED = 3
HITS, LATENCY = 0.95, 1 / 1.1  # targets: after the event / before it, before it / after it
FOUND = {one.value for one in (Outcome.HBM_HIT, Outcome.DRAM_HIT, Outcome.JOINED)}
COMPUTED = {one.value for one in (Verdict.PREINFER, Verdict.EXTEND)}
# fetches that began and led to nothing: their signals have said `reload`, and computed
FRUITLESS = {one.value for one in Fetched} - {
    one.value for one in (Fetched.HIT, Fetched.SLOWER, Fetched.BUSY)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A signal and its rank. A status of 0 is no answer."""

    user: int
    due_at: float  # of the rank
    took_s: float  # from then
    signal: int
    verdict: str
    rank: int
    outcome: str
    instance: str  # that has answered the rank
    scores: str

    @property
    def is_hit(self) -> bool:
        """Whether the prefix was found, as far as the answers tell."""
        return self.outcome in FOUND and self.verdict not in COMPUTED

    @property
    def num_failed(self) -> int:
        """Count the requests of the pair that had no answer."""
        return (self.signal not in (200, 202)) + (self.rank != 200)


class Answer(NamedTuple):
    """The status of a request, its instance and its body."""

    status: int
    instance: str
    body: dict[str, Any]


class Users:
    """The clients: each user has one history and one list of candidates."""

    def __init__(self, port: int, bodies: Sequence[dict[str, Any]], lead_s: float) -> None:
        self._url = f"http://127.0.0.1:{port}/v1/"
        self._names = [body["user_id"] for body in bodies]
        self._ranks = [json.dumps(body).encode() for body in bodies]
        names = ("user_id", "tenant", "history")
        self._signals = [
            json.dumps({name: body[name] for name in names}).encode() for body in bodies
        ]
        self._lead_s = lead_s
        self.pairs: list[Pair] = []
        self.in_flight = 0  # requests

    async def warm_up(self) -> None:
        """Ask for each user some times."""
        loop = asyncio.get_running_loop()
        waiting = asyncio.Semaphore(WARM)

        async def one(http: aiohttp.ClientSession, user: int) -> None:
            async with waiting:
                await self._pair(http, user, loop.time())

        async with self._session() as http:
            for _ in range(ROUNDS):
                await asyncio.gather(*(one(http, user) for user in range(len(self._names))))

    async def load(
        self, rate_per_s: float, seconds: float, event: Callable[[], None], seed: int
    ) -> tuple[float, int]:
        """Ask at a rate for twice so long, with the event in the middle.

        Returns:
            When the event was, and how many requests were on their way.
        """
        loop = asyncio.get_running_loop()
        random = np.random.default_rng(seed)
        tasks: list[asyncio.Task[None]] = []
        begins_at = loop.time()
        happened: tuple[float, int] | None = None
        async with self._session() as http:
            for number in range(int(2 * seconds * rate_per_s)):
                due_at = begins_at + number / rate_per_s
                if happened is None and number >= seconds * rate_per_s:
                    await asyncio.sleep(due_at - loop.time())
                    happened = due_at, self.in_flight
                    event()
                await asyncio.sleep(due_at - loop.time())
                user = int(random.integers(len(self._names)))
                tasks.append(asyncio.create_task(self._pair(http, user, due_at)))
            await asyncio.gather(*tasks)
        assert happened is not None
        return happened

    def _session(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=BUDGET_S + 1.0)
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)

    async def _pair(self, http: aiohttp.ClientSession, user: int, due_at: float) -> None:
        loop = asyncio.get_running_loop()
        signal = asyncio.create_task(self._ask(http, "signal", user, self._signals[user]))
        due_at += self._lead_s
        await asyncio.sleep(due_at - loop.time())
        ranked = await self._ask(http, "rank", user, self._ranks[user])
        took_s = loop.time() - due_at
        signalled = await signal
        pair = Pair(
            user=user,
            due_at=due_at,
            took_s=took_s,
            signal=signalled.status,
            verdict=signalled.body.get("verdict", ""),
            rank=ranked.status,
            outcome=ranked.body.get("outcome", ""),
            instance=ranked.instance,
            scores=json.dumps(ranked.body.get("scores")),
        )
        self.pairs.append(pair)

    async def _ask(self, http: aiohttp.ClientSession, path: str, user: int, body: bytes) -> Answer:
        headers = {
            "Content-Type": "application/json",
            "X-User-Id": self._names[user],
            "X-Request-Timeout-Ms": f"{BUDGET_S * 1e3:.0f}",
        }
        self.in_flight += 1
        try:
            async with http.post(self._url + path, data=body, headers=headers) as found:
                instance = found.headers.get("X-NpuGr-Instance", "")
                return Answer(found.status, instance, await found.json(content_type=None))
        except (aiohttp.ClientError, OSError, ValueError):  # TimeoutError is an OSError
            return Answer(0, "", {})
        finally:
            self.in_flight -= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The pairs before or after the event."""

    pairs: list[Pair]
    num_fruitless: int = 0  # fetches

    @property
    def hits(self) -> float:
        """Share of the ranks whose prefix was found; a fruitless fetch is none."""
        found = sum(pair.is_hit for pair in self.pairs) - self.num_fruitless
        return max(0, found) / max(1, len(self.pairs))

    @property
    def p99_ms(self) -> float:
        """P99 of the ranks, those that failed among them."""
        return float(np.percentile([pair.took_s for pair in self.pairs], 99)) * 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One event at one fleet."""

    before: Span
    after: Span
    homes: dict[int, str]  # of each user, the instance of the last rank before the event
    num_failed: int  # requests of the whole run
    num_in_flight: int  # requests, at the event
    num_other: int  # ranks with other scores than the user's first one
    fetches: Counter[str]  # of the instances that stayed, since the warm-up

    @property
    def first(self) -> Span:
        """The first rank after the event of each user who has another instance since."""
        first: dict[int, Pair] = {}
        for pair in sorted(self.after.pairs, key=lambda one: one.due_at):
            first.setdefault(pair.user, pair)
        moved = [pair for user, pair in first.items() if pair.instance != self.homes[user]]
        return Span(pairs=moved, num_fruitless=self.after.num_fruitless)


def fetches(ports: Sequence[int]) -> Counter[str]:
    """Read the fetches of instances by their outcome, from their metrics."""
    found: Counter[str] = Counter()
    for port in ports:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        pattern = r'^npu_gr_kv_pool_fetches_total\{outcome="(\w+)"\} (\S+)$'
        for outcome, count in re.findall(pattern, text, re.MULTILINE):
            found[outcome] += int(float(count))
    return found


def lines(
    config: Path,
    tokens: int,
    layers: int,
    users: int,
    rate: float,
    seconds: float,
    lead: float,
    parts: Sequence[str],
    overrides: tuple[str, ...],
    seed: int,
) -> Iterator[Line]:
    """Run each event with the pool and without it, each on a fleet of its own.

    Raises:
        ConfigError: Mooncake or HAProxy is not installed.
        AssertionError: Scores are wrong; nothing was timed.
        Unavailable: A process did not start.
    """
    about = f"{users} users of {tokens}, {rate:g} ranks/s"
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_checkpoint(folder / "checkpoint", layers, tokens, seed)
        traffic = Traffic(history_tokens=tokens, num_users=users, num_tenants=1)
        bodies = traffic.bodies(load(folder / "checkpoint"), "", seed)
        for event in parts:
            runs = {}
            for arm in ("pool", "no pool"):
                with ExitStack() as stack:
                    own = [*overrides]
                    if arm == "pool":
                        try:
                            store = stack.enter_context(mooncake(POOL_BYTES))
                        except ImportError as error:
                            raise ConfigError(f"bench handover: {NEEDS}: {error}") from error
                        own.append(f"kv_cache.pool={store.url}")
                    made = folder / f"{event} {arm}".replace(" ", "-")
                    made.mkdir()
                    runs[arm] = measured(
                        stack, config, folder / "checkpoint", made, own, bodies, rate, seconds,
                        lead, EVENTS[event], seed,
                    )  # fmt: skip
                tell("handover", described(event, arm, runs[arm]))
            yield from compared_runs(f"{event}, {about}", runs["pool"], runs["no pool"])


def measured(
    stack: ExitStack,
    config: Path,
    checkpoint: Path,
    folder: Path,
    overrides: Sequence[str],
    bodies: list[dict[str, Any]],
    rate: float,
    seconds: float,
    lead: float,
    number: signal.Signals,
    seed: int,
) -> Run:
    """Start a fleet, and let one of it go under load."""
    tiers = [f"kv_cache.{tier}_bytes={TIER_BYTES}" for tier in ("hbm", "dram")]
    admins = [free_port() for _ in range(SIZE)]
    made: list[Process] = []
    for at, admin in enumerate(admins):
        own = (*tiers, "trigger.policy=always", f"server.admin_port={admin}", *overrides)
        made.append(behind(f"of fleet {at}", checkpoint, folder, own, config))
        server = stack.enter_context(running(made[-1].name, made[-1]))
        check(server, checkpoint, bodies[:CHECKED])
    front = proxy("fleet", made, folder)
    stack.enter_context(running("fleet", front))
    victim, *others = made
    clients = Users(front.port, bodies, lead)

    async def played() -> tuple[Counter[str], float, int]:
        await clients.warm_up()
        until = await asyncio.to_thread(fetches, admins[1:])
        return until, *await clients.load(rate, seconds, lambda: victim.signal(number), seed)

    until, happened_at, num_in_flight = asyncio.run(played())
    assert victim.ended() in (0, -signal.SIGKILL)
    since = fetches(admins[1:]) - until
    assert all(one.pid for one in others)
    return summed(clients, bodies, happened_at, num_in_flight, since)


def summed(
    clients: Users,
    bodies: Sequence[dict[str, Any]],
    happened_at: float,
    num_in_flight: int,
    since: Counter[str],
) -> Run:
    """Sum up what the clients have seen; the warm-up gives first scores and instances."""
    warm, timed = clients.pairs[: ROUNDS * len(bodies)], clients.pairs[ROUNDS * len(bodies) :]
    first: dict[int, str] = {}
    for pair in warm:
        if pair.rank == 200:
            first.setdefault(pair.user, pair.scores)
    other = [pair for pair in timed if pair.rank == 200 and pair.scores != first[pair.user]]
    return Run(
        before=Span(pairs=[pair for pair in timed if pair.due_at < happened_at]),
        after=Span(
            pairs=[pair for pair in timed if pair.due_at >= happened_at],
            num_fruitless=sum(since[name] for name in FRUITLESS),
        ),
        homes={pair.user: pair.instance for pair in clients.pairs if pair.due_at < happened_at},
        num_failed=sum(pair.num_failed for pair in timed),
        num_in_flight=num_in_flight,
        num_other=len(other),
        fetches=since,
    )


def described(event: str, arm: str, run: Run) -> str:
    """Describe a run in one line."""
    spans = {"before": run.before, "after": run.after, "first rank of who moved": run.first}
    shown = ", ".join(
        f"{name}: {len(one.pairs)} ranks, {one.hits:.1%} hits, P99 {one.p99_ms:.0f} ms"
        for name, one in spans.items()
        if one.pairs
    )
    return f"{event}, {arm}: {shown}; {run.num_failed} failed, fetches {dict(run.fetches)}"


def compared_runs(case: str, pool: Run, alone: Run) -> Iterator[Line]:
    """Yield the lines of one event."""
    hits = 100 * pool.after.hits, 100 * pool.before.hits
    yield compared(
        "handover", f"{case}: hits after it", hits[0], "%", "before it", hits[1],
        hits[0] / max(hits[1], 1e-9), HITS,
    )  # fmt: skip
    p99 = pool.after.p99_ms, pool.before.p99_ms
    yield compared(
        "handover", f"{case}: P99 after it", p99[0], "ms", "before it", p99[1], p99[1] / p99[0],
        LATENCY,
    )  # fmt: skip
    for name, mine, other in (
        ("hits after it", pool.after, alone.after),
        (f"hits of the first ranks of {len(pool.first.pairs)} who moved", pool.first, alone.first),
    ):
        yield compared(
            "handover", f"{case}: {name}", 100 * mine.hits, "%", "without the pool",
            100 * other.hits, mine.hits / max(other.hits, 1e-9),
        )  # fmt: skip
    if pool.first.pairs and alone.first.pairs:
        mine_ms, other_ms = (
            float(np.median([pair.took_s for pair in run.first.pairs])) * 1e3
            for run in (pool, alone)
        )
        yield compared(
            "handover", f"{case}: median of those first ranks", mine_ms, "ms", "without the pool",
            other_ms, other_ms / mine_ms,
        )  # fmt: skip
    failed, flying = pool.num_failed, pool.num_in_flight
    yield compared(
        "handover", f"{case}: requests without an answer", failed, "requests",
        "on their way at the event", flying, float(failed <= flying), 1.0,
    )  # fmt: skip
    ranked = len(pool.before.pairs) + len(pool.after.pairs)
    yield compared(
        "handover", f"{case}: ranks with another score", pool.num_other, "ranks", "all ranks",
        ranked, float(not pool.num_other), 1.0,
    )  # fmt: skip
