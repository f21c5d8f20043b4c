"""Make semantic IDs for the items of a log; items that are used together share a prefix.

    item vectors   co-occurrence of items in the trained part of histories: the largest eigenvectors
                   of the positive pointwise mutual information, joined with the items' features
    codes          residual k-means: each level codes the residual of the levels before it
    collisions     of items with equal codes, the most used one keeps them. Every other one descends
                   the levels again, and takes at each level the nearest code with a free semantic
                   ID below it

Deterministic: the same log, options and seed give the same codes.

Source: residual quantisation of items as in TIGER (arXiv:2305.05065), with k-means instead of
learned codebooks, and co-occurrence in histories instead of the items' texts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm, prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from npu_gr.catalogue.records import read_items
from npu_gr.catalogue.trie import I32
from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import ConfigError, DataError
from npu_gr.core.names import item_ids as ids_of_names
from npu_gr.core.request import Normalise
from npu_gr.history_store.interactions import ItemValues
from npu_gr.train.data import InteractionLog, trained_blocks
from npu_gr.train.evaluate import Csr
from npu_gr.train.metrics import F64

# Added to each item's count, so that one co-occurrence of rare items counts little.
SMOOTHING = 10.0
SHORTEST = 1e-2  # vectors shorter than this are rounding error, and are not normalised to length 1
EIGEN_SWEEPS = 8  # iterations of the block power iteration
SPARE_VECTORS = 8  # extra vectors to iterate, because the last ones of a block converge slowest
KMEANS_SWEEPS = 30
MOST_PAIRS = 25_000_000  # of co-occurring items that are counted, 16 bytes each


@dataclass(frozen=True, slots=True, eq=False)
class ItemCodes:
    """A semantic ID for every item. N = items, L = levels."""

    sids: I32  # [N, L], distinct rows
    code_count: tuple[int, ...]  # codes of each level
    centroids: tuple[F32, ...] = ()  # L x [codes, vector dim]; empty for ready-made codes
    # [L + 1] mean squared length of the vectors, and of the residual after each level
    residuals: tuple[float, ...] = ()
    num_moved: int = 0  # items that lost a collision and got other codes
    # codes whose nodes these are, see `nodes.py`; None = these are no nodes
    given: ItemCodes | None = None

    @property
    def normalise(self) -> Normalise:
        """The tokens over which the training loss normalises; the search has to do the same."""
        return "vocabulary" if self.given is None else "valid"

    def balance(self) -> list[float]:
        """Compute how evenly each level's codes are used: entropy / maximum entropy, 0 .. 1."""
        found = []
        for codes, count in zip(self.sids.T, self.code_count, strict=True):
            shares = np.bincount(codes, minlength=count) / len(codes)
            shares = shares[shares > 0]
            entropy = float((shares * np.log(1 / shares)).sum())
            found.append(entropy / float(np.log(count)) if count > 1 else 1.0)
        return found

    def num_prefixes(self) -> list[int]:
        """Count the distinct prefixes of each length; the last count is the number of items."""
        return [
            len(np.unique(self.sids[:, : level + 1], axis=0))
            for level in range(len(self.code_count))
        ]

    def text(self) -> str:
        """Describe the codes in words."""
        if self.given is not None:
            num_prefixes = sum(self.num_prefixes())
            return f"{self.given.text()}; a token for each of the {num_prefixes:,} prefixes"
        levels = " x ".join(map(str, self.code_count))
        balance = ", ".join(f"{value:.2f}" for value in self.balance())
        prefixes = ", ".join(f"{count:,}" for count in self.num_prefixes())
        collided = (
            f"; {self.num_moved:,} items collided and got other codes"
            if self.centroids
            else ", ready-made"
        )
        return f"codes: {levels}, balance {balance}; distinct prefixes {prefixes}{collided}"

    def means(self, vectors: F32) -> list[F32]:
        """Compute the mean vector of each code, as a start of its embedding.

        A code's mean is that of its items' residuals after the levels before it. A node's mean is
        that of its items' vectors, because its token contains the whole prefix.

        Args:
            vectors: float32 [N, d] vector of each item.

        Returns:
            float32 [codes, d] of each level; zero for an unused code.
        """
        rest = vectors
        found = []
        for codes, count in zip(self.sids.T, self.code_count, strict=True):
            sums = np.zeros((count, vectors.shape[1]), np.float32)
            np.add.at(sums, codes, rest)
            uses = np.bincount(codes, minlength=count).clip(min=1).astype(np.float32)
            means: F32 = sums / uses[:, None]
            if self.given is None:
                rest = rest - means[codes]
            found.append(means)
        return found


