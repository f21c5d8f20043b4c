"""Train a decoder over semantic IDs: its forward pass with gradients, and its losses.

The forward pass (`encode`) computes the same function as `Decoder.prefill` for many histories at
once. Histories are padded at the end, so the causal mask keeps real tokens from attending to the
padding.

Every prefix of a semantic ID can have a token of its own: a node of the tree (trie) of the IDs.

    codes           3 7 1      3 7 2      5 7 1
    nodes           0 0 0      0 0 1      1 1 2      numbered by level, in the order of the codes;
                                                     nodes of known items keep their numbers

The same code means something else after another prefix: 7 after 3 is not 7 after 5. A small decoder
would have to combine all codes of an item to know which item it read. The token of a node contains
the whole prefix, and the token of the last level is the item.

The tree stays the same. A level may have as many nodes as there are items, and a softmax over all
of them would cost more than the decoder. So the loss compares a node with its siblings only, as a
search does that normalises over valid codes. A node without siblings has probability 1 and costs
nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import (
    cross_entropy,
    dropout,
    embedding,
    linear,
    pad,
    scaled_dot_product_attention,
)

from npu_gr.catalogue.build import build_trie
from npu_gr.catalogue.trie import I32, Codebooks, Trie
from npu_gr.model.decoder import Decoder, DecoderLayer
from npu_gr.train.data import Batch
from npu_gr.train.generate.codes import ItemCodes

STD = 0.05  # standard deviation of the codes' rows at the start
IMPOSSIBLE = float("-inf")  # logit of the padding of a row of siblings


def nodes_of(given: ItemCodes, kept: I32 | None = None) -> ItemCodes:
    """Replace the codes of distinct semantic IDs by the numbers of their nodes.

    The result has the same tree, and keeps the given codes in `ItemCodes.given`.

    Args:
        given: Codes of N items, L of each.
        kept: int32 [N, L] numbers that the nodes of an item have already, -1 = the item is new;
            None = all are.
    """
    rows = np.arange(len(given.sids), dtype=np.int64)
    trie = build_trie(given.sids, rows, Codebooks.stacked(given.code_count))
    states = [trie.find(rows)]
    for level in reversed(range(1, trie.num_levels)):
        states.append(trie.parent(level, states[-1]))
    places = np.stack(states[::-1], axis=1)
    count = node_count(given.code_count, len(rows))
    if kept is None or (kept.max(axis=0) >= count).any():
        return ItemCodes(places.astype(np.int32), count, given=given)
    sids = np.empty_like(given.sids)
    for level, codes in enumerate(trie.token):
        is_known = kept[:, level] >= 0
        number = np.full(len(codes), -1, np.int32)
        number[places[is_known, level]] = kept[is_known, level]
        is_new = number < 0
        free = np.setdiff1d(np.arange(count[level], dtype=np.int32), number)
        number[is_new] = free[: is_new.sum()]
        sids[:, level] = number[places[:, level]]
    return ItemCodes(sids, count, given=given)


def node_count(code_count: Sequence[int], num_items: int) -> tuple[int, ...]:
    """Compute the tokens of each level that nodes of semantic IDs take.

    There is room for more items, so that the configuration that names these numbers stays as it is
    until the catalogue passes the next power of 2.
    """
    room = 1 << (num_items - 1).bit_length()
    return tuple(min(room, prefixes) for prefixes in accumulate(code_count, mul))


class NodeDecoder(nn.Module):
    """A decoder over nodes in training: a node's embedding is its own row plus its code's row.

    Nodes with the same code share its row, so rare nodes learn from frequent ones. `folded` returns
    the decoder to serve, with the sums as its embedding table.
    """

    code_of: Tensor

    def __init__(self, decoder: Decoder, nodes: ItemCodes, generator: torch.Generator) -> None:
        """Initialise the rows of the codes at random.

        Args:
            decoder: Decoder over the nodes, with a tied head; its embedding has the nodes' own
                rows.
            nodes: Result of `nodes_of`.
            generator: Random generator of the codes' rows.
        """
        super().__init__()
        assert nodes.given is not None
        assert decoder.config.tied_head
        self.decoder = decoder
        rows = torch.empty(sum(nodes.given.code_count), decoder.config.dim)
        self.code_rows = nn.Parameter(rows.normal_(0.0, STD, generator=generator))
        self.register_buffer("code_of", _codes_of(nodes, nodes.given))

    @property
    def table(self) -> Tensor:
        """The embedding of each node, [nodes, dim]."""
        return self.decoder.embedding.weight + self.code_rows[self.code_of]

    @torch.no_grad()
    def keep_sums(self) -> None:
        """Subtract the codes' rows from the nodes' own, so that the decoder's table is the sums."""
        self.decoder.embedding.weight -= self.code_rows[self.code_of]

    @torch.no_grad()
    def folded(self) -> Decoder:
        """Copy the decoder, with the sums as its embedding."""
        decoder = copy.deepcopy(self.decoder)
        decoder.embedding.weight.copy_(self.table)
        return decoder


