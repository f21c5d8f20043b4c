"""Reload the configuration file of a running instance, or roll its models back, all or nothing.

    checkpoint      another version is loaded, verified and warmed up while the old one serves,
                    which then drains; its actions must begin with those of the old one, and it must
                    know the items of the cascade's sources
    generate        another version is loaded and warmed up while the old one serves, which then
                    drains; memory sizes and the number of levels cannot change
    match           other vectors are read and serve from the next request on
    recommend       the list of popular items and the hooks are read again; requests that name a
                    version that drains keep its sources, order and popular items
    slo, admission, service, relay, trigger, brownout    apply from the next request on
    calibration     applies with the next version of the checkpoint
    all others      cannot change; an error names them

Pages keep their content, since the key of a prefix has the version that wrote it. Latency
histograms and the rules made from them keep the edges of the start.

A rollback serves the models of before the last reload that changed one. A version that still drains
is current again at once; another one is loaded, verified and warmed up again from its files, which
are held open, so it does not matter whether a training has replaced them (`held_folder.py`). Other
settings stay, and so do a catalogue that both versions share, and the vectors; but the sources, the
order and the popular items of `recommend` go back with the models that they were chosen for. A
second rollback undoes the first, and a reload serves what the file names.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from npu_gr.catalogue.names import key_of
from npu_gr.core.errors import ConfigError, DataError, NpuGrError, StoreFailed, Unavailable
from npu_gr.core.kinds import GENERATE, MATCH, RANK
from npu_gr.core.names import difference, item_ids
from npu_gr.core.settings import LiveConfig
from npu_gr.engine.scheduler import Scheduler
from npu_gr.handlers.cascade_plan import POPULAR
from npu_gr.handlers.cascade_run import CascadeParts
from npu_gr.handlers.generation import Generation
from npu_gr.handlers.histories import Histories
from npu_gr.handlers.item_filters import ItemFilters
from npu_gr.handlers.match import MatchVersion, ServedVectors
from npu_gr.handlers.ranking import Ranking
from npu_gr.handlers.recommend import Cascade
from npu_gr.handlers.scored_items import Commit, CoverageRule, Items, Measured, ScoredItems
from npu_gr.handlers.served_catalogue import ServedCatalogue
from npu_gr.handlers.versions import ModelVersions, V, Versions
from npu_gr.history_store.store import check_item_key
from npu_gr.metrics.registry.process import Reloaded, ReloadMetrics
from npu_gr.relay.brownout import BrownoutControl
from npu_gr.server.admission.controller import AdmissionController
from npu_gr.service.build import Prepared
from npu_gr.service.config import Config
from npu_gr.service.held_folder import HeldFolder

log = logging.getLogger(__name__)

CHANGEABLE = {
    "checkpoint",
    "generate",
    "match",
    "recommend",
    "slo",
    "admission",
    "service",
    "relay",
    "trigger",
    "calibration",
    "brownout",
}


def check_changeable(old: Config, new: Config) -> None:
    """Check that only changeable settings differ.

    Args:
        old: Current configuration.
        new: New configuration.

    Raises:
        ConfigError: other settings differ; the message names them.
    """
    differing = [
        name for name in Config.__struct_fields__ if getattr(old, name) != getattr(new, name)
    ]
    if fixed := [name for name in differing if name not in CHANGEABLE]:
        way_out = ""
        if "history_store" in fixed and old.history_store.kind == "embedded":
            way_out = (
                ". All sites that an instance serves have one history store: start it with --set "
                f"history_store.path={old.history_store.path}"
            )
        raise ConfigError(
            f"{', '.join(fixed)}: cannot change while the instance runs; restart it{way_out}"
        )
    for name in ("checkpoint", "generate", "match", "recommend"):
        if (getattr(old, name) is None) != (getattr(new, name) is None):
            raise ConfigError(
                f"{name}: cannot be added or removed while the instance runs; restart it"
            )
    if old.recommend and new.recommend and old.recommend.index != new.recommend.index:
        raise ConfigError("recommend.index: cannot change while the instance runs; restart it")
    before = old.generate
    after = new.generate
    if before is None or after is None:
        return
    for field in ("hbm_bytes", "dram_bytes", "filter_cache_bytes"):
        if getattr(before, field) != getattr(after, field):
            raise ConfigError(
                f"generate.{field}: cannot change while the instance runs; restart it"
            )
    if len(before.codes) != len(after.codes):
        raise ConfigError(
            f"generate.codes: {len(after.codes)} levels, but the instance serves "
            f"{len(before.codes)}; restart it"
        )


def check_actions(old: Sequence[str], new: Sequence[str]) -> None:
    """Check that actions keep their indices, which histories hold.

    Raises:
        ConfigError: they do not; the message names the first that differs.
    """
    if changed := difference(old, new):
        raise ConfigError(
            f"checkpoint: the current version has other actions: {changed}; histories hold indices "
            "of actions, so actions may only be added at the end; train on a dataset that keeps "
            "their order"
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Served:
    """The models that serve, or served before."""

    config: Config
    ranker: str  # version of its weights; "" = the instance has none
    generator: str
    parts: CascadeParts | None  # of recommend
    folders: dict[str, HeldFolder]  # kind -> files of its checkpoint

    @classmethod
    def of(cls, config: Config, versions: Versions, parts: CascadeParts | None) -> _Served:
        """Hold the files of the current versions."""
        folders = {RANK.name: config.checkpoint} if config.checkpoint else {}
        if config.generate is not None:
            folders[GENERATE.name] = config.generate.checkpoint
        return cls(
            config,
            _weights_of(versions),
            versions.generator().version if versions.generators else "",
            parts,
            {kind: HeldFolder(Path(folder)) for kind, folder in folders.items()},
        )


class Reload:
    """Reloads the configuration when called, and rolls models back.

    A second call waits for the first.
    """

    def __init__(
        self,
        *,
        settings: LiveConfig[Config],
        versions: Versions,
        admission: AdmissionController,
        scheduler: Scheduler,
        brownout: BrownoutControl,
        histories: Histories,
        coverage: CoverageRule,
        cascade: Cascade | None,
        vectors: ServedVectors | None,
        read: Callable[[], Config],
        open_ranking: Callable[[Config, Ranking, Path | None], Awaitable[Prepared[Ranking]]],
        open_generation: Callable[
            [Config, Generation, Path | None], Awaitable[Prepared[Generation]]
        ],
        ranking_returned: Callable[[Ranking], Prepared[Ranking]],
        generation_returned: Callable[[Generation], Prepared[Generation]],
        metrics: ReloadMetrics,
        one_at_a_time: asyncio.Lock,
    ) -> None:
        """Store the parts.

        Args:
            settings: Current configuration, replaced by a successful reload.
            versions, admission, scheduler, brownout, histories: Reconfigured parts.
            coverage: Coverage rule of the cascade's sources.
            cascade, vectors: Those of recommend and match, if there are any.
            read: Function that reads the configuration again; called in a thread.
            open_ranking, open_generation: Prepare a model of the new configuration, or of a
                folder in the place of the configured one, while another one serves. `activate` of
                the result takes over the pages, and returns the serving model if the version is the
                same.
            ranking_returned, generation_returned: Prepare a version that drains to serve again.
            metrics: Reload metrics.
            one_at_a_time: Held by whatever changes a served model.
        """
        self._settings = settings
        self._versions = versions
        self._admission = admission
        self._scheduler = scheduler
        self._brownout = brownout
        self._histories = histories
        self._coverage = coverage
        self._cascade = cascade
        self._vectors = vectors
        self._read = read
        self._open_ranking = open_ranking
        self._open_generation = open_generation
        self._ranking_returned = ranking_returned
        self._generation_returned = generation_returned
        self._metrics = metrics
        self._one_at_a_time = one_at_a_time
        self._served = _Served.of(settings.config, versions, self._parts)
        self._before: _Served | None = None  # what a rollback serves

    async def __call__(self) -> None:
        """Reload; after an error the previous configuration is served.

        Raises:
            ConfigError: a setting is invalid, or cannot change at run time.
            DeviceError: the new version failed its self-test.
            Unavailable: the previous version still drains, and a third would not fit.
        """
        async with self._one_at_a_time:
            with self._metrics.attempt(Reloaded.CONFIGURATION), _rejected("reload"):
                await self._reload(await asyncio.to_thread(self._read), None)

    async def promote(self, checkpoint: str, ranking: Prepared[Ranking]) -> None:
        """Serve a ranker that is in memory, as a reload that names its checkpoint would.

        Args:
            checkpoint: Folder of the ranker.
            ranking: The ranker, over the pages of the current one.

        Raises:
            ConfigError, Unavailable: as a reload; the current ranker stays.
        """
        async with self._one_at_a_time:
            with _rejected("promotion"):
                new = replace(self._settings.config, checkpoint=checkpoint)
                await self._reload(new, ranking)

    async def _reload(self, new: Config, promoted: Prepared[Ranking] | None) -> None:
        old = self._settings.config
        check_changeable(old, new)
        versions = self._versions
        if versions.is_draining:
            raise Unavailable("the previous version still drains; try again when it has ended")
        ranking, generation = promoted, None
        if versions.rankers is not None:
            if ranking is None:
                ranking = await self._open_ranking(new, versions.rankers.current, None)
            if ranking.actions is not None:
                check_actions(versions.rankers.current.model.actions, ranking.actions)
        if versions.generators is not None:
            generation = await self._open_generation(new, versions.generators.current, None)
        match = None
        if self._vectors is not None and new.match is not None and new.match != old.match:
            try:
                match = await asyncio.to_thread(self._vectors.read, new.match)
            except DataError as error:
                raise ConfigError(f"match.vectors: {error}") from error
        ids_of = partial(item_ids, key=await self._check_item_key(ranking, generation, match))
        parts = None
        if self._cascade is not None and new.recommend is not None:
            parts = await asyncio.to_thread(self._cascade.made, new.recommend, ids_of)
            rules = new.recommend.rules
            if rules is not None and rules != self._cascade.parts.config.rules:
                filters = self._cascade.parts.filters
                if generation is not None and (items := generation.items) is not None:
                    filters = ItemFilters(lambda: items, ids_of)
                filters.check(rules)
        models = versions.current()
        before = dataclasses.replace(self._served, ranker=_weights_of(versions), parts=self._parts)
        await self._serve(new, ranking, generation, match, parts, self._coverage.check)
        if models != versions.current():
            self._before = before
            self._served = await asyncio.to_thread(_Served.of, new, versions, self._parts)
        log.info("reloaded: %s", _named(versions))

    async def roll_back(self) -> None:
        """Serve the models of before the last reload that changed one.

        After an error the current models serve.

        Raises:
            ConfigError: there are none, or they cannot be served any more.
            DeviceError: one failed its self-test.
        """
        async with self._one_at_a_time:
            with _rejected("rollback"):
                await self._roll_back()

    async def _roll_back(self) -> None:
        back, versions = self._before, self._versions
        if back is None:
            raise ConfigError("there is no previous version of the models")
        now = self._settings.config
        new = replace(now, checkpoint=back.config.checkpoint, generate=back.config.generate)
        parts = self._parts
        if parts is not None and back.parts is not None:
            parts = parts.chosen_by(back.parts)
            new = replace(new, recommend=parts.config)
        ranking = generation = None
        async with AsyncExitStack() as held:
            now_served = dataclasses.replace(
                self._served, ranker=_weights_of(versions), parts=self._parts
            )
            if versions.rankers is not None and now_served.ranker != back.ranker:
                if (draining := versions.rankers.draining) is not None:
                    held.enter_context(draining.use)  # so that it does not stop meanwhile
                    ranking = self._ranking_returned(draining)
                else:
                    folder = await held.enter_async_context(back.folders[RANK.name].linked())
                    ranking = await self._open_ranking(new, versions.ranker(), folder)
                _check_version("checkpoint", ranking.version, back.ranker)
                await self._check_stored_actions(ranking.actions or ())
            if versions.generators is not None and (
                versions.generator().version != back.generator
                or versions.generator().config != new.generate
            ):
                if (old := versions.generators.draining) is not None:
                    held.enter_context(old.use)
                    generation = self._generation_returned(old)
                else:
                    folder = await held.enter_async_context(back.folders[GENERATE.name].linked())
                    generation = await self._open_generation(new, versions.generator(), folder)
                _check_version("generate.checkpoint", generation.version, back.generator)
            await self._serve(new, ranking, generation, None, parts, self._coverage.measure)
        self._served, self._before = back, now_served
        log.info("rolled back: %s", _named(versions))

    async def _check_item_key(
        self,
        ranking: Prepared[Ranking] | None,
        generation: Prepared[Generation] | None,
        match: MatchVersion | None,
    ) -> bytes:
        """Return the key of the items' ids of new models; requests and histories have the same.

        Raises:
            ConfigError: it is another one.
        """
        served = self._versions.item_tables()
        new = dict(served)
        if ranking is not None:
            new["checkpoint"] = ranking.names
        if generation is not None:
            new["generate.checkpoint"] = generation.names
            if generation.items is not None:
                new["generate.catalogue"] = generation.items.names
        if match is not None:
            new["match.vectors"] = match.names
        key = key_of({**{f"the served {of}": table for of, table in served.items()}, **new})
        store = self._histories.store
        if store is not None and key != key_of(served):
            await check_item_key(store, key)
        return key

    async def _check_stored_actions(self, names: Sequence[str]) -> None:
        """Check that a ranker knows the actions of stored events; skipped if the store fails.

        Raises:
            ConfigError: it does not.
        """
        store = self._histories.store
        try:
            stored = () if store is None else await store.actions()
        except StoreFailed as error:
            log.warning("the actions of the history store could not be compared: %s", error)
            return
        if changed := difference(stored, names):
            raise ConfigError(f"checkpoint: the history store has other actions: {changed}")

    async def _serve(
        self,
        new: Config,
        ranking: Prepared[Ranking] | None,
        generation: Prepared[Generation] | None,
        match: MatchVersion | None,
        parts: CascadeParts | None,
        measure: Callable[..., Awaitable[Measured]],
    ) -> None:
        """Serve prepared models, and apply the settings; None = unchanged.

        Args:
            new: Configuration to apply.
            ranking, generation, match: Prepared models.
            parts: Parts of recommend.
            measure: Measures the coverage of the cascade's sources, or rejects it.
        """
        versions = self._versions
        sources: dict[str, Items] = {}
        if generation is not None and generation.items:
            sources[GENERATE.name] = generation.items.item_ids
        if match is not None:
            sources[MATCH.name] = lambda: match.matcher.vectors.item_ids
        if parts is not None:
            sources[POPULAR] = lambda: parts.popular
        async with self._coverage.changing:
            scored = None if ranking is None else ranking.scored
            measured = await measure(
                None if scored is None else scored.vocabulary, sources, new.recommend
            )
            commits = await self._followed(scored, None if generation is None else generation.items)
            # From here on nothing fails or waits, since a model must serve as soon as it takes over
            # pages.
            for commit in commits:
                commit()
            ranker = versions.rankers.current.version if versions.rankers else ""
            if versions.rankers is not None and ranking is not None:
                _replace(versions.rankers, ranking)
            if versions.generators is not None and generation is not None:
                _replace(versions.generators, generation)
            if self._vectors is not None and match is not None and new.match is not None:
                self._vectors.serve(match, new.match)
            if self._cascade is not None and parts is not None:
                is_same = ranking is None or ranking.version == ranker
                self._cascade.serve(parts, "" if is_same else ranker)
            self._coverage.accept(measured, new.recommend)
            self._reconfigure(new)

    @property
    def _parts(self) -> CascadeParts | None:
        return None if self._cascade is None else self._cascade.parts

    async def _followed(
        self, scored: ScoredItems | None, items: ServedCatalogue | None
    ) -> list[Commit]:
        """Let rankers prepare for a new catalogue, or a new ranker for the current one."""
        versions = self._versions
        commits = []
        served = None if versions.generators is None else versions.generators.current.items
        successor = None if items is served else items
        if successor is not None and served is not None:
            if successor.carried is not served.changes:  # changed since this one was read
                try:
                    await successor.reload(predecessor=served)
                except DataError as error:
                    raise ConfigError(f"generate.catalogue: {error}") from error
            successor.follow = versions.follow
            commits.append(await successor.followed())
        catalogue = successor or served
        rankers = versions.rankers
        follows = rankers is not None and any(one.items is scored for one in rankers.all())
        if scored is not None and catalogue is not None and not follows:
            with catalogue.pin() as (snapshot, _):
                commits.append(await scored.follow(snapshot, False))
        if successor is not None and served is not None:
            await successor.succeed(served)  # last, since it cannot be undone
        return commits

    def _reconfigure(self, new: Config) -> None:
        for kind, models in ((RANK, self._versions.rankers), (GENERATE, self._versions.generators)):
            if models is not None:
                models.current.relay.reconfigure(
                    new.relay, new.trigger_with_budget(), new.admission.tenant_weights
                )
                models.current.engine.objective_s = new.slo.objective_s(kind.name)
        if self._versions.rankers is not None:
            self._versions.rankers.current.reconfigure(new.service)
        self._admission.reconfigure(new.admission, new.slo.objective_s)
        self._scheduler.weigh(new.admission.tenant_weights)
        self._brownout.reconfigure(new.brownout)
        self._histories.reconfigure(
            new.service.known_prefix_bytes,
            new.service.cut_step_tokens,
            new.admission.tenant_weights,
            new.service.unsorted_history,
        )
        self._settings.config = new


@contextmanager
def _rejected(what: str) -> Iterator[None]:
    try:
        yield
    except NpuGrError as error:
        log.error("%s rejected: %s; what serves stays", what, error)
        raise


def _replace(models: ModelVersions[V], prepared: Prepared[V]) -> None:
    new = prepared.activate()
    if new is models.draining:
        models.roll_back()
    elif new is not models.current:
        models.replace(new)


def _weights_of(versions: Versions) -> str:
    """Return the version of the served ranker's weights, with its deltas; "" = there is none."""
    return versions.ranker().weights.combined() if versions.rankers else ""


def _check_version(field: str, found: str, wanted: str) -> None:
    """Check the version of a model that was read again.

    Raises:
        ConfigError: its files are not those that served.
    """
    if found != wanted:
        raise ConfigError(
            f"{field}: the files of version {wanted}, which served before, were overwritten: they "
            f"are version {found} now; put them into a folder, name it, and reload"
        )


def _named(versions: Versions) -> str:
    return ", ".join(
        f"{one.name} {one.version}" for one in versions.models() if not one.is_draining
    )