def item_vectors(
    log: InteractionLog, features: Sequence[ItemValues], dim: int, window: int, seed: int
) -> F32:
    """Compute a vector for each item from the items near it in histories, and from its features.

    Args:
        log: Log whose trained events are counted.
        features: Side features of items; each has as much weight in a vector as the co-occurrences.
        dim: Most dimensions of the co-occurrence part.
        window: Most events between two items that co-occur; a pair n events apart counts 1 / n.
        seed: Seed of the eigenvectors' random start.

    Returns:
        float32 [num_items, d], rows of unit length; zero for an item without co-occurrences and
        features.
    """
    parts = [_neighbour_vectors(log, dim, window, seed)]
    for feature in features:
        if not feature.values:
            continue
        table = np.zeros((log.num_items, len(feature.values)), np.float32)
        for row, item in enumerate(log.item_ids.tolist()):
            table[row, feature.of_item.get(item, [])] = 1
        parts.append(_unit(torch.from_numpy(table)))
    together = np.concatenate([part.numpy() for part in parts], axis=1)
    return _unit(torch.from_numpy(together)).numpy()


def _neighbour_vectors(log: InteractionLog, dim: int, window: int, seed: int) -> Tensor:
    num_items = log.num_items
    one, other, count = _count_pairs(log, window)
    sums = np.bincount(one, count, num_items) + np.bincount(other, count, num_items)
    total = sums + SMOOTHING
    information = np.log(count * total.sum() / (total[one] * total[other]))
    kept = (information > 0) & (one != other)
    one, other = one[kept], other[kept]
    values = information[kept].astype(np.float32)
    keys = np.concatenate([one * num_items + other, other * num_items + one])
    order = np.argsort(keys)
    keys = keys[order]
    starts = np.searchsorted(keys, np.arange(num_items + 1) * num_items)
    matrix = Csr(
        torch.from_numpy(starts.astype(np.int32)),
        torch.from_numpy((keys % num_items).astype(np.int32)),
        torch.from_numpy(np.tile(values, 2)[order]),
    )
    return _unit(_largest(matrix, min(dim, num_items), seed))


def _count_pairs(log: InteractionLog, window: int) -> tuple[I64, I64, F64]:
    """Count the pairs of items that co-occur, a block of the events at a time.

    Returns:
        Both items of each pair, the smaller row first, int64 [pairs], pairs ascending, and its
        count, float64 [pairs]. Of more than `MOST_PAIRS` those with the smallest counts are left
        out after each block.
    """
    unit = lcm(*range(1, window + 1))  # whole numbers, whose sum does not depend on its order
    pairs, count = np.array([-1]), np.array([np.inf])  # the first one is none
    for users, events in trained_blocks(log):
        items = log.items[events]
        for apart in range(1, window + 1):
            near = users[apart:] == users[:-apart]
            one, other = items[:-apart][near], items[apart:][near]
            found, number = np.unique(
                np.minimum(one, other) * log.num_items + np.maximum(one, other), return_counts=True
            )
            more = number * (unit / apart)
            at = np.searchsorted(pairs, found, "right")
            is_new = pairs[at - 1] != found
            count[at[~is_new] - 1] += more[~is_new]
            pairs = np.insert(pairs, at[is_new], found[is_new])
            count = np.insert(count, at[is_new], more[is_new])
        if len(pairs) > 1 + MOST_PAIRS:
            most = np.sort(np.argsort(-count, kind="stable")[: 1 + MOST_PAIRS])
            pairs, count = pairs[most], count[most]
    one, other = np.divmod(pairs[1:], log.num_items)
    return one, other, count[1:] / unit


def _largest(matrix: Csr, dim: int, seed: int) -> Tensor:
    """Compute the eigenvectors of a symmetric matrix's largest eigenvalues, times their roots.

    Args:
        matrix: float32 [n, n].
        dim: Number of eigenvectors.
        seed: Seed of the random start.

    Returns:
        float32 [n, dim], largest eigenvalue first; zero for an eigenvalue below zero.
    """
    generator = torch.Generator().manual_seed(seed)
    num_rows = len(matrix.starts) - 1
    width = min(num_rows, dim + SPARE_VECTORS)
    basis = torch.randn(num_rows, width, generator=generator)
    for _ in range(EIGEN_SWEEPS):
        basis = torch.linalg.qr(matrix.times(basis))[0]
    small = basis.T @ matrix.times(basis)
    values, vectors = torch.linalg.eigh((small + small.T) / 2)  # eigenvalues ascend
    largest: Tensor = basis @ vectors[:, -dim:].flip(1) * values[-dim:].flip(0).clamp(min=0).sqrt()
    return largest


