"""What the tests of our words read: files, and their comments and docstrings with their lines."""

from __future__ import annotations

import ast
import io
import re
import shutil
import subprocess
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
BUILT = {".venv", ".git", ".demo", "build", "__pycache__", ".hypothesis", "node_modules"}

# where statements stand in a node of a tree
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")

_HAS_GIT = shutil.which("git") is not None and (ROOT / ".git").exists()


class Text(NamedTuple):
    """Words of ours."""

    path: Path  # relative to ROOT
    line: int  # of its first line
    text: str


@cache
def files() -> tuple[Path, ...]:
    """All files that git tracks or would track, relative to ROOT.

    Without git, all outside of build products.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = (
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if _HAS_GIT
        else None
    )
    if done is not None and not done.returncode:
        names = [Path(name) for name in done.stdout.split("\0") if name]
    else:
        names = [
            path.relative_to(ROOT) for path in ROOT.rglob("*") if not BUILT.intersection(path.parts)
        ]
    return tuple(sorted({name for name in names if (ROOT / name).is_file()}))


def python(*rooms: str) -> list[Path]:
    """Python files of some top-level folders."""
    return [path for path in files() if path.suffix == ".py" and path.parts[0] in rooms]


def tree(path: Path) -> ast.Module:
    """A Python file, parsed.

    To keep all of them costs the garbage collector more than to parse them again.
    """
    return ast.parse((ROOT / path).read_text(), str(path))


def docstrings(path: Path) -> Iterator[Text]:
    """Of the module, its classes and its functions."""
    found: list[ast.AST] = [tree(path)]
    while found:
        node = found.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield Text(path, node.body[0].lineno, text)
        for block in BLOCKS:  # expressions, most of a tree, hold none
            found += getattr(node, block, ())


def comments(path: Path) -> Iterator[Text]:
    """Of a Python file, of C++ (`//`), or of a file with `#` comments: one a line."""
    text = (ROOT / path).read_text()
    if path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield Text(path, token.start[0], token.string)
        return
    mark = re.compile(r"//.*") if path.suffix in (".h", ".cpp") else re.compile(r"(?:^|\s)#.*")
    for number, row in enumerate(text.splitlines(), 1):
        if found := mark.search(row):
            yield Text(path, number, found[0])


@cache
def words() -> tuple[Text, ...]:
    """Everything that we wrote for people: pages, docstrings, comments."""
    return tuple(_words())


def _words() -> Iterator[Text]:
    for path in files():
        if path.suffix == ".md":
            yield Text(path, 1, (ROOT / path).read_text())
        elif path.suffix == ".py":
            yield from docstrings(path)
            yield from comments(path)
        elif path.suffix in (".h", ".cpp", ".sh", ".yaml", ".yml", ".toml") or path.name in (
            "Makefile",
            "run",
        ):
            yield from comments(path)


def at(text: Text, offset: int) -> str:
    """`path:line` of a place in a text."""
    return f"{text.path}:{text.line + text.text.count(chr(10), 0, offset)}"
