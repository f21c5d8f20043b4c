"""Linear collaborative filters: ItemKNN, EASE and PureSVD, and their tuning on a validation.

Each model scores the items of a user-item graph for its users; the order of events does not count.
Users are rows, items are columns. Two domains that share users are one graph (`Graph.join`), of
which only the first `num_scored` items are scored. Models multiply the rows of users; they make no
matrix of items by items, unless there are fewer items than users.

Tuning adds two popularity parameters to every model, chosen on the validation:

    score(u, i) = model(u, i) d_i^g + b log(d_i + 1/2)

d_i is the number of edges of item i. Both terms are scaled to a root mean square of 1, so that the
weights mean the same for every model. Without these terms a model would lose to popularity where
most next items are popular ones.

Source: ItemKNN (Deshpande and Karypis, TOIS 2004), EASE (Steck, WWW 2019), PureSVD (Cremonesi et
al., RecSys 2010).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from math import isqrt
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import DataError
from npu_gr.core.memory import total_memory
from npu_gr.train.evaluate import Csr, Evaluator, Graph, smooth_hit

# largest side of the matrix that EASE inverts: users or items, the fewer ones. An inversion takes
# 20 CPU seconds and 0.58 GB
MAX_SIDE = 12_000
MEMORY_SHARE = 8  # that matrix takes at most one part in so many of the machine's memory
BLOCK_ROWS = 256  # rows that are dense at a time
# iterations of the randomised decomposition: spectra are flat, and 6 leave an error of 5 %
SVD_SWEEPS = 30
SPARE_VECTORS = 8  # extra vectors to iterate, because the last ones of a block converge slowest


class LinearModel(Protocol):
    """Scores items for users."""

    def scores(self, users: Tensor) -> Tensor:
        """Score the items for some users: int64 [n] rows -> float32 [n, num_scored]."""
        ...


class ItemKNN:
    """Scores an item by the users that it shares with the user's items; all neighbours count.

        score(u, i) = sum over the items j of u of  shared(j, i) / (n_j^b sqrt(n_i))
        shared(j, i) = sum over the users v who have both of  n_v^-a

    n are degrees, a and b the exponents. a = 0, b = 1/2 is the cosine.
    """

    def __init__(
        self, graph: Graph, num_scored: int, user_exponent: float, item_exponent: float
    ) -> None:
        """Build the sparse matrices.

        Args:
            graph: Edges between users and items.
            num_scored: Number of items that are scored, the first ones.
            user_exponent: a, which lowers the weight of users with many items.
            item_exponent: b, which lowers the weight of items with many users.
        """
        of_users, of_items = (
            np.maximum(degrees, 1).astype(np.float32) for degrees in graph.degrees()
        )
        by_item: F32 = of_items[graph.items] ** np.float32(-0.5)
        of_rows: F32 = of_items ** np.float32(-item_exponent)
        self._num_items = graph.num_items
        self._of_rows = torch.from_numpy(of_rows)
        self._rows = graph.to_users(of_rows[graph.items])
        by_user: F32 = of_users[graph.users] ** np.float32(-user_exponent)
        of_itself = np.bincount(graph.items, by_user, graph.num_items) * of_rows / np.sqrt(of_items)
        # float32 [num_scored] weight of each item for its own score
        self.own = torch.from_numpy(of_itself[:num_scored].astype(np.float32))
        self._shared = graph.to_users(by_user)
        self._scored = _first(graph, num_scored, by_item)

    def scores(self, users: Tensor) -> Tensor:
        return self._scored.times(
            self._shared.times(self._rows.dense(users, self._num_items).T.contiguous())
        ).T

    def weights(self, start: int, stop: int) -> Tensor:
        """Compute rows start .. stop - 1 of the item-item weights, float32 [items, num_scored].

        The score of an item that the user does not have is the sum of the rows of the user's items.
        An item's weight for its own score is 0 here.
        """
        rows, places = torch.arange(start, stop), torch.arange(stop - start)
        alone = torch.zeros(self._num_items, stop - start)
        alone[rows, places] = self._of_rows[rows]
        weights = self._scored.times(self._shared.times(alone)).T
        is_scored = rows < weights.shape[1]
        weights[places[is_scored], rows[is_scored]] = 0
        return weights


class EASE:
    """Scores by a linear autoencoder with a zero diagonal, in closed form.

        B = 1 - P / diag(P),   P = (X'X + ridge)^-1,   scores X B

    With fewer users than items, K = (XX' + ridge)^-1 of users by users is inverted in its place:
    P_jj = (1 - x_j'K x_j) / ridge and X P = K X.
    """

    def __init__(self, graph: Graph, num_scored: int, ridge: float) -> None:
        """Invert the smaller Gram matrix.

        Args:
            graph: Edges between users and items.
            num_scored: Number of items that are scored, the first ones.
            ridge: Weight of the squared norm of B.

        Raises:
            DataError: there are more users and more items than `max_side()`.
        """
        if (too_many := ease_is_too_large(graph)) is not None:
            raise DataError(too_many)
        ones = np.ones(len(graph.users), np.float32)
        self._num_items = graph.num_items
        self._ridge = ridge
        self._rows = graph.to_users(ones)
        self._kernel: Tensor | None = None
        self._weights: Tensor | None = None
        if graph.num_users <= graph.num_items:
            self._kernel = _inverse(_gram(self._rows, graph.num_items), ridge)
            self._scored = _first(graph, num_scored, ones)
            self._factors = ridge / (1 - self._held(graph, num_scored)).clamp(min=1e-6)
        else:
            inverse = _inverse(_gram(graph.to_items(ones), graph.num_users), ridge)
            weights = inverse.div_(-inverse.diagonal())  # in place: it is as large as all else
            weights.fill_diagonal_(0)
            self._weights = weights[:, :num_scored].contiguous()
        self._num_scored = num_scored

    def _held(self, graph: Graph, num_scored: int) -> Tensor:
        """Compute x_j'K x_j of each scored item: float32 [num_scored]."""
        assert self._kernel is not None
        chosen = graph.items < num_scored
        users, items = (torch.from_numpy(part[chosen]) for part in (graph.users, graph.items))
        total = torch.zeros(num_scored)
        for rows in torch.arange(graph.num_users).split(BLOCK_ROWS):
            mine = (users >= rows[0]) & (users <= rows[-1])
            products = self._scored.times(self._kernel[:, rows])  # [num_scored, rows]
            total.index_add_(0, items[mine], products[items[mine], users[mine] - rows[0]])
        return total

    def weights(self, start: int, stop: int) -> Tensor:
        """Compute rows start .. stop - 1 of B, float32 [rows, num_scored]."""
        if self._weights is not None:
            return self._weights[start:stop]
        assert self._kernel is not None
        products = self._scored.block(start, stop).times(self._kernel)
        rows = (
            self._scored.times(products.T.contiguous()) * (self._factors / self._ridge)[:, None]
        ).T
        places = torch.arange(stop - start)
        rows[places, start + places] = 0
        return rows

    def scores(self, users: Tensor) -> Tensor:
        if self._weights is not None:
            return self._rows.of(users).times(self._weights)
        assert self._kernel is not None
        own = self._rows.dense(users, self._num_items)
        products = self._scored.times(self._kernel[:, users]) * self._factors[:, None]
        return own[:, : self._num_scored] - products.T


class Spectrum(NamedTuple):
    """The largest singular values of N, in descending order. k = values.

        N = Du^-1/2 X Di^-item_exponent

    Du and Di count the edges of users and items.
    """

    users: Tensor  # float32 [num_users, k]
    values: Tensor  # float32 [k]
    items: Tensor  # float32 [num_items, k]
    columns: Tensor  # float32 [num_items] factor of each item's column: Di^-item_exponent


def spectrum(graph: Graph, item_exponent: float, num_values: int) -> Spectrum:
    """Decompose the normalised user-item matrix N by a randomised SVD.

    Args:
        graph: Edges between users and items.
        item_exponent: Exponent of an item's edges, by which its column is divided.
        num_values: Most singular values.
    """
    of_users, of_items = (np.maximum(degrees, 1).astype(np.float32) for degrees in graph.degrees())
    columns: F32 = of_items ** np.float32(-item_exponent)
    values: F32 = of_users[graph.users] ** np.float32(-0.5) * columns[graph.items]
    places = torch.from_numpy(np.stack([graph.users, graph.items]))
    shape = (graph.num_users, graph.num_items)
    matrix = torch.sparse_coo_tensor(
        places, torch.from_numpy(values), shape, check_invariants=False
    ).coalesce()
    num_values = min(num_values, *shape)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        left, found, right = torch.svd_lowrank(
            matrix, min(num_values + SPARE_VECTORS, *shape), SVD_SWEEPS
        )
    parts = (left[:, :num_values], found[:num_values], right[:, :num_values])
    return Spectrum(*parts, torch.from_numpy(columns))


@dataclass(frozen=True, slots=True, eq=False)
class PureSVD:
    """Scores by the largest singular values: U f(s) V'."""

    found: Spectrum
    num_scored: int  # items that are scored, the first ones
    num_values: int  # singular values to use, of those found
    power: float  # f(s) = s^power

    def scores(self, users: Tensor) -> Tensor:
        k = self.num_values
        rows = self.found.users[users, :k] * self.found.values[:k] ** self.power
        return rows @ self.found.items[: self.num_scored, :k].T


def ease_is_too_large(graph: Graph) -> str | None:
    """Say why EASE is skipped; None = it is not."""
    limit = max_side()
    if min(graph.num_users, graph.num_items) <= limit:
        return None
    return (
        f"EASE is skipped: it inverts a matrix of at most {limit} users or items, and there "
        f"are {graph.num_users} users and {graph.num_items} items"
    )


def max_side() -> int:
    """Return the largest side of EASE's matrix on this machine, whose memory decides."""
    memory = total_memory()
    if memory is None:
        return MAX_SIDE
    return min(MAX_SIDE, isqrt(memory.num_bytes // MEMORY_SHARE // np.dtype(np.float32).itemsize))


def _first(graph: Graph, num_scored: int, values: F32) -> Csr:
    """Make the matrix [num_scored, num_users] of the first items, with a value for each edge."""
    chosen = graph.items < num_scored
    first = Graph(graph.users[chosen], graph.items[chosen], graph.num_users, num_scored)
    return first.to_items(values[chosen])


def _gram(matrix: Csr, num_columns: int) -> Tensor:
    """Multiply a matrix by its transpose, `BLOCK_ROWS` rows at a time."""
    num_rows = len(matrix.starts) - 1
    out = torch.empty(num_rows, num_rows)
    for rows in torch.arange(num_rows).split(BLOCK_ROWS):
        out[:, rows] = matrix.times(matrix.dense(rows, num_columns).T.contiguous())
    return out


def _inverse(gram: Tensor, ridge: float) -> Tensor:
    """Invert a symmetric matrix plus the ridge, in place."""
    gram.diagonal().add_(ridge)
    # LAPACK's columns are the rows of a symmetric matrix, and no other matrix is made
    columns = gram.mT
    torch.linalg.cholesky(columns, out=columns)
    torch.cholesky_inverse(columns, out=columns)
    return gram


# the grid of the tuning
KNN_EXPONENTS = (0.0, 0.5)  # ItemKNN's exponents of users and of items
RIDGES = (10.0, 100.0, 1000.0)  # EASE's ridge
EXPONENTS = (0.0, 0.5, 0.75)  # g, the popularity exponent
WEIGHTS = (0.0, 0.2, 0.5, 1.0)  # b, the weight of the popularity term
SCALE_USERS = 256  # users whose scores decide the scale

M = TypeVar("M", bound=LinearModel, covariant=True)
_Setting = tuple[float, float, Tensor, Tensor]  # g, b, factors, terms


class Candidate(NamedTuple, Generic[M]):
    """A model to choose from."""

    name: str  # the settings, in words
    make: Callable[[], M]


def item_knns(graph: Graph, num_scored: int) -> Iterator[Candidate[ItemKNN]]:
    """List the ItemKNN candidates: all pairs of exponents."""
    for of_user, of_item in product(KNN_EXPONENTS, KNN_EXPONENTS):
        make = partial(ItemKNN, graph, num_scored, of_user, of_item)
        yield Candidate(f"user exponent {of_user:g}, item exponent {of_item:g}", make)


def eases(graph: Graph, num_scored: int) -> Iterator[Candidate[EASE]]:
    """List the EASE candidates; none if the graph is too large to invert."""
    if ease_is_too_large(graph) is None:
        for ridge in RIDGES:
            yield Candidate(f"ridge {ridge:g}", partial(EASE, graph, num_scored, ridge))


@dataclass(frozen=True, eq=False)
class Tuned(Generic[M]):
    """A model with its popularity exponent and term. I = scored items."""

    make: Callable[[], M]  # fits the model
    name: str  # the model's settings, in words
    exponent: float  # g
    weight: float  # b
    validation: float  # smooth HIT; 0 = the validation was empty
    factors: Tensor  # float32 [I] factors of the model's scores
    terms: Tensor  # float32 [I] terms that are added

    @classmethod
    def unfitted(cls, name: str, exponent: float, weight: float, validation: float) -> Tuned[M]:
        """Keep chosen settings, to be `refitted`."""

        def make() -> M:
            raise AssertionError(f"{name} was not fitted")

        return cls(make, name, exponent, weight, validation, torch.empty(0), torch.empty(0))

    @cached_property
    def model(self) -> M:
        """The model, which is fitted when it is first asked for."""
        return self.make()

    @property
    def settings(self) -> str:
        """The chosen settings, in words."""
        return f"{self.name}, popularity exponent {self.exponent:g} and weight {self.weight:g}"

    def scores(self, users: Tensor) -> Tensor:
        """Score the items for some users: int64 [n] rows -> float32 [n, I]."""
        return torch.addcmul(self.terms, self.model.scores(users), self.factors)

    def fitted(self, candidates: Iterable[Candidate[M]]) -> M:
        """Fit the model alone, with the same settings, to the data of the candidates."""
        return next(make for name, make in candidates if name == self.name)()

    def refitted(self, candidates: Iterable[Candidate[M]], degrees: I64, users: I64) -> Tuned[M]:
        """Fit the same settings to other data.

        Args:
            candidates: Candidates for the other data, with the same names.
            degrees: int64 [I] edges of each scored item in the other data.
            users: Rows of users; the scores of the first `SCALE_USERS` decide the scale.
        """
        model = self.fitted(candidates)
        factors = _factors(_sample(model, users), degrees, self.exponent)
        terms = _terms(degrees, self.weight)
        return replace(self, make=lambda: model, factors=factors, terms=terms)


def tune(candidates: Iterable[Candidate[M]], degrees: I64, evaluator: Evaluator) -> Tuned[M]:
    """Choose the candidate and popularity terms with the best smooth HIT; ties go to the first.

    One model is in memory at a time: the chosen one is fitted again if it is asked for.

    Args:
        candidates: Models to try, at least one.
        degrees: int64 [I] edges of each scored item.
        evaluator: Evaluator of the validation.
    """
    best: Tuned[M] | None = None
    for name, make in candidates:
        model = make()
        sample = _sample(model, evaluator.held_out.users)
        grid = [
            (g, b, _factors(sample, degrees, g), _terms(degrees, b))
            for g, b in product(EXPONENTS, WEIGHTS)
        ]

        hits = _hits(model, grid, evaluator) if len(sample) else [0.0]
        place = int(np.argmax(hits))
        if best is None or hits[place] > best.validation:
            best = Tuned(make, name, *grid[place][:2], hits[place], *grid[place][2:])
        del model  # before the next one is made
    assert best is not None, "there is a candidate"
    return best


def _hits(model: LinearModel, grid: Sequence[_Setting], evaluator: Evaluator) -> list[float]:
    """Compute the smooth HIT of each setting of the popularity terms."""

    def tables(users: Tensor) -> Iterator[Tensor]:
        scores = model.scores(users)
        return (torch.addcmul(terms, scores, factors) for _, _, factors, terms in grid)

    return [smooth_hit(ranks) for ranks in evaluator.ranks_of_each(tables)]


def log_popularity(degrees: I64) -> Tensor:
    """Compute the popularity term of scores: log(d + 1/2) minus its mean, float32 [I]."""
    logs = torch.from_numpy(np.log(degrees + 0.5).astype(np.float32))
    return logs - logs.mean()


def root_mean_square(x: Tensor) -> float:
    """Compute the root mean square; 1 for an empty or all-zero tensor, so that it can divide."""
    return (float(x.square().mean().sqrt()) if x.numel() else 0.0) or 1.0


def _sample(model: LinearModel, users: I64) -> Tensor:
    return model.scores(torch.from_numpy(users[:SCALE_USERS]))


def _factors(sample: Tensor, degrees: I64, exponent: float) -> Tensor:
    """Compute the factors d^exponent, scaled to a root mean square of 1 of the sample's scores."""
    factors = torch.from_numpy(np.maximum(degrees, 1).astype(np.float32)) ** exponent
    return factors / root_mean_square(sample * factors)


def _terms(degrees: I64, weight: float) -> Tensor:
    popularity = log_popularity(degrees)
    return popularity * (weight / root_mean_square(popularity))
