"""Versions of ranker and generator: the current ones, and previous ones while they drain.

replace(new)    new requests get `new`; requests that name the old version still get that one
T_life later    prefixes of the old version are used or expired
after its last request the old version is stopped and removed
roll_back()     until then, the old version becomes current again, and the new one drains

`ServedNames` has the names of items and actions of all these versions.

The handlers of `signal`, `rank` and `generate` read the history, and call the requested version.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Generic, TypeVar

import msgspec

from npu_gr.catalogue.names import ItemNames, names_of, titles_of
from npu_gr.catalogue.versions import Snapshot
from npu_gr.core.arrays import I64
from npu_gr.core.errors import NotFound, StoreFailed, Unprocessable
from npu_gr.core.feature_schema.columns import ModelFeatures
from npu_gr.core.history import HistoryReport, OnUnsorted
from npu_gr.core.lifetime import Published
from npu_gr.core.names import ActionNames, is_hashed, item_ids, names_of_numbers
from npu_gr.core.request import (
    GenerateAnswer,
    GenerateRequest,
    RankAnswer,
    RankRequest,
    SignalAnswer,
    SignalRequest,
    Verdict,
)
from npu_gr.core.served import ModelInfo
from npu_gr.core.text_format import quoted
from npu_gr.handlers.base import Call
from npu_gr.handlers.generation import Generation
from npu_gr.handlers.histories import Histories
from npu_gr.handlers.match import ServedVectors
from npu_gr.handlers.ranking import Ranking
from npu_gr.handlers.scored_items import Commit
from npu_gr.handlers.shadow import Shadow
from npu_gr.metrics.registry import Metrics

V = TypeVar("V", Ranking, Generation)


class ModelVersions(Generic[V]):
    """The current version of a model, and at most one that drains. Event loop only."""

    def __init__(self, name: str, first: V, on_change: Callable[[], None]) -> None:
        """Begin with one version.

        Args:
            name: Description of the model in messages.
            first: The current version.
            on_change: Callback after a change of the current version.
        """
        self._versions: Published[V] = Published(name)
        self._versions.publish(first)
        self._on_change = on_change
        # at most two, since one may still be stopping its version; the newest is `_retirement`
        self._retirements: set[asyncio.Task[None]] = set()
        self._retirement: asyncio.Task[None] | None = None

    @property
    def current(self) -> V:
        """The current version."""
        return self._versions.current

    @property
    def draining(self) -> V | None:
        """The previous version, until it is stopped."""
        return self._versions.previous

    def all(self) -> list[V]:
        """Return the draining version, then the current one.

        They share pages, and an erasure must visit the current one last, which overwrites them.
        """
        return [version for version in (self.draining, self.current) if version is not None]

    def find(self, version: str | None) -> V:
        """Return the requested version; None for the current one.

        Raises:
            NotFound: the version is neither current nor draining.
        """
        if version is None:
            return self.current
        served = self.all()[::-1]
        for each in served:
            if version == each.version:
                return each
        names = " and ".join(repr(each.version) for each in served)
        raise NotFound(f"model_version: {quoted(version)} is not served; there is {names}")

    @property
    def is_retiring(self) -> bool:
        """Whether a previous version drains or is being stopped."""
        return bool(self._retirements)

    def replace(self, new: V) -> None:
        """Make `new` the current version; the previous one drains."""
        assert self.draining is None, "a reload must wait until the draining version has ended"
        old = self.current
        self._versions.publish(new)
        self._begin_retirement(old)

    def roll_back(self) -> None:
        """Make the version that drains the current one; the current one drains."""
        assert self.draining is not None
        assert self._retirement is not None
        self._retirement.cancel()
        old = self.current
        self._versions.rollback()
        self._begin_retirement(old)

    def _begin_retirement(self, old: V) -> None:
        self._on_change()
        task = asyncio.get_running_loop().create_task(self._retire(old))
        self._retirement = task
        self._retirements.add(task)
        task.add_done_callback(self._retirements.discard)
        # its engine and relay form a cycle, so only a full collection frees the old weights
        task.add_done_callback(lambda _: gc.collect())

    async def _retire(self, old: V) -> None:
        await asyncio.sleep(old.relay.t_life_s)
        await old.use.wait_free()  # no request can use the version between this line and the next
        self._versions.drop_previous()
        await old.stop()

    async def stop(self) -> None:
        """Stop all versions and retirements."""
        for task in list(self._retirements):
            task.cancel()
        await asyncio.gather(*self._retirements, return_exceptions=True)
        for version in self.all():
            await version.stop()


class Versions:
    """The ranker and the generator of an instance, at least one of them. Event loop only."""

    def __init__(
        self,
        ranking: Ranking | None,
        generation: Generation | None,
        on_change: Callable[[ModelInfo], None] = lambda _first: None,
    ) -> None:
        """Begin with these models.

        Args:
            ranking, generation: The models; None if not configured.
            on_change: Callback with the default model after a change of a version.
        """
        assert ranking or generation
        self.shadow: Shadow | None = None

        def changed() -> None:
            on_change(self.models()[0])

        self.rankers = None if ranking is None else ModelVersions("the ranker", ranking, changed)
        self.generators = (
            None if generation is None else ModelVersions("the generator", generation, changed)
        )

    def ranker(self, version: str | None = None) -> Ranking:
        """Return a version of the ranker.

        Raises:
            NotFound: there is no ranker, or it has no such version.
        """
        if self.rankers is None:
            raise NotFound("this instance does not rank; its configuration has no checkpoint")
        return self.rankers.find(version)

    def generator(self, version: str | None = None) -> Generation:
        """Return a version of the generator.

        Raises:
            NotFound: there is no generator, or it has no such version.
        """
        if self.generators is None:
            raise NotFound(
                "this instance does not generate; its configuration has no section generate"
            )
        return self.generators.find(version)

    def current(self) -> list[Ranking | Generation]:
        """Return the current versions."""
        return [models.current for models in (self.rankers, self.generators) if models is not None]

    def all(self) -> list[Ranking | Generation]:
        """Return all versions, draining ones first."""
        return [*self._draining(), *self.current()]

    def _draining(self) -> list[Ranking | Generation]:
        found = [
            models.draining for models in (self.rankers, self.generators) if models is not None
        ]
        return [version for version in found if version is not None]

    async def follow(self, snapshot: Snapshot, is_strict: bool) -> Commit:
        """Let all versions of the ranker prepare for a catalogue, see `ScoredItems.follow`.

        Args:
            snapshot: Version of the catalogue to be published.
            is_strict: Strictness for the current version; a draining one is never strict.
        """
        if self.rankers is None:
            return lambda: None
        current = self.rankers.current
        commits = [
            await r.items.follow(snapshot, is_strict and r is current) for r in self.rankers.all()
        ]

        def commit() -> None:
            for show in commits:
                show()

        return commit

    def of_ranker(self) -> tuple[str, ...]:
        """Return the versions of the ranker, the current one first; () without a ranker."""
        return (
            ()
            if self.rankers is None
            else tuple(one.version for one in reversed(self.rankers.all()))
        )

    def of_generator(self) -> tuple[str, ...]:
        """Return the versions of the generator, the current one first; () without a generator."""
        return (
            ()
            if self.generators is None
            else tuple(one.version for one in reversed(self.generators.all()))
        )

    def item_tables(self) -> dict[str, ItemNames]:
        """Return the names in the folders of the current versions, by the setting of the folder."""
        tables: dict[str, ItemNames] = {}
        if self.rankers is not None:
            tables["checkpoint"] = self.rankers.current.names
        if self.generators is not None:
            tables["generate.checkpoint"] = self.generators.current.names
            tables["generate.catalogue"] = self.generators.current.items.names
        return tables

    def models(self) -> list[ModelInfo]:
        """Describe all versions, current ones first."""
        draining = [
            dataclasses.replace(version.model, is_draining=True) for version in self._draining()
        ]
        return [version.model for version in self.current()] + draining

    @property
    def is_draining(self) -> bool:
        """Whether a previous version still drains."""
        return bool(self._draining())

    @property
    def is_retiring(self) -> bool:
        """Whether a previous version drains or is being stopped."""
        return any(
            models is not None and models.is_retiring for models in (self.rankers, self.generators)
        )

    @property
    def max_events(self) -> int:
        """Number of newest events in the longest window of the current versions."""
        return max([version.max_events for version in self.current()])

    async def stop(self) -> None:
        """Stop all versions."""
        if self.shadow is not None:
            await self.shadow.stop()
        for models in (self.rankers, self.generators):
            if models is not None:
                await models.stop()
        if self.generators is not None:
            self.generators.current.items.close()


class ServedNames:
    """Names of items and actions of all versions; any table may name an id. Event loop only."""

    def __init__(
        self, histories: Histories, versions: Versions, vectors: ServedVectors | None
    ) -> None:
        """Store the parts.

        Args:
            histories: Histories, which have the policy for unsorted ones.
            versions: Versions of ranker and generator.
            vectors: Vectors of match, if configured.
        """
        self._histories = histories
        self._versions = versions
        self._vectors = vectors

    @property
    def unsorted_history(self) -> OnUnsorted:
        """Policy for a history that is out of time order."""
        return self._histories.on_unsorted

    def actions(self, version: str | None) -> ActionNames | None:
        """Return the actions of a version of the ranker, else of the generator; None if unnamed.

        Raises:
            NotFound: the version is not served.
        """
        if self._versions.rankers is not None:
            return self._versions.rankers.find(version).actions
        return self._versions.generator().actions

    def features(self, version: str | None) -> ModelFeatures:
        """Return the features of a version of the ranker; none without a ranker.

        Raises:
            NotFound: the version is not served.
        """
        rankers = self._versions.rankers
        return ModelFeatures() if rankers is None else rankers.find(version).features

    @property
    def key(self) -> bytes:
        """The key of the items' ids; empty = they have none."""
        vectors = [] if self._vectors is None else self._vectors.kept()
        tables = (*self._versions.item_tables().values(), *(one.names for one in vectors))
        return next((table.key for table in tables if table.key), b"")

    def item_ids(self, names: Sequence[str | int]) -> I64:
        """Return the ids of names by the key of the served models: [n] -> int64 [n].

        Raises:
            ValueError: as `core.names.item_ids`.
        """
        return item_ids(names, self.key)

    def items(self, ids: I64) -> list[str | int]:
        """Return the name of each item: [n] -> n names; the id if the name is unknown."""
        if not is_hashed(ids).any():
            return names_of_numbers(ids)
        return names_of(self._tables(), ids)

    def titles(self, ids: I64) -> list[str | None]:
        """Return the title of each item: [n] -> n titles, None if it has none."""
        return titles_of(self._tables(), ids)

    def _tables(self) -> list[ItemNames]:
        """Return the distinct tables: of the catalogue, of current and of previous versions."""
        tables = (
            []
            if self._versions.generators is None
            else self._versions.generators.current.items.tables()
        )
        vectors = [] if self._vectors is None else self._vectors.kept()
        serving, all_versions = self._versions.current(), self._versions.all()
        tables += [version.names for version in (*serving, *vectors, *all_versions)]
        return list(dict.fromkeys(table for table in tables if len(table)))


