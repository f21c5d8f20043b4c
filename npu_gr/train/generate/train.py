"""Train a semantic-ID generator from a log: make item codes, then train a decoder over them.

A history is a sequence of codes, L for each item. The decoder predicts every code but the first
from the codes before it, over the whole vocabulary, as in service. The log is split leave-one-out
twice:

    events of a user   0 1 2 ... n-3 | n-2          | n-1
                       trained on      validation     test

The validation chooses the epoch to keep. Neither the decoder nor the item codes see the validation
or the test. Then the generator is refitted: codes and decoder are made from all events, with the
same settings and the chosen number of epochs. The figures are those of the generator before the
refit. Of a log in files, validation and test are of a sample of its users.

Figures rank the next item over the whole catalogue by the beam search of the service. A next item
that is not among the beams counts as missed.

Deterministic: the same log, options and number of threads give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import Meta
from torch import nn

from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.catalogue.build import build_trie
from npu_gr.catalogue.filters import Filter, allow_all, deny_items
from npu_gr.catalogue.trie import Codebooks
from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import ConfigError
from npu_gr.core.settings import Count
from npu_gr.engine.beam_search import SearchOptions, Tables
from npu_gr.engine.generate_engine import Generator, PromptKV, layout_of, make_prompt
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import PageRun
from npu_gr.history_store.interactions import Interactions, ItemValues
from npu_gr.model.decoder import Decoder, DecoderConfig
from npu_gr.train.data import (
    Augmentation,
    Batch,
    InteractionLog,
    NextItem,
    Split,
    build_log,
    count_trained,
)
from npu_gr.train.distributed import num_events
from npu_gr.train.epochs import epoch
from npu_gr.train.generate.codes import ItemCodes, item_vectors, read_codes, residual_codes
from npu_gr.train.generate.nodes import CodeLoss, NodeDecoder, SiblingLoss, nodes_of
from npu_gr.train.generate.nodes import start as start_at_random
from npu_gr.train.generate.warm import (
    GeneratorStart,
    GeneratorStarts,
    KnownItems,
    begin_at,
    kept_codes,
)
from npu_gr.train.metrics import F64, known
from npu_gr.train.next_item import (
    NextItemRanks,
    RetrievalFigures,
    RetrievalReport,
    sample_targets,
)
from npu_gr.train.options import DropoutRatio, Share, Weight
from npu_gr.train.resume import NO_STATES, TrainingStates
from npu_gr.train.shared_baselines import RankBaselines, rank_baselines
from npu_gr.train.steps import BestEpoch, EpochTrainer, StepOptions, TrainingProgress
from npu_gr.train.stored_log import StoredLog, sampled

SPLIT: Split = "leave-one-out"
MISSED = float("inf")  # rank of an item that no beam has found
DECODER = "generator"
COOCCURRENCE_WINDOW = 5  # two items co-occur if they are at most so many events apart


class GenerateOptions(StepOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides the result, except the log, ready-made codes and threads."""

    epochs: Annotated[Count, Meta(description="most passes over the log")] = 30
    code_count: Annotated[
        tuple[Count, ...], Meta(min_length=1, description="codes of each level")
    ] = (64, 64)
    vector_dim: Annotated[
        Count, Meta(description="most dimensions of the co-occurrence part of an item vector")
    ] = 64

    given_tokens: Annotated[
        Literal["nodes", "codes"],
        Meta(
            description="tokens of ready-made codes: nodes = one for each prefix of a semantic "
            "ID; codes = the codes themselves"
        ),
    ] = "nodes"
    own_tokens: Annotated[
        Literal["nodes", "codes"],
        Meta(
            description="tokens of codes that are made here; with nodes a new item cannot have an "
            "ID of its own before the next training"
        ),
    ] = "codes"

    dim: Annotated[Count, Meta(description="width of a token")] = 64
    num_layers: Annotated[Count, Meta(description="decoder layers")] = 2
    num_heads: Annotated[Count, Meta(description="attention heads")] = 2
    num_kv_heads: Annotated[
        Count, Meta(description="key-value heads, which attention heads share")
    ] = 2
    head_dim: Annotated[Count, Meta(description="width of a head")] = 32
    mlp_dim: Annotated[Count, Meta(description="hidden width of the MLP")] = 128
    history_items: Annotated[
        Count, Meta(description="newest items of a history that the model reads")
    ] = 50

    batch_tokens: Annotated[Count, Meta(description="tokens of one step, padding included")] = 2048
    dropout: Annotated[
        DropoutRatio, Meta(description="share of embeddings and updates that are dropped")
    ] = 0.2
    skip_ratio: Annotated[
        DropoutRatio, Meta(description="share of the events that an epoch leaves out")
    ] = 0.0
    swap_ratio: Annotated[
        Share,
        Meta(
            description="share of the events whose item an epoch replaces by another one that "
            "followed the item before"
        ),
    ] = 0.0
    code_init_norm: Annotated[
        Weight,
        Meta(
            description="length of the codes' initial embeddings, made from item co-occurrence; "
            "0 = random start"
        ),
    ] = 0.0

    beam_width: Annotated[
        int, Meta(ge=50, le=1024, description="beam width of the validation and the test")
    ] = 50
    validate_every: Annotated[Count, Meta(description="epochs between two validations")] = 5
    validation_users: Annotated[
        Count, Meta(description="most users of the validation, drawn at random")
    ] = 1000
    test_users: Annotated[Count, Meta(description="most users of the test, drawn at random")] = (
        1_000_000
    )
    memory_events: Annotated[
        Count,
        Meta(
            description="largest log in memory (.25 kB an event); of a larger dataset the events "
            "are read from files, and validation, baselines and test are of a sample of its users "
            "with about so many events"
        ),
    ] = 10_000_000
    patience: Annotated[
        Count, Meta(description="validations in a row without a new best that end the training")
    ] = 3


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
    own_tokens="nodes",
    code_init_norm=1.0,
)
"""For logs with many short histories."""
BEAUTY_GIVEN = msgspec.structs.replace(BEAUTY, batch_tokens=4096)
"""For logs with many short histories, and ready-made codes of four levels."""


