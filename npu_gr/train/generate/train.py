"""Train a semantic-ID generator from an interaction log: item codes first, then a decoder over them.

A history is a sequence of codes, L for each item. The decoder predicts every code but the first from the codes before
it, over the whole vocabulary, as it does when it serves. The log is split leave-one-out twice:

    events of a user   0 1 2 ... n-3 | n-2          | n-1
                       trained on      validation     test

The validation chooses among the states of the training. Neither the validation nor the test is trained on, and the item
codes do not depend on them. Then the generator is refitted: codes and decoder are made anew of all events, with the
same settings and as many epochs as the best state had. What is measured is the generator of the older events.

Deterministic: the same log, options and number of threads give the same bits.

Vary a log from epoch to epoch: what is short and sparse is read in more ways than one.

    skip    an event is left out, so the items around it follow each other
    swap    an item gives place to another that followed the item before it, in anybody's history

Histories of ten items say little, and a decoder soon knows them by heart. Counts of what follows what are then the
strongest baseline there is; swaps are drawn from just these counts, so the decoder learns them too.

Source: item dropout and substitution of correlated items as in CoSeRec (arXiv:2108.06479), which adds a contrastive
loss; here the varied histories are simply trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from npu_gr.catalogue.trie import Codebooks
from npu_gr.core.arrays import F32
from npu_gr.core.errors import ConfigError
from npu_gr.core.settings import Count, Positive
from npu_gr.features.interactions import Interactions, ItemValues
from npu_gr.model.decoder import Decoder, DecoderConfig
from npu_gr.train.baselines import fit_baselines
from npu_gr.train.data import Batch, InteractionLog, Split, batches, build_log, windows
from npu_gr.train.generate.codes import ItemCodes, item_vectors, read_codes, residual_codes
from npu_gr.train.generate.nodes import NodeDecoder, SiblingLoss, encode, next_logits, nodes_of, start
from npu_gr.train.generate.retrieval import (
    GeneratorJudge,
    RetrievalFigures,
    RetrievalReport,
    baseline_figures,
    published,
)
from npu_gr.train.next_item import NO_RANKS, sample_targets
from npu_gr.train.options import Decay, DropoutRatio, Seed, Share, Weight
from npu_gr.train.steps import EarlyStopping, EpochTrainer, TrainingProgress

SPLIT: Split = "leave-one-out"
COMPANY_WINDOW = 5  # items at most so many events apart are neighbours
M = TypeVar("M", bound=nn.Module)  # what is trained


class GenerateOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides the result but the log, ready-made codes and the number of threads."""

    seed: Annotated[Seed, Meta(description="of everything that is drawn: codes, weights, batches, test users")] = 0

    code_count: Annotated[tuple[Count, ...], Meta(min_length=1, description="codes of each level")] = (64, 64)
    vector_dim: Annotated[Count, Meta(description="most dimensions of the neighbours' part of an item vector")] = 64

    given_tokens: Annotated[
        Literal["nodes", "codes"],
        Meta(description="tokens of ready-made codes: nodes = one for each beginning of a semantic ID; codes = theirs"),
    ] = "nodes"

    dim: Annotated[Count, Meta(description="width of a token")] = 64
    num_layers: Annotated[Count, Meta(description="decoder layers")] = 2
    num_heads: Annotated[Count, Meta(description="attention heads")] = 2
    num_kv_heads: Annotated[Count, Meta(description="heads of keys and values, which attention heads share")] = 2
    head_dim: Annotated[Count, Meta(description="width of a head")] = 32
    mlp_dim: Annotated[Count, Meta(description="hidden width of the MLP")] = 128
    history_items: Annotated[Count, Meta(description="newest items of a history that the model reads")] = 50

    epochs: Annotated[Count, Meta(description="most passes over the log")] = 30
    batch_tokens: Annotated[Count, Meta(description="tokens of one step, padding included")] = 2048
    learning_rate: Annotated[Positive, Meta(description="highest rate, at the end of the warm-up")] = 3e-3
    warm_up_ratio: Annotated[Share, Meta(description="share of the steps with a rising learning rate")] = 0.05
    dropout: Annotated[DropoutRatio, Meta(description="share of embeddings and updates that are dropped")] = 0.2
    skip_ratio: Annotated[DropoutRatio, Meta(description="share of the events that an epoch leaves out")] = 0.0
    swap_ratio: Annotated[
        Share,
        Meta(description="share of the events whose item an epoch swaps for another that followed the one before"),
    ] = 0.0
    code_length: Annotated[
        Weight, Meta(description="of the codes' embeddings at the start, which say what stands near what; 0 = random")
    ] = 0.0
    average_decay: Annotated[Decay, Meta(description="of the moving average of the weights, which is served")] = 0.995
    refit: Annotated[
        bool, Meta(description="after the evaluation, train the served model anew on all events, the newest included")
    ] = True

    beam_width: Annotated[int, Meta(ge=50, le=1024, description="beams of the validation and the test")] = 50
    validate_every: Annotated[Count, Meta(description="epochs between two validations")] = 5
    validation_users: Annotated[Count, Meta(description="most users of the validation, drawn at random")] = 1000
    test_users: Annotated[Count, Meta(description="most users of the test, drawn at random")] = 1_000_000
    patience: Annotated[Count, Meta(description="validations in a row without a best one that end the training")] = 3


