"""Train SCCDR: two graph encoders, first within their domains, then across the domains.

Source: SCCDR (arXiv:2502.16239). The stages and losses are the paper's. Their concrete form, the
projectors, the start of the target's users at their source vectors, and all values are our reading.

    source   train the source's encoder on the source's edges
    target   train the target's encoder on the target's edges; users start at their source vectors
    inter    add the inter-domain losses; start at the best weights so far (smooth HIT on the
             validation)

Every intra-domain logit has a popularity prior (`log_odds`), so the vectors only have to learn the
deviation from popularity.

Deterministic: the same data, options and number of threads give the same bits. Every stage has its
own random numbers.

All ranks of `torchrun` draw the same edges and anchors, and take their rows of them; each encodes
the whole graph.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch
import xxhash
from msgspec import Meta
from torch import Tensor, nn
from torch.nn.functional import normalize

from npu_gr.core.arrays import I64
from npu_gr.core.errors import DataError
from npu_gr.core.settings import Count, Positive
from npu_gr.train.distributed import Ranks
from npu_gr.train.evaluate import Graph, smooth_hit
from npu_gr.train.linear import log_popularity
from npu_gr.train.match.domains import MatchData
from npu_gr.train.match.model import (
    EMBEDDING_STD,
    Encoding,
    GraphEncoder,
    Negatives,
    dots,
    inter_loss,
    intra_loss,
    katz,
    share,
)
from npu_gr.train.options import Seed, Weight
from npu_gr.train.resume import NO_STATES, TrainingStates
from npu_gr.train.steps import EarlyStopping, TrainingProgress
from npu_gr.vector_search.fold import Folding

log = logging.getLogger(__name__)

MATRIX_LEARNING_RATE = 1e-3  # learning rate of all weights but the embedding tables
STATE = "match"  # name of the state of all stages
INTER_LEARNING_RATE_RATIO = 0.2  # factor of both rates in the inter-domain stage


class MatchOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides an SCCDR training, except its data and the number of threads."""

    seed: Annotated[Seed, Meta(description="seed of all random numbers")] = 0

    schedule: Annotated[
        Literal["target-only", "initialised", "separated"],
        Meta(
            description="target-only: no source; initialised: source, then target, whose users "
            "start at their source vectors; separated: then the inter-domain stage"
        ),
    ] = "separated"
    stop_gradient: Annotated[
        bool, Meta(description="keep the source's weights fixed in the inter-domain stage")
    ] = True
    curriculum: Annotated[
        bool, Meta(description="draw negatives from easy to hard, by Katz centrality")
    ] = True

    dim: Annotated[Count, Meta(description="width of a vector")] = 64
    num_layers: Annotated[Count, Meta(description="hops in the graph")] = 2

    source_steps: Annotated[Count, Meta(description="most steps of the source's stage")] = 120
    target_steps: Annotated[Count, Meta(description="most steps of the target's stage")] = 120
    inter_steps: Annotated[Count, Meta(description="most steps of the inter-domain stage")] = 120
    evaluate_every: Annotated[Count, Meta(description="steps between two validations")] = 10
    patience: Annotated[
        int, Meta(ge=0, description="validations without a new best that end a stage; 0 = never")
    ] = 4
    batch_edges: Annotated[Count, Meta(description="edges of each domain in a step")] = 8192
    num_negatives: Annotated[Count, Meta(description="sampled items per edge")] = 4
    batch_anchors: Annotated[
        Count, Meta(description="anchors of each inter-domain loss in a step")
    ] = 512
    num_inter_negatives: Annotated[Count, Meta(description="negatives of each anchor")] = 128
    lambda_intra: Annotated[
        Weight, Meta(description="weight of the intra-domain losses in the inter-domain stage")
    ] = 0.1
    tau: Annotated[Positive, Meta(description="temperature of the inter-domain losses")] = 0.2
    learning_rate: Annotated[
        Positive, Meta(description="learning rate of the embedding tables")
    ] = 2e-2
    curriculum_validations: Annotated[
        Count,
        Meta(description="with curriculum: validations after which every negative may be drawn"),
    ] = 4


