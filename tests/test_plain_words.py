"""The field's words, whole sentences, lines of 100 columns: what CONTRIBUTING.md asks for.

`python -m tests.test_plain_words [FOLDER]` lists what to mend.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.sources import ROOT

LINE = 100
MOST_FRAGMENTS = 0.02  # of the entries of all `Args:` sections
# Words of our own where the field, or plain English, has one -> what to say.
FORBIDDEN = {
    r"told\b": "say who learns what: 'the client gets ...', 'the answer says ...'",
    r"nobody": "name who does not: 'no request waits for it'",
    r"beside": "next to, temporary, sibling, in the same folder",
    r"lent|lends?|lending": "hand off, borrow, allocate",
    r"stranger|newcomer": "new connection, unknown client, new user",
    r"hangs? up|hung up": "disconnects",
    r"entrance|shedder|shedding": "HTTP front end, load shedding by the proxy",
    r"the door|at the door|behind the door": "admission",
    r"trunk": "shared encoder",
    r"twins?": "CPU emulator, near-duplicate",
    r"judge[sd]?|judging": "evaluate",
    r"refus(e[sd]?|ing|al\w?)": "reject",
    r"in force": "live, current",
    r"whoever": "the client, the operator, the caller of a function",
    r"aside": "temporary",
}
# Also a kernel's answer, values on the wire, names of files and of others' settings.
ALLOWED = re.compile(
    r"connections? (is |are |was |were )?refused|connection_refused|connectionrefused\w*"
    r"|econnrefused|[\"'`=: ]refuse[\"'`]|refuse$|(unknown_items|unsorted_history)[:=] ?refuse"
    r"|benchmarks? door|\"door\"|`door`",
    re.IGNORECASE,
)
# Old names that callers, operators and files still use -> the words that must stay there.
OLD_NAMES = {
    "npu_gr/core/renamed.py": {"trunk", "refused", "refusals", "judge"},
    "npu_gr/core/request.py": {"trunk"},
    "npu_gr/dataset/files.py": {"told"},
    "npu_gr/vector_search/vectors.py": {"twin"},
    "benchmarks/frame.py": {"trunk", "twin"},
}
NOT_OURS = ("upgrading.md", "decisions/", "history/")
WORD = re.compile(rf"(?<![a-z])({'|'.join(FORBIDDEN)})(?![a-z])", re.IGNORECASE)
# An entry that begins so is no sentence and no noun: "keys: in force.", "url: of the address."
FRAGMENT = re.compile(
    r"(of|in|for|to|at|on|by|with|from|between|behind|before|after|as|its|their|that|whose|where"
    r"|who|those|it|is|are|has|have|called|asked|fitted|made|given|wanted|known|holds|makes|draws"
    r"|runs|gets|counts|begins|generates|shows|names|reads|writes|says|tells)\b",
    re.IGNORECASE,
)


class Found(NamedTuple):
    """One thing to mend."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.text}"


class Entry(NamedTuple):
    """An entry of an `Args:` section."""

    at: Found
    is_fragment: bool


def sources(*folders: str, suffixes: tuple[str, ...] = (".py",)) -> Iterator[Path]:
    for folder in folders:
        path = ROOT / folder
        for one in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if one.suffix in suffixes and not one.stem.endswith("_pb2") and one.is_file():
                yield one


def entries(path: Path) -> Iterator[Entry]:
    """Yield the entries of all `Args:` sections of a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        text = ast.get_docstring(node) or ""
        section = re.search(r"^Args:\n((?: .*\n?|\n)+)", f"{text}\n", re.MULTILINE)
        if section is None:
            continue
        for name, said in re.findall(r"^    (\*{0,2}\w[\w, *]*): (.*)", section[1], re.MULTILINE):
            yield Entry(Found(path, node.lineno, f"{name}: {said}"), bool(FRAGMENT.match(said)))


def forbidden(path: Path) -> Iterator[Found]:
    """Yield the lines of a file that have a word of our own."""
    old = OLD_NAMES.get(path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else "", ())
    for number, line in enumerate(path.read_text().split("\n"), 1):
        # a name of two words is two words
        plain = re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", ALLOWED.sub("", line))
        found = [word[0] for word in WORD.finditer(plain) if word[0].lower() not in old]
        if found:
            yield Found(path, number, f"{found[0]!r} in {line.strip()[:LINE]}")


def long_prose(path: Path) -> Iterator[Found]:
    """Yield the lines of a page that are too long; rows of tables, links and code may be."""
    is_code = False
    for number, line in enumerate(path.read_text().split("\n"), 1):
        is_code ^= line.lstrip().startswith("```")
        is_free = is_code or line.lstrip().startswith(("|", "<", "![", "```")) or "](" in line[60:]
        if len(line) > LINE and not is_free and " " in line.strip()[20:]:
            yield Found(path, number, f"{len(line)} columns")


def pages() -> list[Path]:
    found = [*sources("docs", suffixes=(".md",)), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    return [path for path in found if not any(part in str(path) for part in NOT_OURS)]


def test_entries_of_args_are_no_fragments() -> None:
    found = [entry for path in sources("npu_gr") for entry in entries(path)]
    fragments = [entry.at for entry in found if entry.is_fragment]
    assert len(found) > 300
    assert len(fragments) <= MOST_FRAGMENTS * len(found), "\n".join(map(str, fragments))


def test_a_fragment_is_seen(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        'def f(a, b):\n    """Do.\n\n    Args:\n        a: of the address.\n'
        '        b: Base URL.\n    """\n'
    )
    assert [entry.is_fragment for entry in entries(module)] == [True, False]


def test_lines_have_at_most_100_columns() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["ruff"]["line-length"] == LINE  # which `make lint` holds
    assert "E" in project["tool"]["ruff"]["lint"]["select"]
    assert "E501" not in project["tool"]["ruff"]["lint"]["ignore"]
    long = [found for path in pages() for found in long_prose(path)]
    assert not long, "\n".join(map(str, long))


@pytest.mark.parametrize("folder", ["npu_gr", "benchmarks", "pages"])
def test_words_are_the_fields(folder: str) -> None:
    paths = pages() if folder == "pages" else sources(folder)
    found = [one for path in paths for one in forbidden(path)]
    assert not found, "\n".join(map(str, found))


def test_old_names_are_still_in_use() -> None:
    for name, words in OLD_NAMES.items():
        text = (ROOT / name).read_text().lower()
        assert all(word in text for word in words), name


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("def told(self) -> str:", True),
        ("the client is_told_so", True),
        ("class OldTrunk:", True),
        ("connection refused", False),
        ('unknown_items: "refuse"', False),
        ("a silent client", False),
    ],
)
def test_a_word_of_our_own_is_seen(line: str, is_found: bool, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(line)
    assert [one.line for one in forbidden(path)] == ([1] if is_found else [])


def main(asked: list[str]) -> None:
    """Write what is to be mended."""
    for path in sources(*asked, suffixes=(".py", ".md")):
        if any(part in str(path) for part in NOT_OURS):
            continue
        found = list(forbidden(path))
        if path.suffix == ".py":
            found += [entry.at for entry in entries(path) if entry.is_fragment]
        else:
            found += long_prose(path)
        sys.stdout.writelines(f"{one}\n" for one in found)


if __name__ == "__main__":
    main(sys.argv[1:] or ["npu_gr", "benchmarks", "docs", "README.md", "CONTRIBUTING.md"])