MOVIELENS = GenerateOptions()
QUICK = GenerateOptions(epochs=10, validate_every=5, validation_users=200, test_users=1000)
"""Two CPU minutes for 100,000 events, the refit included."""
BEAUTY = GenerateOptions(
    code_count=(256, 256),
    dim=128,
    num_heads=4,
    num_kv_heads=4,
    mlp_dim=256,
    history_items=20,
    epochs=9,
    validate_every=3,
    skip_ratio=0.15,
    swap_ratio=0.2,
    code_length=0.3,
)
"""For many short histories."""
BEAUTY_GIVEN = msgspec.structs.replace(BEAUTY, batch_tokens=4096, code_length=1.0)
"""For many short histories and ready-made codes of four levels."""


class TrainedGenerator(NamedTuple):
    """A generator, the items that it generates, and the figures."""

    model: Decoder
    log: InteractionLog  # whose trained events the model and the codes were made of
    codes: ItemCodes
    report: RetrievalReport  # of the evaluated generator, which has the model's settings


def train_generator(
    interactions: Interactions,
    features: Sequence[ItemValues],
    options: GenerateOptions,
    codes_path: Path | None = None,
    progress: Callable[[TrainingProgress], None] = lambda _: None,
    evaluated: Callable[[TrainedGenerator], None] = lambda _: None,
) -> TrainedGenerator:
    """Make item codes, train a decoder over them, evaluate it beside the baselines, and refit it on all events.

    Args:
        interactions: the whole log.
        features: side features of items; they shape the codes.
        options: the model and its training.
        codes_path: file of ready-made codes, which replace those that `code_count` would make; None: make them.
        progress: called after every step of training and every user of the test, in this thread.
        evaluated: called with the evaluated generator, before the refit.

    Raises:
        DataError: the log is too small, the codes do not fit it, or the loss is not finite.
        ConfigError: there are fewer semantic IDs than items, or the options do not make a model.
    """
    log = build_log(interactions, features, SPLIT)
    trained = log.only_trained(SPLIT)
    codes = _codes(trained, features, options, codes_path)
    model = _new_model(trained, codes, options)
    judge = GeneratorJudge(codes, log.item_ids, options.history_items, options.beam_width)
    epochs, validation = _fit(model, trained, codes, judge, options, progress)
    targets = sample_targets(log.next_items(), options.test_users, options.seed)

    def show(done: int, total: int) -> None:
        progress(TrainingProgress("generator: evaluate", done, total))

    test = judge.judge(model, log, targets, show, unseen=True)
    baselines = fit_baselines(log, SPLIT, options.seed)
    report = RetrievalReport(
        num_trained=int(trained.trained.sum()),
        num_served=len(log.items) if options.refit else int(trained.trained.sum()),
        generator=test,
        validation=validation,
        baselines=tuple(baseline_figures(log, targets, baseline) for baseline in baselines.fitted),
        left_out=baselines.left_out,
        published=published(log),
        codes=codes.text(),
    )
    found = TrainedGenerator(model, log, codes, report)
    evaluated(found)
    if not options.refit:
        return found
    whole = log.all_trained()
    codes = _codes(whole, features, options, codes_path)
    model = _new_model(whole, codes, options)
    _refit(model, whole, codes, epochs, options, progress)
    return TrainedGenerator(model, whole, codes, report)