def _unit(rows: Tensor) -> Tensor:
    unit: Tensor = normalize(rows, dim=1, eps=SHORTEST)
    return unit


def residual_codes(vectors: F32, code_count: Sequence[int], uses: I64, seed: int) -> ItemCodes:
    """Code vectors by residual k-means, and resolve collisions.

    Args:
        vectors: float32 [N, d], N >= 1.
        code_count: Number of codes of each level.
        uses: int64 [N] number of uses of each item. In a collision the most used item keeps its
            codes; ties go to the first one.
        seed: Seed of the centroids' start.

    Raises:
        ConfigError: there are fewer semantic IDs than items.
    """
    if prod(code_count) < len(vectors):
        raise ConfigError(
            f"code_count: {list(code_count)} make {prod(code_count)} semantic IDs, "
            f"{len(vectors)} needed; use more codes or more levels"
        )
    generator = torch.Generator().manual_seed(seed)
    rest = torch.from_numpy(vectors)
    centroids = []
    codes = []
    residuals = [float(rest.square().sum(1).mean())]
    for count in code_count:
        table, code = kmeans(rest, count, generator)
        rest = rest - table[code]
        centroids.append(table.numpy())
        codes.append(code.numpy())
        residuals.append(float(rest.square().sum(1).mean()))
    sids = np.stack(codes, axis=1)
    num_moved = _resolve(sids, vectors, centroids, np.argsort(-uses, kind="stable"))
    return ItemCodes(
        sids.astype(np.int32), tuple(code_count), tuple(centroids), tuple(residuals), num_moved
    )


def codes_of_new(codes: ItemCodes, vectors: F32, new_vectors: F32) -> I32:
    """Code new items by the nearest codes with a free semantic ID; known items keep their codes.

    Args:
        codes: Result of `residual_codes` for the known items.
        vectors: float32 [N, d] vectors of the known items.
        new_vectors: float32 [n, d]; of two new items that collide, the first keeps its codes.

    Returns:
        int32 [n, L].
    """
    rest = torch.from_numpy(new_vectors)
    found = []
    for centroids in codes.centroids:
        code, _ = _nearest(rest, torch.from_numpy(centroids))
        rest = rest - torch.from_numpy(centroids)[code]
        found.append(code.numpy())
    sids = np.concatenate([codes.sids, np.stack(found, axis=1)]).astype(np.int64)
    _resolve(sids, np.concatenate([vectors, new_vectors]), codes.centroids, np.arange(len(sids)))
    return sids[len(codes.sids) :].astype(np.int32)