class TrainedGenerator(NamedTuple):
    """A generator, the items that it generates, and the figures."""

    model: Decoder
    log: InteractionLog  # the model and the codes were made from its trained events
    codes: ItemCodes
    report: RetrievalReport  # figures of the evaluated generator, which has the same settings


def train_generator(
    interactions: Interactions | StoredLog,
    features: Sequence[ItemValues],
    options: GenerateOptions,
    codes_path: Path | None = None,
    progress: Callable[[TrainingProgress], None] = lambda _: None,
    evaluated: Callable[[TrainedGenerator], None] = lambda _: None,
    states: TrainingStates = NO_STATES,
    start: GeneratorStarts | None = None,
    rank: RankBaselines = rank_baselines,
) -> TrainedGenerator:
    """Make item codes, train a decoder over them, compare it with the baselines, and refit it.

    Args:
        interactions: The whole log. Of one in files, a sample of the users is validated and tested.
        features: Side features of items; they shape the codes.
        options: Options of the model and its training.
        codes_path: File of ready-made codes; None = make codes by `code_count`.
        progress: Callback after every training step and every user of the test, in this thread.
        evaluated: Callback with the evaluated generator, before the refit.
        states: Where the state of the trainings is kept.
        start: Earlier generators to train on, whose items keep their codes; None = train from
            random weights.
        rank: Ranks the test users' next items by the baselines.

    Raises:
        DataError: the log is too small, the codes do not fit it, or the loss is not finite.
        ConfigError: there are fewer semantic IDs than items, or the options do not make a model.
    """
    if isinstance(interactions, StoredLog):
        log = interactions.split(SPLIT)
        sample, _ = interactions.sample(log, options.seed)
        made = f"{sampled('validation, baselines and figures', sample, log)}\n"
    else:
        log = sample = build_log(interactions, features, SPLIT)
        made = ""
    trained, earlier = log.without_last(), sample.without_last()
    progress(TrainingProgress("generator: codes of the items", 0, 1))
    codes = _codes(trained, features, options, codes_path, start and start.evaluated)
    evaluate = GeneratorEvaluator(codes, log.item_ids, options.history_items, options.beam_width)
    validated = sample_targets(earlier.next_items(), options.validation_users, options.seed)
    validations: list[dict[str, Any]] = []

    def score(decoder: Decoder) -> float:
        figures = evaluate.evaluate(decoder, earlier, validated, unseen=True)
        validations.append({**known(asdict(figures)), "score": figures.score})
        return figures.score

    stage = "generator: train"
    model, epochs = _fit(
        trained,
        codes,
        options,
        stage,
        progress,
        states,
        start and start.evaluated,
        score=score,
        found=validations,
        sample=earlier,
    )
    validation = max(validations, key=lambda figures: figures["score"])
    targets = sample_targets(sample.next_items(), options.test_users, options.seed)

    def show(done: int, total: int) -> None:
        progress(TrainingProgress("generator: evaluate", done, total))

    test = evaluate.evaluate(model, sample, targets, show, unseen=True)
    baselines = rank(sample, SPLIT, options.seed, targets)
    num_trained = int(trained.num_trained.sum())
    report = RetrievalReport(
        num_trained=num_trained,
        num_served=len(log.items) if options.refit else num_trained,
        own=test,
        baselines=baselines.figures(),
        skipped=baselines.skipped,
        made=made + codes.text(),
        chosen={"codes": codes.text(), "validation": validation},
    )
    found = TrainedGenerator(model, log, codes, report)
    evaluated(found)
    if not options.refit:
        return found
    full_log = log.all_trained()
    codes = _codes(full_log, features, options, codes_path, start and start.served)
    model, _ = _fit(
        full_log,
        codes,
        options,
        "generator: refit",
        progress,
        states,
        start and start.served,
        num_epochs=epochs,
        sample=sample.all_trained(),
    )
    return TrainedGenerator(model, full_log, codes, report)


