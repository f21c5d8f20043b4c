"""How our code reads, as far as a machine can tell: CONTRIBUTING.md has the rules in words."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import docstrings, python, tree

ROOMS = sorted({path.parts[1].removesuffix(".py") for path in python("npu_gr")})
CLOCKS = ("monotonic", "perf_counter", "time", "clock", "_clock")
# Whole docstrings that say nothing: a reference, or a word or two that stand for a sentence.
EMPTY = re.compile(
    r"(See|As|Like) `[\w.]+`[.;]?|(Of|As) "
    r"(both|all|each|it|above|before)\.|Held\.|The same\."
)


def room(name: str) -> list[Path]:
    """Files of a room, or the module of that name at the top."""
    return [path for path in python("npu_gr") if path.parts[1].removesuffix(".py") == name]


def test_public_class_names_are_unique() -> None:
    homes = defaultdict(list)
    for path in python("npu_gr"):
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path))
    twice = [
        f"{name}: {', '.join(paths)}" for name, paths in sorted(homes.items()) if len(paths) > 1
    ]
    assert not twice, "\n" + "\n".join(twice)


@pytest.mark.parametrize("name", ROOMS)
def test_docstrings_say_something(name: str) -> None:
    empty = [
        f"{text.path}:{text.line}: {text.text}"
        for path in room(name)
        for text in docstrings(path)
        if EMPTY.fullmatch(text.text.strip())
    ]
    assert not empty, "\n" + "\n".join(empty)


@pytest.mark.parametrize("name", ROOMS)
def test_a_line_assigns_no_more_than_two_things(name: str) -> None:
    packed = [f"{path}:{line}" for path in room(name) for line in _packed(path)]
    assert not packed, "\n" + "\n".join(packed)


def _packed(path: Path) -> Iterator[int]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and len(target.elts) == len(node.value.elts) > 2:
                    yield node.lineno


@pytest.mark.parametrize("name", ROOMS)
def test_an_instant_is_no_duration(name: str) -> None:
    """`began_at = time.monotonic()`, never `began_s`: see `_at` and `_s` in CONTRIBUTING.md."""
    wrong = [f"{path}:{line}" for path in room(name) for line in _instants_named_as_durations(path)]
    assert not wrong, "\n" + "\n".join(wrong)


def _instants_named_as_durations(path: Path) -> Iterator[int]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from (
                    node.lineno
                    for name, value in _pairs(target, node.value)
                    if _is_wrong(name, value)
                )
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            yield from (
                node.lineno
                for name, value in _pairs(node.target, node.value)
                if _is_wrong(name, value)
            )


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, its in zip(target.elts, value.elts, strict=False):
            yield from _pairs(one, its)
    elif isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Attribute):
        yield target.attr, value


def _is_wrong(name: str, value: ast.expr) -> bool:
    if not name.endswith("_s") or not isinstance(value, ast.Call) or value.args:
        return False
    called = value.func
    return (isinstance(called, ast.Attribute) and called.attr in CLOCKS) or (
        isinstance(called, ast.Name) and called.id in CLOCKS
    )