def kmeans(rows: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Cluster rows by k-means.

    A centroid that has lost all its rows moves to the row that is farthest from its own centroid.
    If there are fewer distinct rows than centroids, some centroids stay unused.

    Args:
        rows: float32 [n, d].
        count: Number of centroids; may be more than rows.
        generator: Random generator that draws the rows at which the centroids start.

    Returns:
        The centroids, float32 [count, d], and the nearest of each row, int64 [n].
    """
    start = torch.randperm(len(rows), generator=generator)[torch.arange(count) % len(rows)]
    table = rows[start].clone()
    code, distance = _nearest(rows, table)
    for _ in range(KMEANS_SWEEPS):
        sums = torch.zeros_like(table).index_add_(0, code, rows)
        sizes = torch.bincount(code, minlength=count)
        table = torch.where(sizes[:, None] > 0, sums / sizes[:, None].clamp(min=1), table)
        worst = torch.argsort(distance, descending=True, stable=True)
        empty = torch.nonzero(sizes == 0)[:, 0][: int((distance > 0).sum())]
        table[empty] = rows[worst[: len(empty)]]
        before = code
        code, distance = _nearest(rows, table)
        if not len(empty) and torch.equal(code, before):
            break
    return table, code


def _nearest(rows: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Find the nearest row of the table, int64 [n], and its squared distance, float32 [n]."""
    half = table.square().sum(1) / 2
    found = []
    for part in rows.split(8192):  # limits the memory of the distances
        nearest = torch.addmm(half, part, table.T, alpha=-1).min(
            1
        )  # half of them, less half |row|^2
        distance = (part.square().sum(1) + 2 * nearest.values).clamp(min=0)
        found.append((nearest.indices, distance))
    return torch.cat([code for code, _ in found]), torch.cat([distance for _, distance in found])


def _resolve(sids: I64, vectors: F32, centroids: Sequence[F32], order: I64) -> int:
    """Give all but the first item of every collision other codes, in place.

    The descent only takes codes with a free semantic ID below them, so it always ends at a free
    one.

    Args:
        sids: int64 [N, L], changed in place.
        vectors: float32 [N, d].
        centroids: L x float32 [codes, d].
        order: int64 [N] rows of the items; in a collision the first one in this order keeps its
            codes.

    Returns:
        The number of items that got other codes.
    """
    _, first = np.unique(sids[order], axis=0, return_index=True)
    keeps = np.zeros(len(sids), np.bool_)
    keeps[order[first]] = True
    used: dict[tuple[int, ...], int] = {}  # prefix -> number of taken semantic IDs that have it
    for kept in sids[keeps].tolist():
        _take(used, kept)
    # semantic IDs below a code of each level
    room = [prod(len(table) for table in centroids[level + 1 :]) for level in range(len(centroids))]
    moved = order[~keeps[order]]
    # items without events often have the vector of many others: their features are the same
    _, groups, sizes = np.unique(vectors[moved], axis=0, return_inverse=True, return_counts=True)
    # by vector and prefix: the codes that may have room, the nearest last; room is never given back
    farthest_first: dict[tuple[int, ...], list[int]] = {}
    for row, group in zip(moved.tolist(), groups.ravel().tolist(), strict=True):
        rest = vectors[row]
        sid: list[int] = []
        for level, table in enumerate(centroids):
            codes = farthest_first.get((group, *sid))
            if codes is None:
                nearest = np.argsort(np.square(rest - table).sum(1), kind="stable")
                codes = nearest[::-1].tolist()
                if sizes[group] > 1:
                    farthest_first[group, *sid] = codes
            while used.get((*sid, codes[-1]), 0) == room[level]:
                codes.pop()
            sid.append(codes[-1])
            rest = rest - table[codes[-1]]
        _take(used, sid)
        sids[row] = sid
    return int(len(sids) - keeps.sum())


def _take(used: dict[tuple[int, ...], int], sid: list[int]) -> None:
    """Count a semantic ID as taken."""
    for level in range(len(sid)):
        prefix = tuple(sid[: level + 1])
        used[prefix] = used.get(prefix, 0) + 1


def codes_text(item_ids: I64, codes: ItemCodes) -> str:
    """Encode codes as the JSON that `read_codes` reads."""
    return json.dumps(dict(zip(map(str, item_ids.tolist()), codes.sids.tolist(), strict=True)))


def read_codes(path: Path, item_ids: I64, key: bytes = b"") -> ItemCodes:
    """Read the ready-made codes of items from a catalogue file, or from JSON {"item": [code, ...]}.

    Args:
        path: The file.
        item_ids: Ids of the items.
        key: Key of their ids; empty = they have none.

    Raises:
        DataError: the file is not one of these, an item has no codes, or two items have the same.
    """
    if path.suffix == ".json":
        found, sids = _read_json(path, key)
    else:
        items = read_items(path)
        found = items.item_ids
        sids = items.sids
    order = np.argsort(found, kind="stable")
    at = np.searchsorted(found[order], item_ids).clip(max=max(len(found) - 1, 0))
    if not len(found) or (missing := found[order][at] != item_ids).any():
        raise DataError(
            f"{path}: no codes for item "
            f"{item_ids[np.argmax(missing)] if len(found) else item_ids[0]}"
        )
    sids = sids[order][at]
    _, first, counts = np.unique(sids, axis=0, return_index=True, return_counts=True)
    if (counts > 1).any():
        row = int(first[np.argmax(counts > 1)])
        raise DataError(
            f"{path}: item {item_ids[row]} and another item have the same codes, "
            f"{sids[row].tolist()}; a semantic ID names one item"
        )
    return ItemCodes(sids, tuple(int(codes.max()) + 1 for codes in sids.T))


def _read_json(path: Path, key: bytes) -> tuple[I64, I32]:
    try:
        table = json.loads(path.read_bytes())
        ids = ids_of_names(list(table), key)
        sids = np.array(list(table.values()), np.int32)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(
            f'{path}: must be {{"item": [code, ...]}}, the same number of codes for each item: '
            f"{error}"
        ) from error
    if sids.ndim != 2 or not sids.size or int(sids.min()) < 0:
        raise DataError(
            f'{path}: must be {{"item": [code, ...]}}, the same number of codes for each item, '
            "each 0 or more"
        )
    return ids, sids