def both_codes(
    interactions: Interactions, features: Sequence[ItemValues], options: GenerateOptions
) -> tuple[ItemCodes, ItemCodes]:
    """Make the codes of the evaluated and of the refitted generator, for a ranker that is trained beside it.

    Args:
        interactions: the whole log.
        features, options: as of `train_generator`, which makes the same codes of them.
    """
    log = build_log(interactions, features, SPLIT)
    evaluated, served = log.only_trained(SPLIT), log.all_trained()
    return _codes(evaluated, features, options, None), _codes(served, features, options, None)


def _codes(
    log: InteractionLog, features: Sequence[ItemValues], options: GenerateOptions, path: Path | None
) -> ItemCodes:
    if path is not None:
        given = read_codes(path, log.item_ids)
        return nodes_of(given) if options.given_tokens == "nodes" else given
    vectors = item_vectors(log, features, options.vector_dim, COMPANY_WINDOW, options.seed)
    uses = np.bincount(log.items[log.trained], minlength=log.num_items)
    return residual_codes(vectors, options.code_count, uses, options.seed)


def _new_model(log: InteractionLog, codes: ItemCodes, options: GenerateOptions) -> Decoder:
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
    if options.code_length:
        vectors = item_vectors(log, [], min(options.vector_dim, options.dim), COMPANY_WINDOW, options.seed)
        means = codes.means(vectors)
        units = np.concatenate([of_level / (_mean_length(of_level) or 1.0) for of_level in means])
        with torch.no_grad():
            model.embedding.weight[:, : units.shape[1]] += options.code_length * torch.from_numpy(units)
    return model


def _mean_length(rows: F32) -> float:
    """Average the lengths of the rows that are not zero; 0 if all are."""
    lengths = np.sqrt(np.square(rows).sum(1))
    return float(lengths[lengths > 0].mean()) if lengths.any() else 0.0


def _fit(
    model: Decoder,
    log: InteractionLog,
    codes: ItemCodes,
    judge: GeneratorJudge,
    options: GenerateOptions,
    progress: Callable[[TrainingProgress], None],
) -> tuple[int, RetrievalFigures]:
    """Train the model in place: it ends with the moving average that was best on the validation.

    Returns:
        The epochs of the best validation, and its figures.
    """
    targets = sample_targets(log.next_items(), options.validation_users, options.seed)
    stopping = EarlyStopping(options.patience)
    best = RetrievalFigures.from_ranks(NO_RANKS)
    best_epochs = options.epochs
    best_state = model.state_dict()
    for epoch, averaged in _epochs(model, log, codes, options, "generator: train", progress):
        if (epoch + 1) % options.validate_every and epoch + 1 < options.epochs:
            continue
        figures = judge.judge(averaged, log, targets)
        if stopping.is_best(figures.ndcg_at_10):
            best = figures
            best_epochs = epoch + 1
            best_state = {name: tensor.clone() for name, tensor in averaged.state_dict().items()}
        if stopping.is_over:
            break
    model.load_state_dict(best_state)
    model.eval().requires_grad_(False)
    return best_epochs, best


def _refit(
    model: Decoder,
    log: InteractionLog,
    codes: ItemCodes,
    epochs: int,
    options: GenerateOptions,
    progress: Callable[[TrainingProgress], None],
) -> None:
    """Train the model in place for so many epochs, at the learning rates that the evaluated one had in them."""
    steps = _epochs(model, log, codes, options, "generator: refit", progress)
    averaged = next(averaged for epoch, averaged in steps if epoch + 1 == epochs)
    model.load_state_dict(averaged.state_dict())
    model.eval().requires_grad_(False)


def _epochs(
    model: Decoder,
    log: InteractionLog,
    codes: ItemCodes,
    options: GenerateOptions,
    stage: str,
    progress: Callable[[TrainingProgress], None],
) -> Iterator[tuple[int, Decoder]]:
    """Train the model in place. After every epoch hand out its number, from 0, and what serves: the moving average."""
    if codes.given is None:
        code_loss = CodeLoss(codes)
        yield from _steps(
            model, [model.embedding.weight], log, len(codes.code_count), options, stage, progress, code_loss
        )
        return
    nodes = NodeDecoder(model, codes, torch.Generator().manual_seed(options.seed))
    tables = [model.embedding.weight, nodes.code_rows]
    sibling_loss = SiblingLoss(codes)
    for epoch, averaged in _steps(nodes, tables, log, len(codes.code_count), options, stage, progress, sibling_loss):
        yield epoch, averaged.folded()


