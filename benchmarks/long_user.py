"""One user's history of any length in an engine without a service around it."""

from __future__ import annotations

import time

import numpy as np
import torch

from benchmarks.rank import layout
from npu_gr.backend.base import Backend
from npu_gr.core.arrays import I64
from npu_gr.core.history import Events, HistoryReport
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import PageRun
from npu_gr.engine.page_jobs import CachedPrefix, chunks
from npu_gr.engine.rank_engine import RankEngine, RankPass
from npu_gr.model.config import HSTUConfig
from npu_gr.model.history_tokenizer import Tokens
from npu_gr.model.hstu import HSTU

CANDIDATES = 100
CHUNK_TOKENS = 512  # of a prefill, as `scheduler.prefill_chunk_tokens`
NOTHING: I64 = np.empty(0, np.int64)


class Long:
    """A ranker, and one user's history of any length in its pages."""

    def __init__(
        self, model: HSTU, backend: Backend, seed: int, pages: torch.dtype | None = None
    ) -> None:
        """Lay out the pages of a model in evaluation mode, its items frozen.

        Args:
            model, backend: Model and its backend.
            seed: Random seed of the histories.
            pages: Dtype of the pages; None = the model's.
        """
        self.layout = layout(model.config, backend, pages or model.dtype)
        self._backend, self._model, self._seed = backend, model, seed

    @classmethod
    def untrained(
        cls,
        shape: HSTUConfig,
        backend: Backend,
        dtype: torch.dtype,
        seed: int,
        pages: torch.dtype | None = None,
    ) -> Long:
        """Draw the weights of a model."""
        torch.manual_seed(seed)
        model = HSTU(shape)
        model.cast(dtype).eval().items.freeze()
        return cls(model, backend, seed, pages)

    def engine(self, num_tokens: int) -> tuple[RankEngine, tuple[PageRun, ...]]:
        """Make an engine with the pages of one history."""
        pages = self.layout.pages(num_tokens)
        arena = KVArena(self.layout, pages, self._backend.device, pack=self._backend.pack_kv)
        engine = RankEngine(self._model, self._backend, None, arena)  # type: ignore[arg-type]
        return engine, (PageRun(0, pages),)

    def tokens(self, num_events: int) -> Tokens:
        """Draw a history."""
        random = np.random.default_rng(self._seed)
        rows = random.integers(0, self._model.config.num_items, num_events)
        times = 1_600_000_000 + np.cumsum(random.integers(0, 10_000, num_events))
        events = Events(rows, np.zeros(num_events, np.int16), times)
        return Tokens(events, rows, HistoryReport(fingerprint="", num_tokens=num_events))


class Prepared:
    """A history of one length, encoded chunk by chunk, as a chain of deltas, on this thread."""

    def __init__(self, long: Long, num_events: int) -> None:
        self.whole = long.tokens(num_events + 1)
        self.engine, self.runs = long.engine(num_events + 1)
        self.num_events = num_events
        began_at = time.process_time()
        for start, stop in chunks(0, num_events, CHUNK_TOKENS):
            self.encode(start, stop)
        self.prefill_s = time.process_time() - began_at

    def encode(self, start: int, stop: int) -> None:
        """Encode [start, stop) behind the tokens before it."""
        cached = CachedPrefix(self.runs, start) if start else None
        self.engine.forward([RankPass(self.whole[:stop], 0, NOTHING, 0, cached, self.runs)])

    def rank(self, cached: bool = True) -> bytes:
        """Rank, from the prefix or cold."""
        tokens = self.whole[: self.num_events]
        prefix = CachedPrefix(self.runs, self.num_events) if cached else None
        work = RankPass(tokens, 0, np.arange(CANDIDATES), int(tokens.timestamps[-1]), prefix)
        return self.engine.forward([work])[0].tobytes()

    def append(self) -> None:
        """Encode one more event. The row that it overwrites is read by no later row."""
        self.encode(self.num_events, self.num_events + 1)
