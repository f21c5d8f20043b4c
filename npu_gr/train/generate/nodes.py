"""Give every beginning of a ready-made semantic ID a token of its own: a node of the tree that the codes name.

Codes of texts say what an item is, and little of what comes next. A code stands for something else
behind every other beginning, so a small decoder would have to bind all codes of an item before it
knew what it has read. The token of a node says it at once, and that of the last level is the item.

    given codes     3 7 1      3 7 2      5 7 1
    nodes           0 0 0      0 0 1      1 1 2      numbered by level, in the order of the codes

The paths stay what they were. A level may have as many nodes as there are items, and a softmax over
all of them would cost more than the decoder; so training compares a node with its siblings alone,
as a search does that normalises over valid codes. A node without siblings is certain, and costs
nothing.

The decoder's forward pass for training: many histories at once, padded at the end, with gradients.

It computes the same function as `Decoder.prefill`: the layers are the same, and a row attends to
itself and to the tokens before it. Padding stands after all real tokens, which therefore never
attend to it: it needs no mask.
"""

from __future__ import annotations

import copy

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
from npu_gr.catalogue.trie import Codebooks, Trie
from npu_gr.model.decoder import Decoder, DecoderLayer
from npu_gr.train.data import Batch
from npu_gr.train.generate.codes import ItemCodes

STD = 0.05  # of the codes' rows at the start
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


class NodeDecoder(nn.Module):
    """A decoder over nodes while it is trained: a node's embedding is a row of its own and its code's row.

    Codes that nodes have in common teach them something in common, however seldom one of them is
    used. `folded` is what serves: the sums are its only table.
    """

    code_of: Tensor

    def __init__(self, decoder: Decoder, nodes: ItemCodes, generator: torch.Generator) -> None:
        """Start the rows of the codes at random.

        Args:
            decoder: over the nodes, with a tied head; its embedding has the nodes' own rows.
            nodes: made by `nodes_of`.
            generator: draws the rows of the codes.
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
        """[nodes, dim] the embedding of each node."""
        return self.decoder.embedding.weight + self.code_rows[self.code_of]

    @torch.no_grad()
    def folded(self) -> Decoder:
        """Copy the decoder, with the sums as its embedding."""
        decoder = copy.deepcopy(self.decoder)
        decoder.embedding.weight.copy_(self.table)
        return decoder


class CodeLoss:
    """The loss of a decoder over codes: cross-entropy of each code among the whole vocabulary."""

    def __init__(self, codes: ItemCodes) -> None:
        bases = Codebooks.stacked(codes.code_count).vocab_base
        self._tokens = torch.from_numpy(codes.sids + np.array(bases, np.int64))  # [N, L]

    def __call__(self, model: Decoder, batch: Batch, dropout_ratio: float) -> Tensor:
        """Average the cross-entropy of every code but the first of each window.

        Padding does not count.
        """
        tokens = self._tokens
        sequence = tokens[batch.items].flatten(1)  # [B, N * L]
        counts = batch.valid.repeat_interleave(tokens.shape[1], dim=1)[:, 1:]
        rows = encode(model, sequence[:, :-1], dropout_ratio)
        return cross_entropy(next_logits(model, rows[counts]), sequence[:, 1:][counts])


class SiblingLoss:
    """The loss of a decoder over nodes: cross-entropy of each node among those that share its parent."""

    def __init__(self, nodes: ItemCodes) -> None:
        books = Codebooks.stacked(nodes.code_count)
        trie = build_trie(nodes.sids, np.arange(len(nodes.sids), dtype=np.int64), books)
        self._bases = books.vocab_base
        self._tokens = torch.from_numpy(nodes.sids + np.array(books.vocab_base, np.int64))  # [N, L]
        self._first, self._siblings = zip(
            *(_siblings(trie, level) for level in range(len(books))), strict=True
        )

    def __call__(self, model: NodeDecoder, batch: Batch, dropout_ratio: float) -> Tensor:
        """Sum the cross-entropy of all nodes but the first of each window, and divide it by the items.

        Args:
            model: over these nodes.
            batch: windows; padding does not count.
            dropout_ratio: as of `encode`.
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
                counts[:, 0] = False  # nothing stands before the first node of a window
            wanted = tokens[..., level][counts] - self._bases[level]
            losses.append(self._among_siblings(table, rows[:, :, level][counts], wanted, level))
        return torch.stack(losses).sum() / batch.valid.sum()

    def _among_siblings(self, table: Tensor, rows: Tensor, wanted: Tensor, level: int) -> Tensor:
        """Sum the cross-entropy of nodes `wanted` [n] of a level, given the rows [n, dim] that expect them."""
        first, base = self._first[level], self._bases[level]
        if not level:  # all nodes are siblings
            logits = rows @ table[base : base + len(first)].T
            return cross_entropy(logits, wanted, reduction="sum")
        siblings = self._siblings[level][wanted]
        uncertain = siblings > 1
        rows, wanted = rows[uncertain], wanted[uncertain]
        siblings = siblings[uncertain]
        if not len(wanted):
            return rows.sum()
        places = torch.arange(int(siblings.max()))
        # a place that pads reads the last sibling again, which exists
        nodes = first[wanted, None] + torch.minimum(places, siblings[:, None] - 1)
        logits = torch.bmm(embedding(nodes + base, table), rows[:, :, None])[:, :, 0]
        logits = logits.masked_fill(places >= siblings[:, None], IMPOSSIBLE)
        return cross_entropy(logits, wanted - first[wanted], reduction="sum")


