"""Small random models and histories that several test folders use."""

from __future__ import annotations

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from npu_gr.backend.base import Slab
from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.core.history import Events
from npu_gr.model.blend import ScoreBlend
from npu_gr.model.config import HSTUConfig, ItemFeature
from npu_gr.model.hstu import HSTU
from npu_gr.model.hstu_layer import Past, Segment
from npu_gr.model.item_similarity import Neighbours

CPU = CPUBackend()
NONE = torch.empty(0, dtype=torch.int64)


def tiny_config(**changes: object) -> HSTUConfig:
    settings: dict[str, object] = {
        "num_items": 300,
        "item_features": (ItemFeature(name="genre", num_values=7, max_values=3),),
        "actions": ("skip", "click", "like"),
        "tasks": ("click", "like"),
        "dim": 32,
        "num_layers": 3,
        "num_heads": 2,
        "qk_dim": 8,
        "v_dim": 16,
        "head_dim": 24,
        "position_buckets": 40,
        "scaling_seqlen": 64,
        "max_history_tokens": 2048,
    }
    return HSTUConfig(**{**settings, **changes})  # type: ignore[arg-type]


def tiny_model(
    dtype: torch.dtype = torch.float32, seed: int = 0, std: float = 0.25, **changes: object
) -> HSTU:
    """Random weights, large enough that every part of the computation shows in the logits."""
    torch.manual_seed(seed)
    model = HSTU(tiny_config(**changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=std)
        for index, feature in enumerate(model.config.item_features):
            ids = torch.randint(
                0, feature.num_values + 1, (model.config.num_items, feature.max_values)
            )
            getattr(model, f"feature_ids_{index}").copy_(ids)
    model.cast(dtype).eval().items.freeze()
    return model


def tiny_order(num_items: int = 300, seed: int = 0) -> ScoreBlend:
    """Weights of the usual size, and random transitions in which every term of the sum shows."""
    random = np.random.default_rng(seed)
    chosen = [np.sort(random.choice(num_items, 8, replace=False)) for _ in range(num_items)]
    return ScoreBlend(
        task="like",
        weights={
            "retrieval": 0.6,
            "click": 0.2,
            "transitions": 0.3,
            "neighbours": 0.5,
            "popularity": 0.4,
            "seen": -6.0,
            "own_count": 2.0,
            "own_age": -0.5,
            "own_or_next": 0.1,
        },
        successors=np.stack(chosen).astype(np.int32),
        log_prob=np.log(random.dirichlet(np.ones(9), num_items)[:, :8]).astype(np.float32),
        popularity=np.log(random.dirichlet(np.ones(num_items))).astype(np.float32),
        neighbours=Neighbours(
            np.stack(
                [np.sort(random.choice(num_items, 6, replace=False)) for _ in range(num_items)]
            ).astype(np.int32),
            random.uniform(0.1, 2.0, (num_items, 6)).astype(np.float32),
        ),
    )


def events(num: int, seed: int = 0, config: HSTUConfig | None = None) -> Events:
    random = np.random.default_rng(seed)
    config = config or tiny_config()
    return Events.make(
        random.integers(0, config.num_items, num),
        random.integers(0, len(config.actions), num),
        1_600_000_000 + np.cumsum(random.integers(0, 100_000, num)),
    )


def after(history: Events, newer: Events) -> Events:
    """The same events as `newer`, at times after all of a history."""
    if not len(history) or not len(newer):
        return newer
    shift = 1 + history.timestamps.max() - newer.timestamps.min()
    return replace(newer, timestamps=newer.timestamps + shift)


class Request:
    """One user's history and candidates as tensors, to be cut anywhere."""

    def __init__(self, num_history: int, num_candidates: int, seed: int = 0) -> None:
        history = events(num_history, seed)
        self.items = torch.from_numpy(history.items)
        self.actions = torch.from_numpy(history.actions.astype(np.int64))
        self.times = torch.from_numpy(history.timestamps)
        random = np.random.default_rng(seed + 1)
        self.candidates = torch.from_numpy(
            random.integers(0, tiny_config().num_items, num_candidates)
        )
        self.shown_at = 1_600_000_000 + 100_000 * num_history

    def segment(
        self,
        start: int = 0,
        stop: int | None = None,
        candidates: Tensor | None = None,
        **more: object,
    ) -> Segment:
        part = slice(start, stop)
        return Segment(
            items=self.items[part],
            actions=self.actions[part],
            times=self.times[part],
            candidates=self.candidates if candidates is None else candidates,
            candidate_time=self.shown_at,
            **more,  # type: ignore[arg-type]
        )


class Store:
    """Keeps what a sink is given and reads it back in slabs of the given sizes."""

    def __init__(self) -> None:
        self.layers: dict[int, Slab] = {}

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        if layer in self.layers:
            before = self.layers[layer]
            self.layers[layer] = (torch.cat([before[0], k]), torch.cat([before[1], v]))
        else:
            self.layers[layer] = (k.clone(), v.clone())

    def past(self, times: Tensor, slab_tokens: int = 1 << 30) -> Past:
        def slabs(layer: int) -> list[Slab]:
            k, v = self.layers[layer]
            return list(zip(k.split(slab_tokens), v.split(slab_tokens), strict=True))

        return Past(times, slabs)


def full(model: HSTU, request: Request, backend: object = CPU) -> Tensor:
    return model(backend, [request.segment()])[0]  # type: ignore[no-any-return]


def cached(model: HSTU, request: Request, cut: int, slab_tokens: int = 1 << 30) -> Tensor:
    """Prefill the first `cut` tokens, then rank the rest and the candidates against them."""
    store = Store()
    model(CPU, [request.segment(0, cut, NONE, sink=store.write)])
    past = store.past(request.times[:cut], slab_tokens)
    return model(CPU, [request.segment(cut, past=past)])[0]  # type: ignore[no-any-return]