# After these verdicts the prefix is in HBM, or on its way there.
_HAS_PREFIX = (
    Verdict.PREINFER,
    Verdict.EXTEND,
    Verdict.RELOAD,
    Verdict.ALREADY_RESIDENT,
    Verdict.ALREADY_RUNNING,
)


class _ModelJob:
    """Base of the handlers of models."""

    def __init__(self, versions: Versions, histories: Histories, metrics: Metrics) -> None:
        """Store the parts.

        Args:
            versions: Versions of ranker and generator.
            histories: Histories of users.
            metrics: Metrics of the instance.
        """
        self._versions = versions
        self._histories = histories
        self._metrics = metrics

    async def stop(self) -> None:
        """Do nothing, since versions stop their own work."""


class SignalJob(_ModelJob):
    """Handles signals for the ranker's prefix, the generator's prompt, or both."""

    async def run(self, request: SignalRequest, call: Call) -> SignalAnswer:
        """Decide, start prefills, and answer without waiting for them."""
        versions, version = self._versions, request.model_version
        ranking = versions.ranker(version) if versions.rankers is not None else None
        generation = None
        if versions.generators is not None:
            generation = versions.generators.current if ranking else versions.generator(version)
        verdict = generate_verdict = None
        with ExitStack() as used:
            for model in (ranking, generation):
                if model is not None:
                    used.enter_context(model.use)
            reads = None if ranking is None else ranking.features.user.features
            history = await self._histories.read(
                request.user,
                request.history,
                versions.max_events,
                call.slot.suspended,
                reads,
                call.deadline_at,
            )
            read_at = time.monotonic()
            if ranking is not None:
                tokens = ranking.tokenize(history)
                report = tokens.report
                verdict = ranking.signal(request.user, tokens, request.num_candidates)
            else:
                events = history.events
                report = HistoryReport(
                    fingerprint=history.fingerprint,
                    num_tokens=len(events),
                    read_events=len(events),
                    origin=events.origin,
                )
            self._histories.remember(request.user, request.history, history)
            if generation is not None:
                generate_verdict = await generation.signal(request.user, history)
        first = verdict or generate_verdict
        model = ranking or generation
        assert first is not None
        assert model is not None
        self._metrics.signal.decided(first)
        return SignalAnswer(
            verdict=first,
            model_version=model.version,
            history=report,
            resident_for_s=model.relay.t_life_s if first in _HAS_PREFIX else 0.0,
            generate_verdict=generate_verdict,
            stages_s={"history": read_at - call.arrived_at, "decide": time.monotonic() - read_at},
        )


