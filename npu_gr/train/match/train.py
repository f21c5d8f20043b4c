"""Train SCCDR: two graph encoders, first within their domains, then across the domains.

Source: SCCDR (arXiv:2502.16239). The stages and losses are the paper's. Their concrete form, the projectors, the start
of the target's users at their source vectors, and all values are our reading.

The stages of the schedule `separated` (`options.stages`):

    source   trains the source's encoder on the source's edges
    target   trains the target's encoder on the target's edges; users start at their source vectors
    inter    trains with the inter-domain losses too; starts at the best weights so far (smooth HIT on the validation)

Every intra-domain logit has a prior, how popular the item is (`log_odds`): the vectors learn what is left.

Every stage has its own random numbers, so trainings that differ only in a later stage can share an earlier one, bit
for bit.

Deterministic: the same data, options and number of threads give the same bits, even if a training was resumed.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.nn.functional import normalize

from npu_gr.core.arrays import I64
from npu_gr.core.errors import DataError
from npu_gr.matching.fold import Folding
from npu_gr.train.baselines.linear import log_popularity
from npu_gr.train.judge import Graph, smooth_hit
from npu_gr.train.match.domains import MatchData
from npu_gr.train.match.losses import Negatives, dots, inter_loss, intra_loss, share
from npu_gr.train.match.model import EMBEDDING_STD, Encoding, GraphEncoder, Projector, katz
from npu_gr.train.match.options import MatchOptions, TrainingStage, shared_key, stages
from npu_gr.train.steps import EarlyStopping

MATRIX_LEARNING_RATE = 1e-3  # of all weights but the embedding tables
INTER_LEARNING_RATE_RATIO = 0.2  # factor of both rates in the inter-domain stage


class StageProgress(NamedTuple):
    """How far a stage is."""

    stage: str
    done: int  # steps
    total: int
    loss: float  # of the last step
    hit: float  # best smooth HIT on the validation so far; -1 before the first


class Validation(NamedTuple):
    """One validation."""

    stage: str
    step: int
    hit: float  # smooth HIT


class Validated(NamedTuple):
    """Vectors as the validation saw them: without its edges. U = users, I = items of the target, d = dimension."""

    users: Tensor  # float32 [U, d]
    items: Tensor  # float32 [I, d]
    prior: Tensor | None  # float32 [I]

    def scores(self, users: Tensor) -> Tensor:
        """Score all items for some users: int64 [n] rows -> float32 [n, I]."""
        return _with(self.users[users] @ self.items.T, self.prior)


class TrainedVectors(NamedTuple):
    """The result of a training. U = users, I = items of the target, d = dimension.

    The weights have not learnt the validation's edges. The encoder passes messages over them, so the vectors know them.
    """

    users: Tensor  # float32 [U, d] in the target domain
    items: Tensor  # float32 [I, d]
    prior: Tensor | None  # float32 [I] is added to the items' scores; None: popularity is in the vectors
    source_users: Tensor | None  # float32 [U, d] in the source domain; None: the source was not trained
    bridge_items: Tensor | None  # float32 [I, d] of length 1, for source vectors; None: no neighbour loss was trained
    validation: float  # smooth HIT of the best weights
    stage: str  # that the best weights are from
    step: int
    folding: Folding  # computes vectors of users who come later
    validated: Validated

    def scores(self, users: Tensor) -> Tensor:
        """Score all items for some users: int64 [n] rows -> float32 [n, I]."""
        return _with(self.users[users] @ self.items.T, self.prior)


class Trainer:
    """One training, from its options to its result. `state` and `load` carry it over a restart."""

    def __init__(self, data: MatchData, options: MatchOptions) -> None:
        self.data = data
        self.options = options
        self._judge = data.judge()
        self.source = _encoder("source", data.source, None, options)
        self.target = _encoder("target", data.target, self.source.users if options.users == "shared" else None, options)
        self.project_users = Projector(options.dim)
        self.project_items = Projector(options.dim)
        self._edges = {"source": _Edges(data.source, options), "target": _Edges(data.target, options)}
        self._prior = log_popularity(data.target.degrees()[1]) if options.prior else None
        self._in_source = np.flatnonzero(data.source.degrees()[0])
        self._bridge = _Bridge(data, self._in_source)
        self._stages = stages(options)
        self._stage = 0
        self._step = 0
        self._stopping = EarlyStopping(options.patience)  # of the stage
        self._optimizer: torch.optim.Adam | None = None  # of the stage; None: the stage has not begun
        self._generator = torch.Generator()
        self._source_users: Tensor | None = None  # normalised, in a stage that does not train them
        self._best = Validation("", 0, -1.0)  # of all stages
        self._best_state = self._weights()
        self.validations: list[Validation] = []

    def run(
        self,
        progress: Callable[[StageProgress], None] = lambda _: None,
        validated: Callable[[], None] = lambda: None,
        shared: MutableMapping[str, bytes] | None = None,
    ) -> TrainedVectors:
        """Train to the end.

        Args:
            progress: called after every step.
            validated: called after every `evaluate_every` steps, when `state` may be saved.
            shared: states at the end of stages, by `shared_key`: trainings on the same data leave them for each other.

        Raises:
            DataError: the loss is not finite.
        """
        while self._stage < len(self._stages):
            stage = self._stages[self._stage]
            key = None if shared is None else shared_key(self.options, stage)
            if key is not None and shared is not None and key in shared:
                self.load(shared[key])
                continue
            self._run_stage(stage, progress, validated)
            self._stage += 1
            self._step = 0
            self._optimizer = None
            if key is not None and shared is not None:
                shared[key] = self.state()
        return self._result()

    @property
    def place(self) -> str:
        """How far the training is, in words."""
        if self._stage == len(self._stages):
            return "the last step"
        return f"step {self._step} of stage {self._stages[self._stage].name}"

    # ---- stages

    def _run_stage(
        self, stage: TrainingStage, progress: Callable[[StageProgress], None], validated: Callable[[], None]
    ) -> None:
        if self._optimizer is None:
            self._begin(stage)
        optimizer = self._optimizer
        assert optimizer is not None
        if stage.inter and "source" not in stage.moves:
            with torch.no_grad():
                self._source_users = normalize(self.source()[0], dim=-1)
        while self._step < stage.steps and not self._stopping.is_over:
            loss = self._loss(stage)
            if not math.isfinite(loss.item()):
                raise DataError(f"the loss is {loss.item()} in step {self._step}: try a lower learning_rate")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            self._step += 1
            if self._step % self.options.evaluate_every == 0 or self._step == stage.steps:
                if stage.is_validated:
                    self._validate(stage)
                validated()
            progress(StageProgress(stage.name, self._step, stage.steps, loss.item(), self._best.hit))

    def _begin(self, stage: TrainingStage) -> None:
        """Set the random numbers, the weights and the optimizer that a stage starts with."""
        options = self.options
        self._generator.manual_seed(_seed(options.seed, stage.name))
        self._stopping = EarlyStopping(options.patience)
        if stage.name == "target" and options.schedule == "separated" and options.initialise:
            with torch.no_grad():
                vectors = self.source()[0][self._in_source]
                self.target.users[self._in_source] = vectors * (EMBEDDING_STD / vectors.std())
        if stage.name == "inter":
            self._load_weights(self._best_state)
        ratio = INTER_LEARNING_RATE_RATIO if stage.name == "inter" else 1.0
        modules: list[nn.Module] = [getattr(self, name) for name in stage.moves]
        tables = {id(table): table for module in modules for table in (module.users, module.items)}
        if stage.inter:
            modules += [self.project_users, self.project_items]
        others = {id(p): p for module in modules for p in module.parameters() if id(p) not in tables}
        groups = [{"params": list(tables.values()), "lr": options.learning_rate * ratio}]
        if others:
            groups.append({"params": list(others.values()), "lr": MATRIX_LEARNING_RATE * ratio})
        self._optimizer = torch.optim.Adam(groups, foreach=True)

    @torch.no_grad()
    def _validate(self, stage: TrainingStage) -> None:
        users, items = self.target()
        prior = self._prior
        hit = smooth_hit(self._judge.ranks_by(lambda rows: _with(users[rows] @ items.T, prior)))
        validation = Validation(stage.name, self._step, hit)
        self.validations.append(validation)
        self._stopping.is_best(hit)
        if hit > self._best.hit:
            self._best = validation
            self._best_state = self._weights()

    # ---- losses

    def _loss(self, stage: TrainingStage) -> Tensor:
        options = self.options
        vectors: dict[str, Encoding] = {name: getattr(self, name)() for name in stage.moves}
        intra = torch.stack([self._intra(name, z) for name, z in vectors.items()]).sum()
        if not stage.inter:
            return intra
        if "source" in vectors:
            trained_users = normalize(vectors["source"][0], dim=-1)
            source_users = trained_users.detach() if options.stop_gradient else trained_users
        else:
            assert self._source_users is not None
            source_users = self._source_users
        return options.lambda_intra * intra + options.lambda_inter * self._inter(stage, source_users, vectors["target"])

    def _intra(self, domain: str, vectors: Encoding) -> Tensor:
        """Compute the loss of a batch of edges of a domain."""
        edges = self._edges[domain]
        users, items = edges.draw(self._generator)
        logits = dots(*vectors, users, items)
        return intra_loss(logits if edges.log_odds is None else logits + edges.log_odds[items])

    def _inter(self, stage: TrainingStage, source_users: Tensor, target: Encoding) -> Tensor:
        """Sum the inter-domain losses that are switched on."""
        options = self.options
        losses = []
        done = min(1.0, self._step / (options.pacing_looks * options.evaluate_every))
        easiest = share(done) if options.curriculum else 1.0
        size = (options.batch_anchors, options.num_inter_negatives)
        if options.aligned:
            users, matches = self._bridge.users(*size, easiest, self._generator)
            projected = normalize(self.project_users(target[0]), dim=-1)
            hide = matches[:, 1:] == users[:, None]
            losses.append(inter_loss(dots(projected, source_users, users, matches), hide, options.tau))
        if options.neighbour and len(self._bridge.edge_users):
            users, matches = self._bridge.items(*size, easiest, self._generator)
            projected = normalize(self.project_items(target[1]), dim=-1)
            hide = matches[:, 1:] == matches[:, :1]
            losses.append(inter_loss(dots(source_users, projected, users, matches), hide, options.tau))
        return torch.stack(losses).sum()

    # ---- results

    @torch.no_grad()
    def _result(self) -> TrainedVectors:
        self._load_weights(self._best_state)
        users, items = self.target()
        validated = Validated(users, items, self._prior)
        whole = self.data.whole().target
        degrees = whole.degrees()[1]
        self.target.pass_over(whole)
        users, items = self.target()
        folding = self.target.folding(degrees)
        self.target.pass_over(self.data.target)
        names = {name for stage in self._stages for name in stage.moves}
        is_bridged = self._stages[-1].inter and self.options.neighbour
        return TrainedVectors(
            users=users,
            items=items,
            prior=log_popularity(degrees) if self.options.prior else None,
            source_users=normalize(self.source()[0], dim=-1) if "source" in names else None,
            bridge_items=normalize(self.project_items(items), dim=-1) if is_bridged else None,
            validation=self._best.hit,
            stage=self._best.stage,
            step=self._best.step,
            folding=folding,
            validated=validated,
        )

    # ---- state

    def _modules(self) -> dict[str, nn.Module]:
        names = ("source", "target", "project_users", "project_items")
        return {name: getattr(self, name) for name in names}

    def _weights(self) -> dict[str, dict[str, Tensor]]:
        return {
            name: {key: value.detach().clone() for key, value in module.state_dict().items()}
            for name, module in self._modules().items()
        }

    def _load_weights(self, weights: dict[str, dict[str, Tensor]]) -> None:
        for name, module in self._modules().items():
            module.load_state_dict(weights[name])

    def state(self) -> bytes:
        """Serialise everything that the rest of the training depends on."""
        table: dict[str, Any] = {
            "place": [self._stage, self._step, self._stopping.num_worse],
            "hits": [self._stopping.best, self._best.hit],
            "best_at": [self._best.stage, self._best.step],
            "looks": [list(validation) for validation in self.validations],
            "weights": self._weights(),
            "best": self._best_state,
            "generator": self._generator.get_state(),
            "optimizer": self._optimizer.state_dict() if self._optimizer else None,
        }
        file = io.BytesIO()
        torch.save(table, file)
        return file.getvalue()

    def load(self, state: bytes) -> None:
        """Continue where `state` was taken, by a training with the same data and options or an equal `shared_key`."""
        table = torch.load(io.BytesIO(state), weights_only=True)
        self._stage, self._step, num_worse = table["place"]
        stage_best, best_hit = table["hits"]
        stage, step = table["best_at"]
        self._best = Validation(stage, step, best_hit)
        self._best_state = table["best"]
        self.validations = [Validation(*validation) for validation in table["looks"]]
        self._optimizer = None
        if table["optimizer"] is not None:
            # Makes the optimizer of the stage; all else that it starts with is replaced below.
            self._begin(self._stages[self._stage])
            assert self._optimizer is not None
            self._optimizer.load_state_dict(table["optimizer"])
        self._load_weights(table["weights"])
        self._stopping = EarlyStopping(self.options.patience)
        self._stopping.best = stage_best
        self._stopping.num_worse = num_worse
        self._generator.set_state(table["generator"])


def log_odds(graph: Graph, num_negatives: int, negative_power: float) -> Tensor:
    """Compute the best logit of the intra-domain loss that knows no user: log(P(item) / (k Q(item))).

    P is the item's share of the edges, half an edge added; Q is its chance to be drawn as a negative, k negatives an
    edge. The vectors learn what is left.

    Returns:
        float32 [num_items].
    """
    degrees = graph.degrees()[1].astype(np.float64)
    drawn = np.maximum(degrees**negative_power, 1e-9)  # an item that is never drawn needs no logit
    odds = (degrees + 0.5) / len(graph.users) / (num_negatives * drawn / drawn.sum())
    return torch.from_numpy(np.log(odds).astype(np.float32))


class _Edges:
    """Draws edges of a domain evenly, each with random items as negatives."""

    def __init__(self, graph: Graph, options: MatchOptions) -> None:
        self._options = options
        self._users = torch.from_numpy(graph.users)
        self._items = torch.from_numpy(graph.items)
        self._num_items = graph.num_items
        weights = np.cumsum(graph.degrees()[1].astype(np.float64) ** options.negative_power)
        self._cumulative = torch.from_numpy(weights / weights[-1])
        self.log_odds = log_odds(graph, options.num_negatives, options.negative_power) if options.prior else None

    def draw(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw a batch: int64 [B] users, and int64 [B, 1 + k] items, the edge's own first."""
        size = (self._options.batch_edges, self._options.num_negatives)
        at = torch.randint(len(self._users), size[:1], generator=generator)
        if self._options.negative_power:
            negatives = torch.searchsorted(
                self._cumulative, torch.rand(size, generator=generator, dtype=torch.float64)
            ).clamp_(max=self._num_items - 1)
        else:
            negatives = torch.randint(self._num_items, size, generator=generator)
        return self._users[at], torch.cat([self._items[at, None], negatives], dim=1)


