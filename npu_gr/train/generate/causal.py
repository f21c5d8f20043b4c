"""The decoder's forward pass for training: many histories at once, padded at the end, with gradients.

It computes the same function as `Decoder.prefill`: the layers are the same, and a row attends to itself and to the
tokens before it. Padding stands after all real tokens, which therefore never attend to it: it needs no mask.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import dropout, embedding, linear, scaled_dot_product_attention

from npu_gr.model.decoder import Decoder, DecoderLayer


def encode(model: Decoder, tokens: Tensor, dropout_ratio: float = 0.0, table: Tensor | None = None) -> Tensor:
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
    x = dropout(embedding(tokens, model.embedding.weight if table is None else table), dropout_ratio)
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
    """Compute the logits of the next token: [..., dim] -> [..., vocabulary]. `Decoder.logits` with gradients."""
    weight = model.embedding.weight if model.config.tied_head else model.head.weight
    return linear(rows, weight)


@torch.no_grad()
def start(model: Decoder, generator: torch.Generator, std: float = 0.05) -> None:
    """Initialise the weights in place: matrices normal, norms 1, biases 0.

    Args:
        model: the decoder.
        generator: draws the matrices.
        std: of a matrix; one that adds to the residual stream has std / sqrt(2 x layers), so that the stream's variance
            does not grow with depth.
    """
    for name, weight in model.named_parameters():
        if weight.ndim < 2:
            weight.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        adds = name.endswith(("out.weight", "down.weight"))
        weight.normal_(0.0, std / (2 * model.config.num_layers) ** 0.5 if adds else std, generator=generator)
