"""Our kernels pass the checks of `npu-gr doctor` for native operators on the CPU emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from npu_gr.backend.npu.check import disagreements
from tests.backend.npu.on_emulator import HstuOnEmulator
from tests.ops.ascend_emulator import Emulator

NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def array(x: Any) -> Any:
    """Contiguous, as the binding demands; bfloat16 as the emulator takes it."""
    if not isinstance(x, Tensor):
        return x
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).contiguous().numpy()


class OnEmulator(HstuOnEmulator):
    """`torch.ops.npu_gr` of our kernels."""

    def masked_topk(self, logits: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        made = self.emulator.masked_topk(
            array(logits), *map(array, rest), dtype=NAMES[logits.dtype]
        )
        return tuple(torch.from_numpy(x) for x in made[:2])

    def csr_gather_topk(self, logits: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        norm, acc, lo, degree, code, allowed, k = map(array, rest)
        name = NAMES[logits.dtype]
        bits = allowed.astype(np.uint8)
        made = self.emulator.csr_gather_topk(
            array(logits), norm, acc, lo, degree, code, bits, k, dtype=name
        )
        return tuple(torch.from_numpy(x) for x in made[:3])

    def beam_fork_(self, keys: Tensor, values: Tensor, parent: Tensor, num_slots: int) -> None:
        self.emulator.beam_fork(array(keys), array(values), array(parent), num_slots)


def test_every_operator_does_what_the_doctor_demands(emulator: Emulator) -> None:
    found = dict(disagreements(torch.device("cpu"), OnEmulator(emulator)))
    assert len(found) == 6
    assert not any(found.values()), found
