"""Give every beginning of a ready-made semantic ID a token of its own: a node of the tree that the codes name.

Codes of texts say what an item is, and little of what comes next. A code stands for something else behind every other
beginning, so a small decoder would have to bind all codes of an item before it knew what it has read. The token of a
node says it at once, and that of the last level is the item.

    given codes     3 7 1      3 7 2      5 7 1
    nodes           0 0 0      0 0 1      1 1 2      numbered by level, in the order of the codes

The paths stay what they were. A level may have as many nodes as there are items, and a softmax over all of them would
cost more than the decoder; so training compares a node with its siblings alone, as a search does that normalises over
valid codes. A node without siblings is certain, and costs nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding, pad

from npu_gr.catalogue.build import build_trie
from npu_gr.catalogue.trie import Codebooks, Trie
from npu_gr.model.decoder import Decoder
from npu_gr.train.data import Batch
from npu_gr.train.generate.causal import encode
from npu_gr.train.generate.codes import ItemCodes

IMPOSSIBLE = float("-inf")  # logit of a place that pads a row of siblings


def nodes_of(given: ItemCodes) -> ItemCodes:
    """Number the nodes of given codes: each level's codes are the beginnings of that length.

    Args:
        given: each semantic ID once.

    Returns:
        Codes with the same tree; they remember what was given.
    """
    rows = np.arange(len(given.sids), dtype=np.int64)
    trie = build_trie(given.sids, rows, Codebooks.stacked(given.code_count))
    states = [trie.find(rows)]
    for level in reversed(range(1, trie.num_levels)):
        states.append(trie.parent(level, states[-1]))
    sids = np.stack(states[::-1], axis=1).astype(np.int32)
    return ItemCodes(sids, tuple(len(codes) for codes in trie.token), given=given)


class SiblingLoss:
    """The loss of a decoder over nodes: cross-entropy of each node among those that share its parent."""

    def __init__(self, nodes: ItemCodes) -> None:
        books = Codebooks.stacked(nodes.code_count)
        trie = build_trie(nodes.sids, np.arange(len(nodes.sids), dtype=np.int64), books)
        self._bases = books.vocab_base
        self._tokens = torch.from_numpy(nodes.sids + np.array(books.vocab_base, np.int64))  # [N, L]
        self._first, self._siblings = zip(*(_siblings(trie, level) for level in range(len(books))), strict=True)

    def __call__(self, model: Decoder, batch: Batch, dropout_ratio: float) -> Tensor:
        """Sum the cross-entropy of all nodes but the first of each window, and divide it by the items.

        Args:
            model: its vocabulary is the nodes of all levels, its head the token embedding.
            batch: windows; padding does not count.
            dropout_ratio: as of `encode`.
        """
        tokens = self._tokens[batch.items]  # [B, N, L]
        rows = encode(model, tokens.flatten(1)[:, :-1], dropout_ratio)
        rows = pad(rows, (0, 0, 1, 0)).unflatten(1, tokens.shape[1:])  # [:, i, l] expects level l of item i
        losses = []
        for level in range(tokens.shape[2]):
            counts = batch.valid
            if not level:
                counts = counts.clone()
                counts[:, 0] = False  # nothing stands before the first node of a window
            wanted = tokens[..., level][counts] - self._bases[level]
            losses.append(self._among_siblings(model.head_weight, rows[:, :, level][counts], wanted, level))
        return torch.stack(losses).sum() / batch.valid.sum()

    def _among_siblings(self, head: Tensor, rows: Tensor, wanted: Tensor, level: int) -> Tensor:
        """Sum the cross-entropy of nodes `wanted` [n] of a level, given the rows [n, dim] that expect them."""
        first, base = self._first[level], self._bases[level]
        if not level:  # all nodes are siblings
            logits = rows @ head[base : base + len(first)].T
            return cross_entropy(logits, wanted, reduction="sum")
        siblings = self._siblings[level][wanted]
        uncertain = siblings > 1
        rows, wanted, siblings = rows[uncertain], wanted[uncertain], siblings[uncertain]
        if not len(wanted):
            return rows.sum()
        places = torch.arange(int(siblings.max()))
        # a row that pads reads the last sibling again, which exists
        nodes = first[wanted, None] + torch.minimum(places, siblings[:, None] - 1)
        logits = torch.bmm(embedding(nodes + base, head), rows[:, :, None])[:, :, 0]
        logits = logits.masked_fill(places >= siblings[:, None], IMPOSSIBLE)
        return cross_entropy(logits, wanted - first[wanted], reduction="sum")


def _siblings(trie: Trie, level: int) -> tuple[Tensor, Tensor]:
    """Find, for each node of a level, the first node below its parent, and how many there are. int64 [n], [n]."""
    pointers = trie.indptr[level].astype(np.int64)
    counts = np.diff(pointers)
    return torch.from_numpy(np.repeat(pointers[:-1], counts)), torch.from_numpy(np.repeat(counts, counts))
