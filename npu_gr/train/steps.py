"""The training loop that the trainers share.

AdamW with a learning-rate schedule, gradient clipping, a moving average of the weights, early
stopping, and progress.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Generic, NamedTuple, TypeVar, cast

import msgspec
import numpy as np
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
from npu_gr.train.data import Batch
from npu_gr.train.distributed import Ranks, num_events
from npu_gr.train.options import Decay, Seed, Share
from npu_gr.train.resume import NO_STATES, TrainingStates

log = logging.getLogger(__name__)

LAST_BATCHES = 20  # steps whose mean loss is reported: one batch's loss is too noisy to read
MAX_GRADIENT_NORM = 1.0
MOST_STEPS = 1_000_000_000  # of an epoch: what numbers the steps of all epochs
NEARLY = 0.98  # share of a stage, over which a line says that it ends
WEIGHT_DECAY = 0.1  # weight decay of every matrix but the embedding tables
BETAS = (0.9, 0.98)  # AdamW's betas; the default of the second is 0.999

M = TypeVar("M", bound=nn.Module)


class TrainingProgress(NamedTuple):
    """Progress of a training."""

    # the model and what is done with it: "ranker: train", "ranker: evaluate", "ranker: refit"
    stage: str
    done: float  # epochs, steps or users
    total: float
    loss: float = float("nan")  # of the last batches
    hit: float = -1.0  # best smooth HIT on the validation so far; -1 = none
    num_events: int = 0  # events of all steps of this stage in this process
    hr_at_10: float = float("nan")  # of the last validation


class StepOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options that trainers by epochs share."""

    seed: Annotated[Seed, Meta(description="seed of all random numbers")] = 0
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
        Decay, Meta(description="decay of the moving average of the weights, which is served")
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
    num_epochs: int  # epochs that it was trained for


