"""A converted checkpoint gives the numbers that its project's own code gave: weights, inputs and outputs are files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from npu_gr.model.hstu import HSTU
from npu_gr.model.imported.converted import Converted, GivenNames
from npu_gr.model.imported.families import FAMILIES
from npu_gr.model.imported.source import ForeignCheckpoint
from npu_gr.model.segment import Segment
from tests.models import CPU

DATA = Path(__file__).parent / "data"
RESEARCH: dict[str, dict[str, Any]] = {
    "research": {
        "hstu_encoder.num_heads": 2, "hstu_encoder.dqk": 8, "hstu_encoder.dv": 8,
        "train_fn.gr_output_length": 1, "train_fn.item_l2_norm": True,
    },
    "research_concat": {
        "hstu_encoder.dqk": 16, "hstu_encoder.dv": 16, "hstu_encoder.num_blocks": 1, "hstu_encoder.concat_ua": True,
        "train_fn.gr_output_length": 1, "train_fn.item_l2_norm": True, "train_fn.user_embedding_norm": "layer_norm",
    },
}  # fmt: skip


def fixture(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights, and everything else."""
    tensors = load_file(DATA / f"{name}.safetensors")
    weights = {k.removeprefix("weights."): v for k, v in tensors.items() if k.startswith("weights.")}
    return weights, {k: v for k, v in tensors.items() if not k.startswith("weights.")}


def made(family: str, weights: dict[str, Tensor], settings: dict[str, Any]) -> Converted:
    converted = FAMILIES[family](ForeignCheckpoint("fixture", weights, settings), GivenNames())
    converted.model.freeze_items()
    return converted


def scores(model: HSTU, items: Tensor, actions: Tensor, times: Tensor, candidates: Tensor, at: int) -> Tensor:
    segment = Segment(items=items, actions=actions, times=times, candidates=candidates, candidate_time=at)
    found: Tensor = model(CPU, [segment])[0]
    return found


def drift(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.std())


@pytest.mark.parametrize("name", RESEARCH)
def test_generative_recommenders(name: str) -> None:
    weights, known = fixture(name)
    model = made("generative-recommenders", weights, RESEARCH[name]).model
    for user, n in enumerate(known["in.lengths"].tolist()):
        items, times = known["in.ids"][user, :n] - 1, known["in.times"][user]
        got = scores(model, items, torch.zeros_like(items), times[:n], torch.arange(30), int(times[n]))
        assert drift(got[:, 0], known["out.logits"][user]) < 1e-5


RECSYS = {
    "NetworkArgs.num_layers": 2, "NetworkArgs.num_attention_heads": 2, "NetworkArgs.hidden_size": 16,
    "NetworkArgs.kv_channels": 8, "NetworkArgs.scaling_seqlen": 50, "RankingArgs.prediction_head_arch": [12, 3],
    "RankingArgs.num_tasks": 3, "DatasetArgs.max_history_seqlen": 10,
}  # fmt: skip


@pytest.mark.parametrize("name", ["recsys_fused", "recsys_native"])
def test_recsys_examples(name: str) -> None:
    """Fused layers, and native ones whose projections are head by head; the latter with an MLP on items and actions."""
    weights, known = fixture(name)
    more = {"NetworkArgs.item_embedding_dim": 10} if name == "recsys_native" else {}
    model = made("recsys-examples", weights, RECSYS | more).model
    for user, n in enumerate(known["in.lengths"].tolist()):
        items = known["in.items"][user, :n].repeat_interleave(2)
        actions = known["in.actions"][user, :n].repeat_interleave(2)
        actions[::2] = -1
        got = scores(model, items, actions, torch.zeros_like(items), known["in.candidates"], 0)
        assert drift(got, known["out.logits"][user]) < 1e-5


DLRM = {"hstu_num_heads": 2, "hstu_attn_linear_dim": 8, "hstu_attn_qk_dim": 4, "scaling_seqlen": 32}


@pytest.mark.parametrize("name", ["dlrm", "dlrm_group"])
def test_dlrmv3(name: str) -> None:
    """With clocks, and with one norm weight a head."""
    weights, known = fixture(name)
    model = made("dlrmv3", weights, DLRM | {"hstu_group_norm": name == "dlrm_group"}).model
    assert model.config.actions == tuple("01234567")
    for user, n in enumerate(known["in.lengths"].tolist()):
        items, actions, times = (known[f"in.{key}"][user] for key in ("items", "actions", "times"))
        got = scores(model, items[:n], actions[:n], times[:n], known["in.candidates"], int(times[n]))
        assert drift(got, known["out.logits"][user]) < 1e-5
