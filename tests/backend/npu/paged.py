"""A fake of RecSDK's library: its operator as documented, for calls of one request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from npu_gr.backend.npu.hstu_paged import PAGE_TOKENS

SCHEMA = (
    "hstu_paged(Tensor q, Tensor k, Tensor v, Tensor? kv_cache=None, Tensor? k_cache=None, Tensor? "
    "v_cache=None, "
    "Tensor? mask=None, Tensor? attn_bias=None, int mask_type=0, int max_seq_len=0, int "
    "max_seq_len_k=0, "
    "float silu_scale=0.0, Tensor? seq_offset=None, Tensor? seq_offset_k=None, Tensor? "
    "seq_offset_t=None, "
    "Tensor? page_offsets=None, Tensor? page_ids=None, Tensor? last_page_len=None, Tensor? "
    "num_target=None, "
    "int target_group_size=0, float? alpha=1.0, bool deterministic=False) -> Tensor"
)
OLDER = SCHEMA.replace("Tensor? k_cache=None, Tensor? v_cache=None, ", "").replace(
    ", bool deterministic=False", ""
)
NAMES = [
    *(
        "kv_cache",
        "k_cache",
        "v_cache",
        "mask",
        "attn_bias",
        "mask_type",
        "max_seq_len",
        "max_seq_len_k",
    ),
    *(
        "silu_scale",
        "seq_offset",
        "seq_offset_k",
        "seq_offset_t",
        "page_offsets",
        "page_ids",
        "last_page_len",
    ),
    *("num_target", "target_group_size", "alpha", "deterministic"),
]


def dense_paged(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *values: Any, **named: Any
) -> torch.Tensor:
    a = {**dict(zip(NAMES, values, strict=False)), **named}
    (first, end), ids = a["page_offsets"].tolist(), a["page_ids"].tolist()
    pages = [ids[at] for at in range(first, end)]
    num_targets, length = (
        int(a["num_target"]),
        (len(pages) - 1) * PAGE_TOKENS + int(a["last_page_len"]),
    )
    held_k, held_v = (
        torch.cat([plane[p] for p in pages])[:length] for plane in (a["k_cache"], a["v_cache"])
    )
    history = len(q) - num_targets
    keys, vals = torch.cat([held_k, k[history:]]), torch.cat([held_v, v[history:]])
    assert a["seq_offset"].tolist() == [0, len(q)]
    assert a["seq_offset_k"].tolist() == [0, len(keys)]
    assert a["seq_offset_t"].tolist() == [0, num_targets]
    assert (a["mask_type"], a["target_group_size"], a["max_seq_len"]) == (0, 1, len(q))
    assert a["deterministic"] is True
    row, column = torch.arange(len(q))[:, None], torch.arange(len(keys))[None]
    seen = torch.where(
        row < history,
        column <= row + length - history,
        (column < length) | (column - length == row),
    )
    weights = (
        torch.nn.functional.silu(torch.einsum("ihd,jhd->hij", q, keys) * a["alpha"])
        * a["silu_scale"]
    )
    return torch.einsum("hij,jhd->ihd", weights * seen, vals)


def install(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    library: torch.library.Library,
    schema: str = SCHEMA,
) -> Path:
    """Return the path of a library.

    When torch loads it, `library` gets the operator, as `mxrec`.
    """
    path = folder / "libfbgemm_npu_api.so"
    path.write_bytes(b"")

    def load(loaded: Path) -> None:
        assert loaded == path
        # a second load does nothing
        if schema and not hasattr(getattr(torch.ops, library.ns), "hstu_paged"):
            library.define(schema)
            library.impl("hstu_paged", dense_paged, "CompositeExplicitAutograd")
        monkeypatch.setattr(torch.ops, "mxrec", getattr(torch.ops, library.ns))

    monkeypatch.setattr(torch.ops, "load_library", load)
    return path