class EpochTrainer(Generic[M]):
    """Trains a model by AdamW: linear warm-up of the learning rate, then a cosine to 0.

    Keeps a moving average of the weights, which is the result.
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
        states: TrainingStates = NO_STATES,
        terms_of: Callable[[Batch], int] = num_events,
    ) -> None:
        """Make the optimizer; the model is trained in place, by all ranks of `torchrun`.

        Args:
            model: Model to train and average.
            options: Seed, epochs, learning rate and averaging.
            tables: Embedding tables of the model that have `table_weight_decay`. Other matrices
                have `WEIGHT_DECAY`, vectors (biases, norms) have none.
            table_weight_decay: Weight decay of `tables`.
            stage: Name of the training in its progress.
            auxiliary: Parameters that are trained too, but not averaged.
            progress: Callback after every step.
            states: Where the state of this stage is kept; rank 0's counts.
            terms_of: Function batch -> number of terms that its loss is the mean of.
        """
        self._model = model
        self._terms_of = terms_of
        self._ranks = Ranks()
        self._ranks.align(model, auxiliary)
        self._states = states
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
            fused=True,  # a fifth of the time on a CPU, where tables of embeddings are long
        )
        self._averaged = AveragedModel(model, multi_avg_fn=partial(average, options.ema_decay))
        self._recent_losses: list[float] = []
        self._num_events = 0
        self._hr_at_10 = math.nan
        self._random = np.random.default_rng(options.seed)
        self.done_ratio = 0.0  # share of the training before the step that is being taken

    @property
    def averaged(self) -> M:
        """A copy of the model with the moving average of its weights; the next step changes it."""
        return cast(M, self._averaged.module)

    def fit(
        self,
        batches_of_epoch: Callable[[np.random.Generator], Sequence[Batch]],
        loss_of: Callable[[Batch], Tensor],
        *,
        score: Callable[[M], float] | None = None,
        found: list[dict[str, Any]] | None = None,
        patience: int = 0,
        validate_every: int = 1,
        num_epochs: int | None = None,
        gives_up: Callable[[int], bool] = lambda _: False,
    ) -> BestEpoch[M]:
        """Train for all epochs, or until the validation has no better score.

        An interrupted training goes on where its state was kept, with the same bits.

        Args:
            batches_of_epoch: Function that draws the batches of the next epoch.
            loss_of: Function batch -> differentiable scalar loss; draws by torch's global generator
                alone.
            score: Function averaged model -> validation score, 0 .. 1; the epoch with the best
                score is the result. None = the last epoch is.
            found: List to which `score` adds its figures by name, numbers and texts; it is kept
                with the state.
            patience: Validations without a new best score that end the training; 0 = never.
            validate_every: Epochs between two validations; the last epoch is validated too.
            num_epochs: End after so many epochs, on the learning-rate schedule of all
                `options.epochs`. None = all epochs.
            gives_up: Callback after every validation, with the number of epochs done; True ends
                the training.

        Raises:
            DataError: the loss is not finite, or the state cannot be written.
        """
        last = num_epochs or self._options.epochs
        key = f"{msgspec.json.encode(self._options).decode()} {last}"
        run: _Run[M] = _Run(EarlyStopping(patience), [] if found is None else found)
        self._restore(self._ranks.from_first(lambda: self._states.read(self._stage, key)), run)
        while not run.is_over:
            before = json.dumps(self._random.bit_generator.state)

            def keep(num_steps: int, before: str = before) -> None:
                if self._states.is_due():
                    self._states.write(self._stage, key, self._state(run, num_steps, before))

            batches = batches_of_epoch(self._random)
            self._run_epoch(run.num_epochs, batches, run.num_steps, loss_of, keep)
            run.num_epochs, run.num_steps = run.num_epochs + 1, 0
            done = run.num_epochs
            run.is_over = done >= last
            if score is None or (done % validate_every and done < last):
                continue
            found_score = score(self.averaged.eval())
            if run.stopping.is_best(self._ranks.from_first(partial(float, found_score))):
                run.best = BestEpoch(copy.deepcopy(self.averaged), done)
            if run.found:
                self._hr_at_10 = run.found[-1].get("hr_at_10", math.nan)
            ends = run.stopping.is_over or gives_up(done)
            run.is_over |= self._ranks.from_first(partial(bool, ends))
        self._ranks.end(self._options.seed)
        for line in self._ranks.throughput():
            if self._ranks.is_first:
                log.info("%s: %s", self._stage, line)
        best = run.best or BestEpoch(self.averaged, last)
        over = {"is_over": True, "best": best.model.state_dict(), "best_epochs": best.num_epochs}
        self._states.write(self._stage, key, {**over, "found": json.dumps(run.found)})
        return best

    def _state(self, run: _Run[M], num_steps: int, random: str) -> dict[str, Any]:
        best = run.best
        return {
            "is_over": False,
            "parameters": [parameter.detach() for parameter in self._parameters],
            "averaged": self._averaged.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "losses": self._recent_losses,
            "random": random,  # before the batches of this epoch were drawn
            "num_epochs": run.num_epochs,
            "num_steps": num_steps,
            "best": None if best is None else best.model.state_dict(),
            "best_epochs": 0 if best is None else best.num_epochs,
            "stopping": [run.stopping.best, run.stopping.num_worse],
            "found": json.dumps(run.found),
        }

    def _restore(self, state: dict[str, Any] | None, run: _Run[M]) -> None:
        """Go on from a state; None = from the start."""
        if state is None:
            return
        run.found[:] = json.loads(state["found"])
        if state["best"] is not None:
            best = copy.deepcopy(self.averaged)
            best.load_state_dict(state["best"])
            run.best = BestEpoch(best, state["best_epochs"])
        run.is_over = state["is_over"]
        if run.is_over:
            return
        with torch.no_grad():
            for parameter, was in zip(self._parameters, state["parameters"], strict=True):
                parameter.copy_(was)
        self._averaged.load_state_dict(state["averaged"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._recent_losses = state["losses"]
        self._random.bit_generator.state = json.loads(state["random"])
        run.num_epochs, run.num_steps = state["num_epochs"], state["num_steps"]
        run.stopping.best, run.stopping.num_worse = state["stopping"]

    def _run_epoch(
        self,
        epoch: int,
        batches: Sequence[Batch],
        num_done: int,
        loss_of: Callable[[Batch], Tensor],
        keep: Callable[[int], None],
    ) -> None:
        """Take one step per batch.

        Args:
            epoch: Number of the epoch, from 0.
            batches: Batches of this epoch.
            num_done: Batches whose steps were taken before an interruption.
            loss_of: Function batch -> differentiable scalar loss.
            keep: Callback after every step, with the number of steps of this epoch.

        Raises:
            DataError: the loss is not finite.
        """
        options = self._options
        self._model.train()
        for index, batch in enumerate(batches[num_done:], num_done):
            done = epoch + index / len(batches)
            self.done_ratio = done / options.epochs
            for group in self._optimizer.param_groups:
                group["lr"] = options.learning_rate * schedule(
                    self.done_ratio, options.warm_up_ratio
                )
            self._ranks.start_step(options.seed, epoch * MOST_STEPS + index)
            loss = self._ranks.backward(batch, loss_of, self._terms_of, self._parameters)
            nn.utils.clip_grad_norm_(self._parameters, MAX_GRADIENT_NORM)
            self._optimizer.step()
            self._averaged.update_parameters(self._model)
            self._recent_losses = [*self._recent_losses[1 - LAST_BATCHES :], loss]
            if not math.isfinite(loss):
                raise DataError(
                    f"the loss is {loss} in epoch {done:.2f}: try a lower learning_rate"
                )
            mean_loss = sum(self._recent_losses) / len(self._recent_losses)
            keep(index + 1)
            self._num_events += int(batch.valid.sum())
            self._progress(
                TrainingProgress(
                    self._stage,
                    done,
                    options.epochs,
                    mean_loss,
                    num_events=self._num_events,
                    hr_at_10=self._hr_at_10,
                )
            )


@dataclass(slots=True)
class _Run(Generic[M]):
    """How far a training is."""

    stopping: EarlyStopping
    found: list[dict[str, Any]]  # what `score` has found
    num_epochs: int = 0  # that are done
    num_steps: int = 0  # of the next epoch that are done
    best: BestEpoch[M] | None = None
    is_over: bool = False


class EarlyStopping:
    """Ends a training whose score has not risen for `patience` validations; 0 = never."""

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
        averages: Average of each parameter; changed in place.
        now: Current value of each parameter.
        num_averaged: Updates before this one. The first ones use a smaller decay, (1 + n) / (10 +
            n), so that the average forgets the initial weights.
    """
    steps = int(num_averaged)
    torch._foreach_lerp_(averages, now, 1 - min(decay, (1 + steps) / (10 + steps)))


