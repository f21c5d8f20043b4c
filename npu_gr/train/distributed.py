"""Data parallel training on torch.distributed, started by `torchrun`.

    torchrun --nproc-per-node 2 -m npu_gr train rank DATA --out FOLDER     # or generate, or match

Every rank draws the same batches, takes its rows of each one, and adds its gradient to those of the
others, weighted by what its rows count for. So a step is that of one process with the whole batch,
but for the random draws of the losses (dropout, negatives), which each rank makes for its own rows.

Tables of items are replicated, and their gradients are summed as they are, dense. One buffer holds
all gradients, so a step has one all-reduce.

Without `torchrun` there is one rank and nothing here changes a bit.

Invariants:
    All ranks have the same weights before and after every step.
    Decisions (the score of a validation, whether to end, which state to go on from) are rank 0's.
    A step's random draws depend on the seed, the step and the rank alone, so an interrupted
    training goes on with the same bits without a state of each rank.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from npu_gr.core.errors import ConfigError, DataError
from npu_gr.train.data import Batch

T = TypeVar("T")


def num_launched() -> int:
    """Return the number of processes that `torchrun` started; 1 = it did not start this one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def reject_ranks(command: str) -> None:
    """Raise a ConfigError if `torchrun` started more than one process of a command for one."""
    if num_launched() > 1:
        raise ConfigError(
            f"torchrun: {command} runs in one process, not in {num_launched()}; "
            "`train rank`, `train generate` and `train match` share their batches among ranks"
        )


@contextmanager
def joined() -> Iterator[Ranks]:
    """Join the other processes of `torchrun` or Ray Train; without them, yield the only rank."""
    if dist.is_available() and dist.is_initialized():  # Ray Train has joined them, and ends it
        yield Ranks()
        dist.barrier()
        return
    if num_launched() == 1:
        yield Ranks()
        return
    # tensors are on the host: gloo. A trainer on a device would name it here
    dist.init_process_group(dist.get_default_backend_for_device("cpu"))
    try:
        yield Ranks()
        dist.barrier()  # a rank that ends early would take its connections from the others
    finally:
        dist.destroy_process_group()


class Ranks:
    """The ranks that train one model: those of the default process group, or this process alone."""

    def __init__(self) -> None:
        is_joined = dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size() if is_joined else 1
        self.rank = dist.get_rank() if is_joined else 0
        self._num_terms = 0
        self._began_at = time.monotonic()
        self._buffer = torch.empty(0)

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and prints."""
        return self.rank == 0

    def from_first(self, make: Callable[[], T]) -> T:
        """Return what `make` returns on rank 0, on every rank; the others do not call it."""
        if self.size == 1:
            return make()
        found = [make() if self.is_first else None]
        dist.broadcast_object_list(found)
        return found[0]  # type: ignore[return-value]  # rank 0 has put it there

    def align(self, model: nn.Module, auxiliary: Sequence[Tensor]) -> None:
        """Copy rank 0's weights and buffers to every rank.

        Raises:
            DataError: the ranks have models of different sizes, so they read different logs.
        """
        if self.size == 1:
            return
        own = [*model.parameters(), *model.buffers(), *auxiliary]
        sizes = [None] * self.size
        dist.all_gather_object(sizes, [tuple(one.shape) for one in own])
        if any(found != sizes[0] for found in sizes):
            raise DataError("the ranks have models of different shapes: do all read the same log?")
        for one in own:
            dist.broadcast(one.detach(), 0)

    def start_step(self, seed: int, step: int) -> None:
        """Seed the random draws of this rank's part of a step."""
        if self.size > 1:
            torch.manual_seed(((seed * 1_000_003 + step) * self.size + self.rank) % 2**63)

    def end(self, seed: int) -> None:
        """Give all ranks one random state again, after the last step."""
        if self.size > 1:
            torch.manual_seed(seed)

    def backward(
        self,
        batch: Batch,
        loss_of: Callable[[Batch], Tensor],
        terms_of: Callable[[Batch], int],
        parameters: Sequence[Tensor],
    ) -> float:
        """Compute the gradients of a batch, in place of earlier ones.

        Args:
            batch: The whole batch, the same on all ranks.
            loss_of: Function batch -> differentiable mean over its terms.
            terms_of: Function batch -> number of terms of this mean.
            parameters: Parameters whose gradients are set, the same on all ranks afterwards.

        Returns:
            The loss of the whole batch.
        """
        if self.size == 1:
            return self.gradients(loss_of(batch), parameters)
        part = rows_of(batch, self.rank, self.size)
        num_terms = terms_of(part) if len(part.items) else 0
        share = num_terms / max(1, terms_of(batch))
        loss = loss_of(part) * share if num_terms else torch.zeros(())
        return self.gradients(loss, parameters, num_terms)

    def mine(self, whole: Tensor) -> Tensor:
        """Take this rank's rows of a tensor: every `size`-th."""
        return whole[self.rank :: self.size]

    def gradients(self, loss: Tensor, parameters: Sequence[Tensor], num_terms: int = 0) -> float:
        """Compute the gradients of a loss that is the sum of all ranks' parts.

        Args:
            loss: This rank's part, a scalar; without a gradient = this rank has none.
            parameters: Parameters whose gradients are set, the same on all ranks afterwards.
            num_terms: Terms of the loss in this part, for `throughput`.

        Returns:
            The whole loss.
        """
        for parameter in parameters:
            parameter.grad = None
        if loss.requires_grad:
            loss.backward()
        if self.size == 1:
            return loss.item()
        self._num_terms += num_terms
        # [gradients | which parameters have one | loss]
        sizes = [parameter.numel() for parameter in parameters]
        total = sum(sizes)
        if len(self._buffer) != total + len(sizes) + 1:
            self._buffer = torch.empty(total + len(sizes) + 1)
        buffer = self._buffer.zero_()
        views = buffer[:total].split(sizes)
        for place, (parameter, view) in enumerate(zip(parameters, views, strict=True)):
            if parameter.grad is not None:
                view.copy_(parameter.grad.flatten())
                buffer[total + place] = 1
        buffer[-1] = loss.detach()
        dist.all_reduce(buffer)
        has_gradient = buffer[total:-1].tolist()
        for parameter, view, has in zip(parameters, views, has_gradient, strict=True):
            parameter.grad = view.view_as(parameter) if has else None
        return float(buffer[-1])

    def throughput(self) -> list[str]:
        """Say how many terms of the loss each rank had a second; nothing of one process."""
        if self.size == 1:
            return []
        found: list[tuple[int, float]] = [(0, 0.0)] * self.size
        dist.all_gather_object(found, (self._num_terms, time.monotonic() - self._began_at))
        return [
            f"rank {rank} of {self.size}: {terms:,} terms of the loss in {took_s:.1f} s, "
            f"{terms / took_s:,.0f} a second"
            for rank, (terms, took_s) in enumerate(found)
        ]


def rows_of(batch: Batch, rank: int, size: int) -> Batch:
    """Take every `size`-th window; a batch is sorted by length, so the parts are alike."""
    found = ((one.name, getattr(batch, one.name)) for one in fields(batch))
    parts = {name: whole[rank::size].contiguous() for name, whole in found if whole is not None}
    return replace(batch, **parts)


def num_events(batch: Batch) -> int:
    """Count the events of a batch, without padding."""
    return int(batch.valid.sum())
