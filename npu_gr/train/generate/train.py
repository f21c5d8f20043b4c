"""Train a semantic-ID generator from an interaction log: item codes first, then a decoder over them.

A history is a sequence of codes, L an item, and every code but those that begin it is predicted from those before
it, over the whole vocabulary, as the service will ask. The log is split leave-one-out twice: a user's last event is
the test, the one before it the validation, which chooses among the training's states; neither is trained on, nor
read by the codes.

Deterministic: the same log, options and number of threads give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel

from npu_gr.catalogue.trie import Codebooks
from npu_gr.core.errors import ConfigError, DataError
from npu_gr.features.interactions import Interactions, ItemValues
from npu_gr.model.decoder import Decoder, DecoderConfig
from npu_gr.train.baselines import Baseline, Markov, Popularity
from npu_gr.train.data import Batch, Log, Split, batches, build_log, windows
from npu_gr.train.generate.causal import encode, next_logits, start
from npu_gr.train.generate.codes import ItemCodes, item_vectors, read_codes, residual_codes
from npu_gr.train.generate.retrieval import Asked, Figures, Report, Search, baseline_figures, published
from npu_gr.train.steps import LAST_BATCHES, Progress, average, schedule

Count = Annotated[int, Meta(ge=1)]
Ratio = Annotated[float, Meta(ge=0.0, le=1.0)]
Decay = Annotated[float, Meta(ge=0.0)]
SPLIT: Split = "leave-one-out"


class GenerateOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides the result, apart from the log, ready-made codes and the number of threads."""

    seed: Annotated[int, Meta(ge=0)] = 0

    code_count: Annotated[tuple[Count, ...], Meta(min_length=1, description="codes of each level")] = (64, 64)
    vector_dim: Annotated[Count, Meta(description="of the item vectors that are coded")] = 64
    company_window: Annotated[Count, Meta(description="events apart within which items are company")] = 5

    dim: Count = 64
    num_layers: Count = 2
    num_heads: Count = 2
    num_kv_heads: Count = 2
    head_dim: Count = 32
    mlp_dim: Count = 128
    history_items: Annotated[Count, Meta(description="newest items of a history that are read")] = 50

    epochs: Count = 30
    batch_tokens: Annotated[Count, Meta(description="tokens of one step, padding included")] = 2048
    learning_rate: Annotated[float, Meta(gt=0.0)] = 3e-3
    warm_up_ratio: Annotated[Ratio, Meta(description="share of the steps with a rising learning rate")] = 0.05
    weight_decay: Decay = 0.1
    code_weight_decay: Annotated[Decay, Meta(description="of the codes' embeddings")] = 0.0
    dropout: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.2
    average_decay: Annotated[float, Meta(ge=0.0, lt=1.0, description="of the moving average that is served")] = 0.995

    beam_width: Annotated[int, Meta(ge=50, le=1024, description="of the validation and the test")] = 50
    validate_every: Annotated[Count, Meta(description="epochs")] = 5
    validation_users: Annotated[Count, Meta(description="drawn at random, where there are more")] = 1000
    test_users: Annotated[Count, Meta(description="as of the validation")] = 1_000_000
    patience: Annotated[Count, Meta(description="validations without a better one that end the training")] = 3


MOVIELENS = GenerateOptions()
BEAUTY = GenerateOptions(history_items=20)


class Trained(NamedTuple):
    """A generator and what it generates."""

    model: Decoder
    log: Log
    codes: ItemCodes
    report: Report