def schedule(progress_ratio: float, warm_up_ratio: float) -> float:
    """Compute the factor of the learning rate, 0 .. 1: a linear rise, then a cosine to 0.

    Args:
        progress_ratio: Share of the training that is done, 0 .. 1.
        warm_up_ratio: Share of the training with a rising rate, 0 .. 1.
    """
    if progress_ratio < warm_up_ratio:
        return progress_ratio / warm_up_ratio
    return (1 + math.cos(math.pi * (progress_ratio - warm_up_ratio) / (1 - warm_up_ratio))) / 2


@contextmanager
def training_progress(console: Console) -> Iterator[Callable[[TrainingProgress], None]]:
    """Show the progress of each stage of a training; yields the callback for it.

    A terminal gets a bar for each stage, a pipe a line every 10 s.
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
            if model in latest:  # a training reports its progress before the last step ends
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
    began: dict[str, tuple[float, float]] = {}  # by stage: when, and what was done before
    lines: dict[str, str] = {}  # by model, of its current stage

    def write(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False, highlight=False)

    with heartbeat(write, "starting the training processes") as progress:

        def show(step: TrainingProgress) -> None:
            at, before = began.setdefault(step.stage, (time.monotonic(), step.done))
            left = time_left(step.done - before, step.total - before, time.monotonic() - at)
            share = step.done / max(step.total, 1e-9)
            line = f"{step.stage} {share:.0%}" + (f" ({left})" if left else "")
            if share > NEARLY:  # its last message; what follows it has no steps to count
                line = f"{step.stage}: finishing"
            lines[step.stage.partition(":")[0]] = line
            progress.status = "; ".join(lines.values())

        yield show
