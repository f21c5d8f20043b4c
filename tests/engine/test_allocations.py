"""No request makes a tensor over 32 MiB, for which glibc would map fresh memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import rank
from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.catalogue.build import build_trie
from npu_gr.catalogue.trie import Codebooks
from npu_gr.engine.beam_search import SearchOptions, Tables
from npu_gr.engine.generate_engine import Generator, ItemSearch, PromptKV
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import KVLayout, PageRun
from npu_gr.model.decoder import Decoder, DecoderConfig
from npu_gr.model.hstu import HSTU
from npu_gr.model.hstu_layer import Past, Segment

MOST_BYTES = 32 << 20
CPU = CPUBackend()


class Largest(TorchDispatchMode):
    """Within the block: the largest memory that an op made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation here
        self.num_bytes, self.op = 0, ""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        held = {
            x.untyped_storage().data_ptr()
            for x in tree_leaves((args, kwargs))
            if isinstance(x, Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in held:
                self.num_bytes, self.op = max(
                    (self.num_bytes, self.op), (x.untyped_storage().nbytes(), str(func))
                )
        return out


def test_it_sees_what_is_made_and_nothing_else() -> None:
    x = torch.zeros(1000)
    with torch.inference_mode(), Largest() as largest:
        x[:10].view(2, 5).add_(1)
        assert largest.num_bytes < 100
        x + 1
    assert (largest.num_bytes, largest.op) == (4000, "aten.add.Tensor")


@pytest.mark.parametrize("normalise", ["vocabulary", "codebook", "valid"])
def test_generate(normalise: Any) -> None:
    """Two beams of 512 over three codebooks of 8,192."""
    if not CPU.native:
        pytest.skip("no kernels: torch's ops make their own temporaries")
    torch.manual_seed(0)
    books = Codebooks.stacked([8192] * 3)
    shape = DecoderConfig(
        vocab_size=3 * 8192, dim=32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16,
        mlp_dim=64, max_tokens=1024, rope_theta=1e4, norm_eps=1e-6, qk_norm=True, qkv_bias=False,
        tied_head=False,
    )  # fmt: skip
    decoder = Decoder(shape).eval()
    sids = np.random.default_rng(0).integers(0, 8192, (100_000, 3))
    trie = build_trie(sids, np.arange(len(sids)), books)
    layout = KVLayout(num_layers=1, num_heads=2, qk_dim=16, v_dim=16)
    arena = KVArena(layout, layout.pages(1024), CPU.device)
    generator = Generator(decoder, CPU, 512, 3, max_rows=1024)
    tokens = np.arange(900)
    part = PromptKV(arena, (PageRun(0, layout.pages(1024)),), len(tokens))
    options = SearchOptions(width=512, normalise=normalise)
    ask = ItemSearch(trie, Tables.upload(trie, CPU.device), tokens, [part], options, 10)

    def run() -> None:
        generator.encode(tokens, [], part)
        generator.generate_all([ask, ask])

    run()  # the warm-up makes what is kept grow
    with Largest() as largest:
        run()
    assert 0 < largest.num_bytes <= MOST_BYTES, largest.op


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rank(dtype: torch.dtype) -> None:
    """A prefill of 4,096 tokens, a rank of 500 candidates against it, and one without a cache."""
    shape = rank.config(num_layers=2)
    model = HSTU(shape).cast(dtype).eval()
    model.items.freeze()
    layout = KVLayout(
        num_layers=2, num_heads=shape.num_heads, qk_dim=shape.qk_dim, v_dim=shape.v_dim,
        dtype=str(dtype).removeprefix("torch."), arrangement=CPU.arrangement(dtype, 64),
    )  # fmt: skip
    runs = (PageRun(0, layout.pages(4096)),)
    arena = KVArena(layout, layout.pages(4096), CPU.device, pack=CPU.pack_kv)
    items, times, none = (
        torch.arange(4096),
        torch.arange(4096) * 1000,
        torch.empty(0, dtype=torch.int64),
    )
    new: dict[str, Any] = {"items": items, "actions": items * 0, "times": times}
    own: dict[str, Any] = {"candidates": torch.arange(500), "candidate_time": 4_096_000}
    past = Past(times, lambda layer: arena.slabs(layer, runs, 4096))
    model(CPU, [Segment(**new, candidates=none)])  # packs the weights
    for segment in (
        Segment(**new, candidates=none, sink=arena.sink(runs)),
        Segment(items=none, actions=none, times=none, past=past, **own),
        Segment(**new, **own),
    ):
        with Largest() as largest:
            model(CPU, [segment])
        assert 0 < largest.num_bytes <= MOST_BYTES, largest.op
