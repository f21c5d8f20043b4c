"""The optimizer's steps that the trainers share: schedule, clipping, moving average, early stopping, progress."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Generic, NamedTuple, TypeVar, cast

import msgspec
import torch
from msgspec import Meta
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from npu_gr.core.errors import DataError
from npu_gr.core.progress import heartbeat, time_left
from npu_gr.core.settings import Count, Positive
from npu_gr.train.options import Decay, Seed, Share

LAST_BATCHES = 20  # steps whose mean loss is reported: one batch's loss is too noisy to read
MAX_GRADIENT_NORM = 1.0
WEIGHT_DECAY = 0.1  # AdamW's, of every matrix but the embedding tables
BETAS = (0.9, 0.98)  # of AdamW; the second one is lower than its default, 0.999

B = TypeVar("B")  # a batch, as `loss_of` takes it
M = TypeVar("M", bound=nn.Module)


class TrainingProgress(NamedTuple):
    """How far a training is."""

    # the model and what is done with it: "ranker: train", "ranker: evaluate", "ranker: refit"
    stage: str
    done: float  # epochs, steps or users
    total: float
    loss: float = float("nan")  # of the last batches
    hit: float = -1.0  # best smooth HIT on the validation so far; -1 = none


class StepOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options that trainers by epochs share."""

    seed: Annotated[Seed, Meta(description="of everything that is drawn")] = 0
    epochs: Annotated[
        Count,
        Meta(description="most passes over the log; the learning rate falls over all of them"),
    ] = 16
    learning_rate: Annotated[
        Positive, Meta(description="highest rate, at the end of the warm-up")
    ] = 3e-3
    warm_up_ratio: Annotated[
        Share, Meta(description="share of the steps with a rising learning rate")
    ] = 0.05
    ema_decay: Annotated[
        Decay, Meta(description="of the moving average of the weights, which is served")
    ] = 0.995
    refit: Annotated[
        bool,
        Meta(
            description="after the evaluation, train the served model anew on all events, "
            "the newest included"
        ),
    ] = True


class BestEpoch(NamedTuple, Generic[M]):
    """The result of a training."""

    model: M  # with the moving average of the weights
    num_epochs: int  # that it was trained for


class EpochTrainer(Generic[M]):
    """Trains a model by AdamW: linear warm-up, then a cosine down to nothing.

    Keeps a moving average of the weights.
    """

    def __init__(
        self,
        model: M,
        options: StepOptions,
        *,
        tables: Sequence[Tensor],
        table_weight_decay: float,
        stage: str,
        auxiliary: Sequence[nn.Parameter] = (),
        progress: Callable[[TrainingProgress], None] = lambda _: None,
    ) -> None:
        """Make the optimizer; the model is trained in place.

        Args:
            model: what is trained and averaged.
            options: of the steps.
            tables: the model's embedding tables that have a weight decay of their own.
            table_weight_decay: of `tables`. Vectors (biases, norms) have none.
            stage: names the training in its progress.
            auxiliary: parameters that are trained along and not averaged.
            progress: called after every step.
        """
        self._model = model
        self._options = options
        self._stage = stage
        self._progress = progress
        self._parameters = [*model.parameters(), *auxiliary]
        matrices = [
            p for p in self._parameters if p.ndim > 1 and all(p is not table for table in tables)
        ]
        vectors = [p for p in self._parameters if p.ndim < 2]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [*tables], "weight_decay": table_weight_decay},
                {"params": matrices, "weight_decay": WEIGHT_DECAY},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=options.learning_rate,
            betas=BETAS,
        )
        self._averaged = AveragedModel(model, multi_avg_fn=partial(average, options.ema_decay))
        self._recent_losses: list[float] = []
        self.done_ratio = 0.0  # share of the training before the step that is being taken

    @property
    def averaged(self) -> M:
        """A copy of the model with the moving average of its weights; the next step changes it."""
        return cast(M, self._averaged.module)

    def fit(
        self,
        batches_of_epoch: Callable[[], Sequence[B]],
        loss_of: Callable[[B], Tensor],
        *,
        score: Callable[[M], float] | None = None,
        patience: int = 0,
        validate_every: int = 1,
        num_epochs: int | None = None,
        gives_up: Callable[[int], bool] = lambda _: False,
    ) -> BestEpoch[M]:
        """Train for all epochs, or until the validation has no better score.

        Args:
            batches_of_epoch: draws the batches of the next epoch.
            loss_of: differentiable loss of a batch, a scalar.
            score: of the averaged model on the validation, 0 .. 1; the epoch with the best one is
                the result. None = the last epoch is.
            patience: validations without a best score that end the training; 0 = none do.
            validate_every: epochs between two validations; the last epoch has one, too.
            num_epochs: end after so many; the learning rate falls as if there were all. None = all.
            gives_up: asked after every validation, with the number of epochs; True ends the
                training.

        Raises:
            DataError: the loss is not finite.
        """
        stopping = EarlyStopping(patience)
        last = num_epochs or self._options.epochs
        best = None
        for done in range(1, last + 1):
            self.run_epoch(done - 1, batches_of_epoch(), loss_of)
            if score is None or (done % validate_every and done < last):
                continue
            if stopping.is_best(score(self.averaged.eval())):
                best = BestEpoch(copy.deepcopy(self.averaged), done)
            if stopping.is_over or gives_up(done):
                break
        return best or BestEpoch(self.averaged, last)

    def run_epoch(self, epoch: int, batches: Sequence[B], loss_of: Callable[[B], Tensor]) -> None:
        """Take one step a batch.

        Args:
            epoch: from 0.
            batches: of this epoch.
            loss_of: differentiable loss of a batch, a scalar.

        Raises:
            DataError: the loss is not finite.
        """
        options = self._options
        self._model.train()
        for index, batch in enumerate(batches):
            done = epoch + index / len(batches)
            self.done_ratio = done / options.epochs
            for group in self._optimizer.param_groups:
                group["lr"] = options.learning_rate * schedule(
                    self.done_ratio, options.warm_up_ratio
                )
            loss = loss_of(batch)
            self._optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self._parameters, MAX_GRADIENT_NORM)
            self._optimizer.step()
            self._averaged.update_parameters(self._model)
            self._recent_losses = [*self._recent_losses[1 - LAST_BATCHES :], loss.item()]
            if not math.isfinite(loss.item()):
                raise DataError(
                    f"the loss is {loss.item()} in epoch {done:.2f}: try a lower learning_rate"
                )
            mean_loss = sum(self._recent_losses) / len(self._recent_losses)
            self._progress(TrainingProgress(self._stage, done, options.epochs, mean_loss))


