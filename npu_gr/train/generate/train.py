"""Train a semantic-ID generator from an interaction log: item codes first, then a decoder over them.

A history is a sequence of codes, L for each item. The decoder predicts every code but the first from the codes before
it, over the whole vocabulary, as it does when it serves. The log is split leave-one-out twice:

    events of a user   0 1 2 ... n-3 | n-2          | n-1
                       trained on      validation     test

The validation chooses among the states of the training. Neither the validation nor the test is trained on, and the item
codes do not depend on them.

Deterministic: the same log, options and number of threads give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import Meta
from torch import Tensor
from torch.nn.functional import cross_entropy

from npu_gr.catalogue.trie import Codebooks
from npu_gr.core.errors import ConfigError
from npu_gr.core.settings import Count, Positive
from npu_gr.features.interactions import Interactions, ItemValues
from npu_gr.model.decoder import Decoder, DecoderConfig
from npu_gr.train.baselines import Baseline, Markov, Popularity
from npu_gr.train.data import Batch, InteractionLog, NextItem, Split, batches, build_log, windows
from npu_gr.train.generate.causal import encode, next_logits, start
from npu_gr.train.generate.codes import ItemCodes, item_vectors, read_codes, residual_codes
from npu_gr.train.generate.retrieval import (
    GeneratorJudge,
    RetrievalFigures,
    RetrievalReport,
    baseline_figures,
    published,
)
from npu_gr.train.options import Decay, DropoutRatio, Seed, Share, Weight
from npu_gr.train.steps import EarlyStopping, EpochTrainer, TrainingProgress

SPLIT: Split = "leave-one-out"


class GenerateOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides the result but the log, ready-made codes and the number of threads."""

    seed: Seed = 0

    code_count: Annotated[tuple[Count, ...], Meta(min_length=1, description="codes of each level")] = (64, 64)
    vector_dim: Annotated[Count, Meta(description="most dimensions of the neighbours' part of an item vector")] = 64
    company_window: Annotated[Count, Meta(description="items at most so many events apart are neighbours")] = 5

    dim: Count = 64
    num_layers: Count = 2
    num_heads: Count = 2
    num_kv_heads: Count = 2
    head_dim: Count = 32
    mlp_dim: Count = 128
    history_items: Annotated[Count, Meta(description="newest items of a history that the model reads")] = 50

    epochs: Count = 30
    batch_tokens: Annotated[Count, Meta(description="tokens of one step, padding included")] = 2048
    learning_rate: Positive = 3e-3
    warm_up_ratio: Annotated[Share, Meta(description="share of the steps with a rising learning rate")] = 0.05
    weight_decay: Weight = 0.1
    code_weight_decay: Annotated[Weight, Meta(description="weight decay of the codes' embeddings")] = 0.0
    dropout: DropoutRatio = 0.2
    average_decay: Annotated[Decay, Meta(description="of the moving average of the weights, which is served")] = 0.995

    beam_width: Annotated[int, Meta(ge=50, le=1024, description="beams of the validation and the test")] = 50
    validate_every: Annotated[Count, Meta(description="epochs between two validations")] = 5
    validation_users: Annotated[Count, Meta(description="most users of the validation, drawn at random")] = 1000
    test_users: Annotated[Count, Meta(description="most users of the test, drawn at random")] = 1_000_000
    patience: Annotated[Count, Meta(description="validations in a row without a best one that end the training")] = 3


MOVIELENS = GenerateOptions()
BEAUTY = GenerateOptions(history_items=20)


class TrainedGenerator(NamedTuple):
    """A generator, the items that it generates, and its figures."""

    model: Decoder
    log: InteractionLog
    codes: ItemCodes
    report: RetrievalReport