class CodeLoss:
    """The loss of a decoder over codes: cross-entropy of each code over the whole vocabulary."""

    def __init__(self, codes: ItemCodes) -> None:
        bases = Codebooks.stacked(codes.code_count).vocab_base
        self._tokens = torch.from_numpy(codes.sids + np.array(bases, np.int64))  # [N, L]

    def __call__(self, model: Decoder, batch: Batch, dropout_ratio: float) -> Tensor:
        """Average the cross-entropy of all codes but the first of each window, without padding."""
        tokens = self._tokens
        sequence = tokens[batch.items].flatten(1)  # [B, N * L]
        counts = batch.valid.repeat_interleave(tokens.shape[1], dim=1)[:, 1:]
        rows = encode(model, sequence[:, :-1], dropout_ratio)
        return cross_entropy(next_logits(model, rows[counts]), sequence[:, 1:][counts])

    def num_terms(self, batch: Batch) -> int:
        """Count the codes that the loss is the mean of."""
        return int(batch.valid.sum()) * self._tokens.shape[1] - len(batch.valid)


class SiblingLoss:
    """The loss of a decoder over nodes: cross-entropy of each node over its siblings."""

    def __init__(self, nodes: ItemCodes) -> None:
        books = Codebooks.stacked(nodes.code_count)
        trie = build_trie(nodes.sids, np.arange(len(nodes.sids), dtype=np.int64), books)
        self._bases = books.vocab_base
        self._tokens = torch.from_numpy(nodes.sids + np.array(books.vocab_base, np.int64))  # [N, L]
        self._nodes = [torch.from_numpy(level.astype(np.int64)) for level in trie.token]
        self._places = [_places_of(nodes) for nodes in self._nodes]
        self._first, self._siblings = zip(
            *(_siblings(trie, level) for level in range(len(books))), strict=True
        )

    def __call__(self, model: NodeDecoder, batch: Batch, dropout_ratio: float) -> Tensor:
        """Sum the cross-entropy of all nodes but the first of each window, without padding.

        The sum is divided by the number of items.
        """
        table = model.table
        tokens = self._tokens[batch.items]  # [B, N, L]
        rows = encode(model.decoder, tokens.flatten(1)[:, :-1], dropout_ratio, table)
        # [:, i, l] expects level l of item i
        rows = pad(rows, (0, 0, 1, 0)).unflatten(1, tokens.shape[1:])
        losses = []
        for level in range(tokens.shape[2]):
            counts = batch.valid
            if not level:
                counts = counts.clone()
                counts[:, 0] = False  # no token precedes the first node of a window
            wanted = self._places[level][tokens[..., level][counts] - self._bases[level]]
            losses.append(self._among_siblings(table, rows[:, :, level][counts], wanted, level))
        return torch.stack(losses).sum() / batch.valid.sum()

    def _among_siblings(self, table: Tensor, rows: Tensor, wanted: Tensor, level: int) -> Tensor:
        """Sum the cross-entropy of nodes of a level over their siblings.

        `wanted` [n] are the nodes' places in the trie, where siblings stand side by side, and
        `rows` [n, dim] the final rows that predict them.
        """
        first, nodes = self._first[level], self._bases[level] + self._nodes[level]
        if not level:  # all nodes are siblings
            logits = rows @ embedding(nodes, table).T
            return cross_entropy(logits, wanted, reduction="sum")
        siblings = self._siblings[level][wanted]
        uncertain = siblings > 1
        rows, wanted = rows[uncertain], wanted[uncertain]
        siblings = siblings[uncertain]
        if not len(wanted):
            return rows.sum()
        places = torch.arange(int(siblings.max()))
        # padding repeats the last sibling, so that the index is valid
        among = nodes[first[wanted, None] + torch.minimum(places, siblings[:, None] - 1)]
        logits = torch.bmm(embedding(among, table), rows[:, :, None])[:, :, 0]
        logits = logits.masked_fill(places >= siblings[:, None], IMPOSSIBLE)
        return cross_entropy(logits, wanted - first[wanted], reduction="sum")


