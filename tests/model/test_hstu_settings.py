"""Compare every setting of layers, time buckets and head with a slow numpy model in fp64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from npu_gr.backend.calls import HstuCall, HstuShape
from npu_gr.backend.reference import ReferenceBackend
from npu_gr.model.config import HSTUConfig, TimeBuckets, inexact_fields, write_keys
from npu_gr.model.hstu import HSTU
from npu_gr.model.hstu_layer import NEVER_S, bucket_by_formula, edges_of
from tests.models import CPU, Request, cached, full, tiny_config, tiny_model

LOG = TimeBuckets(function="log", count=20, divisor=0.301)
SQRT = TimeBuckets(function="sqrt", count=50, unit_s=60.0)
DOT: dict[str, Any] = {
    "head": "dot",
    "head_norm": "l2",
    "head_item_norm": "l2",
    "head_scale": 20.0,
    "attention_time": "next",
    "retrieval": True,
    "tasks": ("next",),
    "alpha": 1.0,
    "time_buckets": LOG,
    "positions": "start",
}
VARIANTS: list[dict[str, Any]] = [
    {"alpha": 1.0},
    {"norm_eps": 1e-2},
    {"relative_bias": "position"},
    {"relative_bias": "none"},
    {"time_buckets": LOG},
    {"time_buckets": SQRT},
    {"residual": "concat"},
    {"residual": "concat", "attention_norm_in_concat": True},
    {"norm": "head", "residual": "concat", "activation": "u"},
    {"norm": "group"},
    {"token": "interleaved", "positions": "start"},
    {"head_norm": "none", "head_activation": "relu", "head_scale": 0.5},
    {"head_norm": "l2", "head_activation": "gelu"},
]


def _normed(x: Any, eps: float) -> Any:
    return (x - x.mean()) / math.sqrt(x.var() + eps)


def _silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


def _bucket(config: HSTUConfig, seconds: int) -> int:
    times = config.time_buckets
    if times is None:  # half octaves
        octave = math.floor(math.log2(seconds + 1))
        return min(63, 2 * octave + int((seconds + 1) >= 1.5 * 2**octave))
    scaled = max(seconds, 1) / times.unit_s
    scaled = math.log(scaled) if times.function == "log" else math.sqrt(scaled)
    return int(min(max(math.floor(scaled / times.divisor), 0), times.count - 1))


class _Slow:
    """One request, one token at a time, from the checkpoint's tensors alone."""

    def __init__(self, model: HSTU) -> None:
        self.config = model.config
        self.w = {name: tensor.numpy() for name, tensor in model.state_dict().items()}

    def item(self, row: int) -> Any:
        x = self.w["item.weight"][row].copy()
        for index, feature in enumerate(self.config.item_features):
            ids = [i for i in self.w[f"feature_ids_{index}"][row] if i != feature.num_values]
            x += sum(self.w[f"feature.{index}.weight"][i] for i in ids) / max(len(ids), 1)
        return x

    def logits(self, request: Request) -> np.ndarray[Any, Any]:
        config = self.config
        shown = len(config.actions)
        # embedding, position, time of key, of query
        rows: list[tuple[np.ndarray[Any, Any], int, int, int]] = []
        events = list(
            zip(
                request.items.tolist(),
                request.actions.tolist(),
                request.times.tolist(),
                strict=True,
            )
        )
        for place, (item, action, at) in enumerate(events):
            asks = at
            if config.attention_time == "next":
                asks = events[place + 1][2] if place + 1 < len(events) else request.shown_at
            if not config.is_interleaved:
                rows.append((self.item(item) + self.w["action.weight"][action], place, at, asks))
            else:
                rows.append((self.item(item), 2 * place, at, asks))
                rows.append((self.w["action.weight"][action], 2 * place + 1, at, asks))
        history = len(rows)
        if config.head == "mlp":
            for item in request.candidates.tolist():
                x = self.item(item) + self.w["action.weight"][shown]
                rows.append((x, history, request.shown_at, request.shown_at))
        x = [
            row[0] + (self.w["position.weight"][row[1]] if config.positions == "start" else 0)
            for row in rows
        ]
        for layer in range(config.num_layers):
            x = self.layer(f"layers.{layer}.", x, rows, history)
        return np.stack(
            [self.answer(x, request, history, c) for c in range(len(request.candidates))]
        )

    def layer(self, at: str, x: list[Any], rows: list[Any], history: int) -> list[Any]:
        config, w = self.config, self.w
        heads, dq, dv = config.num_heads, config.qk_dim, config.v_dim
        parts = []
        for row in x:
            normed = (
                _normed(row, config.norm_eps) * w[at + "norm_in.weight"] + w[at + "norm_in.bias"]
            )
            mixed = w[at + "uvqk.weight"] @ normed + w[at + "uvqk.bias"]
            u, v, q, k = np.split(mixed, np.cumsum([heads * dv, heads * dv, heads * dq]))
            everything = config.activation == "uvqk"
            parts.append([_silu(u), *(_silu(p) if everything else p for p in (v, q, k))])
        out = []
        for i, (row, part) in enumerate(zip(x, parts, strict=True)):
            attended = np.zeros((heads, dv))
            for j in range(len(x)):
                if not (j <= i if i < history else j < history or j == i):
                    continue
                for h in range(heads):
                    q, k = part[2].reshape(heads, dq)[h], parts[j][3].reshape(heads, dq)[h]
                    logit = q @ k * (dq**-0.5 if config.alpha is None else config.alpha)
                    if "position" in config.relative_bias:
                        distance = min(rows[i][1] - rows[j][1], config.position_buckets - 1)
                        logit += w[at + "position_bias"][h, distance]
                    if "time" in config.relative_bias:
                        logit += w[at + "time_bias"][
                            h, _bucket(config, max(0, rows[i][3] - rows[j][2]))
                        ]
                    attended[h] += (
                        _silu(logit) * parts[j][1].reshape(heads, dv)[h] / config.scaling_seqlen
                    )
            weight, bias = w[at + "norm_attention.weight"], w[at + "norm_attention.bias"]
            if config.norm == "layer":
                normed = _normed(attended.ravel(), config.norm_eps) * weight + bias
            else:
                columns = (
                    (weight[:, None], bias[:, None]) if config.norm == "head" else (weight, bias)
                )
                each = np.stack([_normed(head, config.norm_eps) for head in attended])
                normed = (each * columns[0] + columns[1]).ravel()
            gated = part[0] * normed
            if config.residual == "concat":
                middle = normed if config.attention_norm_in_concat else attended.ravel()
                gated = np.concatenate([part[0], middle, gated])
            out.append(row + w[at + "out.weight"] @ gated + w[at + "out.bias"])
        return out

    def answer(
        self, x: list[Any], request: Request, history: int, candidate: int
    ) -> np.ndarray[Any, Any]:
        config, w = self.config, self.w
        row = x[-1] if config.head == "dot" else x[history + candidate]
        if config.head_norm == "layer":
            row = _normed(row, config.norm_eps) * w["norm_head.weight"] + w["norm_head.bias"]
        elif config.head_norm == "l2":
            row = row / np.linalg.norm(row)
        if config.head == "dot":
            item = self.item(int(request.candidates[candidate]))
            return np.array([row @ (item / np.linalg.norm(item)) * config.head_scale])
        hidden = w["head.0.weight"] @ row + w["head.0.bias"]
        if config.head_activation == "silu":
            hidden = _silu(hidden)
        elif config.head_activation == "relu":
            hidden = np.maximum(hidden, 0)
        else:
            hidden = np.array([0.5 * z * (1 + math.erf(z / math.sqrt(2))) for z in hidden])
        answer: np.ndarray[Any, Any] = (
            w["head.2.weight"] @ hidden + w["head.2.bias"]
        ) * config.head_scale
        return answer


