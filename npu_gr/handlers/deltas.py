"""Applies deltas to the weights of the served ranker, in order, while requests run.

    POST /v1/models/delta     file -> checked -> synced into the folder of deltas -> written
    models.deltas_from        a file that another process put there -> checked -> written
    models.deltas_stream      an entry of Redis -> checked -> synced into the folder -> written
    POST /v1/models/rollback  the number to serve, synced -> written

A move computes what it writes on a thread of its own. The device then writes it between two passes,
so a pass sees the weights of one delta. What was durable before is served after a crash, and so is
what became durable: the old delta, or the new one.

The items of a delta become a version of the catalogue in the step in which its weights are served.
The catalogue's log says up to which delta it has them (`DeltaMark`), so a start takes the rest from
the folder, each once, in order. A rollback to another delta leaves the catalogue: what was taken
off sale stays so. An instance without a catalogue takes the weights alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from npu_gr.core.errors import AppliedAlready, DeviceError, NpuGrError, Unavailable
from npu_gr.core.health import Worker
from npu_gr.core.lifetime import to_the_end
from npu_gr.core.memory import free_memory, misfit
from npu_gr.core.served import DeltaMark
from npu_gr.handlers.admin import CatalogueOfGenerator
from npu_gr.handlers.ranking import Ranking
from npu_gr.handlers.refresh import Refreshes
from npu_gr.handlers.served_catalogue import Around, FromDeltas
from npu_gr.handlers.versions import Versions
from npu_gr.metrics.registry.process import Reloaded, ReloadMetrics
from npu_gr.model.delta import read_delta
from npu_gr.model.delta_log import Link
from npu_gr.model.served_weights import Patch, ServedWeights

log = logging.getLogger(__name__)

FOLLOW_S = 0.3  # between two looks for deltas of others
# Host memory that a delta takes at most, by its bytes: the values, their rows, and as tensors of
# the model.
TAKES = 3.0
_RECEIVED = ".received-"  # names of files that were not checked yet
_FORGOTTEN_S = 3600.0  # age after which nothing writes such a file any more


class Deltas:
    """The deltas of the current ranker. Event loop only."""

    def __init__(
        self,
        versions: Versions,
        one_at_a_time: asyncio.Lock,
        keep_stale_s: Callable[[], float],
        metrics: ReloadMetrics,
        on_fault: Callable[[str], None],
        refreshes: Refreshes,
        catalogue: CatalogueOfGenerator,
    ) -> None:
        """Apply nothing yet.

        Args:
            versions: Versions of the ranker.
            one_at_a_time: Held by whatever changes a served model.
            keep_stale_s: Returns `relay.max_stale_s`.
            metrics: Metrics of reloads.
            on_fault: Makes the instance unready, for a reason.
            refreshes: Encodes again what a delta has touched.
            catalogue: Takes the items of deltas.
        """
        self._versions = versions
        self._one_at_a_time = one_at_a_time
        self._keep_stale_s = keep_stale_s
        self._metrics = metrics
        self._on_fault = on_fault
        self._refreshes = refreshes
        self._catalogue = catalogue
        metrics.observe_delta(lambda: versions.ranker().weights.info())

    async def add(self, body: bytes) -> None:
        """Make a delta durable and serve it; nothing happens if it is served already.

        Args:
            body: Content of its file.

        Raises:
            NotFound: there is no ranker.
            DeltaError: it is damaged, of another model, a duplicate, not the next one, or rests on
                other weights; nothing was changed.
            Unprocessable: an item is invalid; nothing was changed.
            Unavailable: there is too little memory; nothing was changed.
            DeviceError: the device failed; the instance is unready until it is restarted.
        """
        self._versions.ranker()  # before a folder is made
        try:
            async with self._one_at_a_time:
                await to_the_end(self._add(self._versions.ranker(), body))
        except AppliedAlready as error:  # repeated, or taken by an instance with the same log
            await self.follow()
            if self._versions.ranker().weights.sequence != error.sequence:
                raise

    async def roll_back(self, sequence: int) -> None:
        """Serve the weights of a kept delta, or of the checkpoint (0).

        Raises:
            NotFound, DeltaError, DeviceError: as `add`.
        """
        async with self._one_at_a_time:
            await to_the_end(self._roll_back(self._versions.ranker(), sequence))

    async def follow(self) -> None:
        """Serve what the folder says, if that is another delta than the served one, and its items.

        Raises:
            DeltaError, Unavailable, DeviceError: as `add`.
        """
        await asyncio.to_thread(self._versions.ranker().weights.log.pull)
        async with self._one_at_a_time:
            ranking = self._versions.ranker()
            weights = ranking.weights
            way = await asyncio.to_thread(weights.log.way, weights.base)
            left = []
            if (mark := self._catalogue.delta()) is not None:
                taken = mark.sequence if mark.folder == str(weights.log.folder) else 0
                files = await asyncio.to_thread(weights.log.files)
                left = [link for link in files if link.sequence > taken and link.manifest.items]
            if left or way != weights.way:
                await to_the_end(self._follow(ranking, way, left))

    async def watch(self, worker: Worker) -> None:
        """Follow the folder until cancelled; log each new reason why that fails."""
        reason = ""
        async for _ in worker.turns(FOLLOW_S):
            try:
                await self.follow()
                reason = ""
            except NpuGrError as error:
                self._metrics.failed(Reloaded.DELTA)
                if str(error) != reason:
                    log.error("deltas: %s", error)
                reason = str(error)

    async def _add(self, ranking: Ranking, body: bytes) -> None:
        weights = ranking.weights
        made, patch = await asyncio.to_thread(_received, body, weights)

        async def serve(keep_items: Callable[[], Awaitable[None]]) -> None:
            link = await asyncio.to_thread(weights.log.add, made, patch.way[-1].manifest)
            try:
                await keep_items()
            except Unavailable as error:  # a start serves the delta
                self._on_fault(f"a delta was served in part: {error}")
                raise
            await self._write(ranking, patch._replace(way=[*patch.way[:-1], link]))

        try:
            await self._serve(patch.way[-1:], weights.log.folder, serve, is_strict=True)
        finally:
            await asyncio.to_thread(made.unlink, missing_ok=True)

    async def _roll_back(self, ranking: Ranking, sequence: int) -> None:
        await self._write(ranking, await asyncio.to_thread(_rolled_back, sequence, ranking.weights))

    async def _follow(self, ranking: Ranking, way: list[Link], left: list[Link]) -> None:
        weights = ranking.weights
        patch = None
        if way != weights.way:
            patch = await asyncio.to_thread(_followed, way, weights)

        async def serve(keep_items: Callable[[], Awaitable[None]]) -> None:
            await keep_items()
            if patch is not None:
                await self._write(ranking, patch)

        await self._serve(left, weights.log.folder, serve, is_strict=False)

    async def _serve(
        self, links: list[Link], folder: Path, serve: Around, *, is_strict: bool
    ) -> None:
        """Call `serve` in the step in which the items of deltas are served."""
        changes = [one.change() for link in links for one in link.manifest.items]
        if not changes or self._catalogue.delta() is None:
            await serve(_nothing)
            return
        mark = DeltaMark(str(folder), links[-1].sequence)
        await self._catalogue.follow_deltas(changes, FromDeltas(mark, serve, is_strict))

    async def _write(self, ranking: Ranking, patch: Patch) -> None:
        began_at = time.monotonic()
        before, stamps = ranking.weights.sequence, ranking.weights.current()
        try:
            await ranking.move(patch, self._keep_stale_s())
        except (DeviceError, Unavailable) as error:
            self._on_fault(f"a delta was written in part: {error}")
            raise
        if patch.reaches_prefixes:
            self._refreshes.begin(ranking, stamps)
        took_s = time.monotonic() - began_at
        self._metrics.moved(patch.num_rows, took_s)
        self._metrics.loaded(Reloaded.DELTA)
        log.info(
            "delta %d is served after %d: %d rows of %d tensors, %.3f s",
            *(ranking.weights.sequence, before, patch.num_rows, len(patch.changes), took_s),
        )


# ---- files; not on the event loop


async def _nothing() -> None:
    pass


def _received(body: bytes, weights: ServedWeights) -> tuple[Path, Patch]:
    """Check a delta, and compute what it writes; its file has no name in the folder yet."""
    _check_memory(len(body))
    made = as_received(weights.log.folder, body)
    try:
        delta = read_delta(made)
        weights.check(delta)
        return made, weights.patch([*weights.way, Link(made, delta.manifest)], delta)
    except BaseException:
        made.unlink(missing_ok=True)
        raise


def _rolled_back(sequence: int, weights: ServedWeights) -> Patch:
    patch = weights.patch(weights.log.way(weights.base, sequence))
    weights.log.roll_back(sequence)
    return patch


def _followed(way: list[Link], weights: ServedWeights) -> Patch:
    _check_memory(sum(link.path.stat().st_size for link in way if link not in weights.way))
    return weights.patch(way)


def _check_memory(num_bytes: int) -> None:
    if words := misfit("the delta", TAKES * num_bytes, free_memory()):
        raise Unavailable(words)


def as_received(folder: Path, body: bytes) -> Path:
    """Write a file that is not a delta of the folder yet; files of a process that died are removed.

    Raises:
        Unavailable: the disk failed.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(f"{_RECEIVED}*"):
            if time.time() - old.stat().st_mtime > _FORGOTTEN_S:
                old.unlink(missing_ok=True)
        handle, name = tempfile.mkstemp(".tmp", _RECEIVED, folder)
        with os.fdopen(handle, "wb") as file:
            file.write(body)
        os.chmod(name, 0o644)  # as the files of a checkpoint
    except OSError as error:
        raise Unavailable(f"nothing is changed: {folder}: {error.strerror}") from error
    return Path(name)