class _Stage(NamedTuple):
    """One stage of a training, with its own optimizer."""

    name: Literal["source", "target", "inter"]
    steps: int
    moves: tuple[Literal["source", "target"], ...]  # the domains whose weights it trains


def _stages(options: MatchOptions) -> list[_Stage]:
    """List the stages of a training, in order."""
    target = _Stage("target", options.target_steps, ("target",))
    if options.schedule == "target-only":
        return [target]
    first = [_Stage("source", options.source_steps, ("source",)), target]
    if options.schedule == "initialised":
        return first
    inter = _Stage(
        "inter", options.inter_steps, ("target",) if options.stop_gradient else ("source", "target")
    )
    return [*first, inter]


class Validated(NamedTuple):
    """Vectors of the best validation, computed without the validation's edges.

    U = users, I = items of the target, d = dimension.
    """

    users: Tensor  # float32 [U, d]
    items: Tensor  # float32 [I, d]
    prior: Tensor  # float32 [I] popularity prior, added to the items' scores

    def scores(self, users: Tensor) -> Tensor:
        """Score all items for some users: int64 [n] rows -> float32 [n, I]."""
        return self.users[users] @ self.items.T + self.prior


class TrainedVectors(NamedTuple):
    """The result of a training. U = users, I = items of the target, d = dimension.

    The weights were not trained on the validation's edges, but the encoder passes messages over
    them, so the vectors reflect them.
    """

    users: Tensor  # float32 [U, d] in the target domain
    items: Tensor  # float32 [I, d]
    prior: Tensor  # float32 [I] popularity prior, added to the items' scores
    # float32 [U, d] in the source domain; None = the source was not trained
    source_users: Tensor | None
    # float32 [I, d] of length 1, in the source's space; None = there was no inter-domain stage
    bridge_items: Tensor | None
    validation: float  # smooth HIT of the best weights
    stage: str  # stage of the best weights
    step: int  # step of the best weights
    folding: Folding  # computes the vectors of users who come after the training
    validated: Validated

    def scores(self, users: Tensor) -> Tensor:
        """Score all items for some users: int64 [n] rows -> float32 [n, I]."""
        return self.users[users] @ self.items.T + self.prior