class _Tokens(Request):
    """A request of an interleaved model, two tokens a behaviour."""

    def __init__(self, events: Request) -> None:
        self.__dict__.update(events.__dict__)
        self.items, self.times = (
            events.items.repeat_interleave(2),
            events.times.repeat_interleave(2),
        )
        self.actions = events.actions.repeat_interleave(2)
        self.actions[::2] = -1


def _made(variant: dict[str, Any]) -> HSTU:
    model = tiny_model(torch.float64, num_layers=2, **variant)
    with torch.no_grad():  # norms whose weights show
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
        for name, parameter in model.named_parameters():
            if name.startswith("feature."):
                parameter[-1] = 0  # padding
    model.items.freeze()
    return model


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_setting_is_what_the_slow_model_computes(variant: dict[str, Any]) -> None:
    """Full inference by the CPU's ops and by the definition, and a rank against a cached prefix."""
    model, events = _made(variant), Request(23, 3)
    want = torch.from_numpy(_Slow(model).logits(events))
    request = _Tokens(events) if model.config.is_interleaved else events
    for got in (
        full(model, request),
        full(model, request, ReferenceBackend()),
        cached(model, request, 17, 5),
    ):
        assert float((got - want).abs().max() / want.std()) < 1e-10
    assert inexact_fields(model.config) == []


