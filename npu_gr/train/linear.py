"""Linear models of who has what: ItemKNN, EASE and PureSVD.

Each scores any item for any user of a graph.

Users are rows, items columns. Of two domains side by side the items come one domain after the other
(`Graph.beside`), and only the first `num_scored` of them are scored. A product with users' rows is
all that is computed: neither model makes a matrix of items by items, unless there are fewer items
than users.

Source: ItemKNN (Deshpande and Karypis, TOIS 2004), EASE (Steck, WWW 2019), PureSVD (Cremonesi et
al., RecSys 2010).

Choose among models on a validation, each with a popularity exponent and a popularity term.

    score(u, i) = part(u, i) d_i^g + b log(d_i + 1/2)

d are the items' edges. Both terms are scaled to a root mean square of 1, so that weights mean the
same for every model. A model without the two is at a disadvantage: most of what is bought is bought
because it is popular.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import DataError
from npu_gr.train.evaluate import Csr, Evaluator, Graph, smooth_hit

MAX_SIDE = 12_000  # users or items, whichever are fewer, of EASE's matrix: it is inverted
BLOCK_ROWS = 256  # written out at a time
# of the randomised decomposition: spectra are flat, with 6 the values are off by a twentieth
SVD_SWEEPS = 30
SPARE_VECTORS = 8  # that it iterates beside the wanted ones: the last of a block converge slowest


class LinearModel(Protocol):
    """Scores items for users."""

    def scores(self, users: Tensor) -> Tensor:
        """Score the items for some users: int64 [n] rows -> float32 [n, num_scored]."""
        ...


class ItemKNN:
    """Scores an item by how many users it shares with the user's items: no neighbour is left out.

        score(u, i) = sum over the user's j of (sum over users v who have both of n_v^-a) / (n_j^b
        sqrt(n_i))

    n are degrees, a and b the exponents. a = 0, b = 1/2 is the cosine.
    """

    def __init__(
        self, graph: Graph, num_scored: int, user_exponent: float, item_exponent: float
    ) -> None:
        """Keep the matrices.

        Args:
            graph: who has what.
            num_scored: first items that are scored.
            user_exponent: a; a user who has many items tells less of each.
            item_exponent: b; an item that many users have tells less of each.
        """
        of_users, of_items = (
            np.maximum(degrees, 1).astype(np.float32) for degrees in graph.degrees()
        )
        by_item: F32 = of_items[graph.items] ** np.float32(-0.5)
        of_rows: F32 = of_items ** np.float32(-item_exponent)
        self._num_items = graph.num_items
        self._of_rows = torch.from_numpy(of_rows)
        self._rows = graph.to_users(of_rows[graph.items])
        told: F32 = of_users[graph.users] ** np.float32(-user_exponent)
        of_itself = np.bincount(graph.items, told, graph.num_items) * of_rows / np.sqrt(of_items)
        # what each item adds to itself
        self.own = torch.from_numpy(of_itself[:num_scored].astype(np.float32))
        self._shared = graph.to_users(told)
        self._scored = _first(graph, num_scored, by_item)

    def scores(self, users: Tensor) -> Tensor:
        return self._scored.times(
            self._shared.times(self._rows.dense(users, self._num_items).T.contiguous())
        ).T

    def weights(self, start: int, stop: int) -> Tensor:
        """Compute what some items, start .. stop - 1, add to each other one: float32 [items, num_scored].

        Scores of what a user lacks are sums of these rows; what an item adds to itself is left out.
        """
        rows, places = torch.arange(start, stop), torch.arange(stop - start)
        alone = torch.zeros(self._num_items, stop - start)
        alone[rows, places] = self._of_rows[rows]
        weights = self._scored.times(self._shared.times(alone)).T
        is_scored = rows < weights.shape[1]
        weights[places[is_scored], rows[is_scored]] = 0
        return weights


class EASE:
    """Scores by the linear autoencoder without a diagonal, in closed form.

        B = 1 - P / diag(P),   P = (X'X + ridge)^-1,   scores X B

    With fewer users than items by K = (XX' + ridge)^-1, of users x users: P_jj = (1 - x_j'K x_j) /
    ridge, X P = K X.
    """

    def __init__(self, graph: Graph, num_scored: int, ridge: float) -> None:
        """Invert.

        Args:
            graph: who has what.
            num_scored: first items that are scored.
            ridge: weight of the squared norm of B.

        Raises:
            DataError: users and items are more than `MAX_SIDE` each.
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
            weights = -inverse / inverse.diagonal()
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
        """Compute what some scored items, start .. stop - 1, add to each: rows of B, float32 [items, num_scored]."""
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
        own = self._rows.dense(users, self._num_items)
        if self._weights is not None:
            return own @ self._weights
        assert self._kernel is not None
        products = self._scored.times(self._kernel[:, users]) * self._factors[:, None]
        return own[:, : self._num_scored] - products.T


class Spectrum(NamedTuple):
    """The largest singular values of N, best first. k = values.

        N = Du^-1/2 X Di^-item_exponent

    Du and Di count the edges of users and items.
    """

    users: Tensor  # float32 [num_users, k]
    values: Tensor  # float32 [k]
    items: Tensor  # float32 [num_items, k]
    # float32 [num_items] what each item's column is multiplied by: Di^-item_exponent
    columns: Tensor


def spectrum(graph: Graph, item_exponent: float, num_values: int) -> Spectrum:
    """Decompose, until it has converged.

    Args:
        graph: who has what.
        item_exponent: of an item's edges, by which its column is divided.
        num_values: most singular values.
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
    num_scored: int  # first items that are scored
    num_values: int  # of those found
    power: float  # f(s) = s^power

    def scores(self, users: Tensor) -> Tensor:
        k = self.num_values
        rows = self.found.users[users, :k] * self.found.values[:k] ** self.power
        return rows @ self.found.items[: self.num_scored, :k].T


def ease_is_too_large(graph: Graph) -> str | None:
    """Say why EASE is left out; None = it is not."""
    if min(graph.num_users, graph.num_items) <= MAX_SIDE:
        return None
    return (
        f"EASE is left out: {graph.num_users} users and {graph.num_items} items, and it "
        "inverts "
        f"at most {MAX_SIDE}"
    )


def _first(graph: Graph, num_scored: int, values: F32) -> Csr:
    """Make the matrix [num_scored, num_users] of the first items."""
    chosen = graph.items < num_scored
    first = Graph(graph.users[chosen], graph.items[chosen], graph.num_users, num_scored)
    return first.to_items(values[chosen])


def _gram(matrix: Csr, num_columns: int) -> Tensor:
    """Multiply a matrix by its transpose, some rows at a time."""
    num_rows = len(matrix.starts) - 1
    out = torch.empty(num_rows, num_rows)
    for rows in torch.arange(num_rows).split(BLOCK_ROWS):
        out[:, rows] = matrix.times(matrix.dense(rows, num_columns).T.contiguous())
    return out


def _inverse(gram: Tensor, ridge: float) -> Tensor:
    gram.diagonal().add_(ridge)
    inverse: Tensor = torch.cholesky_inverse(torch.linalg.cholesky(gram))
    return inverse


KNN_EXPONENTS = (0.0, 0.5)  # of users and of items, of ItemKNN
RIDGES = (10.0, 100.0, 1000.0)  # of EASE
EXPONENTS = (0.0, 0.5, 0.75)  # g
WEIGHTS = (0.0, 0.2, 0.5, 1.0)  # b
SCALE_USERS = 256  # users whose scores decide the scale

M = TypeVar("M", bound=LinearModel, covariant=True)
_Setting = tuple[float, float, Tensor, Tensor]  # g, b, factors, terms


class Candidate(NamedTuple, Generic[M]):
    """A model to choose."""

    name: str  # its settings in words
    make: Callable[[], M]


def item_knns(graph: Graph, num_scored: int) -> Iterator[Candidate[ItemKNN]]:
    """List the candidates of ItemKNN: both exponents."""
    for of_user, of_item in product(KNN_EXPONENTS, KNN_EXPONENTS):
        make = partial(ItemKNN, graph, num_scored, of_user, of_item)
        yield Candidate(f"user exponent {of_user:g}, item exponent {of_item:g}", make)


def eases(graph: Graph, num_scored: int) -> Iterator[Candidate[EASE]]:
    """List the candidates of EASE; none if it is too large to invert."""
    if ease_is_too_large(graph) is None:
        for ridge in RIDGES:
            yield Candidate(f"ridge {ridge:g}", partial(EASE, graph, num_scored, ridge))


@dataclass(frozen=True, slots=True, eq=False)
class Tuned(Generic[M]):
    """A model with its popularity exponent and term. I = scored items."""

    model: M
    name: str  # the model's settings in words
    exponent: float
    weight: float
    validation: float  # smooth HIT; 0: nothing was validated
    factors: Tensor  # float32 [I] multiply the model's scores
    terms: Tensor  # float32 [I] are added

    @property
    def settings(self) -> str:
        """What was chosen, in words."""
        return f"{self.name}, popularity exponent {self.exponent:g} and weight {self.weight:g}"

    def scores(self, users: Tensor) -> Tensor:
        """Score the items for some users: int64 [n] rows -> float32 [n, I]."""
        return torch.addcmul(self.terms, self.model.scores(users), self.factors)

    def refitted(self, candidates: Iterable[Candidate[M]], degrees: I64, users: I64) -> Tuned[M]:
        """Make the same of other data.

        Args:
            candidates: of the other data, with the same names.
            degrees: int64 [I] edges of each scored item in it.
            users: some whose scores decide the scale.
        """
        model = next(make for name, make in candidates if name == self.name)()
        factors = _factors(_sample(model, users), degrees, self.exponent)
        return replace(self, model=model, factors=factors, terms=_terms(degrees, self.weight))


def tune(candidates: Iterable[Candidate[M]], degrees: I64, evaluate: Evaluator) -> Tuned[M]:
    """Choose by smooth HIT; of equals the first.

    Args:
        candidates: at least one; one model is held at a time beside the best so far.
        degrees: int64 [I] edges of each scored item.
        evaluate: of the validation.
    """
    best: Tuned[M] | None = None
    for name, make in candidates:
        model = make()
        sample = _sample(model, evaluate.held_out.users)
        grid = [
            (g, b, _factors(sample, degrees, g), _terms(degrees, b))
            for g, b in product(EXPONENTS, WEIGHTS)
        ]

        def tables(
            users: Tensor, model: LinearModel = model, grid: list[_Setting] = grid
        ) -> Iterator[Tensor]:
            scores = model.scores(users)
            return (torch.addcmul(terms, scores, factors) for _, _, factors, terms in grid)

        hits = (
            [smooth_hit(ranks) for ranks in evaluate.ranks_of_each(tables)]
            if len(sample)
            else [0.0]
        )
        place = int(np.argmax(hits))
        if best is None or hits[place] > best.validation:
            best = Tuned(model, name, *grid[place][:2], hits[place], *grid[place][2:])
    assert best is not None, "there is a candidate"
    return best


def log_popularity(degrees: I64) -> Tensor:
    """Compute how popular items are as a term of a score: log(d + 1/2) less its mean, float32 [I]."""
    logs = torch.from_numpy(np.log(degrees + 0.5).astype(np.float32))
    return logs - logs.mean()


def root_mean_square(x: Tensor) -> float:
    """Compute the size of scores; 1 of none or of zeros, so that it may divide."""
    return (float(x.square().mean().sqrt()) if x.numel() else 0.0) or 1.0


def _sample(model: LinearModel, users: I64) -> Tensor:
    return model.scores(torch.from_numpy(users[:SCALE_USERS]))


def _factors(sample: Tensor, degrees: I64, exponent: float) -> Tensor:
    """Compute the factors d^exponent, scaled so that the sample's scores have a root mean square of 1."""
    factors = torch.from_numpy(np.maximum(degrees, 1).astype(np.float32)) ** exponent
    return factors / root_mean_square(sample * factors)


def _terms(degrees: I64, weight: float) -> Tensor:
    popularity = log_popularity(degrees)
    return popularity * (weight / root_mean_square(popularity))