def _steps(
    model: M,
    tables: Sequence[Tensor],
    log: InteractionLog,
    num_levels: int,
    options: GenerateOptions,
    stage: str,
    progress: Callable[[TrainingProgress], None],
    loss_of: Callable[[M, Batch, float], Tensor],
) -> Iterator[tuple[int, M]]:
    """Do the work of `_epochs` for a model of any kind. Hand out its moving average as it is."""
    torch.manual_seed(options.seed)
    random = np.random.default_rng(options.seed)
    trainer = EpochTrainer(
        model,
        options,
        tables=tables,
        table_weight_decay=0.0,
        stage=stage,
        progress=progress,
    )
    augmentation = Augmentation(log, options.skip_ratio, options.swap_ratio)
    for epoch in range(options.epochs):
        varied = augmentation.draw(random)
        cut = windows(varied, options.history_items + 1, random)
        parts = list(batches(varied, cut, max(1, options.batch_tokens // num_levels), random))
        trainer.run_epoch(epoch, parts, lambda batch: loss_of(model, batch, options.dropout))
        yield epoch, trainer.averaged


class CodeLoss:
    """The loss of a decoder over codes: cross-entropy of each code among the whole vocabulary."""

    def __init__(self, codes: ItemCodes) -> None:
        bases = Codebooks.stacked(codes.code_count).vocab_base
        self._tokens = torch.from_numpy(codes.sids + np.array(bases, np.int64))  # [N, L]

    def __call__(self, model: Decoder, batch: Batch, dropout_ratio: float) -> Tensor:
        """Average the cross-entropy of every code but the first of each window; padding does not count."""
        tokens = self._tokens
        sequence = tokens[batch.items].flatten(1)  # [B, N * L]
        counts = batch.valid.repeat_interleave(tokens.shape[1], dim=1)[:, 1:]
        rows = encode(model, sequence[:, :-1], dropout_ratio)
        return cross_entropy(next_logits(model, rows[counts]), sequence[:, 1:][counts])


MAX_APART = 2  # events between which one item counts as following the other


class Augmentation:
    """Draws variations of a log's trained events."""

    def __init__(self, log: InteractionLog, skip_ratio: float, swap_ratio: float) -> None:
        """Count what follows what.

        Args:
            log: its trained events count.
            skip_ratio: share of the events to leave out, 0 .. 1.
            swap_ratio: share of the events with another item, 0 .. 1; a user's first event has none.
        """
        self._log = log
        self._skip_ratio = skip_ratio
        self._swap_ratio = swap_ratio
        self._users = log.users
        self._trained = log.trained
        near = [
            (apart, self._trained[apart:] & (self._users[apart:] == self._users[:-apart]))
            for apart in range(1, MAX_APART + 1)
        ]
        leads = np.concatenate([log.items[:-apart][both] for apart, both in near])
        follows = np.concatenate([log.items[apart:][both] for apart, both in near])
        self._follows = follows[np.argsort(leads, kind="stable")]
        self._starts = np.concatenate([[0], np.cumsum(np.bincount(leads, minlength=log.num_items))])

    def draw(self, random: np.random.Generator) -> InteractionLog:
        """Draw one variation; without skips and swaps it is the log itself.

        Args:
            random: draws it.

        Returns:
            A log of trained events alone, some left out, some with other items.
        """
        if not self._skip_ratio and not self._swap_ratio:
            return self._log
        log = self._log
        items = log.items.copy()
        has_before = self._trained & (np.diff(self._users, prepend=-1) == 0)
        at = np.flatnonzero(has_before & (random.random(len(items)) < self._swap_ratio))
        before = log.items[at - 1]
        # what follows the item before is at least the item that is swapped
        counts = self._starts[before + 1] - self._starts[before]
        items[at] = self._follows[self._starts[before] + (random.random(len(at)) * counts).astype(np.int64)]
        kept = self._trained & (random.random(len(items)) >= self._skip_ratio)
        num_kept = np.bincount(self._users[kept], minlength=log.num_users)
        return replace(
            log,
            items=items[kept],
            actions=log.actions[kept],
            times=log.times[kept],
            starts=np.concatenate([[0], np.cumsum(num_kept)]),
            num_trained=num_kept,
        )
