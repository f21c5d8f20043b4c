"""Every change of the kernels that can be seen is seen: mutants fall to the fixed cases; all with -m mutation."""

from __future__ import annotations

import importlib.util
import shutil
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from npu_gr.bench.ascend_twin import SOURCES

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here: no mutant can be built")


@pytest.fixture(scope="module")
def mutate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutate", SOURCES / "mutate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_enough(mutate: ModuleType) -> None:
    """At least twenty of each kernel, its shared parts included; nothing is called equivalent that is not there."""
    mutants = [mutant for rule in range(len(mutate.RULES)) for mutant in mutate.planted(rule)]
    of_ops = Counter(op for mutant in mutants for op in mutate.KERNELS[mutant.file])
    assert len(of_ops) == 6
    assert min(of_ops.values()) >= 20
    unknown = set(mutate.EQUIVALENT) - {mutant.key for mutant in mutants}
    assert not unknown


def test_a_sample_falls(mutate: ModuleType, tmp_path: Path) -> None:
    """One build: all missing barriers, of which some."""
    rule = next(i for i, rule in enumerate(mutate.RULES) if rule.name == "no barrier")
    library = mutate.build(rule, tmp_path)
    assert mutate.verdict(library, None) == "survived"
    sample = [mutant for mutant in mutate.planted(rule) if mutant.key not in mutate.EQUIVALENT][::6]
    assert len(sample) >= 5
    for mutant in sample:
        assert mutate.verdict(library, mutant).startswith("fell: "), mutant


@pytest.mark.mutation
def test_all_fall(mutate: ModuleType) -> None:
    assert mutate.check(every=1, jobs=2) == 0