def train_generator(
    interactions: Interactions,
    features: Sequence[ItemValues],
    options: GenerateOptions,
    codes_path: Path | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Trained:
    """Make codes, train, and measure beside the baselines.

    Args:
        interactions: whole log.
        features: side features of items, for their codes.
        options: what to train.
        codes_path: ready-made codes, instead of `code_count`.
        progress: called after every step of training and every user of the test, in this thread.

    Raises:
        DataError: the log is too small, the codes do not fit it, or the loss is not finite.
        ConfigError: there are fewer semantic IDs than items, or the options do not make a model.
    """
    log = build_log(interactions, features, SPLIT)
    trained = log.only_trained(SPLIT)
    codes = _codes(trained, features, options, codes_path)
    model = _new_model(codes, options)
    search = Search(codes, log.item_ids, options.history_items, options.beam_width)
    validation = _fit(model, trained, codes, search, options, progress)
    asked = _some(log.next_items(), options.test_users, options.seed)
    test = search.judge(model, log, asked, lambda done, total: progress(Progress("evaluate", done, total)), unseen=True)
    fitted: list[Baseline] = [Popularity(log), Markov(log)]
    return Trained(
        model,
        log,
        codes,
        Report(
            num_trained=int(trained.trained.sum()),
            generator=test,
            validation=validation,
            baselines=tuple(baseline_figures(log, asked, baseline) for baseline in fitted),
            published=published(log),
        ),
    )


def _codes(log: Log, features: Sequence[ItemValues], options: GenerateOptions, path: Path | None) -> ItemCodes:
    if path is not None:
        return read_codes(path, log.item_ids)
    vectors = item_vectors(log, features, options.vector_dim, options.company_window, options.seed)
    uses = np.bincount(log.items[log.trained], minlength=log.num_items)
    return residual_codes(vectors, options.code_count, uses, options.seed)


def _new_model(codes: ItemCodes, options: GenerateOptions) -> Decoder:
    try:
        config = DecoderConfig(
            vocab_size=sum(codes.code_count),
            dim=options.dim,
            num_layers=options.num_layers,
            num_heads=options.num_heads,
            num_kv_heads=options.num_kv_heads,
            head_dim=options.head_dim,
            mlp_dim=options.mlp_dim,
            max_tokens=(options.history_items + 1) * len(codes.code_count),
            rope_theta=10_000.0,
            norm_eps=1e-6,
            qk_norm=True,
            qkv_bias=False,
            tied_head=True,
        )
    except ValueError as error:
        raise ConfigError(f"train: {error}") from error
    model = Decoder(config)
    start(model, torch.Generator().manual_seed(options.seed))
    return model


def _fit(
    model: Decoder,
    log: Log,
    codes: ItemCodes,
    search: Search,
    options: GenerateOptions,
    progress: Callable[[Progress], None],
) -> Figures:
    """AdamW; the moving average that is best on the validation becomes the model. Its figures there."""
    torch.manual_seed(options.seed)
    random = np.random.default_rng(options.seed)
    asked = _some(log.next_items(), options.validation_users, options.seed)
    tokens = torch.from_numpy(codes.sids + np.array(Codebooks.stacked(codes.code_count).vocab_base, np.int64))
    optimizer = _optimizer(model, options)
    averaged = AveragedModel(model, multi_avg_fn=partial(average, options.average_decay))
    best, best_state, worse = Figures.of(np.empty(0)), model.state_dict(), 0
    recent: list[float] = []
    for epoch in range(options.epochs):
        cut = windows(log, options.history_items + 1, random)
        parts = list(batches(log, cut, max(1, options.batch_tokens // len(codes.code_count)), random))
        model.train()
        for index, batch in enumerate(parts):
            done = epoch + index / len(parts)
            for group in optimizer.param_groups:
                group["lr"] = options.learning_rate * schedule(done / options.epochs, options.warm_up_ratio)
            loss = _loss(model, tokens, batch, options.dropout)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            averaged.update_parameters(model)
            recent = [*recent[1 - LAST_BATCHES :], loss.item()]
            if not math.isfinite(recent[-1]):
                raise DataError(f"the loss is {recent[-1]} in epoch {done:.2f}: try a lower learning_rate")
            progress(Progress("train", done, options.epochs, sum(recent) / len(recent)))
        if (epoch + 1) % options.validate_every and epoch + 1 < options.epochs:
            continue
        assert isinstance(averaged.module, Decoder)
        found = search.judge(averaged.module, log, asked)
        worse += 1
        if not best.num_users or found.ndcg_at_10 > best.ndcg_at_10:
            best, worse = found, 0
            best_state = {name: tensor.clone() for name, tensor in averaged.module.state_dict().items()}
        if worse == options.patience:
            break
    model.load_state_dict(best_state)
    model.eval().requires_grad_(False)
    return best


def _some(asked: Asked, num_users: int, seed: int) -> Asked:
    """At most so many of the users, drawn at random, in their order."""
    if len(asked) <= num_users:
        return asked
    chosen = np.random.default_rng(seed).choice(len(asked), num_users, replace=False)
    return [asked[index] for index in sorted(chosen.tolist())]


def _optimizer(model: Decoder, options: GenerateOptions) -> torch.optim.Optimizer:
    table = model.embedding.weight
    return torch.optim.AdamW(
        [
            {"params": [table], "weight_decay": options.code_weight_decay},
            {
                "params": [p for p in model.parameters() if p.ndim > 1 and p is not table],
                "weight_decay": options.weight_decay,
            },
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=options.learning_rate,
        betas=(0.9, 0.98),
    )


def _loss(model: Decoder, tokens: Tensor, batch: Batch, dropout_ratio: float) -> Tensor:
    """Mean over every code that another stands before."""
    sequence = tokens[batch.items].flatten(1)  # [B, N * L]
    counts = batch.valid.repeat_interleave(tokens.shape[1], dim=1)[:, 1:]
    rows = encode(model, sequence[:, :-1], dropout_ratio)
    return cross_entropy(next_logits(model, rows[counts]), sequence[:, 1:][counts])
