"""SASRec, the trained baseline: a causal transformer over the last items of a history.

It predicts every next item by a softmax over the catalogue, or over the true item and a sample of a
large one, which is drawn anew for each step. Training stops early on a validation. It takes about
as long as a ranker, so the trainers run it only if they are asked to (`rank.sasrec`).

Source: Kang and McAuley, ICDM 2018; width, layers, heads, dropout, rate and window are those that
"eSASRec" (arXiv:2508.06450) lists for Amazon Beauty and Sports. Its negatives are each event's own,
ours are shared by a step. docs/measured/quality.md has the figures of both.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from npu_gr.core.arrays import I64
from npu_gr.core.settings import Count, Positive
from npu_gr.train.data import Batch, InteractionLog, NextItem, Split, batches, windows
from npu_gr.train.metrics import F64, ndcg
from npu_gr.train.next_item import rank_next_items, sample_targets
from npu_gr.train.options import DropoutRatio
from npu_gr.train.steps import EarlyStopping, TrainingProgress

INIT_STD = 0.02


class SASRecOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model and its training."""

    dim: Count = 64
    num_layers: Count = 1
    num_heads: Count = 1
    history_items: Count = 50
    dropout: DropoutRatio = 0.2
    learning_rate: Positive = 1e-3
    max_softmax_items: Count = 4000  # largest catalogue with a full softmax
    num_negatives: Count = 1024  # drawn for each step in a larger one, uniformly
    batch_tokens: Count = 4096
    epochs: Count = 100
    validate_every: Count = 3
    validation_users: Count = 1000
    patience: Count = 5  # training ends after so many validations without an improvement


class SASRec:
    """Ranks items by a transformer's inner products. Validation events are never trained on."""

    name = "SASRec"

    def __init__(
        self,
        log: InteractionLog,
        split: Split,
        seed: int,
        options: SASRecOptions | None = None,
        progress: Callable[[TrainingProgress], None] = lambda _: None,
    ) -> None:
        """Train.

        Args:
            log: Log, of which the trained events are used.
            split: Split of the log, which is applied to the trained events again.
            seed: Random seed.
            options: Options of the model; None = the defaults.
            progress: Callback after every epoch.

        Raises:
            DataError: There are no events to validate on.
        """
        self._options = options or SASRecOptions()
        self._progress = progress
        self.num_epochs = 0  # epochs that it was trained for, with the weights of the best one
        began_at = time.monotonic()
        earlier = log.only_trained(split)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self._model = _Transformer(log.num_items, self._options)
            self._train(earlier, seed)
        self.took_s = time.monotonic() - began_at

    @property
    def words(self) -> str:
        """Say what was trained, and how long it took."""
        sampled = len(self._model.items.weight) > self._options.max_softmax_items
        return (
            f"SASRec with a {'sampled' if sampled else 'full'} softmax was trained as a baseline: "
            f"{self.num_epochs} epochs, {self.took_s:.0f} s"
        )

    def liking(self, log: InteractionLog) -> F64 | None:
        return None

    @torch.no_grad()
    def next_items(self, log: InteractionLog, user: int) -> F64:
        start = int(log.starts[user])
        return self._scores(log.items[start : start + int(log.num_trained[user])])

    def _scores(self, items: I64) -> F64:
        newest = torch.from_numpy(items[-self._options.history_items :])[None]
        scores: F64 = self._model.logits(self._model(newest)[:, -1])[0].double().numpy()
        return scores

    def _train(self, log: InteractionLog, seed: int) -> None:
        options = self._options
        random = np.random.default_rng(seed)
        targets = sample_targets(log.next_items(), options.validation_users, seed)
        optimizer = torch.optim.Adam(
            self._model.parameters(), lr=options.learning_rate, betas=(0.9, 0.98)
        )
        stopping = EarlyStopping(options.patience)
        best = self._model.state_dict()
        for epoch in range(1, options.epochs + 1):
            self._model.train()
            cut = windows(log, options.history_items + 1, random)
            for batch in batches(log, cut, options.batch_tokens, random):
                if batch.items.shape[1] > 1:
                    optimizer.zero_grad()
                    self._loss(batch).backward()
                    optimizer.step()
            self.num_epochs = epoch
            self._progress(TrainingProgress("ranker: SASRec", epoch, options.epochs))
            if epoch % options.validate_every == 0 or epoch == options.epochs:
                if stopping.is_best(self._validate(log, targets)):
                    best = {
                        name: tensor.clone() for name, tensor in self._model.state_dict().items()
                    }
                if stopping.is_over:
                    break
        self._model.load_state_dict(best)
        self._model.eval()

    def _loss(self, batch: Batch) -> Tensor:
        counts = batch.valid[:, 1:]
        rows = self._model(batch.items[:, :-1])[counts]
        following = batch.items[:, 1:][counts]
        if len(self._model.items.weight) <= self._options.max_softmax_items:
            return cross_entropy(self._model.logits(rows), following)
        return sampled_loss(rows, self._model.items.weight, following, self._options.num_negatives)

    @torch.no_grad()
    def _validate(self, log: InteractionLog, targets: Sequence[NextItem]) -> float:
        self._model.eval()

        def scores() -> Iterator[F64]:
            for user, event in targets:
                yield self._scores(log.items[log.starts[user] : event])

        return ndcg(rank_next_items(log, targets, scores()).evaluated, 10)


def sampled_loss(rows: Tensor, table: Tensor, following: Tensor, num_negatives: int) -> Tensor:
    """Compute the mean cross-entropy of the true items among a uniform sample of the others.

    A sampled item stands for `num_items / num_negatives` items, so the expected sum of exponentials
    is that of the full softmax.

    Args:
        rows: float32 [n, d] encoded histories.
        table: float32 [num_items, d] items.
        following: int64 [n] true items.
        num_negatives: Items to draw, with repetition.
    """
    drawn = torch.randint(len(table), (num_negatives,))
    others = rows @ table[drawn].T + math.log(len(table) / num_negatives)
    others = others.masked_fill(drawn == following[:, None], -math.inf)
    own = (rows * table[following]).sum(1, keepdim=True)
    logits = torch.cat([own, others], 1)
    return (logits.logsumexp(1) - own[:, 0]).mean()


class _Transformer(nn.Module):
    def __init__(self, num_items: int, options: SASRecOptions) -> None:
        super().__init__()
        self.items = nn.Embedding(num_items, options.dim)
        self.places = nn.Embedding(options.history_items, options.dim)
        self.dropout = nn.Dropout(options.dropout)
        layer = nn.TransformerEncoderLayer(
            options.dim,
            options.num_heads,
            options.dim * 4,
            options.dropout,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(
            layer, options.num_layers, nn.LayerNorm(options.dim), enable_nested_tensor=False
        )
        for table in (self.items, self.places):
            nn.init.normal_(table.weight, std=INIT_STD)

    def forward(self, items: Tensor) -> Tensor:
        """Encode int64 [B, N] items, oldest first and padded at the end, to float32 [B, N, d]."""
        length = items.shape[1]
        rows = self.dropout(
            self.items(items) * self.items.embedding_dim**0.5 + self.places.weight[:length]
        )
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        encoded: Tensor = self.layers(rows, mask, is_causal=True)
        return encoded

    def logits(self, rows: Tensor) -> Tensor:
        """Score every item: [n, d] -> [n, num_items]."""
        return rows @ self.items.weight.T
