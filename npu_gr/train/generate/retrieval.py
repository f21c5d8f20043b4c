"""What a generator is worth: HR and NDCG of the next item over the whole catalogue, found by the search that serves.

Protocol: leave-one-out. The user's events before the one asked for are the history, the newest included; every item
of the catalogue may be the answer, no sampled negatives. "unseen" leaves out the items of the history, as a request
does that denies them. A generator that does not find the item among its beams has missed it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.catalogue.build import build_trie
from npu_gr.catalogue.filters import Filter, allow_all, deny_items
from npu_gr.catalogue.trie import Codebooks
from npu_gr.core.request import I64
from npu_gr.engine.beam_search import SearchOptions, Tables
from npu_gr.engine.generate_engine import Generator, PromptKV, layout_of, make_prompt
from npu_gr.kv.arena import KVArena
from npu_gr.kv.layout import PageRun
from npu_gr.model.decoder import Decoder
from npu_gr.train.baselines import Baseline
from npu_gr.train.data import Log
from npu_gr.train.generate.codes import ItemCodes
from npu_gr.train.metrics import hit_ratio, ndcg, rank_of

F64 = npt.NDArray[np.float64]
Asked = Sequence[tuple[int, int]]  # (user, index of the event asked for), as `Log.next_items` gives them
MISSED, NAN = float("inf"), float("nan")
DECODER = "semantic-ID decoder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One model's; NaN = it has none."""

    model: str
    num_users: int
    hr_at_10: float
    ndcg_at_10: float
    hr_at_50: float
    hr_at_10_unseen: float = NAN
    ndcg_at_10_unseen: float = NAN
    invalid_ratio: float = NAN  # answered items that the catalogue lacks

    @classmethod
    def of(cls, ranks: F64, unseen: F64 | None = None, model: str = DECODER, invalid_ratio: float = NAN) -> Figures:
        """From the rank of each user's item, from 0; `unseen`: among the items that are not in the history."""
        if not len(ranks):
            return cls(model=model, num_users=0, hr_at_10=NAN, ndcg_at_10=NAN, hr_at_50=NAN)
        return cls(
            model=model,
            num_users=len(ranks),
            hr_at_10=hit_ratio(ranks, 10),
            ndcg_at_10=ndcg(ranks, 10),
            hr_at_50=hit_ratio(ranks, 50),
            hr_at_10_unseen=NAN if unseen is None else hit_ratio(unseen, 10),
            ndcg_at_10_unseen=NAN if unseen is None else ndcg(unseen, 10),
            invalid_ratio=invalid_ratio,
        )

    @property
    def interval(self) -> float:
        """Half the width of the 95 % interval of HR@10 (normal approximation)."""
        return float(1.96 * np.sqrt(self.hr_at_10 * (1 - self.hr_at_10) / max(self.num_users, 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The generator's figures and those it is to be compared with."""

    num_trained: int  # events
    generator: Figures
    validation: Figures  # of some users' last event but one, by which the weights were chosen
    baselines: tuple[Figures, ...]  # of this run
    published: tuple[Figures, ...]  # of others, on the same data

    def as_dict(self) -> dict[str, Any]:
        """For JSON: what a model does not have is left out."""

        def known(figures: Figures) -> dict[str, Any]:
            return {name: value for name, value in asdict(figures).items() if value == value}

        return {
            "num_trained": self.num_trained,
            "test": known(self.generator),
            "validation": known(self.validation),
            "baselines": [known(row) for row in self.baselines],
            "published": [known(row) for row in self.published],
        }

    def table(self) -> Table:
        """For a terminal."""
        table = Table(
            "model",
            *("HR@10", "NDCG@10", "HR@50", "HR@10 unseen", "NDCG@10 unseen", "invalid"),
            title=f"leave-one-out, whole catalogue: {self.num_trained} events trained on",
            caption=f"the last event of {self.generator.num_users} users; 95 % interval of the decoder's HR@10: "
            f"+-{self.generator.interval:.4f}; on the validation: HR@10 {self.validation.hr_at_10:.4f}, "
            f"NDCG@10 {self.validation.ndcg_at_10:.4f}",
        )
        for row in (*self.published, *self.baselines, self.generator):
            unseen = (row.hr_at_10_unseen, row.ndcg_at_10_unseen)
            figures = (row.hr_at_10, row.ndcg_at_10, row.hr_at_50, *unseen, row.invalid_ratio)
            table.add_row(row.model, *("-" if value != value else f"{value:.4f}" for value in figures))
        return table


class Search:
    """The service's own search over a catalogue of codes, one user after the other."""

    def __init__(self, codes: ItemCodes, item_ids: I64, history_items: int, beam_width: int) -> None:
        self._backend = CPUBackend()
        self._trie = build_trie(codes.sids, item_ids, Codebooks.stacked(codes.code_count))
        self._tables = Tables.upload(self._trie, self._backend.device)
        self._sids = dict(zip(item_ids.tolist(), codes.sids.tolist(), strict=True))
        self._max_tokens = history_items * self._trie.num_levels
        self._options = SearchOptions(width=beam_width)

    def judge(
        self,
        model: Decoder,
        log: Log,
        asked: Asked,
        done: Callable[[int, int], None] = lambda *_: None,
        *,
        unseen: bool = False,
    ) -> Figures:
        """Figures of a model; with `unseen` those too. `done(users so far, users in all)` follows every user."""
        model.eval()
        generator = Generator(model, self._backend, self._options.width, self._trie.num_levels)
        layout = layout_of(model)
        pages = layout.pages(self._max_tokens)
        arena = KVArena(layout, pages, self._backend.device)
        ranks, ranks_unseen = np.full((2, len(asked)), MISSED)
        num_answered, num_invalid = 0, 0
        for index, (user, at) in enumerate(asked):
            history, target = log.item_ids[log.items[log.starts[user] : at]], int(log.item_ids[log.items[at]])
            tokens = make_prompt(self._trie, history, self._max_tokens).tokens
            part = PromptKV(arena, (PageRun(0, pages),), len(tokens))
            generator.encode(tokens, [], part)
            asking: list[tuple[F64, Filter | None]] = [(ranks, None)]
            if unseen:
                asking.append((ranks_unseen, self._without(history, target)))
            for found_at, allow in asking:
                width = self._options.width
                found = generator.generate(self._trie, self._tables, tokens, [part], self._options, width, allow)
                place = np.flatnonzero(found.item_ids == target)
                found_at[index] = place[0] if len(place) else MISSED
                answered = zip(found.item_ids.tolist(), found.sids.tolist(), strict=True)
                num_invalid += sum(self._sids.get(item) != sid for item, sid in answered)
                num_answered += len(found.item_ids)
            done(index + 1, len(asked))
        return Figures.of(ranks, ranks_unseen if unseen else None, invalid_ratio=num_invalid / max(num_answered, 1))

    def _without(self, history: I64, target: int) -> Filter:
        """All items but those of the history; the one asked for stays, should it come again."""
        return allow_all(self._trie).without(deny_items(self._trie, history[history != target]))


def baseline_figures(log: Log, asked: Asked, baseline: Baseline) -> Figures:
    """Figures of a fitted baseline."""
    ranks, ranks_unseen = np.empty((2, len(asked)))
    for index, (user, at) in enumerate(asked):
        scores, target = baseline.next_items(log, user), int(log.items[at])
        ranks[index] = rank_of(scores, target)
        history = log.items[log.starts[user] : at]
        scores = scores.copy()
        scores[history[history != target]] = -np.inf
        ranks_unseen[index] = rank_of(scores, target)
    return Figures.of(ranks, ranks_unseen, baseline.name)


def _figures(model: str, num_users: int, hr_at_10: float, ndcg_at_10: float, hr_at_50: float = NAN) -> Figures:
    return Figures(model=model, num_users=num_users, hr_at_10=hr_at_10, ndcg_at_10=ndcg_at_10, hr_at_50=hr_at_50)


# (users, items, events) of a public log -> what others have measured on it by this protocol
_PUBLISHED = {
    (943, 1682, 100_000): (  # MovieLens-100K
        _figures("earlier: SASRec, d 64, 2 layers", 943, 0.141, 0.070),
        _figures("earlier: HSTU, same size", 943, 0.135, 0.064),
        _figures("earlier: 3-level decoder, beam 50", 943, 0.117, 0.058, 0.384),
    ),
    (22_363, 12_101, 198_502): (  # Amazon Beauty, with the codes of github.com/NonameUntitled/tiger
        _figures("published: SASRec", 22_363, 0.0516, 0.0272),
        _figures("published: TIGER", 22_363, 0.0582, 0.0319),
        _figures("earlier: SASRec-like", 22_363, 0.0444, NAN),
    ),
}


def published(log: Log) -> tuple[Figures, ...]:
    """Rows for a log that is one of the public ones."""
    return _PUBLISHED.get((log.num_users, log.num_items, len(log.items)), ())
