"""Opens a shadow of the served ranker, and promotes or drops it.

open      another ranker is loaded, verified and warmed up, as by a reload; it scores a share of
          the ranks in spare time (`handlers/shadow.py`)
drop      it is freed, with its prefixes
promote   it serves, as by a reload; the ranker before it stays in memory for `GUARD_S`, scores
          in its place, and serves again if the guard (`guard.py`) or a rollback says so
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from statistics import fmean, median

from msgspec.structs import replace

from npu_gr.core.errors import ConfigError, NotFound, NpuGrError, Unprocessable
from npu_gr.core.health import Worker
from npu_gr.core.kinds import RANK, RECOMMEND
from npu_gr.core.served import ShadowInfo
from npu_gr.core.settings import LiveConfig
from npu_gr.engine.scheduler import Scheduler, is_idle
from npu_gr.handlers.base import AdmissionControl
from npu_gr.handlers.ranking import Ranking, unobserved
from npu_gr.handlers.shadow import Compared, Shadow, Skipped, SpareTime
from npu_gr.handlers.versions import Versions
from npu_gr.metrics.registry import Metrics
from npu_gr.replay.answers import AnswerFile, AnswerLine
from npu_gr.replay.log import digest, raw
from npu_gr.service.build import Prepared, returned
from npu_gr.service.config import Config
from npu_gr.service.guard import GUARD_S, Guard, GuardReason
from npu_gr.service.reload import Reload, check_actions

log = logging.getLogger(__name__)

EVERY_S = 1.0  # between two looks of the guard
BEFORE_S = 300.0  # window of the objectives before a promotion
MOST_LINES = 100_000  # recorded answers of a shadow
KINDS = (RANK.name, RECOMMEND.name)  # that a ranker answers


class Shadows:
    """The shadow of an instance with a ranker, at most one. Event loop only."""

    def __init__(
        self,
        *,
        settings: LiveConfig[Config],
        versions: Versions,
        metrics: Metrics,
        admission: AdmissionControl,
        scheduler: Scheduler,
        open_ranking: Callable[[Config, Ranking, Path | None], Awaitable[Prepared[Ranking]]],
        one_at_a_time: asyncio.Lock,
        reload: Reload | None,
    ) -> None:
        """Store the parts.

        Args:
            settings: Current configuration.
            versions: Versions of the ranker.
            metrics: Metrics of the instance.
            admission, scheduler: Say whether there is time.
            open_ranking: Prepares a ranker while another one serves.
            one_at_a_time: Held by whatever changes a served model.
            reload: Promotes, and rolls back; None = there is no configuration file.
        """
        self._settings = settings
        self._versions = versions
        self._metrics = metrics
        self._admission = admission
        self._scheduler = scheduler
        self._open_ranking = open_ranking
        self._one_at_a_time = one_at_a_time
        self._reload = reload
        self._path = ""
        self._watched: Ranking | None = None  # its answered ranks are offered
        self._answers = _Answers()
        self._changing = asyncio.Lock()  # held by open, drop and promote
        self._guard: Guard | None = None
        self._guard_until_at = 0.0
        self._held = ExitStack()  # the ranker before, while the guard watches
        self._rolled_back = ""
        metrics.shadow.observe(
            Skipped,
            GuardReason,
            lambda: () if versions.shadow is None else list(versions.shadow.differences),
            lambda: versions.shadow is not None,
            lambda: self._guard is not None,
        )

    def info(self) -> ShadowInfo:
        """Describe the shadow and what it showed."""
        shadow = self._versions.shadow
        if shadow is None:
            return ShadowInfo(state="none", rolled_back=self._rolled_back)
        served = self._versions.ranker()
        ours, other = shadow.ranking, served
        if self._guard is not None:
            ours, other = other, ours
        found = list(shadow.differences)
        info = {
            "path": self._path,
            "version": ours.version,
            "against": other.version,
            "share": shadow.share,
            "scored": shadow.num_scored,
            "skipped": {reason.value: num for reason, num in shadow.num_skipped.items()},
            "top_overlap": fmean(one.top_overlap for one in found) if found else None,
            "same_first": fmean(one.has_same_first for one in found) if found else None,
            "correlation": fmean(one.correlation for one in found) if found else None,
            "mean_difference": fmean(one.mean for one in found) if found else None,
            "median_drift": _finite(median(one.drift for one in found)) if found else None,
            "answers": self._answers.folder,
            "rolled_back": self._rolled_back,
        }
        if self._guard is None:
            return ShadowInfo(state="scoring", **info)  # type: ignore[arg-type]
        left_s = max(0.0, self._guard_until_at - time.monotonic())
        return ShadowInfo(state="guarding", guarded_for_s=left_s, **info)  # type: ignore[arg-type]

    async def open(self, path: str, share: float) -> ShadowInfo:
        """Load a ranker, and let it score a share of the ranks.

        Args:
            path: Folder of its checkpoint.
            share: Share of the users, 0 to 1.

        Raises:
            NotFound: there is no ranker.
            Unprocessable: it cannot be compared with the served one, or does not fit in memory.
            DeviceError: it failed its self-test.
        """
        async with self._changing, self._one_at_a_time:
            if self._versions.shadow is not None:
                raise Unprocessable("shadow: there is one already; promote or drop it first")
            served = self._versions.ranker()
            try:
                config = replace(self._settings.config, checkpoint=path)
                ranking = _checked(path, await self._open_ranking(config, served, None), served)
            except ConfigError as error:
                gc.collect()
                raise Unprocessable(f"shadow: {error}") from error
            self._rolled_back = ""
            self._path = path
            if (record := self._settings.config.record) is not None:
                await self._answers.open(record.folder, ranking.version)
            self._begin(ranking, share, is_before=False)
            log.info("the shadow %s scores %.0f %% of the users", ranking.version, 100 * share)
        return self.info()

    async def drop(self) -> ShadowInfo:
        """Free the shadow and its prefixes.

        Raises:
            NotFound: there is none.
        """
        async with self._changing:
            ranking = self._scoring().ranking
            await self._end()
            await ranking.relay.stop()
            log.info("the shadow %s was dropped", ranking.version)
            del ranking
            gc.collect()
        return self.info()

    async def promote(self) -> ShadowInfo:
        """Serve the shadow, and watch it.

        Raises:
            NotFound: there is none.
            Unprocessable, Unavailable: it cannot serve; it goes on as a shadow.
        """
        async with self._changing:
            return await self._promote(self._scoring())

    async def _promote(self, shadow: Shadow) -> ShadowInfo:
        if self._reload is None:
            raise Unprocessable("shadow: this instance has no configuration file to reload")
        before, new = self._versions.ranker(), shadow.ranking
        shown, share = list(shadow.differences), shadow.share
        usual = {kind: self._metrics.requests.over(kind, BEFORE_S) for kind in KINDS}
        with ExitStack() as held:
            held.enter_context(before.use)  # so that it does not stop while the guard watches
            try:
                await self._reload.promote(self._path, returned(new, self._metrics))
            except ConfigError as error:
                raise Unprocessable(f"shadow: {error}") from error
            self._held = held.pop_all()
        await self._end()
        self._begin(before, share, is_before=True)
        after = self._versions.shadow
        assert after is not None
        objectives = self._metrics.requests.objectives
        self._guard = Guard(
            {kind: objectives[kind] for kind in KINDS},
            lambda: {kind: self._metrics.requests.rolling[kind].total for kind in KINDS},
            usual,
            new.selfchecks,
            shown,
            after.differences,
        )
        self._guard_until_at = time.monotonic() + GUARD_S
        log.info(
            "the shadow %s serves in the place of %s; the guard watches it for %.0f s",
            *(new.version, before.version, GUARD_S),
        )
        return self.info()

    async def watch(self, worker: Worker) -> None:
        """Follow reloads, and let the guard look, until cancelled."""
        async for _ in worker.turns(EVERY_S):
            shadow = self._versions.shadow
            if shadow is None or self._changing.locked():
                continue
            if self._versions.ranker() is not self._watched:  # a reload, or a rollback
                if self._guard is not None or self._versions.ranker() is shadow.ranking:
                    await self._end_guard()
                    continue
                shadow.differences.clear()
                self._watch(shadow)
            if self._guard is not None:
                await self._look(self._guard)

    async def close(self) -> None:
        """Stop the shadow with the instance."""
        shadow = self._versions.shadow
        if shadow is not None:
            is_own = self._guard is None
            await self._end()
            if is_own:
                await shadow.ranking.relay.stop()
        self._held.close()

    # ---- parts

    async def _look(self, guard: Guard) -> None:
        verdict = guard.look()
        if verdict is None:
            if time.monotonic() >= self._guard_until_at:
                log.info("the guard ends: the promoted ranker stays")
                await self._end_guard()
            return
        assert self._reload is not None
        self._rolled_back = f"{verdict.reason}: {verdict.text}"
        log.error("the guard rolls the promoted ranker back: %s", self._rolled_back)
        try:
            await self._reload.roll_back()
        except NpuGrError as error:
            log.error("the guard could not roll back, and tries again: %s", error)
            return
        self._metrics.shadow.rolled_back(verdict.reason)
        await self._end_guard()

    async def _end_guard(self) -> None:
        await self._end()
        self._guard = None
        self._held.close()

    def _scoring(self) -> Shadow:
        shadow = self._versions.shadow
        if shadow is None or self._guard is not None:
            raise NotFound("there is no shadow; POST /v1/models/shadow opens one")
        return shadow

    def _begin(self, ranking: Ranking, share: float, *, is_before: bool) -> None:
        requests = self._metrics.requests

        def p99_s() -> float:
            answers = requests.recent.shares(lambda one: one.version)
            found = answers.get(self._versions.ranker().version)
            return 0.0 if found is None else found.p99_s

        def has_time() -> bool:
            admission = self._admission
            return not (admission.work.admitted or admission.waiting) and is_idle(self._scheduler)

        def compared(one: Compared) -> None:
            self._metrics.shadow.scored()
            self._answers.add(one)

        shadow = Shadow(
            ranking,
            share,
            SpareTime(has_time, p99_s),
            compared,
            self._metrics.shadow.skipped,
            is_before=is_before,
        )
        self._versions.shadow = shadow
        shadow.start()
        self._watch(shadow)

    def _watch(self, shadow: Shadow) -> None:
        """Offer the answers of the served ranker to a shadow, and no others."""
        if self._watched is not None:
            self._watched.on_ranked = unobserved
        self._watched = self._versions.ranker()
        self._watched.on_ranked = shadow.offer

    async def _end(self) -> None:
        """End the shadow; its ranker stays in memory."""
        shadow = self._versions.shadow
        assert shadow is not None
        if self._watched is not None:
            self._watched.on_ranked = unobserved
        self._watched = None
        await shadow.stop()
        self._versions.shadow = None
        if shadow.ranking not in self._versions.all():
            shadow.drop_prefixes()
        await self._answers.close()


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None


def _checked(path: str, prepared: Prepared[Ranking], served: Ranking) -> Ranking:
    """Check that a ranker's scores can be compared with the served ones, and return it.

    Raises:
        ConfigError: they cannot.
    """
    if prepared.as_second is None:
        raise ConfigError(f"checkpoint: {path} has the weights that serve")
    check_actions(served.model.actions, prepared.actions or ())
    if prepared.names.key != served.names.key:
        raise ConfigError(f"checkpoint: {path} has another key of the items' ids")
    ranking = prepared.as_second()
    if ranking.model.features != served.model.features:
        raise ConfigError(
            f"checkpoint: {path} reads other features than the current version, so requests "
            "may lack them; compare the two with npu-gr replay compare, and reload"
        )
    if not set(ranking.model.tasks) & set(served.model.tasks):
        raise ConfigError(f"checkpoint: {path} has no task of the current version")
    return ranking


class _Answers:
    """Writes both rankers' answers to files, where requests are recorded."""

    def __init__(self) -> None:
        self.folder = ""
        self._files: tuple[AnswerFile, AnswerFile] | None = None  # of the served, of the shadow
        self._stack = AsyncExitStack()
        self._opened_at = 0.0

    async def open(self, folder: str, version: str) -> None:
        """Open the files of a shadow of this version, in a folder of recordings."""
        own = Path(folder) / f"shadow-{version}"
        files = []
        for name in ("served", "shadow"):
            await asyncio.to_thread((own / name).mkdir, parents=True, exist_ok=True)
            file = AnswerFile(own / name / "answers.jsonl.gz")
            files.append(await self._stack.enter_async_context(file))
        self._files = files[0], files[1]
        self.folder, self._opened_at = str(own), time.monotonic()

    def add(self, one: Compared) -> None:
        """Write a compared rank."""
        if self._files is None or one.number >= MOST_LINES:
            return
        due_at = round(time.monotonic() - self._opened_at, 6)
        of_served = one.answer.scores, one.answer.model_version, sum(one.answer.stages_s.values())
        of_shadow = one.scores, one.version, one.took_s
        for file, (scores, version, took_s) in zip(
            self._files, (of_served, of_shadow), strict=True
        ):
            file.add(
                AnswerLine(
                    number=one.number,
                    kind=RANK.name,
                    due_at=due_at,
                    latency_ms=round(took_s * 1e3, 4),
                    outcome=one.answer.outcome,
                    model_version=version,
                    digest=digest(scores),
                    scores={task: raw(values) for task, values in scores.items()},
                )
            )

    async def close(self) -> None:
        """Close the files."""
        self.folder, self._files = "", None
        await self._stack.aclose()
