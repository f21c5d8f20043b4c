"""Every change of the kernels that can be seen is seen: mutants fall to the fixed cases; all with -m mutation."""

from __future__ import annotations

import importlib
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from npu_gr.bench.ascend_twin import SOURCES

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here: no mutant can be built")


@pytest.fixture(scope="module")
def mutate() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SOURCES)
        yield importlib.import_module("mutate")


def test_there_are_enough(mutate: ModuleType) -> None:
    """At least twenty of each kernel, its shared parts included; nothing is called equivalent that is not there."""
    mutants = [mutant for rule in range(len(mutate.RULES)) for mutant in mutate.planted(rule)]
    of_ops = Counter(op for mutant in mutants for op in mutate.KERNELS[mutant.file])
    assert len(of_ops) == 6
    assert min(of_ops.values()) >= 20
    unknown = set(mutate.EQUIVALENT) - {mutant.key for mutant in mutants}
    assert not unknown


def test_what_a_person_would_do_wrong_falls(mutate: ModuleType, tmp_path: Path) -> None:
    """The faults of a review, in one build."""
    library = mutate.build(None, tmp_path)
    assert mutate.verdict(library, None) == "survived"
    told = {str(fault): mutate.verdict(library, fault) for fault in mutate.KERNEL_FAULTS}
    survived = {name for name, verdict in told.items() if verdict == "survived"}
    assert survived == {str(fault) for fault in mutate.KERNEL_FAULTS if fault.equivalent}, told
    assert len(told) - len(survived) >= 14
    assert "ids of V_MTE2 are in use" in told["kernels/children.h: more buffers of VECIN than there are events"]
    assert "UB overflow" in told["tiling.h: the plan forgets 16 bytes a pair"]


@pytest.mark.mutation
def test_all_fall(mutate: ModuleType) -> None:
    assert mutate.check(every=1, jobs=2) == 0