class _Bridge:
    """Draws the anchors that join the domains, with negatives by difficulty.

    The anchors are the users with source edges (the overlap), and the target edges of those users.
    """

    def __init__(self, data: MatchData, in_source: I64) -> None:
        """Compute the centralities. `in_source` has the rows of the users with source edges, ascending."""
        self._overlap = torch.from_numpy(in_source)
        bridging = np.isin(data.target.users, in_source)
        self.edge_users = torch.from_numpy(data.target.users[bridging])
        self.edge_items = torch.from_numpy(data.target.items[bridging])
        self._items_with_edges = torch.from_numpy(np.flatnonzero(data.target.degrees()[1]))
        users, (_, items) = katz([data.source, data.target])
        self._log_centrality = users.log()
        self._user_negatives = Negatives(users[self._overlap])
        self._item_negatives = Negatives(items[self._items_with_edges])

    def users(self, n: int, k: int, easiest: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw anchors of the aligned-user loss.

        Args:
            n: anchors.
            k: negatives of each.
            easiest: share of the negatives that may be drawn, in (0, 1].
            generator: draws them.

        Returns:
            int64 [n] users, and int64 [n, 1 + k] users to match them with, each anchor itself first.
        """
        users = self._overlap[torch.randint(len(self._overlap), (n,), generator=generator)]
        others = self._user_negatives.draw(self._log_centrality[users], k, easiest, generator)
        return users, torch.cat([users[:, None], self._overlap[others]], dim=1)

    def items(self, n: int, k: int, easiest: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw anchors of the neighbour-similarity loss.

        Args:
            n: anchors.
            k: negatives of each.
            easiest: share of the negatives that may be drawn, in (0, 1].
            generator: draws them.

        Returns:
            int64 [n] users of target edges, and int64 [n, 1 + k] items, each edge's own first.
        """
        at = torch.randint(len(self.edge_users), (n,), generator=generator)
        users = self.edge_users[at]
        others = self._item_negatives.draw(self._log_centrality[users], k, easiest, generator)
        return users, torch.cat([self.edge_items[at, None], self._items_with_edges[others]], dim=1)


def _with(scores: Tensor, prior: Tensor | None) -> Tensor:
    return scores if prior is None else scores + prior


def _seed(seed: int, use: str) -> int:
    return xxhash.xxh3_64_intdigest(f"{seed} {use}".encode()) >> 1


def _encoder(name: str, graph: Graph, users: nn.Parameter | None, options: MatchOptions) -> GraphEncoder:
    return GraphEncoder(
        graph,
        dim=options.dim,
        num_layers=options.num_layers,
        kind=options.encoder,
        norm=options.norm,
        activation=options.activation,
        users=users,
        generator=torch.Generator().manual_seed(_seed(options.seed, f"{name} tables")),
    )