def _codes_of(nodes: ItemCodes, given: ItemCodes) -> Tensor:
    """Find the given code of each node, both numbered through all levels. int64 [nodes]."""
    code_of = np.empty(sum(nodes.code_count), np.int64)
    of_levels = zip(nodes.sids.T, Codebooks.stacked(nodes.code_count).vocab_base, strict=True)
    of_codes = zip(given.sids.T, Codebooks.stacked(given.code_count).vocab_base, strict=True)
    for (node, node_base), (code, code_base) in zip(of_levels, of_codes, strict=True):
        code_of[node + node_base] = code + code_base
    return torch.from_numpy(code_of)


def _siblings(trie: Trie, level: int) -> tuple[Tensor, Tensor]:
    """Find, for each node of a level, the first node below its parent, and how many there are. int64 [n], [n]."""
    pointers = trie.indptr[level].astype(np.int64)
    counts = np.diff(pointers)
    return torch.from_numpy(np.repeat(pointers[:-1], counts)), torch.from_numpy(
        np.repeat(counts, counts)
    )


def encode(
    model: Decoder, tokens: Tensor, dropout_ratio: float = 0.0, table: Tensor | None = None
) -> Tensor:
    """Compute the final rows of token sequences, ready for `next_logits`.

    Args:
        model: the decoder.
        tokens: int64 [B, n], padded at the end with any tokens.
        dropout_ratio: of embedded tokens and of each layer's update.
        table: [vocabulary, dim] in the place of the model's token embedding.

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
    """Compute the logits of the next token: [..., dim] -> [..., vocabulary].

    `Decoder.logits` with gradients.
    """
    weight = model.embedding.weight if model.config.tied_head else model.head.weight
    return linear(rows, weight)


@torch.no_grad()
def start(model: Decoder, generator: torch.Generator, std: float = 0.05) -> None:
    """Initialise the weights in place: matrices normal, norms 1, biases 0.

    Args:
        model: the decoder.
        generator: draws the matrices.
        std: of a matrix; one that adds to the residual stream has std / sqrt(2 x layers), so that
            the stream's variance does not grow with depth.
    """
    for name, weight in model.named_parameters():
        if weight.ndim < 2:
            weight.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        adds = name.endswith(("out.weight", "down.weight"))
        weight.normal_(
            0.0, std / (2 * model.config.num_layers) ** 0.5 if adds else std, generator=generator
        )
