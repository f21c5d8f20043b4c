"""Amazon Beauty: no invalid item, and the same top 10 as Hugging Face transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.catalogue.build import build_trie
from npu_gr.catalogue.trie import Codebooks
from npu_gr.core.arrays import I64
from npu_gr.engine.beam_search import SearchOptions, Tables
from npu_gr.engine.generate_engine import (
    GeneratedItems,
    Generator,
    PromptKV,
    layout_of,
    make_prompt,
)
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import PageRun
from npu_gr.model import hf
from tests.decoders import VARIANTS, saved

DATA = Path(__file__).parents[3] / "shared/data/amazon_beauty_sid"
CPU, LEVELS, CODES, HISTORY = CPUBackend(), 4, 256, 20


def test_real_prompts(tmp_path: Path) -> None:
    if not DATA.exists():
        pytest.skip("the Amazon Beauty data is not next to the checkout")
    index, histories = (
        json.loads((DATA / name).read_text()) for name in ("index_rqvae.json", "inter.json")
    )
    sids = np.array(
        [[int(re.sub(r"\D", "", str(code))) for code in codes] for codes in index.values()]
    )
    trie = build_trie(
        sids, np.array([int(item) for item in index]), Codebooks.stacked([CODES] * LEVELS)
    )
    theirs = saved(tmp_path, **{**VARIANTS["qwen3 g1"], "vocab_size": CODES * LEVELS})
    decoder = hf.load(tmp_path)
    generator, tables = Generator(decoder, CPU, 16, LEVELS), Tables.upload(trie, CPU.device)
    arena = KVArena(layout_of(decoder), 2, CPU.device)
    users = np.random.default_rng(0).choice(list(histories), 1000, replace=False)

    def ask(user: str, width: int) -> tuple[I64, GeneratedItems]:
        tokens = make_prompt(trie, np.array(histories[user])[-HISTORY:], HISTORY * LEVELS).tokens
        part = PromptKV(arena, (PageRun(0, 2),), len(tokens))
        generator.encode(tokens, [], part)
        return tokens, generator.generate(
            trie, tables, tokens, [part], SearchOptions(width=width), width
        )

    valid = {tuple(sid) for sid in sids.tolist()}
    for user in users:
        _, found = ask(user, 16)
        assert len(set(found.item_ids.tolist())) == 16
        assert all(tuple(sid) in valid for sid in found.sids.tolist())

    children: dict[tuple[int, ...], set[int]] = {}
    for path in (sids + np.arange(LEVELS) * CODES).tolist():
        for level, token in enumerate(path):
            children.setdefault(tuple(path[:level]), set()).add(token)

    def ask_theirs(tokens: I64) -> dict[tuple[int, ...], float]:
        def allowed(_: int, row: torch.Tensor) -> list[int]:
            return sorted(children.get(tuple(row[len(tokens) :].tolist()), {0}))

        with torch.inference_mode():
            out = theirs.generate(  # type: ignore[operator]
                torch.from_numpy(tokens)[None],
                attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),
                num_beams=10,
                num_return_sequences=10,
                max_new_tokens=LEVELS,
                min_new_tokens=LEVELS,
                do_sample=False,
                length_penalty=0.0,
                prefix_allowed_tokens_fn=allowed,
                return_dict_in_generate=True,
                output_scores=True,
                pad_token_id=0,
                eos_token_id=None,
            )
        codes = out.sequences[:, len(tokens) :].numpy() - np.arange(LEVELS) * CODES
        return dict(zip(map(tuple, codes.tolist()), out.sequences_scores.tolist(), strict=True))

    for user in users[:200]:
        tokens, found = ask(user, 10)
        want = ask_theirs(tokens)
        got = dict(zip(map(tuple, found.sids.tolist()), found.scores.tolist(), strict=True))
        # in the order of their scores, which rounding decides between ties
        assert got.keys() == want.keys()
        assert all(abs(got[sid] - want[sid]) < 1e-4 for sid in want)
        assert (np.diff(found.scores) <= 0).all()
