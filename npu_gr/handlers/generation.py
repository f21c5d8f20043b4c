"""One version of the generator: semantic-ID beam search after a history.

    prompt -> lease of the prompt's KV -> one pass: encode what is missing, search -> items

A request uses one version of the generator and one of the catalogue from prompt to items.
`versions.py` selects the version of the generator.
"""

from __future__ import annotations

import asyncio
import time

import numpy as np

from npu_gr.catalogue.filters import Filter
from npu_gr.catalogue.names import EMPTY, ItemNames
from npu_gr.catalogue.versions import Snapshot
from npu_gr.core.arrays import I64
from npu_gr.core.errors import ColdUser, NotFound, Unprocessable
from npu_gr.core.history import HistoryReport, UserKey
from npu_gr.core.lifetime import InUse
from npu_gr.core.names import ActionNames
from npu_gr.core.request import GenerateAnswer, GenerateRequest, LimitedBy, Verdict
from npu_gr.core.served import ModelInfo
from npu_gr.core.text_format import quoted
from npu_gr.engine.beam_search import SearchOptions
from npu_gr.engine.generate_engine import Frame, GenerateEngine, GeneratePass, Prompt, make_prompt
from npu_gr.handlers.base import Call
from npu_gr.handlers.config import GenerateConfig
from npu_gr.handlers.prefix_histories import UserHistory
from npu_gr.handlers.served_catalogue import ServedCatalogue
from npu_gr.metrics.registry import Metrics
from npu_gr.relay.relay import Relay


