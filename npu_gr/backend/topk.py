"""Constrain, then select: the best continuations of a request's beams, exactly and in a total order.

Source: xBeam of xGR, arXiv:2512.11529. Rows are visited by an upper bound of what they can
offer, best first, and the visit ends when the bound falls below the worst that is kept: exact, whatever is left out.

Total order: score descending, then beam ascending, then edge (so code) ascending.
"""

from __future__ import annotations

import torch
from torch import Tensor

from npu_gr.backend.calls import Choices, Continuations

CHUNK_EDGES = 1 << 16  # candidates gathered at once; a first chunk is a quarter of it


def select(logits: Tensor, norm: Tensor | None, acc: Tensor, follow: Continuations, width: int) -> Choices:
    """The `width` best of acc[row] + logits[row, code] - norm[row] over all valid edges of all rows.

    Args:
        logits: fp32 (fp64) [rows, codes] of the level's codebook.
        norm: [rows] log-sum-exp of whatever the row is normalised over; None = over its valid, allowed edges.
        acc: [rows] accumulated log-probability of each beam; -inf = a beam that is out.
        follow: the valid edges.
        width: how many are wanted, >= 1.

    Raises:
        FloatingPointError: a logit is NaN or infinity.
    """
    if norm is None:
        norm = _valid_norm(logits, follow)
    best = _Best(width)
    peak = logits.amax(1)
    if bool((peak.isnan() | ~(norm < float("inf"))).any()):
        raise FloatingPointError("a logit is not a number")
    bound = (peak - norm).add_(acc)  # rounds as the scores do, so none of a row's scores is above it
    alive = (bound > float("-inf")) & (follow.degree > 0) & (norm > float("-inf"))
    order = torch.argsort(bound, descending=True, stable=True)
    order = order[alive[order]]
    bounds = bound[order].tolist()
    edges = follow.degree[order].cumsum(0).tolist()
    at = 0
    chunk = CHUNK_EDGES // 4
    while at < len(bounds) and bounds[at] >= best.worst:
        end = at + 1
        limit = (edges[at - 1] if at else 0) + chunk
        while end < len(bounds) and edges[end] <= limit and bounds[end] >= best.worst:
            end += 1
        best.offer(*_candidates(logits, norm, acc, follow, order[at:end]))
        at = end
        chunk = CHUNK_EDGES
    return best.sorted(logits)


class _Best:
    """The best so far, ties with the worst included, in no order."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.worst = float("-inf")
        self._kept: list[Choices] = []

    def offer(self, score: Tensor, parent: Tensor, edge: Tensor) -> None:
        keep = torch.nonzero(score >= self.worst).squeeze(1)
        keep = keep[score[keep] > float("-inf")]
        if not len(keep):
            return
        self._kept.append(Choices(score[keep], parent[keep], edge[keep]))
        if sum(len(part.score) for part in self._kept) >= self.width:
            everything = Choices(*(torch.cat(column) for column in zip(*self._kept, strict=True)))
            worst = torch.topk(everything.score, self.width, sorted=False).values.amin()
            good = torch.nonzero(everything.score >= worst).squeeze(1)
            self.worst = float(worst)
            self._kept = [Choices(*(column[good] for column in everything))]

    def sorted(self, like: Tensor) -> Choices:
        if not self._kept:
            nothing = torch.empty(0, dtype=torch.int64, device=like.device)
            return Choices(like.new_empty(0), nothing, nothing)
        score, parent, edge = (torch.cat(column) for column in zip(*self._kept, strict=True))
        order = torch.argsort(edge)  # edges of a level are distinct, and of one beam they ascend by code
        order = order[torch.argsort(parent[order], stable=True)]
        order = order[torch.argsort(score[order], descending=True, stable=True)][: self.width]
        return Choices(score[order], parent[order], edge[order])


def edges_of(follow: Continuations, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(row, edge) of every allowed edge of some rows, row by row, without padding to the widest."""
    degree = follow.degree[rows]
    ends = degree.cumsum(0)
    row = torch.repeat_interleave(rows, degree)
    first = torch.repeat_interleave(follow.lo[rows] - (ends - degree), degree)
    edge = torch.arange(len(row), device=row.device) + first
    if follow.allowed is not None:
        keep = torch.nonzero(follow.allowed[edge]).squeeze(1)
        row = row[keep]
        edge = edge[keep]
    return row, edge


def _candidates(
    logits: Tensor, norm: Tensor, acc: Tensor, follow: Continuations, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    row, edge = edges_of(follow, rows)
    score = logits[row, follow.code[edge].long()].sub_(norm[row]).add_(acc[row])
    return score, row, edge


def _valid_norm(logits: Tensor, follow: Continuations) -> Tensor:
    """Log-sum-exp over each row's valid edges; -inf for a row without any."""
    row, edge = edges_of(follow, torch.arange(len(logits), device=logits.device))
    values = logits[row, follow.code[edge].long()]
    peak = torch.full_like(logits[:, 0], float("-inf")).scatter_reduce_(0, row, values, "amax")
    total = torch.zeros_like(peak).scatter_add_(0, row, (values - peak[row]).exp_())
    return peak + total.log()
