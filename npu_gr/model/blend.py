"""Score blending: the fitted weighted sum by which a cascade orders retrieved items.

    s(i) = a l(i) + b r(i) + c m(i) + f n(i) + p pop(i) + e seen(i) + g often(i) + h age(i) + o x(i)

    l      retrieval score of the shared encoder: u . e_i
    r      logit of the task named `task`
    m      log of P(i | last events): the transitions of the last five events; the newest has
           weight 1, each older one .6 of the weight of the next newer one, or 0 if that was better
           on the validation
    n      log(1 + 100 x the item's mean similarity to the items of the history that are among its
           neighbours); in sum mode, log(1 + 10 x the sum of these similarities); in linear mode,
           the sum itself
    pop    log of the item's share of the events, smoothed
    seen   1 if the item is in the history
    often  log of how much the user had the item lately; 0 if never (`OwnItems`)
    age    log of 1 + the number of events since the user last had the item; 0 if never
    x      log of (how much the user had the item lately + .3 P(i | last event))

The weights are fitted by likelihood on the validation events. Each item stores its most probable
successors; the remaining probability is shared by all other items, in proportion to their
popularity.

n takes the logarithm because similarities are as skewed as counts, and the factor 100 because a
pair of rare items that one user has together has a similarity of about .01. It takes the mean, not
the sum, because one similarity says less in a longer history. On the validation events of Amazon
Beauty the likelihood rises by .061 nats an event with this n, by .050 without the division, by .014
without the 100, by .008 with the sum itself; 30 and 300 in place of 100 give .053 and .062 (over
the last 20 events; over the last five .063).

x is the baseline of own items (`OwnHistory`). A sum of logs cannot say what this log of a sum does:
that the item either comes again or follows. Its weight is 0 in a log without repeats.

pop is a term of its own because m contains popularity only through the probability that the
successors leave over. For items with few events, popularity is most of what is known.

Nothing was counted for a new item (a row from `num_items` on): its m, n and pop are the means over
the other candidates, so they do not change its place. In a history a new item has the popular items
as successors, and no neighbours.

A blend is the file `order.safetensors` in the checkpoint's folder, and optional. A file of format 1
has no neighbours; a weight of the popularity, often, age or x that a file lacks is 0. Scale 10
means sum mode, scale 0 linear mode.

`ScoreBlend` defines each term. `BlendSum` computes the sum of a request's candidates with a kernel
of the host where the backend has one, otherwise (or to compare) term by term in numpy.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from npu_gr.backend.base import Backend
from npu_gr.backend.calls import BlendCall, BlendTables
from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import CheckpointError
from npu_gr.model.item_similarity import I32, LAST_ITEMS, Neighbours, best_rows
from npu_gr.model.own_items import OwnItems

FILE = "order.safetensors"
# e, g, h: of items that are in the history
OWN_WEIGHTS = ("seen", "own_count", "own_age")
OWN_OR_NEXT = "own_or_next"  # o
# a, b, c, f, p, e, g, h, o
WEIGHTS = (
    *("retrieval", "click", "transitions", "neighbours", "popularity"),
    *(*OWN_WEIGHTS, OWN_OR_NEXT),
)
# weights that older files lack, and that are not written if they are 0, so older versions read them
_NEWER = ("popularity", "own_count", "own_age", OWN_OR_NEXT)
MAX_SUCCESSORS = 100  # of an item
# factor of an event's weight per newer event, and of a pair's count per event between the two
DECAY = 0.6
LAST_ALONE = 0.0  # the decay with which older events count nothing
LAST_EVENTS = 5  # events of a history that are read; largest distance of a counted pair
PRIOR = 10.0  # pseudo-count of the popularity, in transitions
FOLLOWING = 0.3  # weight of what follows the last item, next to a user's own events
SCALE = 100.0  # factor of a mean similarity
SUM_SCALE = 10.0  # factor of a sum of similarities
LINEAR = 0.0  # the scale that stands for linear mode
MAX_POPULAR = 2000  # items retrieved by popularity, including those in the history
_LEAST = 1e-12  # smallest remaining probability of a row: rounding may leave less
_ROWS_AT_ONCE = 1 << 16  # limits the float64 temporaries of a large catalogue
_NO_ROWS: I32 = np.empty(0, np.int32)
_NOTES = "npu_gr.order"  # key of the file's metadata
_WITHOUT_NEIGHBOURS = 1  # format
_WITH_NEIGHBOURS = 2
# tensors of every format
_TENSORS = {"successors": np.int32, "log_prob": np.float32, "popularity": np.float32}
_OF_NEIGHBOURS = {"neighbours": np.int32, "similarity": np.float32}  # in addition, format 2


class _Notes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: int = _WITHOUT_NEIGHBOURS
    task: str
    weights: dict[str, float]
    decay: float = DECAY
    prior: float = PRIOR
    last_events: int = LAST_EVENTS
    last_items: int | msgspec.UnsetType = msgspec.UNSET  # format 2
    scale: float | msgspec.UnsetType = msgspec.UNSET  # format 2: SCALE, SUM_SCALE or LINEAR


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreBlend:
    """Weights of the sum, and the tables of transitions, neighbours and popularity.

    I = items, S = stored successors of an item, at most `MAX_SUCCESSORS`.
    """

    task: str  # the task whose logit is r
    weights: Mapping[str, float]  # by the names of `WEIGHTS`; of the newer ones, none = 0
    successors: I32  # [I, S] item rows, ascending; -1 = padding, which comes first
    log_prob: F32  # [I, S] log P(successor | item); -inf in the padding
    popularity: F32  # [I] log of each item's share of the events, smoothed: finite
    neighbours: Neighbours | None = None  # None = n is 0
    decay: float = DECAY  # or LAST_ALONE
    # [I + 1] P(j | i) / share(j) for every j that is no stored successor of i; last: new items
    rest: F32 = field(init=False, repr=False)
    # [I + 1] popularity; last: new items
    shares: F32 = field(init=False, repr=False)
    _popular: I64 = field(init=False, repr=False)  # rows of the most popular items, best first

    def __post_init__(self) -> None:
        """Check shapes and values.

        Raises:
            ValueError: A field is invalid; the message names it.
        """
        object.__setattr__(self, "weights", dict.fromkeys(_NEWER, 0.0) | dict(self.weights))
        if set(self.weights) != set(WEIGHTS) or not all(map(math.isfinite, self.weights.values())):
            raise ValueError(
                f"weights: needs finite {', '.join(WEIGHTS)}, got {dict(self.weights)}"
            )
        num_items = len(self.popularity)
        if self.popularity.ndim != 1 or not num_items or not np.isfinite(self.popularity).all():
            raise ValueError("popularity: needs one finite number an item")
        shape = self.successors.shape
        if shape != self.log_prob.shape or len(shape) != 2 or len(self.successors) != num_items:
            raise ValueError(
                f"successors and log_prob: need {num_items} equal rows, got {shape}, "
                f"{self.log_prob.shape}"
            )
        is_known = self.successors >= 0
        rises = (np.diff(self.successors, axis=1) > 0) | ~is_known[:, :-1]
        if (self.successors < -1).any() or (self.successors >= num_items).any() or not rises.all():
            raise ValueError(
                f"successors: need ascending item rows below {num_items}, -1 before them"
            )
        if (
            np.isnan(self.log_prob).any()
            or (self.log_prob > 0).any()
            or not np.isfinite(self.log_prob[is_known]).all()
        ):
            raise ValueError("log_prob: needs logs of probabilities")
        if self.neighbours is not None and len(self.neighbours.items) != num_items:
            raise ValueError(
                f"neighbours: needs {num_items} rows, got {len(self.neighbours.items)}"
            )
        share = np.exp(self.popularity.astype(np.float64))
        object.__setattr__(
            self, "rest", np.append(self._factors(share), np.float32(1 / share.sum()))
        )
        object.__setattr__(
            self, "shares", np.append(self.popularity, np.float32(np.log(share.mean())))
        )
        popular = np.argsort(-self.popularity, kind="stable")[:MAX_POPULAR]
        object.__setattr__(self, "_popular", popular)

    def _factors(self, share: npt.NDArray[np.float64]) -> F32:
        """Divide the probability outside the stored successors by the share of all other items."""
        total = share.sum()
        rest = np.empty(self.num_items, np.float32)
        for start in range(0, self.num_items, _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            is_known = self.successors[rows] >= 0
            left = 1 - np.exp(self.log_prob[rows].astype(np.float64)).sum(1, where=is_known)
            others = total - share[self.successors[rows]].sum(1, where=is_known)
            rest[rows] = np.maximum(left, _LEAST) / np.maximum(others, _LEAST)
        return rest

    @property
    def scale(self) -> float:
        """Factor of the similarities inside the logarithm; 0 = no logarithm (linear mode)."""
        if self.neighbours is None or not self.neighbours.is_summed:
            return SCALE
        return LINEAR if self.neighbours.is_linear else SUM_SCALE

    @property
    def num_items(self) -> int:
        """Items of the catalogue that the transitions were counted over."""
        return len(self.popularity)

    def transitions(self, history: I64, candidates: I64) -> F32:
        """Compute m: the log of the probability that each candidate follows.

        Args:
            history: int64 [n] item rows, oldest first, new items allowed; only the last
                `LAST_EVENTS` are read.
            candidates: int64 [c] item rows, new items allowed.

        Returns:
            float32 [c]; the popularity when the history is empty. If all candidates are new, the
            value of an item of mean popularity.
        """
        log_share = self._log_share(candidates)
        if not len(history):
            return self._neutral(log_share, candidates)
        newest_first = history[-LAST_EVENTS:][::-1]
        weights = self.decay ** np.arange(len(newest_first))
        weights /= weights.sum()
        share = np.exp(log_share.astype(np.float64))
        mixed = np.zeros(len(candidates))
        for weight, item in zip(weights, np.minimum(newest_first, self.num_items), strict=True):
            known = self.successors[item] if item < self.num_items else _NO_ROWS
            place = np.minimum(np.searchsorted(known, candidates), max(len(known) - 1, 0))
            probability = self.rest[item] * share
            if len(known):
                kept = known[place] == candidates
                probability[kept] = np.exp(self.log_prob[item, place[kept]].astype(np.float64))
            mixed += weight * probability
        return self._neutral(np.log(mixed).astype(np.float32), candidates)

    def alike(self, history: I64, candidates: I64) -> F32:
        """Compute n: how much each candidate has in common with the history.

        Args:
            history: int64 [n] item rows, oldest first, new items allowed; only the last
                `neighbours.last_items` are read.
            candidates: int64 [c] item rows, new items allowed.

        Returns:
            float32 [c], finite; negative only in linear mode; 0 without neighbours.
        """
        if self.neighbours is None:
            return np.zeros(len(candidates), np.float32)
        count = self.neighbours.sums if self.neighbours.is_summed else self.neighbours.means
        similarity = count(history, candidates)
        alike = similarity if self.neighbours.is_linear else np.log1p(self.scale * similarity)
        return self._neutral(alike.astype(np.float32), candidates)

    def popular(self, candidates: I64) -> F32:
        """Look up pop: int64 [c] item rows -> float32 [c].

        A new item gets the mean over the other candidates; if all are new, the mean of all items.
        """
        return self._neutral(self._log_share(candidates), candidates)

    def _log_share(self, candidates: I64) -> F32:
        found: F32 = self.shares[np.minimum(candidates, self.num_items)]
        return found

    def _neutral(self, term: F32, candidates: I64) -> F32:
        """Set the term of new candidates to the mean of the others, in place."""
        is_new = candidates >= self.num_items
        if is_new.any() and not is_new.all():
            term[is_new] = term[~is_new].mean()
        return term

    def top(self, history: I64, k: int) -> I64:
        """Retrieve the k items that most probably follow the last events.

        Items that are no stored successor follow in proportion to their popularity, so besides the
        stored successors only the k most popular items can be among the best.

        Args:
            history: int64 [n] item rows, oldest first.
            k: Largest number of items.

        Returns:
            int64 [<= k] item rows, best first, ties by the lower row; fewer than k only if k is
            above `MAX_POPULAR`.
        """
        recent = history[-LAST_EVENTS:]
        kept = self.successors[recent[recent < self.num_items]].ravel()
        found: I64 = np.union1d(kept[kept >= 0].astype(np.int64), self._popular[:k])
        best: I64 = found[np.argsort(-self.transitions(history, found), kind="stable")[:k]]
        return best

    def nearest(self, history: I64, k: int) -> I64:
        """Retrieve the k items most similar to the history; none without neighbours.

        In linear mode the score is similarity plus popularity, by the blend's weights, so popular
        items are found even if they have no similarity to the history.

        Args:
            history: int64 [n] item rows, oldest first.
            k: Largest number of items.

        Returns:
            int64 [<= k] item rows, best first, ties by the lower row.
        """
        if self.neighbours is None:
            return np.empty(0, np.int64)
        alike, sums, _ = self.neighbours.found(history)
        return self.best_alike(alike, sums, k)

    def best_alike(self, alike: I64, sums: npt.NDArray[np.float64], k: int) -> I64:
        """Choose the items that `nearest` retrieves.

        Args:
            alike: int64 [n] item rows with a similarity to the history, ascending.
            sums: float64 [n] their sums of similarities.
            k: Largest number of items.
        """
        if self.neighbours is None or not self.neighbours.is_linear:
            return best_rows(alike, sums, k)
        popular = self._popular[:k]
        place = np.searchsorted(alike[:-1], popular)
        found = np.concatenate([alike, popular[alike[place] != popular] if len(alike) else popular])
        scores = self.weights["popularity"] * self.popularity[found].astype(np.float64)
        scores[: len(alike)] += self.weights["neighbours"] * sums
        return best_rows(found, scores, k)

    def own(self, history: I64, candidates: I64) -> F32:
        """Sum the weighted terms of candidates that are in the history: float32 [c].

        Args:
            history: int64 [n] items, oldest first.
            candidates: int64 [c] items, numbered as those of the history.
        """
        return self.own_sum(*OwnItems.of(history).terms(candidates))

    def own_sum(self, seen: F32, own_count: F32, own_age: F32) -> F32:
        """Sum the weighted terms of `OwnItems.terms`, float32 [c] each."""
        e, g, h = (np.float32(self.weights[name]) for name in OWN_WEIGHTS)
        total: F32 = e * seen + g * own_count + h * own_age
        return total

    def scores(
        self,
        retrieval: F32,
        click: F32,
        transitions: F32,
        neighbours: F32,
        popularity: F32,
        own: F32,
    ) -> F32:
        """Sum the terms of each candidate by the weights; `own` is weighted already.

        All are float32 [c], the sum too.
        """
        a, b, c, f, p = (np.float32(self.weights[name]) for name in WEIGHTS[:5])
        total: F32 = a * retrieval + b * click + c * transitions + own
        total += f * neighbours + p * popularity
        return total


def own_or_next(blend: ScoreBlend, own: OwnItems, candidates: I64, last: I64, rows: I64) -> F32:
    """Compute x: the log of how much the user had each candidate, plus that it follows.

    Args:
        blend: Blend with the transitions.
        own: The user's items.
        candidates: int64 [c] items, numbered as those of `own`.
        last: int64 [n] item rows of the history, of which the last is read.
        rows: int64 [c] item rows of the candidates.
    """
    follows = np.exp(blend.transitions(last[-1:], rows).astype(np.float64))
    return np.log(own.weights_of(candidates) + FOLLOWING * follows).astype(np.float32)


def save_blend(blend: ScoreBlend, folder: Path) -> None:
    """Write the blend into a checkpoint's folder; an existing one is replaced.

    Raises:
        CheckpointError: it cannot be written.
    """
    path = folder / FILE
    notes = _Notes(task=blend.task, weights=dict(blend.weights), decay=blend.decay)
    tensors = {name: getattr(blend, name) for name in _TENSORS}
    if blend.neighbours is not None:
        last_items = blend.neighbours.last_items
        notes = msgspec.structs.replace(
            notes, format=_WITH_NEIGHBOURS, last_items=last_items, scale=blend.scale
        )
        tensors |= {"neighbours": blend.neighbours.items, "similarity": blend.neighbours.similarity}
    else:  # as an older version writes and reads it
        del notes.weights["neighbours"]
    for name in _NEWER:
        if not blend.weights[name]:
            del notes.weights[name]
    try:
        save_file(tensors, path.with_suffix(".tmp"), {_NOTES: msgspec.json.encode(notes).decode()})
        path.with_suffix(".tmp").chmod(folder.stat().st_mode & 0o666)  # safetensors makes it 0600
        os.replace(path.with_suffix(".tmp"), path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"score blend {path}: cannot be written: {error}") from error


def load_blend(folder: Path) -> ScoreBlend | None:
    """Read the blend of a checkpoint's folder; None = it has none.

    Raises:
        CheckpointError: the file is damaged, or of another format.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            notes = msgspec.json.decode((file.metadata() or {}).get(_NOTES, "{}"), type=_Notes)
            has_neighbours = notes.format == _WITH_NEIGHBOURS
            kinds = _TENSORS | (_OF_NEIGHBOURS if has_neighbours else {})
            tensors = {name: file.get_tensor(name) for name in kinds}
        if notes != _of_this_version(notes):
            raise ValueError(f"{notes} is not of this version")
        if wrong := [name for name, kind in kinds.items() if tensors[name].dtype != kind]:
            raise ValueError(f"{wrong[0]}: is {tensors[wrong[0]].dtype}")
        weights, decay = notes.weights, notes.decay
        if not has_neighbours:
            weights = weights | {"neighbours": 0.0}
            return ScoreBlend(task=notes.task, weights=weights, decay=decay, **tensors)
        assert notes.last_items is not msgspec.UNSET, "of this version"
        neighbours = Neighbours(
            tensors.pop("neighbours"),
            tensors.pop("similarity"),
            notes.last_items,
            is_summed=notes.scale != SCALE,
            is_linear=notes.scale == LINEAR,
        )
        return ScoreBlend(
            task=notes.task, weights=weights, neighbours=neighbours, decay=decay, **tensors
        )
    except (OSError, SafetensorError, msgspec.MsgspecError, ValueError) as error:
        raise CheckpointError(f"score blend {path}: {error}") from error