class Generation:
    """One version of the generator. Event loop only."""

    def __init__(
        self,
        config: GenerateConfig,
        name: str,
        version: str,
        engine: GenerateEngine,
        relay: Relay[Prompt],
        items: ServedCatalogue,
        metrics: Metrics,
        names: ItemNames = EMPTY,
        actions: ActionNames | None = None,
    ) -> None:
        """Serve one checkpoint.

        Args:
            config: Section `generate` of the configuration.
            name, version: Name and version of the checkpoint.
            engine: Engine of the passes.
            relay: Caches the KV of prompts.
            items: Catalogue of the items.
            metrics: Metrics of the instance.
            names: Item names.
            actions: Action names of the training histories, if known; the model ignores actions.
        """
        self.config = config
        self.actions = actions
        self.names = names  # a reload may replace them
        self.name = name
        self.version = version
        self.engine = engine
        self.relay = relay
        self.items = items
        self._metrics = metrics
        self._max_prompt_tokens = engine.generator.max_prompt_tokens
        # newest events that are searched for items of the prompt, since some are not in the
        # catalogue
        self.max_events = SEARCHED_EVENTS * (
            (self._max_prompt_tokens - config.num_frame_tokens) // len(config.codes)
        )
        self.use = InUse()

    @property
    def model(self) -> ModelInfo:
        """Describe the version, with the current catalogue."""
        return ModelInfo(
            name=self.name,
            version=self.version,
            tasks=("generate",),
            actions=self.actions.names if self.actions else (),
            num_items=self.items.info().num_items,
            max_history_tokens=self._max_prompt_tokens,
            device=self.engine.backend.name,
            dtype=self.engine.arena.layout.dtype,
            kernels=self.engine.backend.kernels,
            ops=self.engine.backend.ops,
        )

    async def stop(self) -> None:
        """Stop the relay."""
        await self.relay.stop()

    # ---- requests

    async def signal(self, user: UserKey, history: UserHistory) -> Verdict:
        """Start a prefill of the prompt, if the trigger decides so."""
        with self.items.pin() as (snapshot, _):
            return self.relay.signal(user, await self._prompt(snapshot, user, history))

    async def _prompt(self, snapshot: Snapshot, user: UserKey, history: UserHistory) -> Prompt:
        """Make the prompt in a thread, since a thousand catalogue look-ups take milliseconds."""
        return await asyncio.to_thread(
            make_prompt,
            snapshot.trie,
            history.newest.events.items,
            self._max_prompt_tokens,
            self.config.cut_step_items,
            history.newest.first_index,
            self._frame(user),
            is_divisible=self.engine.generator.model.is_divisible,
        )

    def _frame(self, user: UserKey) -> Frame:
        """Return the tokens around the items of a user."""
        users = self.config.user_tokens
        own = () if users is None else (users.of(user.user),)
        return Frame(self.config.tokens_before + own, self.config.tokens_after or ())

    def excludes_seen(self, request: GenerateRequest) -> bool:
        """Whether the answer leaves out the items of the history."""
        return self.config.exclude_seen if request.exclude_seen is None else request.exclude_seen

    def _filter(self, snapshot: Snapshot, request: GenerateRequest, item_ids: I64) -> Filter | None:
        """Make the filter of a request; None if all items pass. Slow: call it in a thread."""
        denied = [] if request.deny_items is None else [request.deny_items]
        if self.excludes_seen(request):
            denied.append(item_ids)
        deny = np.concatenate(denied) if denied else None
        return self.items.filters.filter_for(
            snapshot, request.allow_items, deny, request.attributes
        )

    async def generate(
        self, request: GenerateRequest, history: UserHistory, call: Call, history_s: float = 0.0
    ) -> GenerateAnswer:
        """Find the best items after a history.

        Args:
            request: The request.
            history: History of the user.
            call: Arrival, deadline and permit.
            history_s: Seconds of reading the history.

        Raises:
            Unprocessable: the beam exceeds the limit, or a filter is invalid.
            ColdUser: no item of the history is in the catalogue.
            NotFound: the requested version of the catalogue is not served.
        """
        began_at = time.monotonic()
        width = request.beam_width or max(
            self.config.beam_width, min(request.num_items, self.config.max_beams)
        )
        if width > self.config.max_beams:
            raise Unprocessable(f"beam_width: {width}, the limit is {self.config.max_beams}")
        self._metrics.generate.searched(width)
        with self.items.pin() as (snapshot, tables):
            if request.catalogue_version not in (None, snapshot.version):
                wanted = quoted(request.catalogue_version)
                raise NotFound(
                    f"catalogue_version: {wanted} is not served; the current one is "
                    f"{snapshot.version!r}"
                )
            prompt = await self._prompt(snapshot, request.user, history)
            if not len(prompt):
                raise ColdUser(
                    f"history: none of the newest {len(history.newest.events)} items is "
                    "in the catalogue"
                )
            normalise = request.normalise or self.config.normalise
            options = SearchOptions(
                width=width, normalise=normalise, temperature=request.temperature
            )
            allow = await asyncio.to_thread(self._filter, snapshot, request, history.all_items)
            async with self.relay.lease(
                request.user, prompt, width, call.deadline_at, call.slot.suspended
            ) as lease:
                lease_s = time.monotonic() - began_at
                if lease.first_token:
                    prompt = prompt.newest(
                        len(prompt) - lease.first_token, snapshot.trie.num_levels
                    )
                work = GeneratePass(
                    trie=snapshot.trie,
                    tables=tables,
                    prompt=prompt,
                    options=options,
                    num_items=request.num_items,
                    allow=allow,
                    cached=lease.cached,
                    keep=lease.keep,
                )
                done = await self.engine.generate(
                    work, call.deadline_at, call.arrived_at, call.tenant
                )
        limited_by = LimitedBy.NONE
        if (num_found := len(done.value.item_ids)) < request.num_items:
            rest = LimitedBy.FILTER if num_found < snapshot.num_items else LimitedBy.CATALOGUE
            limited_by = LimitedBy.BEAM if done.value.is_cut else rest
        return GenerateAnswer(
            model_version=self.version,
            catalogue_version=snapshot.version,
            outcome=lease.outcome,
            reason=lease.reason,
            limited_by=limited_by,
            item_ids=done.value.item_ids,
            sids=done.value.sids,
            scores=done.value.scores,
            history=HistoryReport(
                fingerprint=history.fingerprint,
                num_tokens=len(prompt),
                read_events=prompt.num_items(snapshot.trie.num_levels),
                cut_tokens=prompt.cut_items * snapshot.trie.num_levels,
                unknown_items=prompt.unknown_items,
            ),
            prefix_tokens=lease.cached.num_tokens if lease.cached else 0,
            stages_s={
                "history": history_s,
                "lease": lease_s,
                "queue": done.queue_s,
                "device": done.device_s,
            },
        )


SEARCHED_EVENTS = 4  # per item of a full prompt
WARM_UP_TOKENS = (48, 240, 960)
WARM_UP_BEAMS = (16, 128)


async def warm_up(config: GenerateConfig, engine: GenerateEngine, items: ServedCatalogue) -> None:
    """Run each shape once, and fit the cost model; nothing for an empty catalogue."""
    with items.pin() as (snapshot, tables):
        if snapshot.trie.num_items:
            lengths = sorted({min(engine.generator.max_prompt_tokens, n) for n in WARM_UP_TOKENS})
            widths = sorted({min(config.max_beams, width) for width in WARM_UP_BEAMS})
            await engine.warm_up(snapshot.trie, tables, lengths, widths)
