"""Evaluate a generator: HR and NDCG of the next item over the whole catalogue, found by the search that serves.

Protocol: leave-one-out. All of the user's events before the next item are the history; every item of the catalogue may
be the answer, no negatives are sampled. "Unseen" figures leave out the items of the history, as a request that denies
them does. If the beams do not contain the next item, the generator has missed it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from rich.table import Table

from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.catalogue.build import build_trie
from npu_gr.catalogue.filters import Filter, allow_all, deny_items
from npu_gr.catalogue.trie import Codebooks
from npu_gr.core.arrays import I64
from npu_gr.engine.beam_search import SearchOptions, Tables
from npu_gr.engine.generate_engine import Generator, PromptKV, layout_of, make_prompt
from npu_gr.engine.kv.arena import KVArena
from npu_gr.engine.kv.pages import PageRun
from npu_gr.model.decoder import Decoder
from npu_gr.train.baselines import Baseline
from npu_gr.train.data import InteractionLog, NextItem, what_stands
from npu_gr.train.generate.codes import ItemCodes
from npu_gr.train.metrics import F64, NAN, cells, hit_ratio, known, ndcg
from npu_gr.train.next_item import NO_RANKS, BaselineComparison, NextItemRanks, compare, rank_next_items

MISSED = float("inf")  # rank of an item that no beam has found
DECODER = "semantic-ID decoder"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalFigures:
    """One model's figures. NaN = the model does not have that figure."""

    model: str
    num_users: int  # behind the figures
    hr_at_10: float
    ndcg_at_10: float
    hr_at_50: float
    hr_at_10_unseen: float = NAN
    ndcg_at_10_unseen: float = NAN
    invalid_ratio: float = NAN  # share of the answered items that the catalogue lacks
    ranks: NextItemRanks = field(default=NO_RANKS, repr=False, compare=False)  # behind the figures

    @classmethod
    def from_ranks(cls, ranks: NextItemRanks, model: str = DECODER, invalid_ratio: float = NAN) -> RetrievalFigures:
        """Compute the figures of a model.

        Args:
            ranks: of each user's next item; `MISSED` = it was not found, and no `unseen` ones = not measured.
            model: name.
            invalid_ratio: share of the answered items that the catalogue lacks.
        """
        overall, unseen, _ = ranks
        if not len(overall):
            return cls(model=model, num_users=0, hr_at_10=NAN, ndcg_at_10=NAN, hr_at_50=NAN)
        return cls(
            model=model,
            num_users=len(overall),
            hr_at_10=hit_ratio(overall, 10),
            ndcg_at_10=ndcg(overall, 10),
            hr_at_50=hit_ratio(overall, 50),
            hr_at_10_unseen=hit_ratio(unseen, 10) if len(unseen) else NAN,
            ndcg_at_10_unseen=ndcg(unseen, 10) if len(unseen) else NAN,
            invalid_ratio=invalid_ratio,
            ranks=ranks,
        )

    @property
    def interval(self) -> float:
        """Half the width of HR@10's 95 % confidence interval, by the normal approximation."""
        return float(1.96 * np.sqrt(self.hr_at_10 * (1 - self.hr_at_10) / max(self.num_users, 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalReport:
    """The generator's figures and those to compare them with."""

    num_trained: int  # events that the evaluated generator was trained on
    num_served: int  # the same of the served one
    generator: RetrievalFigures
    validation: RetrievalFigures  # on some users' last event but one; the weights were chosen by them
    baselines: tuple[RetrievalFigures, ...]  # measured in this run
    published: tuple[RetrievalFigures, ...]  # measured by others, on the same data
    left_out: tuple[str, ...] = ()  # why other baselines are not among them
    codes: str = ""  # how evenly the codes are used, in words

    def as_dict(self) -> dict[str, Any]:
        """Turn the report into plain types for JSON; leave out figures that a model does not have."""
        comparison = self.comparison()
        return {
            "num_trained": self.num_trained,
            "num_served": self.num_served,
            "codes": self.codes,
            "test": known(asdict(self.generator)),
            "validation": known(asdict(self.validation)),
            "baselines": [known(asdict(row)) for row in self.baselines],
            "published": [known(asdict(row)) for row in self.published],
            "comparison": None if comparison is None else comparison.as_dict(),
        }

    def comparison(self) -> BaselineComparison | None:
        """Compare the generator with the strongest baseline; None = there is no user to compare on."""
        return compare(self.generator.model, self.generator.ranks, {row.model: row.ranks for row in self.baselines})

    def text(self) -> str:
        """Say in words how the generator stands beside the strongest baseline."""
        comparison = self.comparison()
        words = "no user has a next item to compare on" if comparison is None else comparison.text()
        return "\n".join([*([self.codes] if self.codes else []), *self.left_out, words])

    def table(self) -> Table:
        """Lay the figures out for a terminal."""
        table = Table(
            "model",
            *("HR@10", "NDCG@10", "HR@50", "HR@10 unseen", "NDCG@10 unseen", "invalid"),
            title=what_stands("leave-one-out", self.num_trained, self.num_served),
            caption=f"whole catalogue, {self.generator.num_users} users; 95 % interval of the decoder's HR@10: "
            f"+-{self.generator.interval:.4f}; on the validation: HR@10 {self.validation.hr_at_10:.4f}, "
            f"NDCG@10 {self.validation.ndcg_at_10:.4f}",
        )
        for row in (*self.published, *self.baselines, self.generator):
            unseen = (row.hr_at_10_unseen, row.ndcg_at_10_unseen)
            figures = (row.hr_at_10, row.ndcg_at_10, row.hr_at_50, *unseen, row.invalid_ratio)
            table.add_row(row.model, *cells(figures))
        return table


class GeneratorJudge:
    """Evaluates models by the service's own search over a catalogue, one user after the other."""

    def __init__(self, codes: ItemCodes, item_ids: I64, history_items: int, beam_width: int) -> None:
        self._backend = CPUBackend()
        self._trie = build_trie(codes.sids, item_ids, Codebooks.stacked(codes.code_count))
        self._tables = Tables.upload(self._trie, self._backend.device)
        self._sids = dict(zip(item_ids.tolist(), codes.sids.tolist(), strict=True))
        self._max_tokens = history_items * self._trie.num_levels
        self._options = SearchOptions(width=beam_width, normalise=codes.normalise)

    def judge(
        self,
        model: Decoder,
        log: InteractionLog,
        targets: Sequence[NextItem],
        done: Callable[[int, int], None] = lambda *_: None,
        *,
        unseen: bool = False,
    ) -> RetrievalFigures:
        """Evaluate a model; it is put into evaluation mode.

        Args:
            model: over the codes of the catalogue.
            log: with the users' histories.
            targets: the next items to find.
            done: called with (users so far, users in all) after every user.
            unseen: measure the unseen figures too, by a second search for every user.
        """
        model.eval()
        generator = Generator(model, self._backend, self._options.width, self._trie.num_levels)
        layout = layout_of(model)
        pages = layout.pages(self._max_tokens)
        arena = KVArena(layout, pages, self._backend.device)
        ranks = np.full(len(targets), MISSED)
        ranks_unseen = np.full(len(targets), MISSED)
        is_repeat = np.zeros(len(targets), np.bool_)
        num_answered = 0
        num_invalid = 0
        for index, (user, event) in enumerate(targets):
            history = log.item_ids[log.items[log.starts[user] : event]]
            target = int(log.item_ids[log.items[event]])
            is_repeat[index] = target in history
            tokens = make_prompt(self._trie, history, self._max_tokens).tokens
            part = PromptKV(arena, (PageRun(0, pages),), len(tokens))
            generator.encode(tokens, [], part)
            searches: list[tuple[F64, Filter | None]] = [(ranks, None)]
            if unseen:
                searches.append((ranks_unseen, self._without(history, target)))
            for ranks_found, allow in searches:
                width = self._options.width
                found = generator.generate(self._trie, self._tables, tokens, [part], self._options, width, allow)
                place = np.flatnonzero(found.item_ids == target)
                ranks_found[index] = place[0] if len(place) else MISSED
                answered = zip(found.item_ids.tolist(), found.sids.tolist(), strict=True)
                num_invalid += sum(self._sids.get(item) != sid for item, sid in answered)
                num_answered += len(found.item_ids)
            done(index + 1, len(targets))
        invalid_ratio = num_invalid / max(num_answered, 1)
        found_ranks = NextItemRanks(ranks, ranks_unseen if unseen else np.empty(0), is_repeat)
        return RetrievalFigures.from_ranks(found_ranks, invalid_ratio=invalid_ratio)

    def _without(self, history: I64, target: int) -> Filter:
        """Allow all items but those of the history; the target stays allowed, even if the user had it before."""
        return allow_all(self._trie).without(deny_items(self._trie, history[history != target]))


def baseline_figures(log: InteractionLog, targets: Sequence[NextItem], baseline: Baseline) -> RetrievalFigures:
    """Evaluate a baseline by the same protocol.

    Args:
        log: with the users' histories.
        targets: the next items to rank.
        baseline: fitted to the log.
    """
    ranks = rank_next_items(log, targets, (baseline.next_items(log, user) for user, _ in targets))
    return RetrievalFigures.from_ranks(ranks, baseline.name)


def _figures(model: str, num_users: int, hr_at_10: float, ndcg_at_10: float, hr_at_50: float = NAN) -> RetrievalFigures:
    return RetrievalFigures(
        model=model, num_users=num_users, hr_at_10=hr_at_10, ndcg_at_10=ndcg_at_10, hr_at_50=hr_at_50
    )


# (users, items, events) of a public log -> figures that others have measured on it by this protocol
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


def published(log: InteractionLog) -> tuple[RetrievalFigures, ...]:
    """Look up the published figures of a log; empty if it is none of the public ones."""
    return _PUBLISHED.get((log.num_users, log.num_items, len(log.items)), ())