class Trainer:
    """One training, from its options to its result."""

    def __init__(
        self, data: MatchData, options: MatchOptions, states: TrainingStates = NO_STATES
    ) -> None:
        self.data = data
        self._states = states
        self.options = options
        self._evaluator = data.evaluator()
        self.source = _encoder("source", data.source, options)
        self.target = _encoder("target", data.target, options)
        self._project_users = _projector(options.dim)
        self._project_items = _projector(options.dim)
        self._all = nn.ModuleList(
            [self.source, self.target, self._project_users, self._project_items]
        )
        self._edges = {
            "source": _Edges(data.source, options),
            "target": _Edges(data.target, options),
        }
        self._ranks = Ranks()
        self._ranks.align(self._all, ())
        self._prior = log_popularity(data.target.degrees()[1])
        self._in_source = np.flatnonzero(data.source.degrees()[0])
        self._bridge = _Bridge(data, self._in_source)
        self._generator = torch.Generator()
        self._source_users: Tensor | None = None  # normalised, in a stage that does not train them
        self._best = ("", 0, -1.0)  # stage, step and smooth HIT of the best validation
        self._best_state = copy.deepcopy(self._all.state_dict())

    def run(self, progress: Callable[[TrainingProgress], None] = lambda _: None) -> TrainedVectors:
        """Train all stages, and call `progress` after every step.

        An interrupted training goes on where its state was kept, with the same bits.

        Raises:
            DataError: the loss is not finite, or the state cannot be written.
        """
        state = self._ranks.from_first(lambda: self._states.read(STATE, self._key))
        for stage in _stages(self.options):
            if state is not None and stage.name != state["stage"]:
                continue
            self._run_stage(stage, progress, state)
            state = None
        for line in self._ranks.throughput():
            if self._ranks.is_first:
                log.info("match: %s", line)
        return self._result()

    @property
    def _key(self) -> str:
        return msgspec.json.encode(self.options).decode()

    # ---- stages

    def _run_stage(
        self,
        stage: _Stage,
        progress: Callable[[TrainingProgress], None],
        state: dict[str, Any] | None,
    ) -> None:
        options = self.options
        stopping = EarlyStopping(options.patience)
        if state is not None:
            self._best_state = state["best_state"]
        optimizer = self._begin(stage)
        if stage.name == "inter" and options.stop_gradient:
            with torch.no_grad():
                self._source_users = normalize(self.source()[0], dim=-1)
        first = 1 if state is None else self._restore(state, optimizer, stopping)
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        num_edges = len(range(self._ranks.rank, options.batch_edges, self._ranks.size))
        for step in range(first, stage.steps + 1):
            loss = self._ranks.gradients(
                self._loss(stage, step - 1), parameters, num_edges * len(stage.moves)
            )
            if not math.isfinite(loss):
                raise DataError(f"the loss is {loss} in step {step - 1}: try a lower learning_rate")
            optimizer.step()
            if stage.name != "source" and (
                step % options.evaluate_every == 0 or step == stage.steps
            ):
                stopping.is_best(self._validate(stage, step))
            progress(
                TrainingProgress(f"match: {stage.name}", step, stage.steps, loss, self._best[2])
            )
            if stopping.is_over:
                break
            if self._states.is_due():
                self._states.write(STATE, self._key, self._state(stage, step, optimizer, stopping))

    def _state(
        self, stage: _Stage, step: int, optimizer: torch.optim.Adam, stopping: EarlyStopping
    ) -> dict[str, Any]:
        return {
            "stage": stage.name,
            "step": step,
            "weights": self._all.state_dict(),
            "optimizer": optimizer.state_dict(),
            "generator": self._generator.get_state(),
            "source_users": self._source_users,
            "stopping": [stopping.best, stopping.num_worse],
            "best": list(self._best),
            "best_state": self._best_state,
        }

    def _restore(
        self, state: dict[str, Any], optimizer: torch.optim.Adam, stopping: EarlyStopping
    ) -> int:
        """Go on from a state of the stage that has begun; return its next step."""
        self._all.load_state_dict(state["weights"])
        optimizer.load_state_dict(state["optimizer"])
        self._generator.set_state(state["generator"])
        self._source_users = state["source_users"]
        stopping.best, stopping.num_worse = state["stopping"]
        stage, step, hit = state["best"]
        self._best = (stage, step, hit)
        return int(state["step"]) + 1

    def _begin(self, stage: _Stage) -> torch.optim.Adam:
        """Set the random seed and the weights that a stage starts with; return its optimizer."""
        options = self.options
        self._generator.manual_seed(_seed(options.seed, stage.name))
        if stage.name == "target" and options.schedule != "target-only":
            with torch.no_grad():
                vectors = self.source()[0][self._in_source]
                self.target.users[self._in_source] = vectors * (EMBEDDING_STD / vectors.std())
        if stage.name == "inter":
            self._all.load_state_dict(self._best_state)
        ratio = INTER_LEARNING_RATE_RATIO if stage.name == "inter" else 1.0
        encoders: list[GraphEncoder] = [getattr(self, name) for name in stage.moves]
        matrices = [weight for encoder in encoders for weight in encoder.weights]
        if stage.name == "inter":
            matrices += [self._project_users.weight, self._project_items.weight]
        tables = [table for encoder in encoders for table in (encoder.users, encoder.items)]
        groups = [
            {"params": tables, "lr": options.learning_rate * ratio},
            {"params": matrices, "lr": MATRIX_LEARNING_RATE * ratio},
        ]
        return torch.optim.Adam(groups, foreach=True)

    @torch.no_grad()
    def _validate(self, stage: _Stage, step: int) -> float:
        def find() -> float:
            users, items = self.target()
            return smooth_hit(self._evaluator.ranks_by(Validated(users, items, self._prior).scores))

        hit = self._ranks.from_first(find)
        if hit > self._best[2]:
            self._best = (stage.name, step, hit)
            self._best_state = copy.deepcopy(self._all.state_dict())
        return hit

    # ---- losses

    def _loss(self, stage: _Stage, step: int) -> Tensor:
        """Compute this rank's part of the loss of a step; `step` counts from 0."""
        options = self.options
        vectors: dict[str, Encoding] = {name: getattr(self, name)() for name in stage.moves}
        intra = torch.stack([self._intra(name, z) for name, z in vectors.items()]).sum()
        if stage.name != "inter":
            return intra
        source_users = (
            normalize(vectors["source"][0], dim=-1) if "source" in vectors else self._source_users
        )
        assert source_users is not None
        return options.lambda_intra * intra + self._inter(step, source_users, vectors["target"])

    def _intra(self, domain: str, vectors: Encoding) -> Tensor:
        """Compute the loss of a random batch of a domain's edges."""
        edges = self._edges[domain]
        users, items = map(self._ranks.mine, edges.draw(self._generator))
        logits = dots(*vectors, users, items) + edges.log_odds[items]
        return intra_loss(logits, self.options.batch_edges)

    def _inter(self, step: int, source_users: Tensor, target: Encoding) -> Tensor:
        """Sum the inter-domain losses: aligned users, and neighbour similarity.

        The second one needs target edges of users who are in both domains; without any it is 0.
        """
        options = self.options
        done = min(1.0, step / (options.curriculum_validations * options.evaluate_every))
        easiest = share(done) if options.curriculum else 1.0
        size = (options.batch_anchors, options.num_inter_negatives)
        drawn = self._bridge.users(*size, easiest, self._generator)
        users, matches = map(self._ranks.mine, drawn)
        projected = normalize(self._project_users(target[0]), dim=-1)
        hide = matches[:, 1:] == users[:, None]
        logits = dots(projected, source_users, users, matches)
        losses = [inter_loss(logits, hide, options.tau, size[0])]
        if len(self._bridge.edge_users):
            drawn = self._bridge.items(*size, easiest, self._generator)
            users, matches = map(self._ranks.mine, drawn)
            projected = normalize(self._project_items(target[1]), dim=-1)
            hide = matches[:, 1:] == matches[:, :1]
            logits = dots(source_users, projected, users, matches)
            losses.append(inter_loss(logits, hide, options.tau, size[0]))
        return torch.stack(losses).sum()

    # ---- results

    @torch.no_grad()
    def _result(self) -> TrainedVectors:
        self._all.load_state_dict(self._best_state)
        users, items = self.target()
        validated = Validated(users, items, self._prior)
        full = self.data.with_validation().target
        degrees = full.degrees()[1]
        self.target.pass_over(full)
        users, items = self.target()
        folding = self.target.folding(degrees)
        self.target.pass_over(self.data.target)
        is_bridged = self.options.schedule == "separated"
        stage, step, hit = self._best
        return TrainedVectors(
            users=users,
            items=items,
            prior=log_popularity(degrees),
            source_users=None
            if self.options.schedule == "target-only"
            else normalize(self.source()[0], dim=-1),
            bridge_items=normalize(self._project_items(items), dim=-1) if is_bridged else None,
            validation=hit,
            stage=stage,
            step=step,
            folding=folding,
            validated=validated,
        )


