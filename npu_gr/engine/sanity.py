"""Self-tests of a model on its device, before it serves: parity and sanity.

`parity` compares a ranker with itself: cold scores == HBM hit == DRAM hit. A checkpoint of zeros
passes that. So the sanity checks look at the numbers: weights and scores must be finite, and scores
must differ between candidates and between histories. A model that fails does not become ready.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from msgspec.structs import replace
from torch import nn

from npu_gr.backend.tiles import Slab
from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import CheckpointError, ConfigError, DeviceError
from npu_gr.engine.generate_engine import GenerateEngine
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.kv_cache.pages import PageRun
from npu_gr.engine.page_jobs import CachedPrefix, PageCopy, warmup_order
from npu_gr.engine.rank_engine import FindPass, RankEngine, RankPass
from npu_gr.model.generative import LayerSlabs
from npu_gr.model.history_tokenizer import Tokens

# Largest difference of scores, in standard deviations of the logits. In int8 every pass rounds the
# same rows in the same way, so that a prefix changes no score by it.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 0.1, "int8": 1e-5}
_FAR = float("inf")


async def parity(
    engine: RankEngine,
    runs: tuple[PageRun, ...],
    dram: KVArena | None,
    dram_runs: tuple[PageRun, ...],
    tokens: Tokens,
    candidates: I64,
) -> float:
    """Rank one history cold, from HBM and from DRAM, and compare the scores.

    A model with a retrieval head has its user vectors compared too.

    Args:
        engine: Engine to test. Its ranks queue as live ones do, so `engine.objective_s` must be
            set.
        runs: Otherwise unused pages of its arena for `tokens`; they are zero at the end.
        dram: Arena of the DRAM tier; None = there is no such tier.
        dram_runs: Otherwise unused pages of `dram` for `tokens`; they are zero at the end.
        tokens: A history; three quarters of it are cached, the rest is computed.
        candidates: [c] item rows.

    Returns:
        The largest difference between a cached and a cold score, in standard deviations of the cold
        scores.

    Raises:
        DeviceError: the difference is over the tolerance for the dtype of the stored KV.
    """
    layout = engine.arena.layout
    cut = max(len(tokens) * 3 // 4, tokens.num_user)
    shown_at = int(tokens.events.timestamps[-1])
    head = tokens[:cut]
    cold = await _scored(engine, RankPass(tokens, 0, candidates, shown_at))
    await engine.prefill(head, runs, _FAR, warmup_order())
    hit = RankPass(tokens, 0, candidates, shown_at, cached=CachedPrefix(runs, cut))
    results = {"HBM": await _scored(engine, hit)}
    if dram is not None:
        await engine.copy(PageCopy(engine.arena, runs, dram, dram_runs, cut), _FAR, warmup_order())
        await engine.zero(engine.arena, runs)
        await engine.copy(PageCopy(dram, dram_runs, engine.arena, runs, cut), _FAR, warmup_order())
        results["DRAM"] = await _scored(engine, hit)
        await engine.zero(dram, dram_runs)
    await engine.zero(engine.arena, runs)
    worst = 0.0
    for tier, result in results.items():
        drift = max(_drift(*pair) for pair in zip(result, cold, strict=True))
        worst = max(worst, drift)
        if not drift <= TOLERANCE[layout.dtype]:
            raise DeviceError(
                f"self-test: scores from {tier} differ from cold ones by {drift:.1e} of their "
                f"standard deviation, the limit for {layout.dtype} is "
                f"{TOLERANCE[layout.dtype]:.0e}"
            )
    return worst


async def int8_drift(
    engine: RankEngine, tokens: Tokens, candidates: I64, max_drift: float
) -> float:
    """Rank one history with keys and values in int8, and as they are computed.

    Args:
        engine: Engine to test, whose pages are in int8.
        tokens: A history.
        candidates: [c] item rows.
        max_drift: Largest allowed difference, in standard deviations of the scores.

    Returns:
        The largest difference of a score.

    Raises:
        ConfigError: it is over `max_drift`.
    """
    work = RankPass(tokens, 0, candidates, int(tokens.events.timestamps[-1]))
    exact = (await engine.rank(replace(work, is_unrounded=True), _FAR)).logits
    drift = _drift((await engine.rank(work, _FAR)).logits, exact)
    if not drift <= max_drift:
        raise ConfigError(
            f"kv_cache.dtype: int8 moves the scores of this ranker by {drift:.1e} of their "
            f"standard deviation, service.selfcheck_max_int8_drift is {max_drift:g}; use bfloat16"
        )
    return drift


async def _scored(engine: RankEngine, work: RankPass) -> list[F32]:
    """Compute the logits, and the user vector if the model has a retrieval head."""
    answers = [(await engine.rank(work, _FAR)).logits]
    if engine.model.config.retrieval:
        nothing: I64 = np.empty(0, np.int64)
        find = FindPass(replace(work, candidates=nothing), 0, nothing)
        answers.append((await engine.find(find, _FAR)).vector)
    return answers


def _drift(got: F32, want: F32) -> float:
    return float(np.abs(got - want).max()) / max(float(want.std()), 1e-6)


def check_weights(model: nn.Module, where: str) -> None:
    """Check that every weight is a finite number.

    Args:
        model: Model on any device.
        where: Prefix of the error message, e.g. "checkpoint /models/ranker".

    Raises:
        CheckpointError: names the tensor, how many of its values are wrong, and the first one.
    """
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point() or bool(tensor.isfinite().all()):
            continue
        wrong = torch.nonzero(~tensor.isfinite())
        first = tuple(wrong[0].tolist())
        raise CheckpointError(
            f"{where}: self-test: {len(wrong)} of {tensor.numel()} values of {name} are not "
            f"finite, the first is {float(tensor[first])} at {list(first)}"
        )


def check_scores(logits: F32, names: Sequence[str], where: str) -> None:
    """Check that scores are finite, and that they differ between candidates and between histories.

    Args:
        logits: [h, c, n] for h different histories, c different candidates, n tasks. With one
            candidate or one history, differences between them are not checked.
        names: [n] names of the scores, for the message.
        where: Prefix of the error message.

    Raises:
        CheckpointError: names the score and what is wrong with it.
    """
    num_histories, num_candidates = logits.shape[:2]
    for name, scores in zip(names, np.moveaxis(logits, 2, 0), strict=True):
        broken = int(np.count_nonzero(~np.isfinite(scores)))
        if broken:
            raise CheckpointError(
                f"{where}: self-test: {broken} of {scores.size} scores of {name} are not finite"
            )
        if num_candidates > 1 and (scores == scores[:, :1]).all():
            raise CheckpointError(
                f"{where}: self-test: all {num_candidates} candidates have the same score of "
                f"{name}, {float(scores[0, 0]):g}"
            )
        if num_histories > 1 and (scores == scores[:1]).all():
            raise CheckpointError(
                f"{where}: self-test: scores of {name} are the same for {num_histories} different "
                "histories"
            )


async def check_ranker(
    engine: RankEngine,
    histories: Sequence[Tokens],
    candidates: I64,
    tasks: Sequence[str],
    where: str,
) -> None:
    """Rank different candidates for different histories, cold, and check the scores.

    Args:
        engine: the engine to test.
        histories: Distinct histories.
        candidates: [c] item rows, distinct.
        tasks: Name of each score.
        where: Prefix of the error message.

    Raises:
        CheckpointError: as `check_scores`.
    """
    found = [
        await engine.rank(RankPass(tokens, 0, candidates, int(tokens.events.timestamps[-1])), _FAR)
        for tokens in histories
    ]
    check_scores(np.stack([each.logits for each in found]), tasks, where)


def _first(kv: Mapping[int, Slab], num_tokens: int) -> LayerSlabs:
    """Make the function that returns a layer's KV of the first tokens of a prompt."""
    return lambda layer: [(kv[layer][0][:num_tokens], kv[layer][1][:num_tokens])]