@pytest.mark.parametrize("num_history", [0, 1, 2, 23])
def test_the_last_behaviour_answers_at_the_requests_time(num_history: int) -> None:
    model, request = _made(DOT), Request(num_history, 5)
    got = full(model, request)
    assert torch.equal(full(model, request), got)
    if num_history == 0:
        assert not got.any()
        return
    want = torch.from_numpy(_Slow(model).logits(request))
    for scores in (got, full(model, request, ReferenceBackend())):
        assert float((scores - want).abs().max()) < 1e-5  # items are compared in fp32
    (u,) = model(CPU, [request.segment(candidates=torch.tensor([300]), is_next=True)])
    assert (
        float(
            ((model.items.vectors()[request.candidates] @ u[0].float())[:, None] - want).abs().max()
        )
        < 1e-5
    )
    (line,) = inexact_fields(model.config)
    assert "E10" in line


def test_the_time_to_the_request_is_no_setting_for_a_cache() -> None:
    model, request = _made({"query_times": SQRT}), Request(23, 3)
    (line,) = inexact_fields(model.config)
    assert "E3" in line
    later = Request(23, 3)
    later.shown_at += 10**6
    assert float((full(model, later) - full(model, request)).abs().max()) > 1e-3


def test_a_setting_at_its_default_is_not_written() -> None:
    """A checkpoint of 0.11 and one that is made now have the same keys."""
    new = {
        "alpha",
        "norm_eps",
        "time_buckets",
        "attention_time",
        "attention_norm_in_concat",
        "token",
        "head",
    }
    assert not new & set(write_keys(tiny_config()))
    assert write_keys(tiny_config(alpha=0.5, norm_eps=1e-5))["alpha"] == 0.5


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"time_buckets": LOG, "relative_bias": "none"}, "time_buckets"),
        ({"attention_norm_in_concat": True}, "attention_norm_in_concat"),
        ({"head": "dot"}, "head"),
        ({**DOT, "tasks": ("a", "b")}, "head"),
        ({**DOT, "attention_time": "own"}, "head"),
        ({"head": "product", "retrieval": True}, "retrieval"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        tiny_config(**settings)


@pytest.mark.parametrize(
    "times", [LOG, SQRT, TimeBuckets(function="linear", count=30, unit_s=3600.0)], ids=str
)
def test_edges_are_where_the_formula_steps(times: TimeBuckets) -> None:
    edges = edges_of(times)
    reached = edges[edges < NEVER_S]
    assert len(reached)
    assert (bucket_by_formula(times, reached) >= torch.arange(1, times.count)[: len(reached)]).all()
    assert (
        bucket_by_formula(times, reached - 1) < torch.arange(1, times.count)[: len(reached)]
    ).all()
    seconds = torch.cat([torch.arange(3000), torch.randint(0, 1 << 35, (3000,))])
    assert torch.equal(
        torch.bucketize(seconds, edges, right=True), bucket_by_formula(times, seconds)
    )


def test_kernels_that_do_not_know_a_setting_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the attention kernel of the CPU nor a pass of whole layers; and the name says so."""
    called = list[HstuCall]()
    if CPU._hstu is not None:
        for name in ("causal", "targets"):
            monkeypatch.setattr(CPU._hstu, name, called.append)
    for name in ("hstu_pass", "fused_forward"):
        monkeypatch.setattr(CPU, name, called.append)
    model = tiny_model(torch.float32, time_buckets=LOG)
    full(model, Request(9, 3))
    assert not called
    shape = HstuShape(
        2, 8, 16, torch.float32, torch.float32, 64, 32, is_joined=False, is_biased=True
    )
    assert CPU.hstu_ways(shape) == (CPU.kernels,)
    assert CPU.hstu_ways(shape._replace(has_plain_times=False)) == ("torch",)
    assert CPU.running("torch").ops["hstu_attention"] == "torch"
    assert CPU.running(CPU.kernels) is CPU
