"""A converted checkpoint reproduces recorded outputs of the original project's code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from npu_gr.core.feature_schema.encode import encode
from npu_gr.model.convert.families import FAMILIES
from npu_gr.model.convert.source import Converted, ForeignCheckpoint, GivenNames
from npu_gr.model.convert.torcheasyrec_files import PIPELINE, parse_text
from npu_gr.model.feature_rows import FeatureValues
from npu_gr.model.hstu import HSTU
from npu_gr.model.hstu_layer import Segment
from tests.models import CPU

DATA = Path(__file__).parent / "data"
RESEARCH: dict[str, dict[str, Any]] = {
    "research": {
        "hstu_encoder.num_heads": 2, "hstu_encoder.dqk": 8, "hstu_encoder.dv": 8,
        "train_fn.gr_output_length": 1, "train_fn.item_l2_norm": True,
    },
    "research_concat": {
        "hstu_encoder.dqk": 16,
        "hstu_encoder.dv": 16,
        "hstu_encoder.num_blocks": 1,
        "hstu_encoder.concat_ua": True,
        "train_fn.gr_output_length": 1,
        "train_fn.item_l2_norm": True,
        "train_fn.user_embedding_norm": "layer_norm",
    },
}  # fmt: skip


def fixture(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights, and everything else."""
    tensors = load_file(DATA / f"{name}.safetensors")
    weights = {
        k.removeprefix("weights."): v for k, v in tensors.items() if k.startswith("weights.")
    }
    return weights, {k: v for k, v in tensors.items() if not k.startswith("weights.")}


def made(family: str, weights: dict[str, Tensor], settings: dict[str, Any]) -> Converted:
    converted = FAMILIES[family](ForeignCheckpoint("fixture", weights, settings), GivenNames())
    converted.model.items.freeze()
    return converted


def scores(
    model: HSTU,
    items: Tensor,
    actions: Tensor,
    times: Tensor,
    candidates: Tensor,
    at: int,
    context: Mapping[str, object] | None = None,
) -> Tensor:
    """Score one user's candidates; `context` are values of the user's features."""
    user = None
    if context is not None:
        columns = {name: [value] for name, value in context.items()}
        user = FeatureValues.of(encode(model.config.features_of("user"), columns, 1))
    times = torch.cat([times[:1].expand(model.config.num_user_tokens), times])
    segment = Segment(
        items=items,
        actions=actions,
        times=times,
        candidates=candidates,
        candidate_time=at,
        user=user,
    )
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
        got = scores(
            model, items, torch.zeros_like(items), times[:n], torch.arange(30), int(times[n])
        )
        assert drift(got[:, 0], known["out.logits"][user]) < 1e-5


RECSYS = {
    "NetworkArgs.num_layers": 2,
    "NetworkArgs.num_attention_heads": 2,
    "NetworkArgs.hidden_size": 16,
    "NetworkArgs.kv_channels": 8,
    "NetworkArgs.scaling_seqlen": 50,
    "RankingArgs.prediction_head_arch": [12, 3],
    "RankingArgs.num_tasks": 3, "DatasetArgs.max_history_seqlen": 10,
}  # fmt: skip


@pytest.mark.parametrize("name", ["recsys_fused", "recsys_native"])
def test_recsys_examples(name: str) -> None:
    """Fused layers, and native ones whose projections are head by head.

    The latter with an MLP on items and actions.
    """
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
        got = scores(
            model, items[:n], actions[:n], times[:n], known["in.candidates"], int(times[n])
        )
        assert drift(got, known["out.logits"][user]) < 1e-5


CONTEXT = {"contextual_feature_to_max_length": {"user_id": 1, "age": 1}}


def test_contextual_features_of_dlrmv3() -> None:
    """Two tokens in front of the history, causal in this project.

    Positions count the others from the candidates.
    """
    weights, known = fixture("dlrm_context")
    model = made("dlrmv3", weights, DLRM | CONTEXT).model
    assert (model.config.num_user_tokens, model.config.context) == (2, "causal")
    for user, n in enumerate(known["in.lengths"].tolist()):
        items, actions, times = (known[f"in.{key}"][user] for key in ("items", "actions", "times"))
        context = dict(zip(("user_id", "age"), known["in.context"][user].tolist(), strict=True))
        got = scores(
            model, items[:n], actions[:n], times[:n], known["in.candidates"], int(times[n]), context
        )
        assert drift(got, known["out.logits"][user]) < 1e-5


@pytest.mark.parametrize("context", ["causal", "full"])
def test_contextual_features_of_recsys_examples(context: str) -> None:
    """By an MLP of their own.

    They see the whole history, or with `disable_contextual_mask` what is before them.
    """
    weights, known = fixture("recsys_context" if context == "causal" else "recsys_context_full")
    more = {
        "NetworkArgs.contextual_embedding_dim": 10,
        "NetworkArgs.disable_contextual_mask": context == "causal",
        "contextual_feature_names": ["user_id", "age"],
    }  # fmt: skip
    model = made(
        "recsys-examples", weights, RECSYS | {"DatasetArgs.max_history_seqlen": 14} | more
    ).model
    assert model.config.context == context
    for user, n in enumerate(known["in.lengths"].tolist()):
        items = known["in.items"][user, :n].repeat_interleave(2)
        actions = known["in.actions"][user, :n].repeat_interleave(2)
        actions[::2] = -1
        values = dict(zip(("user_id", "age"), known["in.context"][user].tolist(), strict=True))
        got = scores(
            model, items, actions, torch.zeros_like(items), known["in.candidates"], 0, values
        )
        assert drift(got, known["out.logits"][user]) < 1e-5


def pipeline(name: str) -> dict[str, Any]:
    return {PIPELINE: parse_text((DATA / f"{name}.config").read_text())}


@pytest.mark.parametrize("name", ["torcheasyrec", "torcheasyrec_causal", "torcheasyrec_concat"])
def test_torcheasyrec(name: str) -> None:
    """As its stock configuration; with causal context, behaviours of two tokens and no times.

    With one user's token.
    """
    weights, known = fixture(name)
    model = made("torcheasyrec", weights, pipeline(name)).model
    # of a vocabulary: the default and the unknown come first
    city = [None, "elsewhere", "oslo", "rome", "lima"]
    for user, n in enumerate(known["in.lengths"].tolist()):
        items, actions, times = (known[f"in.{key}"][user] for key in ("items", "actions", "times"))
        items, actions, seen = items[:n], actions[:n], times[:n]
        if model.config.is_interleaved:
            items, seen = items.repeat_interleave(2), seen.repeat_interleave(2)
            actions = torch.stack([torch.full_like(actions, -1), actions], 1).flatten()
        user_id, age, place = known["in.context"][user].tolist()
        context = {"user_id": None if user == 2 else user_id, "age": age, "city": city[place]}
        got = scores(model, items, actions, seen, known["in.candidates"], int(times[n]), context)
        assert drift(got, known["out.logits"][user]) < 1e-5