def _codes_of(nodes: ItemCodes, given: ItemCodes) -> Tensor:
    """Find the given code of each node, int64 [nodes]; both are numbered across all levels."""
    code_of = np.zeros(sum(nodes.code_count), np.int64)  # 0: a token that no item has
    of_levels = zip(nodes.sids.T, Codebooks.stacked(nodes.code_count).vocab_base, strict=True)
    of_codes = zip(given.sids.T, Codebooks.stacked(given.code_count).vocab_base, strict=True)
    for (node, node_base), (code, code_base) in zip(of_levels, of_codes, strict=True):
        code_of[node + node_base] = code + code_base
    return torch.from_numpy(code_of)


def _places_of(nodes: Tensor) -> Tensor:
    """Invert the list of the nodes at each place, int64 [largest node + 1]."""
    places = torch.zeros(int(nodes.max()) + 1, dtype=torch.int64)
    places[nodes] = torch.arange(len(nodes))
    return places


def _siblings(trie: Trie, level: int) -> tuple[Tensor, Tensor]:
    """Find the first sibling and the number of siblings at each place of a level, int64 [n] each.

    A node is one of its own siblings.
    """
    pointers = trie.indptr[level].astype(np.int64)
    counts = np.diff(pointers)
    return torch.from_numpy(np.repeat(pointers[:-1], counts)), torch.from_numpy(
        np.repeat(counts, counts)
    )


def encode(
    model: Decoder, tokens: Tensor, dropout_ratio: float = 0.0, table: Tensor | None = None
) -> Tensor:
    """Compute the final rows of token sequences, as input of `next_logits`.

    Args:
        model: Decoder to run.
        tokens: int64 [B, n], padded at the end with any tokens.
        dropout_ratio: Dropout of embedded tokens and of each layer's update, 0 .. 1.
        table: float32 [vocabulary, dim] token embedding; None = the model's.

    Returns:
        float32 [B, n, dim].
    """
    config = model.config
    cos, sin = config.angles(0, tokens.shape[1], tokens.device)
    x = dropout(
        embedding(tokens, model.embedding.weight if table is None else table), dropout_ratio
    )
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        q, k, v = (rows.transpose(1, 2) for rows in layer.project(x, cos, sin))  # [B, H, n, D]
        grouped = config.num_heads != config.num_kv_heads
        attention = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        new = layer.finish(x, attention.transpose(1, 2))
        x = x + dropout(new - x, dropout_ratio) if dropout_ratio else new
    rows: Tensor = model.norm(x)
    return rows


def next_logits(model: Decoder, rows: Tensor) -> Tensor:
    """Compute the logits of the next token, with gradients: [..., dim] -> [..., vocabulary]."""
    weight = model.embedding.weight if model.config.tied_head else model.head.weight
    return linear(rows, weight)


@torch.no_grad()
def start(model: Decoder, generator: torch.Generator, std: float = 0.05) -> None:
    """Initialise the weights in place: matrices normal, norms 1, biases 0.

    Matrices that add to the residual stream get std / sqrt(2 x layers), so that the stream's
    variance does not grow with depth; all others get `std`.
    """
    for name, weight in model.named_parameters():
        if weight.ndim < 2:
            weight.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        adds = name.endswith(("out.weight", "down.weight"))
        weight.normal_(
            0.0, std / (2 * model.config.num_layers) ** 0.5 if adds else std, generator=generator
        )
