"""What every trainer's steps share: the learning rate's course, the moving average of weights, a word on progress."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

LAST_BATCHES = 20  # whose mean loss is reported


class Progress(NamedTuple):
    """How far the training is."""

    stage: Literal["train", "evaluate"]
    done: float  # epochs, or users
    total: float
    loss: float = float("nan")  # mean of the last batches


@torch.no_grad()
def average(decay: float, averages: list[Tensor], now: list[Tensor], num_averaged: Tensor | int) -> None:
    """Move the averages towards the weights of now: all the way at decay 0, and further in the first steps."""
    steps = int(num_averaged)
    torch._foreach_lerp_(averages, now, 1 - min(decay, (1 + steps) / (10 + steps)))


def schedule(progress_ratio: float, warm_up_ratio: float) -> float:
    """Share of the learning rate at this point of the training: a linear rise, then a cosine down to nothing."""
    if progress_ratio < warm_up_ratio:
        return progress_ratio / warm_up_ratio
    return (1 + math.cos(math.pi * (progress_ratio - warm_up_ratio) / (1 - warm_up_ratio))) / 2
