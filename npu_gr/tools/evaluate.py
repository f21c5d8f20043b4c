"""Evaluate a running service: does it recommend what the users did next?

The cascade, and each of its stages alone.

Protocol: each user is asked for once. The events before one of the user's events are sent as the
history; that event's item is the right answer. Every item may be answered (no sampled negatives)
but those of the history, and these too where most of the next items are repeats. The ways to ask:

    generate     POST /v1/generate, if the service has it; for as many items as the cascade asks of it, if it does
    match        POST /v1/match, likewise
    shared encoder        POST /v1/recommend of that source alone, without a rank; transitions and neighbours likewise
    rank         POST /v1/rank over every such item of the log, which no service could afford on a large catalogue
    recommend    POST /v1/recommend: the retrieved items, ranked

`retrieved` is the share of the users whose item was among all the retrieved items: the cascade
cannot reach more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
from rich.table import Table

from npu_gr.core.calling import calling_context, calling_headers
from npu_gr.core.errors import Unavailable
from npu_gr.core.kinds import GENERATE, KINDS, MATCH, RECOMMEND
from npu_gr.core.names import answered_ids
from npu_gr.train.cascade import MISSED, NextEventCase, hides_seen, raw_column, repeat_ratio, why
from npu_gr.train.metrics import F64, hit_ratio, ndcg

TOP = 10  # items that count as recommended
BESIDE = 100  # items asked of what the service finds beside the cascade's sources
AT_ONCE = 2  # cases in flight
PATIENCE_S = 60.0  # how long a request that is rejected for load is sent again
UNRANKED = "unranked"  # the outcome of a recommend whose rank failed


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceEvaluation:
    """What the service answered, by way to ask."""

    # way -> place of the right item in each answer, from 0; `MISSED` = not in it
    ranks: dict[str, list[float]]
    seconds: dict[str, list[float]]  # way -> duration of each request
    sources: dict[str, int]  # of the cascade: items that each source is asked for
    order: str  # of the cascade's answers
    retrieved: float  # share of the cases whose item was among the retrieved items
    outcomes: dict[str, int]  # how the cascade's ranks got their prefix
    hides_seen: bool  # items of the history were left out
    repeat_ratio: float = 0.0  # share of the right items that their users had before

    def as_dict(self) -> dict[str, Any]:
        """Plain values that JSON has."""
        ways = {
            way: {
                "hr_at_10": hit_ratio(self._places(way), TOP),
                "ndcg_at_10": ndcg(self._places(way), TOP),
                "p50_s": float(np.median(self.seconds[way])),
            }
            for way in self.ranks
        }
        return {"ways": ways, "num_users": len(self.ranks["rank"]), "retrieved": self.retrieved} | {
            "sources": self.sources,
            "order": self.order,
            "outcomes": self.outcomes,
            "hides_seen": self.hides_seen,
            "repeat_ratio": self.repeat_ratio,
            "why": self.why,
        }

    @property
    def best_part(self) -> str:
        """The way with the highest NDCG@10, of those that are not the cascade."""
        return max(
            (way for way in self.ranks if way != "recommend"),
            key=lambda way: ndcg(self._places(way), TOP),
        )

    @property
    def why(self) -> str:
        """One sentence: how the cascade stands beside its best part, user by user."""
        best = self.best_part
        return why("recommend", self._places("recommend"), f"{best} alone", self._places(best))

    def _places(self, way: str) -> F64:
        return np.array(self.ranks[way])

    def table(self) -> Table:
        """A table for a terminal."""
        found = self.as_dict()
        num = found["num_users"]
        table = Table(
            *("way", f"HR@{TOP}", f"NDCG@{TOP}", "P50 ms"),
            title=f"next item of {num} users, whole catalogue, " + self._of_seen,
            caption=f"95 % interval of an HR@{TOP} of .2: +-{1.96 * (0.16 / num) ** 0.5:.3f}; "
            f"the item was among the {self._asked} retrieved for {self.retrieved:.3f} of the "
            "users; "
            "the cascade's ranks: "
            f"{', '.join(f'{count} {name}' for name, count in self.outcomes.items())}\n{self.why}",
        )
        names = {
            "rank": "rank alone (every item)",
            "recommend": f"recommend: all of them, order {self.order}",
        }
        for way, figures in found["ways"].items():
            numbers = (
                f"{figures['hr_at_10']:.4f}",
                f"{figures['ndcg_at_10']:.4f}",
                f"{figures['p50_s'] * 1e3:.1f}",
            )
            table.add_row(names.get(way, f"{way} alone"), *numbers)
        return table

    @property
    def _of_seen(self) -> str:
        """What became of items that users had before.

        One that is asked for again is missed where they are left out.
        """
        repeats = f"{self.repeat_ratio:.1%} of the next items are repeats"
        if not self.hides_seen:
            return f"seen items too: {repeats}"
        return (
            (f"seen items left out: {repeats}, which no way can find")
            if self.repeat_ratio
            else "seen items left out"
        )

    @property
    def _asked(self) -> str:
        return " + ".join(f"{size} of {name}" for name, size in self.sources.items())


async def evaluate(
    base_url: str,
    admin_url: str,
    cases: Sequence[NextEventCase],
    catalogue: Sequence[int],
    done: Callable[[int, int], None] = lambda *_: None,
    api_key: str | None = None,
) -> ServiceEvaluation:
    """Ask a service for every case in every way.

    Args:
        base_url: of a service that has the cascade.
        admin_url: its admin address, which shows how the cascade is configured.
        cases: at least one.
        catalogue: items that the rank alone chooses from.
        done: called with (cases so far, in all).
        api_key: for every tenant, with the scopes infer and admin; None = none is needed.

    Raises:
        Unavailable: the service rejected a request.
    """
    retrieved: list[bool] = []
    outcomes: dict[str, int] = {}
    async with (
        EvaluationClient(base_url, api_key) as client,
        EvaluationClient(admin_url, api_key) as admin,
    ):
        section = await admin.cascade()
        sources: dict[str, int] = section["sources"]
        parts = dict.fromkeys(await admin.finds(), BESIDE) | sources
        orders: set[str] = set()
        ranks: dict[str, list[float]] = {way: [] for way in (*parts, "rank", "recommend")}
        seconds: dict[str, list[float]] = {way: [] for way in ranks}
        waiting = asyncio.Semaphore(AT_ONCE)
        exclude_seen = hides_seen(cases)

        async def one(case: NextEventCase) -> None:
            async with waiting:
                hidden = case.items if exclude_seen else []
                seen = set(hidden)
                allowed = [item for item in catalogue if item not in seen]
                at: dict[str, Any] = {"timestamp": case.happened_at}
                asked: dict[str, dict[str, Any]] = {
                    "recommend": {**at, "num_items": TOP, "exclude_seen": exclude_seen},
                    **{way: _source_alone(way, size, case, hidden) for way, size in parts.items()},
                    "rank": {**at, "candidates": raw_column(allowed), "top_k": TOP},
                }
                was_retrieved = False
                for way, of_way in asked.items():
                    # each way in a tenant of its own, so that none warms the cache of the next
                    request = case.body(f"evaluate-{way}") | of_way
                    answer, took_s = await client.post(KINDS.get(way, RECOMMEND).path, request)
                    seconds[way].append(took_s)
                    items = answered_ids(
                        answer["top"] if way == "rank" else answer["items"]
                    ).tolist()
                    ranks[way].append(items.index(case.target) if case.target in items else MISSED)
                    was_retrieved |= way in sources and case.target in items
                    if way == "recommend":
                        orders.add(answer["order"])
                        outcome = answer["outcome"] or UNRANKED
                        outcomes[outcome] = outcomes.get(outcome, 0) + 1
                retrieved.append(was_retrieved)
                done(len(ranks["rank"]), len(cases))

        async with asyncio.TaskGroup() as group:
            for case in cases:
                group.create_task(one(case))
    return ServiceEvaluation(
        ranks=ranks,
        seconds=seconds,
        sources=sources,
        order=", ".join(sorted(orders)),
        retrieved=float(np.mean(retrieved)),
        outcomes=dict(sorted(outcomes.items())),
        hides_seen=exclude_seen,
        repeat_ratio=repeat_ratio(cases),
    )


def _source_alone(
    source: str, num_items: int, case: NextEventCase, hidden: list[int]
) -> dict[str, Any]:
    """Ask one source for items that are not hidden: by its own route, or by a cascade of it that ranks nothing."""
    if source in KINDS:
        return {"num_items": num_items, "deny_items": raw_column(hidden)}
    alone = {"sources": [source], "order": "retrieval", "exclude_seen": bool(hidden)}
    return {"num_items": num_items, "timestamp": case.happened_at, **alone}


class EvaluationClient:
    """Posts JSON to a service: `async with`."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        """Connect to nobody yet.

        Args:
            base_url: of the address, public or of operators.
            api_key: that is shown; None = there is none.
        """
        self._url = base_url
        self._headers = calling_headers(api_key)

    async def __aenter__(self) -> EvaluationClient:
        self._http = aiohttp.ClientSession(
            self._url.rstrip("/") + "/",
            headers=self._headers,
            connector=aiohttp.TCPConnector(ssl=calling_context()),
        )
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._http.close()

    async def finds(self) -> list[str]:
        """List the kinds that find items by themselves and that the service has."""
        config = await self._config()
        return [kind.name for kind in (GENERATE, MATCH) if config.get(kind.name)]

    async def cascade(self) -> dict[str, Any]:
        """Return the section `recommend` of the configuration, which the admin address shows.

        Raises:
            Unavailable: it has none, or does not say.
        """
        section: dict[str, Any] = (await self._config()).get(RECOMMEND.name) or {}
        if not section:
            raise Unavailable(
                "the service has no cascade: its configuration needs section recommend"
            )
        return section

    async def _config(self) -> dict[str, Any]:
        async with self._http.get("debug/config") as response:
            if response.status != 200:
                raise Unavailable(
                    f"{self._url}/debug/config: {response.status}: is that the admin address?"
                )
            config: dict[str, Any] = await response.json()
            return config

    async def post(self, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], float]:
        """Send one request; if the service rejects it for load, wait as long as it says and send it again.

        Returns:
            The body of the answer, and the seconds that the answered attempt took.

        Raises:
            Unavailable: the status is not 200, or still 429 after `PATIENCE_S`.
        """
        headers = {"X-Request-Timeout-Ms": "10000"}
        give_up_at = time.perf_counter() + PATIENCE_S
        while True:
            began_at = time.perf_counter()
            async with self._http.post(path.lstrip("/"), json=body, headers=headers) as response:
                answer: dict[str, Any] = await response.json(content_type=None)
                if response.status == 200:
                    return answer, time.perf_counter() - began_at
                if response.status != 429 or time.perf_counter() > give_up_at:
                    raise Unavailable(f"{path}: {response.status}: {answer.get('detail')}")
                wait_s = float(response.headers.get("Retry-After", 1))
            await asyncio.sleep(wait_s)
