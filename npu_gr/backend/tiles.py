"""Tiles: the layout of keys and values for the native HSTU kernels, 64 tokens a tile, by heads.

Widths are padded, Dq to a multiple of 2 and Dv to a multiple of 16. In fp32 a tile's keys are
transposed, [H][Dq][64], and its values are not, [H][64][Dv]; in bf16 both are in pairs, [H][Dq /
2][64][2] over two dims and [H][32][Dv][2] over two tokens. `pack` and `unpack` are the definition;
`ops/cpu/pack_kv.h` is the fast implementation.

Invariant: values behind the last written token of a tile are zero, so that a zero weight is never
multiplied with a NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Slab = tuple[Tensor, Tensor]

TILE_TOKENS = 64
# widths are padded to multiples of these
_KEY_UNITS = 2
_VALUE_UNITS = 16


class Tiles(NamedTuple):
    """Consecutive tiles of one layer; they begin at a multiple of 64 tokens of the history."""

    k: Tensor  # [tiles, H, padded Dq * 64]
    v: Tensor  # [tiles, H, padded Dv * 64]
    num_tokens: int  # <= tiles * 64
    qk_dim: int
    v_dim: int


def padded(qk_dim: int, v_dim: int) -> tuple[int, int]:
    """Return the padded widths of keys and values."""
    return -(-qk_dim // _KEY_UNITS) * _KEY_UNITS, -(-v_dim // _VALUE_UNITS) * _VALUE_UNITS


def empty(num_tiles: int, num_heads: int, qk_dim: int, v_dim: int, dtype: torch.dtype) -> Tiles:
    """Allocate tiles without tokens; the memory is uninitialised.

    Args:
        num_tiles: Number of tiles of 64 tokens.
        num_heads: H.
        qk_dim, v_dim: Dq and Dv of one head, before padding.
        dtype: fp32 or bf16.
    """
    dq, dv = padded(qk_dim, v_dim)
    k = torch.empty(num_tiles, num_heads, dq * TILE_TOKENS, dtype=dtype)
    return Tiles(
        k, torch.empty(num_tiles, num_heads, dv * TILE_TOKENS, dtype=dtype), 0, qk_dim, v_dim
    )


def _in_order(tiles: Tiles) -> tuple[Tensor, Tensor]:
    """View tiles as k [tiles, 64, H, Dq / u, u] and v [tiles, 64 / u, u, H, Dv].

    u is the size of a pair: 2 in bf16, 1 in fp32.
    """
    units = 2 if tiles.k.dtype == torch.bfloat16 else 1
    dq, dv = padded(tiles.qk_dim, tiles.v_dim)
    k = tiles.k.unflatten(2, (dq // units, TILE_TOKENS, units)).permute(0, 3, 1, 2, 4)
    v = tiles.v.unflatten(2, (TILE_TOKENS // units, dv, units)).permute(0, 2, 4, 1, 3)
    return k, v


def pack(into: Tiles, first_token: int, k: Tensor, v: Tensor) -> None:
    """Write rows k [n, H, Dq], v [n, H, Dv] from `first_token` on; zero the values behind them."""
    keys, values = _in_order(into)
    units = keys.shape[-1]
    width = keys.shape[3] * units
    for row in range(len(k)):
        tile, token = divmod(first_token + row, TILE_TOKENS)
        wide = torch.nn.functional.pad(k[row], (0, width - into.qk_dim))
        keys[tile, token] = wide.unflatten(1, (-1, units)).to(keys.dtype)
        values[tile, token // units, token % units] = torch.nn.functional.pad(
            v[row], (0, values.shape[4] - into.v_dim)
        )
    if len(k):
        tile, token = divmod(first_token + len(k), TILE_TOKENS)
        for behind in range(token, TILE_TOKENS if token else 0):
            values[tile, behind // units, behind % units] = 0


def unpack(tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Copy out k [m, H, Dq] and v [m, H, Dv] in token order."""
    keys, values = _in_order(tiles)
    k = keys.flatten(0, 1).flatten(2, 3)[: tiles.num_tokens, :, : tiles.qk_dim]
    v = values.flatten(0, 2)[: tiles.num_tokens, :, : tiles.v_dim]
    return k.contiguous(), v.contiguous()


def natural(slabs: Sequence[Slab | Tiles]) -> list[Slab]:
    """Unpack the tiles among the slabs, for ops that read slabs only."""
    return [unpack(slab) if isinstance(slab, Tiles) else slab for slab in slabs]