def both_codes(
    interactions: Interactions,
    features: Sequence[ItemValues],
    options: GenerateOptions,
    known: tuple[KnownItems | None, KnownItems | None] = (None, None),
) -> tuple[ItemCodes, ItemCodes]:
    """Make the codes of the evaluated and of the refitted generator, for a ranker that reads them.

    `train_generator` makes the same codes from the same arguments, and may make nodes of them;
    `known` are the items of its `start`.
    """
    log = build_log(interactions, features, SPLIT)
    evaluated, served = log.without_last(), log.all_trained()
    first, last = known
    return (
        _own_codes(evaluated, features, options, first),
        _own_codes(served, features, options, last),
    )


def _codes(
    log: InteractionLog,
    features: Sequence[ItemValues],
    options: GenerateOptions,
    path: Path | None,
    start: GeneratorStart | None,
) -> ItemCodes:
    if path is None:
        codes = _own_codes(log, features, options, start and start.items)
        tokens = options.own_tokens
    else:
        codes = read_codes(path, log.item_ids, log.item_key)
        tokens = options.given_tokens
    if tokens == "codes":
        return codes
    return nodes_of(codes, start and start.kept_nodes(log.item_ids, codes))


def _own_codes(
    log: InteractionLog,
    features: Sequence[ItemValues],
    options: GenerateOptions,
    known: KnownItems | None,
) -> ItemCodes:
    vectors = item_vectors(log, features, options.vector_dim, COOCCURRENCE_WINDOW, options.seed)
    if known is not None:
        kept = kept_codes(known, log.item_ids, vectors, options.code_count)
        if kept is not None:
            return kept
    uses = count_trained(log, log.items, log.num_items)
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
    start_at_random(model, torch.Generator().manual_seed(options.seed))
    if options.code_init_norm:
        vectors = item_vectors(
            log, [], min(options.vector_dim, options.dim), COOCCURRENCE_WINDOW, options.seed
        )
        means = codes.means(vectors)
        units = np.concatenate([of_level / (_mean_length(of_level) or 1.0) for of_level in means])
        with torch.no_grad():
            model.embedding.weight[:, : units.shape[1]] += (
                options.code_init_norm * torch.from_numpy(units)
            )
    return model


def _mean_length(rows: F32) -> float:
    """Average the lengths of the nonzero rows; 0 if all rows are zero."""
    lengths = np.sqrt(np.square(rows).sum(1))
    return float(lengths[lengths > 0].mean()) if lengths.any() else 0.0


