"""Tiles: the layout of keys and values for the native HSTU kernels, 64 tokens a tile, by heads.

Widths are padded, Dq to a multiple of 2 and Dv to a multiple of 16. In fp32 a tile's keys are
transposed, [H][Dq][64], and its values are not, [H][64][Dv]; in bf16 both are in pairs, [H][Dq /
2][64][2] over two dims and [H][32][Dv][2] over two tokens. `pack` and `unpack` are the definition;
`ops/cpu/pack_kv.h` is the fast implementation.

In int8 a row of each head is rounded to 8 bits with a scale of its own, max |x| / 127 in bf16,
which stands behind the numbers: `quantise` is the definition. A row is a function of its own
numbers alone, so it is the same whatever chunk of tokens it was computed with; and rounding twice
is rounding once. A tile is [H][Dq / 2][64][2] or [H][32][Dv][2], then 64 scales for each head.

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
SCALE_BYTES = 2  # of a row of one head in int8
# widths are padded to multiples of these
_KEY_UNITS = 2
_VALUE_UNITS = 16
_LEAST = 2.0**-100  # rows whose numbers are all smaller are stored as zeros


class Tiles(NamedTuple):
    """Consecutive tiles of one layer; they begin at a multiple of 64 tokens of the history."""

    k: Tensor  # [tiles, H, padded Dq * 64]; in int8 with scales, [tiles, H, (padded Dq + 2) * 64]
    v: Tensor  # [tiles, H, padded Dv * 64]; as k
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
        dtype: fp32, bf16 or int8.
    """
    scale = scale_bytes(dtype)
    dq, dv = (width + scale for width in padded(qk_dim, v_dim))
    k = torch.empty(num_tiles, num_heads, dq * TILE_TOKENS, dtype=dtype)
    return Tiles(
        k, torch.empty(num_tiles, num_heads, dv * TILE_TOKENS, dtype=dtype), 0, qk_dim, v_dim
    )


def scale_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of the scale of a row that is stored in a dtype."""
    return SCALE_BYTES if dtype == torch.int8 else 0


def quantise(x: Tensor) -> Tensor:
    """Round rows to 8 bits: [..., D] -> int8 [..., D + 2], a row's bf16 scale behind its numbers.

    A row whose numbers are not all finite gets the scale NaN.
    """
    wide = x.float()
    most = wide.abs().amax(-1, keepdim=True)
    # To the nearest: max |x| / scale lies in (126.5, 127.5), so it is always stored as 127, and a
    # rounded row has the same scale again.
    scale = (most / 127).to(torch.bfloat16)
    is_used = scale.isfinite() & (most >= _LEAST)
    scale = torch.where(is_used, scale, torch.where(most < _LEAST, 0.0, torch.nan)).bfloat16()
    steps = torch.where(is_used, wide / scale.float(), 0.0).round().clamp(-127, 127)
    return torch.cat([steps.to(torch.int8), scale.view(torch.int8)], -1)


def _scale(stored: Tensor) -> Tensor:
    """Copy out the scales of stored rows: int8 [..., D + 2] -> bf16 [..., 1]."""
    last = stored[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format)
    return last.view(torch.bfloat16)


def dequantise(stored: Tensor) -> Tensor:
    """Return the numbers of stored rows: int8 [..., D + 2] -> fp32 [..., D]."""
    return stored[..., :-SCALE_BYTES].float() * _scale(stored).float()


def rounded(x: Tensor) -> Tensor:
    """Return rows [..., D] as they are read once they were stored in int8, in the same dtype."""
    return dequantise(quantise(x)).to(x.dtype)


def _scales(plane: Tensor) -> Tensor:
    """View the scales of an int8 plane [tiles, H, (width + 2) * 64]: bf16 [tiles, H, 64]."""
    return plane[..., -SCALE_BYTES * TILE_TOKENS :].view(torch.bfloat16)


def _in_order(tiles: Tiles) -> tuple[Tensor, Tensor]:
    """View tiles as k [tiles, 64, H, Dq / u, u] and v [tiles, 64 / u, u, H, Dv].

    u is the size of a pair: 1 in fp32, else 2. The scales of int8 are left out.
    """
    units = 1 if tiles.k.dtype == torch.float32 else 2
    dq, dv = padded(tiles.qk_dim, tiles.v_dim)
    k, v = tiles.k[..., : dq * TILE_TOKENS], tiles.v[..., : dv * TILE_TOKENS]
    return (
        k.unflatten(2, (dq // units, TILE_TOKENS, units)).permute(0, 3, 1, 2, 4),
        v.unflatten(2, (TILE_TOKENS // units, dv, units)).permute(0, 2, 4, 1, 3),
    )


def pack(into: Tiles, first_token: int, k: Tensor, v: Tensor) -> None:
    """Write rows k [n, H, Dq], v [n, H, Dv] from `first_token` on; zero the values behind them."""
    keys, values = _in_order(into)
    if into.k.dtype == torch.int8:
        k, v = quantise(k), quantise(v)
        for plane, rows in ((into.k, k), (into.v, v)):
            at, scales = _scales(plane), _scale(rows)
            for row in range(len(rows)):
                tile, token = divmod(first_token + row, TILE_TOKENS)
                at[tile, :, token] = scales[row, :, 0]
            tile, token = divmod(first_token + len(rows), TILE_TOKENS)
            if len(rows) and token and plane is into.v:
                at[tile, :, token:] = 0
        k, v = k[..., :-SCALE_BYTES], v[..., :-SCALE_BYTES]
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
    """Copy out k [m, H, Dq] and v [m, H, Dv] in token order; of int8 the numbers, in fp32."""
    keys, values = _in_order(tiles)
    k = keys.flatten(0, 1).flatten(2, 3)[: tiles.num_tokens, :, : tiles.qk_dim]
    v = values.flatten(0, 2)[: tiles.num_tokens, :, : tiles.v_dim]
    if tiles.k.dtype == torch.int8:
        of_k, of_v = (
            _scales(plane).transpose(1, 2).flatten(0, 1)[: tiles.num_tokens, :, None].float()
            for plane in (tiles.k, tiles.v)
        )
        return k * of_k, v * of_v
    return k.contiguous(), v.contiguous()


def natural(slabs: Sequence[Slab | Tiles]) -> list[Slab]:
    """Unpack the tiles among the slabs, and widen stored rows, for ops that read numbers only."""
    return [unpack(slab) if isinstance(slab, Tiles) else _wide(slab) for slab in slabs]


def stored_slabs(slabs: Sequence[Slab | Tiles]) -> list[Slab]:
    """Return slabs whose rows are int8 with their scales (`quantise`); stored ones as they lie."""
    return [
        slab if slab[0].dtype == torch.int8 else (quantise(slab[0]), quantise(slab[1]))
        for slab in (unpack(one) if isinstance(one, Tiles) else one for one in slabs)
    ]


def _wide(slab: Slab) -> Slab:
    k, v = slab
    return (dequantise(k), dequantise(v)) if k.dtype == torch.int8 else slab