async def check_generator(
    engine: GenerateEngine, codes: Sequence[int], first_token: int, where: str
) -> None:
    """Score the semantic-ID tokens that may follow two different prompts, and check the scores.

    Its weights were checked when they were read (`model/hf.py`).

    Args:
        engine: the engine to test.
        codes: Number of codes of each level.
        first_token: token of the first level's code 0; the other levels follow.
        where: Prefix of the error message.

    Raises:
        CheckpointError: as `check_scores`.
    """
    model = engine.generator.model
    random = np.random.default_rng(0)
    bases = first_token + np.cumsum([0, *codes[:-1]])

    def score() -> F32:
        """Score the token after two random items, on a device thread."""
        tokens: I64 = (bases + random.integers(0, codes, (2, len(codes)))).ravel()
        kv: dict[int, Slab] = {}
        for piece in model.encoding(
            engine.backend, tokens, 0, None, lambda layer, k, v: kv.update({layer: (k, v)})
        ):
            piece()
        begun = model.begin(engine.backend, tokens, partial(_first, kv))
        logits = model.logits(begun.hidden, (first_token, first_token + sum(codes)))
        scores: F32 = logits[0].to("cpu", torch.float32).numpy()
        return scores

    found = [await engine.scheduler.call(score, _FAR, warmup_order()) for _ in range(2)]
    check_scores(np.stack([each.value for each in found])[:, :, None], ("the next token",), where)
