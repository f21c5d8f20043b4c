"""`npu-gr evaluate`: next-item metrics of a running service, for the cascade and each stage.

Protocol: one case per user. The events before one of the user's events are the history; that
event's item is the target. All items are candidates (no sampled negatives), without those of the
history unless most of the next items are repeats. Each case is sent in several ways:

    generate         POST /v1/generate, if configured; as many items as the cascade requests from it
    match            POST /v1/match, likewise
    shared_encoder   POST /v1/recommend with this source only and no rank; transitions and
                     neighbours likewise
    rank             POST /v1/rank of all candidates (too slow for production on a large catalogue)
    recommend        POST /v1/recommend: the retrieved items, ranked

`retrieved` is the share of the users whose target was retrieved: an upper bound of the cascade's
hit ratio.
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
from npu_gr.train.cascade import MISSED, NextEventCase, raw_column, repeat_ratio, why
from npu_gr.train.metrics import F64, hit_ratio, ndcg

TOP = 10  # items that count as recommended
OTHER_ITEMS = 100  # items requested from a kind that is not a source of the cascade
AT_ONCE = 2  # cases in flight
PATIENCE_S = 60.0  # for retries of a request that is rejected with 429
UNRANKED = "unranked"  # the outcome of a recommend whose rank failed


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceEvaluation:
    """The answers of the service, by way."""

    # way -> index of the target in each answer; `MISSED` if it is not there
    ranks: dict[str, list[float]]
    seconds: dict[str, list[float]]  # way -> duration of each request
    sources: dict[str, int]  # source of the cascade -> requested items
    order: str  # order of the cascade's answers
    retrieved: float  # share of the cases whose target was retrieved
    outcomes: dict[str, int]  # prefix cache outcomes of the cascade's ranks
    hides_seen: bool  # items of the history were excluded
    repeat_ratio: float = 0.0  # share of the targets that are in the history

    def as_dict(self) -> dict[str, Any]:
        """Return the metrics as JSON values."""
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
        """The way with the highest NDCG@10, without the cascade."""
        return max(
            (way for way in self.ranks if way != "recommend"),
            key=lambda way: ndcg(self._places(way), TOP),
        )

    @property
    def why(self) -> str:
        """One sentence that compares the cascade with its best stage, paired by user."""
        best = self.best_part
        return why("recommend", self._places("recommend"), f"{best} alone", self._places(best))

    def _places(self, way: str) -> F64:
        return np.array(self.ranks[way])

    def table(self) -> Table:
        """Format the metrics for a terminal."""
        found = self.as_dict()
        num = found["num_users"]
        table = Table(
            *("way", f"HR@{TOP}", f"NDCG@{TOP}", "P50 ms"),
            title=f"next item of {num} users, whole catalogue, " + self._of_seen,
            caption=f"95 % interval of an HR@{TOP} of .2: +-{1.96 * (0.16 / num) ** 0.5:.3f}; "
            f"the item was among the {self._asked} retrieved for {self.retrieved:.3f} of the "
            "users; the cascade's ranks: "
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
        """Describe how items of the history were treated; excluded ones cannot be hit again."""
        repeats = f"{self.repeat_ratio:.1%} of the next items are repeats"
        if not self.hides_seen:
            return f"with seen items: {repeats}"
        return (
            f"without seen items: {repeats}, which cannot be hit"
            if self.repeat_ratio
            else "without seen items"
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
    """Send every case to a service in every way.

    Args:
        base_url: URL of a service with the cascade.
        admin_url: URL of its admin address, for the configuration of the cascade.
        cases: Cases, at least one.
        catalogue: Ids of the candidates of `rank`.
        done: Callback with (finished cases, all cases).
        api_key: Key for all tenants with the scopes infer and admin; None if the service needs
            none.

    Raises:
        Unavailable: a request failed.
    """
    retrieved: list[bool] = []
    outcomes: dict[str, int] = {}
    async with (
        EvaluationClient(base_url, api_key) as client,
        EvaluationClient(admin_url, api_key) as admin,
    ):
        section = await admin.cascade()
        sources: dict[str, int] = section["sources"]
        parts = dict.fromkeys(await admin.finds(), OTHER_ITEMS) | sources
        orders: set[str] = set()
        ranks: dict[str, list[float]] = {way: [] for way in (*parts, "rank", "recommend")}
        seconds: dict[str, list[float]] = {way: [] for way in ranks}
        waiting = asyncio.Semaphore(AT_ONCE)
        exclude_seen = bool(section.get("exclude_seen", True))

        async def one(case: NextEventCase) -> None:
            async with waiting:
                hidden = case.items if exclude_seen else []
                seen = set(hidden)
                allowed = [item for item in catalogue if item not in seen]
                at: dict[str, Any] = {"timestamp": case.happened_at}
                asked: dict[str, dict[str, Any]] = {
                    "recommend": {**at, "num_items": TOP},
                    **{way: _source_alone(way, size, case, hidden) for way, size in parts.items()},
                    "rank": {**at, "candidates": raw_column(allowed), "top_k": TOP},
                }
                was_retrieved = False
                for way, of_way in asked.items():
                    # each way has its own tenant, so that none warms the cache of the next
                    request = case.body(f"evaluate-{way}") | of_way
                    answer, took_s = await client.post(KINDS.get(way, RECOMMEND).path, request)
                    seconds[way].append(took_s)
                    found = answer["top"] if way == "rank" else answer["items"]
                    items = answered_ids(found, case.item_key).tolist()
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
    """Build the request of one source: by its own route, else as a cascade without a rank."""
    if source in KINDS:
        return {"num_items": num_items, "deny_items": raw_column(hidden)}
    alone = {"sources": [source], "order": "retrieval", "exclude_seen": bool(hidden)}
    return {"num_items": num_items, "timestamp": case.happened_at, **alone}


class EvaluationClient:
    """Posts JSON to a service. Use it with `async with`."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        """Prepare a client; it connects on the first request.

        Args:
            base_url: URL of a public or admin address.
            api_key: API key of the requests, if any.
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
        """Return the retrieval kinds that the service has: generate, match."""
        config = await self._config()
        return [kind.name for kind in (GENERATE, MATCH) if config.get(kind.name)]

    async def cascade(self) -> dict[str, Any]:
        """Return the section `recommend` of the service's configuration, from the admin address.

        Raises:
            Unavailable: there is no such section, or the address is not an admin address.
        """
        section: dict[str, Any] = (await self._config()).get(RECOMMEND.name) or {}
        if not section:
            raise Unavailable(
                "the service has no cascade; add the section `recommend` to its configuration"
            )
        return section

    async def _config(self) -> dict[str, Any]:
        async with self._http.get("debug/config") as response:
            if response.status != 200:
                raise Unavailable(
                    f"{self._url}/debug/config: status {response.status}; give the admin address"
                )
            config: dict[str, Any] = await response.json()
            return config

    async def post(self, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], float]:
        """Send a request; on 429 wait for Retry-After and send it again.

        A recommend is answered in columns, which say how its items were found.

        Returns:
            The body of the answer, and the seconds that the answered attempt took.

        Raises:
            Unavailable: the status is not 200, or still 429 after `PATIENCE_S`.
        """
        headers = {"X-Request-Timeout-Ms": "10000"}
        if path == RECOMMEND.path:
            body = {"format": "columns", **body}
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
