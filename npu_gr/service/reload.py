"""A configuration file read again while the instance serves: what it says takes effect, or nothing does.

    checkpoint                           another version: loaded, proven and warmed beside the old one, which drains
    generate                             another version: loaded and warmed beside the old one, which drains; what is
                                         sized by it, and its number of codes, are of the start
    slo, service, relay, trigger, brownout   in force from the next request on
    calibration                          in force with the next version of the checkpoint
    everything else                      sized or opened at start: refused by name

The pages, and what lies in them, stay: a prefix's key holds the version that wrote it. Latency histograms keep the
edges of the start, so do the rules made from them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from npu_gr.admission.brownout import BrownoutControl
from npu_gr.core.errors import ConfigError, Unavailable
from npu_gr.jobs.generate import Generation
from npu_gr.jobs.rank import Ranking
from npu_gr.service.config import Config, to_table
from npu_gr.service.service import Service

log = logging.getLogger(__name__)

CHANGEABLE = {"checkpoint", "generate", "slo", "service", "relay", "trigger", "calibration", "brownout"}


def check_changeable(old: Config, new: Config) -> None:
    """Nothing differs but what can change at run time.

    Raises:
        ConfigError: names the sections.
    """
    differing = [name for name in Config.__struct_fields__ if getattr(old, name) != getattr(new, name)]
    if fixed := [name for name in differing if name not in CHANGEABLE]:
        raise ConfigError(f"{', '.join(fixed)}: cannot change while the instance runs; start it anew")
    if (old.checkpoint is None) != (new.checkpoint is None):
        raise ConfigError("checkpoint: an instance cannot begin or cease to rank while it runs; start it anew")
    before, after = old.generate, new.generate
    if before is None or after is None:
        if before is not after:
            raise ConfigError("generate: an instance cannot begin or cease to generate while it runs; start it anew")
        return
    for field in ("hbm_bytes", "dram_bytes", "filter_cache_bytes"):
        if getattr(before, field) != getattr(after, field):
            raise ConfigError(f"generate.{field}: cannot change while the instance runs; start it anew")
    if len(before.codes) != len(after.codes):
        raise ConfigError(
            f"generate.codes: {len(after.codes)} levels where {len(before.codes)} are served; start it anew"
        )


class Reload:
    """Call it to bring a service to what its file says now. One at a time; a second waits for the first."""

    def __init__(
        self,
        service: Service,
        config: Config,
        read: Callable[[], Config],
        open_ranking: Callable[[Config, Ranking], Awaitable[Callable[[], Ranking]]],
        open_generation: Callable[[Config, Generation], Awaitable[Callable[[], Generation]]],
    ) -> None:
        """Nothing is read yet.

        Args:
            service: that serves `config`.
            config: as it was started.
            read: the configuration, from where that one came. In a thread.
            open_ranking, open_generation: a model of the new configuration, ready to serve, which takes the pages over
                of the one that serves when the result is called; that one itself where its version is meant.
        """
        self._service, self._config, self._read = service, config, read
        self._open_ranking, self._open_generation = open_ranking, open_generation
        self._one_at_a_time = asyncio.Lock()

    async def __call__(self) -> None:
        """Reload.

        Raises:
            ConfigError: a setting cannot be used, or not changed at run time; everything is as before.
            DeviceError: the new version failed its self-test; everything is as before.
            Unavailable: the version before the current one still drains, and a third would not fit.
        """
        async with self._one_at_a_time:
            service, new = self._service, await asyncio.to_thread(self._read)
            check_changeable(self._config, new)
            if service.versions.is_draining:
                raise Unavailable("the version before this one still drains; try again when it is gone")
            rank = generate = None
            if new.checkpoint is not None:
                rank = await self._open_ranking(new, service.ranking)
            if new.generate is not None:
                generate = await self._open_generation(new, service.generation)
            # from here on nothing fails and nothing waits: who takes pages over must serve at once
            if rank is not None and (ranking := rank()) is not service.ranking:
                service.versions.replace_ranking(ranking)
            if generate is not None and (generation := generate()) is not service.generation:
                service.versions.replace_generation(generation)
            for job in service.versions.current():
                job.relay.reconfigure(new.relay, new.trigger_with_budget())
            if new.generate is not None:
                service.generation.engine.objective_s = new.slo.objective_s("generate")
            if new.checkpoint is not None:
                service.ranking.engine.objective_s = new.slo.objective_s("rank")
            service.become(new.service, new.slo, BrownoutControl(new.brownout), to_table(new))
            self._config = new
            log.info(
                "reloaded: %s",
                ", ".join(f"{m.name} {m.version}" for m in service.versions.models() if not m.is_draining),
            )
