"""Train SCCDR: two encoders, an intra-domain stage and an inter-domain stage.

Source: SCCDR (arXiv:2502.16239). Its stages and losses are the paper's; their concrete form, the projectors, the
initialising of the target's users and all values are our reading.

A stage starts at the best weights of the stages before it (by HIT@50 on the validation part) and has its own random
numbers, so that trainings that differ only in a later stage can share an earlier one, bit for bit.

Deterministic: the same data, options and number of threads give the same bits, also where a training was resumed.
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

from npu_gr.core.errors import DataError
from npu_gr.matching.fold import Folding
from npu_gr.train.match.curriculum import Negatives, share
from npu_gr.train.match.domains import MatchData
from npu_gr.train.match.evaluate import Judge, hit_ratio
from npu_gr.train.match.graph import Graph, katz
from npu_gr.train.match.losses import dots, inter_loss, intra_loss
from npu_gr.train.match.model import EMBEDDING_STD, Encoder, Encoding, Projector
from npu_gr.train.match.options import MatchOptions, Stage, shared_key, stages

STOP_AT = 50  # HIT@50 on the validation part decides which weights are kept


class Progress(NamedTuple):
    """How far a stage is."""

    stage: str
    done: int  # steps
    total: int
    loss: float  # of the last step
    hit: float  # best HIT@50 on the validation part so far


class Result(NamedTuple):
    """What a training made."""

    users: Tensor  # float32 [U, d] of the target
    items: Tensor  # float32 [I, d] of the target
    source_users: Tensor | None  # float32 [U, d]; None: the source was not trained
    bridge_items: Tensor | None  # float32 [I, d], of length 1: what source vectors are scored against
    validation_hit: float | None  # None: nothing was trained
    stage: str  # the best weights are from here
    step: int
    folding: Folding | None = None  # for users who come later; None: there is no encoder


class Trainer:
    """One training, from its options to its result. `state` and `load` carry it over a restart."""

    def __init__(self, data: MatchData, options: MatchOptions) -> None:
        self.data, self.options = data, options
        self._judge = Judge.make(data.validation, data.target)
        self.source = self._encoder("source", data.source, None)
        self.target = self._encoder("target", data.target, self.source.users if options.users == "shared" else None)
        self.project_users = Projector(options.dim, options.projector)
        self.project_items = Projector(options.dim, options.projector)
        self._edges = {"source": _Edges(data.source, options), "target": _Edges(data.target, options)}
        self._in_source = np.flatnonzero(data.source.degrees()[0])
        self._bridge = _Bridge(data, self._in_source)
        self._stages = stages(options)
        self._stage, self._step, self._stale, self._stage_best = 0, 0, 0, -1.0
        self._optimizer: torch.optim.Adam | None = None
        self._generator = torch.Generator()
        self._source_users: Tensor | None = None  # in a stage that does not move them
        self._best, self._best_at, self._best_state = -1.0, ("", 0), self._weights()
        self.looks: list[tuple[str, int, float]] = []  # stage, step, HIT@50 on the validation part

    def run(
        self,
        progress: Callable[[Progress], None] = lambda _: None,
        looked: Callable[[], None] = lambda: None,
        shared: MutableMapping[str, bytes] | None = None,
    ) -> Result:
        """Train to the end.

        Args:
            progress: called after every step.
            looked: called after every look at the validation part; a moment at which `state` may be saved.
            shared: where trainings of the same data leave finished stages for each other.

        Raises:
            DataError: the loss is not finite.
        """
        while self._stage < len(self._stages):
            stage = self._stages[self._stage]
            key = None if shared is None else shared_key(self.options, stage)
            if key is not None and shared is not None and key in shared:
                self.load(shared[key])
                continue
            self._run_stage(stage, progress, looked)
            self._stage, self._step, self._optimizer = self._stage + 1, 0, None
            if key is not None and shared is not None:
                shared[key] = self.state()
        return self._result()

    @property
    def place(self) -> str:
        """How far it is, in words."""
        if self._stage == len(self._stages):
            return "the last step"
        return f"step {self._step} of stage {self._stages[self._stage].name}"

    # ---- stages

    def _run_stage(self, stage: Stage, progress: Callable[[Progress], None], looked: Callable[[], None]) -> None:
        options = self.options
        if self._optimizer is None:
            self._begin(stage)
        optimizer = self._optimizer
        assert optimizer is not None
        if stage.inter and "source" not in stage.moves:
            with torch.no_grad():
                self._source_users = normalize(self.source()[0], dim=-1)
        while self._step < stage.steps and not (options.patience and self._stale >= options.patience):
            loss = self._loss(stage)
            if not math.isfinite(loss.item()):
                raise DataError(f"the loss is {loss.item()} in step {self._step}: try a lower learning_rate")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            self._step += 1
            if self._step % options.evaluate_every == 0 or self._step == stage.steps:
                if stage.judged:
                    self._look(stage)
                looked()
            progress(Progress(stage.name, self._step, stage.steps, loss.item(), self._best))

    def _begin(self, stage: Stage) -> None:
        """The state that a stage starts in."""
        options = self.options
        self._generator.manual_seed(_seed(options.seed, stage.name))
        self._stale, self._stage_best = 0, -1.0
        if stage.name == "target" and options.schedule == "separated" and options.initialise:
            with torch.no_grad():
                vectors = self.source()[0][self._in_source]
                self.target.users[self._in_source] = vectors * (EMBEDDING_STD / vectors.std())
        if stage.name == "inter":
            self._load_weights(self._best_state)
        ratio = options.inter_learning_rate_ratio if stage.name == "inter" else 1.0
        modules: list[nn.Module] = [getattr(self, name) for name in stage.moves]
        tables = {id(table): table for module in modules for table in (module.users, module.items)}
        if stage.inter:
            modules += [self.project_users, self.project_items]
        others = {id(p): p for module in modules for p in module.parameters() if id(p) not in tables}
        groups = [{"params": list(tables.values()), "lr": options.learning_rate * ratio}]
        if others:
            groups.append({"params": list(others.values()), "lr": options.matrix_learning_rate * ratio})
        self._optimizer = torch.optim.Adam(groups, foreach=True)

    @torch.no_grad()
    def _look(self, stage: Stage) -> None:
        hit = hit_ratio(self._judge.ranks(*self.target()), STOP_AT)
        self.looks.append((stage.name, self._step, hit))
        self._stale = 0 if hit > self._stage_best else self._stale + 1
        self._stage_best = max(self._stage_best, hit)
        if hit > self._best:
            self._best, self._best_at, self._best_state = hit, (stage.name, self._step), self._weights()

    # ---- losses

    def _loss(self, stage: Stage) -> Tensor:
        options = self.options
        vectors: dict[str, Encoding] = {name: getattr(self, name)() for name in stage.moves}
        intra = torch.stack(
            [intra_loss(dots(*z, *self._edges[name].draw(self._generator))) for name, z in vectors.items()]
        ).sum()
        if not stage.inter:
            return intra
        if "source" in vectors:
            moving = normalize(vectors["source"][0], dim=-1)
            source_users = moving.detach() if options.stop_gradient else moving
        else:
            assert self._source_users is not None
            source_users = self._source_users
        return options.lambda_intra * intra + options.lambda_inter * self._inter(stage, source_users, vectors["target"])

    def _inter(self, stage: Stage, source_users: Tensor, target: Encoding) -> Tensor:
        options, losses = self.options, []
        done = self._step / stage.steps
        easiest = share(done, options.start_share, options.pacing_power) if options.curriculum else 1.0
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
    def _result(self) -> Result:
        self._load_weights(self._best_state)
        users, items = self.target()
        names = {name for stage in self._stages for name in stage.moves}
        is_bridged = self._stages[-1].inter and self.options.neighbour
        return Result(
            users=users,
            items=items,
            source_users=normalize(self.source()[0], dim=-1) if "source" in names else None,
            bridge_items=normalize(self.project_items(items), dim=-1) if is_bridged else None,
            validation_hit=self._best,
            stage=self._best_at[0],
            step=self._best_at[1],
            folding=self.target.folding(self.data.target.degrees()[1]),
        )

    def _encoder(self, name: str, graph: Graph, users: nn.Parameter | None) -> Encoder:
        o = self.options
        generator = torch.Generator().manual_seed(_seed(o.seed, f"{name} tables"))
        return Encoder(graph, o.dim, o.num_layers, o.encoder, o.norm, o.activation, users, generator)

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
        """Everything that the rest of the training depends on."""
        table: dict[str, Any] = {
            "place": [self._stage, self._step, self._stale],
            "hits": [self._stage_best, self._best],
            "best_at": list(self._best_at),
            "looks": [list(look) for look in self.looks],
            "weights": self._weights(),
            "best": self._best_state,
            "generator": self._generator.get_state(),
            "optimizer": self._optimizer.state_dict() if self._optimizer else None,
        }
        file = io.BytesIO()
        torch.save(table, file)
        return file.getvalue()

    def load(self, state: bytes) -> None:
        """Go on where `state` was taken: by a training of the same data and options, or up to a stage they share."""
        table = torch.load(io.BytesIO(state), weights_only=True)
        self._stage, self._step, self._stale = table["place"]
        self._stage_best, self._best = table["hits"]
        self._best_at, self._best_state = tuple(table["best_at"]), table["best"]
        self.looks = [tuple(look) for look in table["looks"]]
        self._load_weights(table["weights"])
        self._optimizer = None
        if table["optimizer"] is not None:
            self._begin(self._stages[self._stage])
            assert self._optimizer is not None
            self._optimizer.load_state_dict(table["optimizer"])
            self._load_weights(table["weights"])
            self._stage_best, self._best = table["hits"]
            self._stale = table["place"][2]
        self._generator.set_state(table["generator"])


class _Edges:
    """A domain's edges drawn evenly, each with random items."""

    def __init__(self, graph: Graph, options: MatchOptions) -> None:
        self._options = options
        self._users, self._items = torch.from_numpy(graph.users), torch.from_numpy(graph.items)
        self._num_items = graph.num_items
        weights = np.cumsum(graph.degrees()[1].astype(np.float64) ** options.negative_power)
        self._cumulative = torch.from_numpy(weights / weights[-1])

    def draw(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """int64 [B] users; int64 [B, 1 + k] items, the edge's own first."""
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
    """What joins the domains: users with source edges, and their target edges; with negatives by difficulty."""

    def __init__(self, data: MatchData, in_source: np.ndarray[Any, Any]) -> None:
        self._overlap = torch.from_numpy(in_source)
        bridging = np.isin(data.target.users, in_source)
        self.edge_users = torch.from_numpy(data.target.users[bridging])
        self.edge_items = torch.from_numpy(data.target.items[bridging])
        self._sold = torch.from_numpy(np.flatnonzero(data.target.degrees()[1]))
        users, (_, items) = katz([data.source, data.target])
        self._log_centrality = users.log()
        self._user_negatives = Negatives(users[self._overlap])
        self._item_negatives = Negatives(items[self._sold])

    def users(self, n: int, k: int, easiest: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """int64 [n] users, and [n, 1 + k] themselves and others."""
        users = self._overlap[torch.randint(len(self._overlap), (n,), generator=generator)]
        others = self._user_negatives.draw(self._log_centrality[users], k, easiest, generator)
        return users, torch.cat([users[:, None], self._overlap[others]], dim=1)

    def items(self, n: int, k: int, easiest: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """int64 [n] users of target edges, and [n, 1 + k] the edges' items and others."""
        at = torch.randint(len(self.edge_users), (n,), generator=generator)
        users = self.edge_users[at]
        others = self._item_negatives.draw(self._log_centrality[users], k, easiest, generator)
        return users, torch.cat([self.edge_items[at, None], self._sold[others]], dim=1)


def _seed(seed: int, use: str) -> int:
    return xxhash.xxh3_64_intdigest(f"{seed} {use}".encode()) >> 1