def log_odds(graph: Graph, num_negatives: int) -> Tensor:
    """Compute the popularity prior of the intra-domain logits, float32 [num_items].

    This is the best logit without knowledge of the user: log(P(item) / (k Q(item))). P is the
    item's share of the edges (half an edge added), Q its probability to be drawn as a negative (the
    same for all items), k the number of negatives per edge.
    """
    odds = (graph.degrees()[1] + 0.5) / len(graph.users) / (num_negatives / graph.num_items)
    return torch.from_numpy(np.log(odds).astype(np.float32))


class _Edges:
    """Draws edges of a domain uniformly, each with random items as negatives."""

    def __init__(self, graph: Graph, options: MatchOptions) -> None:
        self._options = options
        self._users = torch.from_numpy(graph.users)
        self._items = torch.from_numpy(graph.items)
        self._num_items = graph.num_items
        self.log_odds = log_odds(graph, options.num_negatives)

    def draw(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw a batch: int64 [B] users, and int64 [B, 1 + k] items, the edge's own first."""
        size = (self._options.batch_edges, self._options.num_negatives)
        at = torch.randint(len(self._users), size[:1], generator=generator)
        negatives = torch.randint(self._num_items, size, generator=generator)
        return self._users[at], torch.cat([self._items[at, None], negatives], dim=1)


class _Bridge:
    """Draws the anchors that join the domains, with negatives by difficulty.

    The anchors are the users with source edges (the overlap), and the target edges of those users.
    """

    def __init__(self, data: MatchData, in_source: I64) -> None:
        """Compute the centralities.

        `in_source` are the rows of users with source edges, ascending.
        """
        self._overlap = torch.from_numpy(in_source)
        bridging = np.isin(data.target.users, in_source)
        self.edge_users = torch.from_numpy(data.target.users[bridging])
        self.edge_items = torch.from_numpy(data.target.items[bridging])
        self._items_with_edges = torch.from_numpy(np.flatnonzero(data.target.degrees()[1]))
        users, (_, items) = katz([data.source, data.target])
        self._log_centrality = users.log()
        self._user_negatives = Negatives(users[self._overlap])
        self._item_negatives = Negatives(items[self._items_with_edges])

    def users(
        self, n: int, k: int, easiest: float, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Draw anchors of the aligned-user loss.

        Args:
            n: Number of anchors.
            k: Negatives per anchor.
            easiest: Share of the negatives that may be drawn, in (0, 1].
            generator: Random generator.

        Returns:
            int64 [n] users, and int64 [n, 1 + k] users to match them with, each anchor itself
            first.
        """
        users = self._overlap[torch.randint(len(self._overlap), (n,), generator=generator)]
        others = self._user_negatives.draw(self._log_centrality[users], k, easiest, generator)
        return users, torch.cat([users[:, None], self._overlap[others]], dim=1)

    def items(
        self, n: int, k: int, easiest: float, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Draw anchors of the neighbour-similarity loss.

        Args:
            n: Number of anchors.
            k: Negatives per anchor.
            easiest: Share of the negatives that may be drawn, in (0, 1].
            generator: Random generator.

        Returns:
            int64 [n] users of target edges, and int64 [n, 1 + k] items, each edge's own first.
        """
        at = torch.randint(len(self.edge_users), (n,), generator=generator)
        users = self.edge_users[at]
        others = self._item_negatives.draw(self._log_centrality[users], k, easiest, generator)
        return users, torch.cat([self.edge_items[at, None], self._items_with_edges[others]], dim=1)


def _seed(seed: int, use: str) -> int:
    return xxhash.xxh3_64_intdigest(f"{seed} {use}".encode()) >> 1


def _encoder(name: str, graph: Graph, options: MatchOptions) -> GraphEncoder:
    generator = torch.Generator().manual_seed(_seed(options.seed, f"{name} tables"))
    return GraphEncoder(graph, options.dim, options.num_layers, generator)


def _projector(dim: int) -> nn.Linear:
    """Make the matrix that maps target vectors into the source's space; it starts as identity."""
    matrix = nn.Linear(dim, dim, bias=False)
    nn.init.eye_(matrix.weight)
    return matrix