def train_generator(
    interactions: Interactions,
    features: Sequence[ItemValues],
    options: GenerateOptions,
    codes_path: Path | None = None,
    progress: Callable[[TrainingProgress], None] = lambda _: None,
) -> TrainedGenerator:
    """Make item codes, train a decoder over them, and evaluate it beside the baselines.

    Args:
        interactions: the whole log.
        features: side features of items; they shape the codes.
        options: the model and its training.
        codes_path: file of ready-made codes, which replace those that `code_count` would make; None: make them.
        progress: called after every step of training and every user of the test, in this thread.

    Raises:
        DataError: the log is too small, the codes do not fit it, or the loss is not finite.
        ConfigError: there are fewer semantic IDs than items, or the options do not make a model.
    """
    log = build_log(interactions, features, SPLIT)
    trained = log.only_trained(SPLIT)
    codes = _codes(trained, features, options, codes_path)
    model = _new_model(codes, options)
    judge = GeneratorJudge(codes, log.item_ids, options.history_items, options.beam_width)
    validation = _fit(model, trained, codes, judge, options, progress)
    targets = _sample(log.next_items(), options.test_users, options.seed)

    def show(done: int, total: int) -> None:
        progress(TrainingProgress("evaluate", done, total))

    test = judge.judge(model, log, targets, show, unseen=True)
    fitted: list[Baseline] = [Popularity(log), Markov(log)]
    report = RetrievalReport(
        num_trained=int(trained.trained.sum()),
        generator=test,
        validation=validation,
        baselines=tuple(baseline_figures(log, targets, baseline) for baseline in fitted),
        published=published(log),
    )
    return TrainedGenerator(model, log, codes, report)


def _codes(
    log: InteractionLog, features: Sequence[ItemValues], options: GenerateOptions, path: Path | None
) -> ItemCodes:
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
    log: InteractionLog,
    codes: ItemCodes,
    judge: GeneratorJudge,
    options: GenerateOptions,
    progress: Callable[[TrainingProgress], None],
) -> RetrievalFigures:
    """Train the model in place: it ends with the moving average that was best on the validation.

    Returns:
        The figures of the best validation.
    """
    torch.manual_seed(options.seed)
    random = np.random.default_rng(options.seed)
    targets = _sample(log.next_items(), options.validation_users, options.seed)
    tokens = torch.from_numpy(codes.sids + np.array(Codebooks.stacked(codes.code_count).vocab_base, np.int64))
    trainer = EpochTrainer(
        model,
        options,
        table=model.embedding.weight,
        table_weight_decay=options.code_weight_decay,
        progress=progress,
    )
    stopping = EarlyStopping(options.patience)
    best = RetrievalFigures.from_ranks(np.empty(0))
    best_state = model.state_dict()
    for epoch in range(options.epochs):
        cut = windows(log, options.history_items + 1, random)
        parts = list(batches(log, cut, max(1, options.batch_tokens // len(codes.code_count)), random))
        trainer.run_epoch(epoch, parts, lambda batch: _loss(model, tokens, batch, options.dropout))
        if (epoch + 1) % options.validate_every and epoch + 1 < options.epochs:
            continue
        figures = judge.judge(trainer.averaged, log, targets)
        if stopping.is_best(figures.ndcg_at_10):
            best = figures
            best_state = {name: tensor.clone() for name, tensor in trainer.averaged.state_dict().items()}
        if stopping.is_over:
            break
    model.load_state_dict(best_state)
    model.eval().requires_grad_(False)
    return best


def _sample(targets: Sequence[NextItem], num_users: int, seed: int) -> Sequence[NextItem]:
    """Draw at most so many of the targets at random; keep their order."""
    if len(targets) <= num_users:
        return targets
    chosen = np.random.default_rng(seed).choice(len(targets), num_users, replace=False)
    return [targets[index] for index in sorted(chosen.tolist())]


def _loss(model: Decoder, tokens: Tensor, batch: Batch, dropout_ratio: float) -> Tensor:
    """Average the cross-entropy of every code but the first of each window; padding does not count."""
    sequence = tokens[batch.items].flatten(1)  # [B, N * L]
    counts = batch.valid.repeat_interleave(tokens.shape[1], dim=1)[:, 1:]
    rows = encode(model, sequence[:, :-1], dropout_ratio)
    return cross_entropy(next_logits(model, rows[counts]), sequence[:, 1:][counts])
