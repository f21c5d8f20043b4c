"""The fixed cases detect every mutant of the kernels that has an effect.

`-m mutants`, as in `make kernels`, runs a sample; `-m mutation` runs all.
"""

from __future__ import annotations

import importlib
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.ops.ascend_emulator import SOURCES

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="no g++ here: no mutant can be built"
)


@pytest.fixture(scope="module")
def mutate() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SOURCES)
        yield importlib.import_module("mutate")


def test_there_are_enough(mutate: ModuleType) -> None:
    """Each op has at least 20 mutants, and every key of EQUIVALENT is the key of a mutant."""
    mutants = [mutant for rule in range(len(mutate.RULES)) for mutant in mutate.planted(rule)]
    of_ops = Counter(op for mutant in mutants for op in mutate.KERNELS[mutant.file])
    assert len(of_ops) == 6
    assert min(of_ops.values()) >= 20
    unknown = set(mutate.EQUIVALENT) - {mutant.key for mutant in mutants}
    assert not unknown


@pytest.mark.mutants
def test_what_a_person_would_do_wrong_falls(mutate: ModuleType, tmp_path: Path) -> None:
    """The faults of a review, and those of the HSTU kernels, in one build."""
    library = mutate.build(None, tmp_path)
    untouched, *found = mutate.verdicts(library, [None, *mutate.FAULTS], jobs=2)
    assert untouched == "survived"
    verdicts = {str(fault): verdict for fault, verdict in zip(mutate.FAULTS, found, strict=True)}
    survived = {name for name, verdict in verdicts.items() if verdict == "survived"}
    assert survived == {str(fault) for fault in mutate.FAULTS if fault.equivalent}, verdicts
    assert sum(str(fault) in verdicts for fault in mutate.HSTU_FAULTS) >= 30
    assert (
        "ids of V_MTE2 are in use"
        in verdicts["kernels/children.h: more buffers of VECIN than there are events"]
    )
    assert "UB overflow" in verdicts["tiling.h: the plan forgets 16 bytes a pair"]


@pytest.mark.mutants
@pytest.mark.parametrize(("name", "every"), [("plus: minus", 5)])
def test_a_sample_of_the_rules_falls(
    mutate: ModuleType, tmp_path: Path, name: str, every: int
) -> None:
    """Of the HSTU kernels; a rule that does not compile any more fails too."""
    (rule,) = (rule for rule in range(len(mutate.RULES)) if mutate.RULES[rule].name == name)
    mutants = [mutant for mutant in mutate.planted(rule) if "hstu" in mutant.file][::every]
    untouched, *found = mutate.verdicts(mutate.build(rule, tmp_path), [None, *mutants], jobs=2)
    assert untouched == "survived"
    assert len(mutants) >= 10
    survived = {str(m) for m, verdict in zip(mutants, found, strict=True) if verdict == "survived"}
    assert survived == {str(m) for m in mutants if str(m) in survived and mutate.is_equivalent(m)}


@pytest.mark.mutation
def test_all_fall(mutate: ModuleType) -> None:
    assert mutate.check(mutate.Chosen(), jobs=2) == 0