class EarlyStopping:
    """Ends a training when its validation score has not risen for `patience` validations.

    Patience 0 never does.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self.best = -1.0  # below every score, which are ratios
        self.num_worse = 0  # validations since the best one

    def is_best(self, score: float) -> bool:
        """Record a validation; True if its score (0 .. 1) is higher than all before."""
        if score > self.best:
            self.best = score
            self.num_worse = 0
            return True
        self.num_worse += 1
        return False

    @property
    def is_over(self) -> bool:
        """Whether the training should end."""
        return bool(self._patience) and self.num_worse >= self._patience


@torch.no_grad()
def average(
    decay: float, averages: list[Tensor], now: list[Tensor], num_averaged: Tensor | int
) -> None:
    """Move averages towards the current weights, in place.

    Args:
        decay: share of the old average that stays; 0 = the average is the current weights.
        averages: of each parameter; changed in place.
        now: the current weights.
        num_averaged: updates before this one. The first ones use a smaller decay, (1 + n) / (10 +
            n), so that the average forgets the initial weights.
    """
    steps = int(num_averaged)
    torch._foreach_lerp_(averages, now, 1 - min(decay, (1 + steps) / (10 + steps)))


def schedule(progress_ratio: float, warm_up_ratio: float) -> float:
    """Compute the share of the learning rate at a point of the training: a linear rise, then a cosine to nothing.

    Args:
        progress_ratio: done share of the training, 0 .. 1.
        warm_up_ratio: share of the training with a rising rate, 0 .. 1.
    """
    if progress_ratio < warm_up_ratio:
        return progress_ratio / warm_up_ratio
    return (1 + math.cos(math.pi * (progress_ratio - warm_up_ratio) / (1 - warm_up_ratio))) / 2


@contextmanager
def training_progress(console: Console) -> Iterator[Callable[[TrainingProgress], None]]:
    """Show how far each stage of a training is; yields what to call with its progress.

    A terminal gets a bar for each stage, a pipe a line every 20 s.
    """
    if not console.is_terminal:
        with _lines_of_progress(console) as show:
            yield show
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, TextColumn("{task.fields[loss]}"), console=console) as bar:
        tasks: dict[str, TaskID] = {}
        latest: dict[str, TrainingProgress] = {}  # by model

        def end(model: str) -> None:
            if model in latest:  # its last step was one short of the end
                bar.update(tasks[latest[model].stage], completed=latest[model].total)

        def show(step: TrainingProgress) -> None:
            model = step.stage.partition(":")[0]
            if step.stage not in tasks:
                end(model)
                tasks[step.stage] = bar.add_task(step.stage, total=step.total, loss="")
            latest[model] = step
            loss = "" if step.loss != step.loss else f"loss {step.loss:.4f}"
            if step.hit >= 0:
                loss += f", best smooth HIT {step.hit:.4f}"
            bar.update(tasks[step.stage], completed=step.done, loss=loss)

        yield show
        for model in latest:
            end(model)


@contextmanager
def _lines_of_progress(console: Console) -> Iterator[Callable[[TrainingProgress], None]]:
    """Print a line for all models that are being trained, at a fixed interval."""
    began_at: dict[str, float] = {}  # by stage
    lines: dict[str, str] = {}  # by model, of its current stage

    def write(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False, highlight=False)

    with heartbeat(write, "starting the training processes") as progress:

        def show(step: TrainingProgress) -> None:
            elapsed_s = time.monotonic() - began_at.setdefault(step.stage, time.monotonic())
            left = time_left(step.done, step.total, elapsed_s)
            line = f"{step.stage} {step.done / max(step.total, 1e-9):.0%}"
            lines[step.stage.partition(":")[0]] = f"{line} ({left})" if left else line
            progress.status = "; ".join(lines.values())

        yield show