class RankJob(_ModelJob):
    """Handles ranks, each with the requested version of the ranker."""

    async def run(self, request: RankRequest, call: Call) -> RankAnswer:
        """Read the history, and score with one version of the ranker."""
        ranking = self._versions.ranker(request.model_version)
        if not len(request.candidates):
            raise Unprocessable("candidates: needs at least one")
        with ranking.use:
            reads = ranking.features.user.features
            history = await self._histories.read(
                request.user,
                request.history,
                self._versions.max_events,
                call.slot.suspended,
                reads,
                call.deadline_at,
            )
            tokens = ranking.tokenize(history)
            self._histories.remember(request.user, request.history, history)
            answer = await ranking.rank(request, tokens, call, time.monotonic() - call.arrived_at)
        self._metrics.rank.answered(answer)
        ranking.on_ranked(request, history, answer)
        return answer


class GenerateJob(_ModelJob):
    """Handles generates, each with the requested version of the generator."""

    async def run(self, request: GenerateRequest, call: Call) -> GenerateAnswer:
        """Read the history, and search with one version of the generator."""
        generation = self._versions.generator(request.model_version)
        with generation.use:
            history = await self._histories.read(
                request.user,
                request.history,
                self._versions.max_events,
                call.slot.suspended,
                deadline_at=call.deadline_at,
                all_items=generation.excludes_seen(request),
            )
            events = history.events
            # else the empty prompt would be a client error (422)
            if events.origin.fault and not len(events):
                raise StoreFailed(
                    "the history store fails, and no history of the user is cached",
                    events.origin.fault,
                )
            self._histories.remember(request.user, request.history, history)
            history_s = time.monotonic() - call.arrived_at
            answer = await generation.generate(request, history, call, history_s)
        answer = msgspec.structs.replace(
            answer, history=msgspec.structs.replace(answer.history, origin=events.origin)
        )
        self._metrics.generate.answered(answer)
        return answer