def _of_this_version(notes: _Notes) -> _Notes:
    """Return the notes that this version would write for the same settings."""
    decay = notes.decay if notes.decay == LAST_ALONE else DECAY
    found = _Notes(task=notes.task, weights=notes.weights, decay=decay)
    if notes.format != _WITH_NEIGHBOURS:
        return found
    last_items = LAST_ITEMS if notes.last_items is msgspec.UNSET else notes.last_items
    scale = notes.scale if notes.scale in (SUM_SCALE, LINEAR) else SCALE
    return msgspec.structs.replace(
        found, format=_WITH_NEIGHBOURS, last_items=last_items, scale=scale
    )


class BlendSum:
    """Computes the weighted sums of one blend. Thread-safe."""

    def __init__(self, blend: ScoreBlend, backend: Backend | None = None) -> None:
        """Prepare the tables of the kernel.

        Args:
            blend: The blend.
            backend: Backend whose kernel is used if it has one; None = numpy.
        """
        self.order = blend
        self._kernel = None if backend is None else backend.blend_sums(_tables(blend))
        self._num_liked = 0 if blend.neighbours is None else blend.neighbours.last_items  # events

    def __call__(
        self, history: I64, candidates: I64, retrieval: F32 | None, click: F32, own: F32 | None
    ) -> F32:
        """Sum the terms of each candidate: float32 [c].

        Args:
            history: int64 [n] item rows, oldest first.
            candidates: int64 [c] item rows, new items allowed.
            retrieval: [c] retrieval scores; None = 0.
            click: [c] logits of the blend's task.
            own: [c] `ScoreBlend.own`; None = 0.
        """
        if self._kernel is None:
            return self._defined(history, candidates, retrieval, click, own)
        recent = history[-max(LAST_EVENTS, self._num_liked) :]
        num_followed, num_liked = min(len(recent), LAST_EVENTS), min(len(recent), self._num_liked)
        return self._kernel(
            BlendCall(recent, num_followed, num_liked, candidates, retrieval, click, own)
        )

    def nearest(self, history: I64, k: int) -> I64:
        """Retrieve as `ScoreBlend.nearest`; with many pairs, the kernel sums over all items."""
        neighbours = self.order.neighbours
        if self._kernel is None or neighbours is None or not neighbours.are_many(history):
            return self.order.nearest(history, k)
        sums = self._kernel.alike(history[-neighbours.last_items :])
        alike = np.flatnonzero(sums)
        return self.order.best_alike(alike, sums[alike], k)

    def _defined(
        self, history: I64, candidates: I64, retrieval: F32 | None, click: F32, own: F32 | None
    ) -> F32:
        nothing = np.zeros(len(candidates), np.float32)
        return self.order.scores(
            nothing if retrieval is None else retrieval,
            click,
            self.order.transitions(history, candidates),
            self.order.alike(history, candidates),
            self.order.popular(candidates),
            nothing if own is None else own,
        )


def _tables(blend: ScoreBlend) -> BlendTables:
    neighbours = blend.neighbours
    none = blend.num_items, 0
    retrieval, click, transitions, alike, popularity = (blend.weights[name] for name in WEIGHTS[:5])
    return BlendTables(
        blend.successors,
        blend.log_prob,
        blend.rest,
        blend.shares,
        np.empty(none, np.int32) if neighbours is None else neighbours.items,
        np.empty(none, np.float32) if neighbours is None else neighbours.similarity,
        blend.decay,
        blend.scale,
        neighbours is not None and neighbours.is_summed,
        (retrieval, click, transitions, alike, popularity, 1.0),  # own terms come weighted
    )