def _fit(
    log: InteractionLog,
    codes: ItemCodes,
    options: GenerateOptions,
    stage: str,
    progress: Callable[[TrainingProgress], None],
    states: TrainingStates = NO_STATES,
    start: GeneratorStart | None = None,
    *,
    score: Callable[[Decoder], float] | None = None,
    found: list[Any] | None = None,
    num_epochs: int | None = None,
    sample: InteractionLog | None = None,
) -> BestEpoch[Decoder]:
    """Train a decoder over codes, or over their nodes; see `EpochTrainer.fit`.

    `sample` has some users of a log in files; None = `log`.
    """
    decoder = _new_model(log, codes, options)
    if start is not None:
        begin_at(decoder, codes, log.item_ids, start)
    model: Any = decoder
    tables = [decoder.embedding.weight]
    loss: CodeLoss | SiblingLoss
    terms_of = num_events
    if codes.given is None:
        loss = CodeLoss(codes)
        terms_of = loss.num_terms
    else:
        model = nodes = NodeDecoder(decoder, codes, torch.Generator().manual_seed(options.seed))
        if start is not None:
            nodes.keep_sums()
        tables.append(nodes.code_rows)
        loss = SiblingLoss(codes)
    torch.manual_seed(options.seed)
    trainer = EpochTrainer(
        model,
        options,
        tables=tables,
        table_weight_decay=0.0,
        stage=stage,
        progress=progress,
        states=states,
        terms_of=terms_of,
    )
    augmentation = Augmentation(sample or log, options.skip_ratio, options.swap_ratio)
    batch_items = max(1, options.batch_tokens // len(codes.code_count))

    def batches_of_epoch(random: np.random.Generator) -> Sequence[Batch]:
        return epoch(log, options.history_items + 1, batch_items, random, vary=augmentation.draw)

    best = trainer.fit(
        batches_of_epoch,
        lambda batch: loss(model, batch, options.dropout),
        score=None if score is None else lambda averaged: score(_served(averaged)),
        found=found,
        patience=options.patience,
        validate_every=options.validate_every,
        num_epochs=num_epochs,
    )
    served = _served(best.model)
    served.eval().requires_grad_(False)
    return BestEpoch(served, best.num_epochs)


def _served(model: nn.Module) -> Decoder:
    """Return the decoder to serve of a model in training."""
    if isinstance(model, NodeDecoder):
        return model.folded()
    assert isinstance(model, Decoder)
    return model


class GeneratorEvaluator:
    """Evaluates models by the beam search of the service, one user after the other."""

    def __init__(
        self, codes: ItemCodes, item_ids: I64, history_items: int, beam_width: int
    ) -> None:
        self._backend = CPUBackend()
        self._trie = build_trie(codes.sids, item_ids, Codebooks.stacked(codes.code_count))
        self._tables = Tables.upload(self._trie, self._backend.device)
        self._sids = dict(zip(item_ids.tolist(), codes.sids.tolist(), strict=True))
        self._max_tokens = history_items * self._trie.num_levels
        self._options = SearchOptions(width=beam_width, normalise=codes.normalise)

    def evaluate(
        self,
        model: Decoder,
        log: InteractionLog,
        targets: Sequence[NextItem],
        done: Callable[[int, int], None] = lambda *_: None,
        *,
        unseen: bool = False,
    ) -> RetrievalFigures:
        """Evaluate a model; it is put into evaluation mode.

        Args:
            model: Decoder over the codes of the catalogue.
            log: Log that holds the users' histories.
            targets: Next items to find.
            done: Callback with (users so far, users in all) after every user.
            unseen: Compute the unseen figures too, by a second search for every user.
        """
        model.eval()
        generator = Generator(model, self._backend, self._options.width, self._trie.num_levels)
        layout = layout_of(model)
        pages = layout.pages(self._max_tokens)
        arena = KVArena(layout, pages, self._backend.device)
        ranks = np.full(len(targets), MISSED)
        ranks_unseen = np.full(len(targets), MISSED)
        is_repeat = np.zeros(len(targets), np.bool_)
        num_answered = 0
        num_invalid = 0
        for index, (user, event) in enumerate(targets):
            history = log.item_ids[log.items[log.starts[user] : event]]
            target = int(log.item_ids[log.items[event]])
            is_repeat[index] = target in history
            tokens = make_prompt(self._trie, history, self._max_tokens).tokens
            part = PromptKV(arena, (PageRun(0, pages),), len(tokens))
            generator.encode(tokens, [], part)
            searches: list[tuple[F64, Filter | None]] = [(ranks, None)]
            if unseen and not is_repeat[index]:
                searches.append((ranks_unseen, self._without(history)))
            for ranks_found, allow in searches:
                width = self._options.width
                found = generator.generate(
                    self._trie, self._tables, tokens, [part], self._options, width, allow
                )
                place = np.flatnonzero(found.item_ids == target)
                ranks_found[index] = place[0] if len(place) else MISSED
                answered = zip(found.item_ids.tolist(), found.sids.tolist(), strict=True)
                num_invalid += sum(self._sids.get(item) != sid for item, sid in answered)
                num_answered += len(found.item_ids)
            done(index + 1, len(targets))
        invalid_ratio = num_invalid / max(num_answered, 1)
        found_ranks = NextItemRanks(ranks, ranks_unseen if unseen else np.empty(0), is_repeat)
        return RetrievalFigures.from_ranks(found_ranks, DECODER, invalid_ratio)

    def _without(self, history: I64) -> Filter:
        """Allow all items but those of the history."""
        return allow_all(self._trie).without(deny_items(self._trie, history))
