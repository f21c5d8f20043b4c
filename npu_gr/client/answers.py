"""What a client answers: names and scores in front, and `answer`, all that the service wrote."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import msgspec
import numpy as np

from npu_gr.client.channel import Reply
from npu_gr.client.columns import Name
from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import BadAnswer
from npu_gr.server.codec.fields import Titles
from npu_gr.server.codec.generate import GenerateOut
from npu_gr.server.codec.match import MatchOut
from npu_gr.server.codec.media import JSON, MSGPACK
from npu_gr.server.codec.rank import RankOut
from npu_gr.server.codec.recommend import RecommendOut

Out = TypeVar("Out", GenerateOut, MatchOut, RecommendOut)
S = TypeVar("S")


class Item(NamedTuple):
    """An item of an answer."""

    name: Name
    score: float  # NaN = unknown to the model, or not ranked
    title: str | None = None  # None = it has none, or was not asked for


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ranked:
    """Scores of candidates, and how they came to be."""

    names: list[Name]  # [c] the candidates, as the caller wrote them
    scores: dict[str, F32]  # task -> [c] logits; NaN = the catalogue lacks the item
    top: list[Item]  # the best `top_k`, by the first task; of equals the earlier candidate
    answer: RankOut

    @property
    def outcome(self) -> str:
        """How the prefix was found: hbm_hit, joined, dram_hit, miss_full or degraded."""
        return self.answer.outcome


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoundItems(Generic[Out]):
    """Items, best first, and how they came to be. It is a sequence of `Item`."""

    names: list[Name]  # [n] as the company knows them
    scores: F32  # [n]
    titles: list[str | None]  # [n]
    answer: Out

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Item]:
        return map(Item, self.names, self.scores.tolist(), self.titles)

    def __getitem__(self, place: int) -> Item:
        return Item(self.names[place], float(self.scores[place]), self.titles[place])


def read(reply: Reply, cls: type[S]) -> S:
    """Decode an answer.

    Raises:
        BadAnswer: it is neither JSON nor msgpack, or not of this form.
    """
    try:
        if reply.media == MSGPACK:
            return msgspec.msgpack.decode(reply.body, type=cls)
        if reply.media == JSON:
            return msgspec.json.decode(reply.body, type=cls)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadAnswer(f"the answer is no {cls.__name__}: {error}") from error
    raise BadAnswer(f"the answer is {reply.media}, neither {JSON} nor {MSGPACK}")


def ranked(reply: Reply, names: list[Name], ids: I64) -> Ranked:
    """Read the answer of a rank, of these candidates.

    Raises:
        BadAnswer: it is none, or of other candidates.
    """
    answer = read(reply, RankOut)
    scores = {task: _floats(column) for task, column in answer.scores.items()}
    if not scores:
        raise BadAnswer("the answer has no scores")
    if any(len(column) != len(names) for column in scores.values()):
        raise BadAnswer(f"the answer has not one score for each of {len(names)} candidates")
    places: dict[str | int, int] = {}  # by id: raw candidates are answered as they were sent
    for place, one in enumerate(ids.tolist()):
        places.setdefault(one, place)
    best = answer.top or []
    titles = _titles(answer.titles, len(best))
    first = next(iter(scores.values()))
    try:
        found = [places[one] for one in best]
    except KeyError as error:
        raise BadAnswer(f"the answer's top has {error}, which was no candidate") from None
    top = [Item(names[place], float(first[place]), title) for place, title in zip(found, titles, strict=True)]
    return Ranked(names=names, scores=scores, top=top, answer=answer)


def found(reply: Reply, cls: type[Out]) -> FoundItems[Out]:
    """Read the answer of a kind that chooses items, as JSON: it has their names.

    Raises:
        BadAnswer: it is none.
    """
    answer = read(reply, cls)
    if isinstance(answer.items, bytes):
        raise BadAnswer("the answer has raw items, where names were asked for")
    scores = _floats(answer.scores)
    if len(scores) != len(answer.items):
        raise BadAnswer(f"the answer has {len(answer.items)} items and {len(scores)} scores")
    titles = _titles(answer.titles, len(scores))
    return FoundItems(names=list(answer.items), scores=scores, titles=titles, answer=answer)


def _titles(titles: Titles, num_items: int) -> list[str | None]:
    if isinstance(titles, msgspec.UnsetType):
        return [None] * num_items
    if len(titles) != num_items:
        raise BadAnswer(f"the answer has {num_items} items and {len(titles)} titles")
    return titles


def _floats(column: list[float | None] | list[float] | bytes) -> F32:
    if isinstance(column, bytes):
        if len(column) % 4:
            raise BadAnswer(f"a column of {len(column)} bytes is not of whole float32 values")
        return np.frombuffer(column, "<f4")
    return np.array([np.nan if one is None else one for one in column], np.float32)
