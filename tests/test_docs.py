"""What our pages, docstrings and comments refer to is there: links, files, tests, rules, routes."""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from npu_gr.cli.main import main
from npu_gr.core.kinds import KINDS
from npu_gr.server.openapi import document
from tests.sources import ROOT, Text, at, files, words

PAGES = [path for path in files() if path.suffix == ".md"]
ROOMS = ("npu_gr", "tests", "ops", "docs", "configs", "dashboards", "deploy", ".ci", ".github")

# A file of ours: a path with folders, or a bare name whose ending only sources and pages have.
FILE = re.compile(
    r"(?<![\w./*<{-])(?<!\]\()((?:[\w.-]+/)*[A-Za-z_][\w.-]*\.(?:py|md|h|cpp|yaml|yml|toml|html))(?![\w/-]|\.\w)"
)
FOLDER = re.compile(
    rf"(?<![\w./<-])((?:{'|'.join(re.escape(room) for room in ROOMS)})(?:/[\w-]+)*)/(?![\w.*<-])"
)
TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
RULE = re.compile(r"(?<![\w/.-])E([1-9])(?![\w.])")
EXAMPLES = ("explain", "mydevice")  # what docs/adding.md adds
# by our commands, or by a user
WRITTEN = ("serve.yaml", "serve.calibration.yaml", "calibration.yaml", "ablation.md")
THEIRS = re.compile(
    r"(torch|torch_npu|transformers|triton|acl|httptools|Python|kernel_operator|ascendcl)[/.]"
)


def _named() -> dict[str, list[Path]]:
    found = defaultdict(list)
    for path in files():
        found[path.name].append(path)
    return found


NAMED = _named()


def _exists(name: str, source: Path) -> bool:
    """Whether a name in a text of `source` leads to one file of ours.

    A path begins at the root, in npu_gr or in a folder above the source. A bare name means a file
    of the same room (for tests: of the room that they test), or the only one of that name.
    """
    if "/" in name:
        bases = [Path(), Path("npu_gr"), *source.parents]
        return any((ROOT / base / name).exists() for base in bases)
    here = [path for path in NAMED[name] if path.parent in source.parents and path.parent != Path()]
    tested = Path("npu_gr", *source.parts[1:-1]) if source.parts[0] == "tests" else source.parent
    room = [path for path in NAMED[name] if tested in path.parents or source.parent in path.parents]
    return bool(here) or len(room) == 1 or len(NAMED[name]) == 1 or (ROOT / name).exists()


def _missing_files(text: Text) -> Iterator[str]:
    for found in FILE.finditer(text.text):
        name = found[1]
        skip = (
            name in WRITTEN
            or any(word in name for word in EXAMPLES)
            or THEIRS.match(name)
            or "://" in _word(found)
        )
        if not skip and not _is_data(name) and not _exists(name, text.path):
            yield f"{at(text, found.start())}: {name}"


def _word(found: re.Match[str]) -> str:
    """The whole word around a match: an address is no file of ours."""
    line_at = found.string.rfind("\n", 0, found.start()) + 1
    before = found.string[line_at : found.start()].rsplit(None, 1)
    return (before[-1] if before and not found.string[found.start() - 1].isspace() else "") + found[
        0
    ]


def _is_data(name: str) -> bool:
    """A bare YAML, HTML or TOML name may be anybody's; one with a folder of ours may not."""
    return not name.endswith((".py", ".md", ".h", ".cpp")) and not name.startswith(
        tuple(f"{room}/" for room in ROOMS)
    )


def test_files_that_are_named_exist() -> None:
    missing = [line for text in words() for line in _missing_files(text)]
    assert not missing, "\n" + "\n".join(missing)


def test_folders_that_are_named_exist() -> None:
    missing = [
        f"{at(text, found.start())}: {found[1]}/"
        for text in words()
        for found in FOLDER.finditer(text.text)
        if not any(
            (ROOT / base / found[1]).is_dir()
            for base in (Path(), Path("npu_gr"), *text.path.parents)
        )
    ]
    assert not missing, "\n" + "\n".join(missing)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall((ROOT / page).read_text()):
        if not re.match(r"[a-z]+:", target):
            name, _, anchor = target.partition("#")
            path = ROOT / page.parent / name if name else ROOT / page
            assert path.exists(), f"{page}: {target}"
            assert not anchor or anchor in _anchors(path), f"{page}: {target}"


def _anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
    return {
        re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


def test_tests_that_pages_name_exist() -> None:
    for page in PAGES:
        for path, name in TEST.findall((ROOT / page).read_text()):
            assert f"def {name}(" in (ROOT / path).read_text(), f"{page}: {path}::{name}"


def test_rules_that_are_cited_are_defined() -> None:
    rules = set(re.findall(r"^\| E(\d) \|", (ROOT / "docs/exactness.md").read_text(), re.M))
    assert rules == set("123456789")
    cited = [(text, found) for text in words() for found in RULE.finditer(text.text)]
    assert cited
    for text, found in cited:
        assert found[1] in rules, at(text, found.start())


def test_every_route_has_its_example_page() -> None:
    page = (ROOT / "docs/http.md").read_text()
    told = set(re.findall(r"`(GET|POST|DELETE) (/[^`?\s]*)`", page))
    routes = {
        (method.upper(), path) for path, item in document()["paths"].items() for method in item
    }
    assert told == {
        (method, path) for method, path in routes if method in ("GET", "POST", "DELETE")
    }
    for kind in KINDS.values():
        assert f"### `{kind.method} {kind.path}`" in page


def test_every_room_has_its_place_on_the_map() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text()
    drawing = (ROOT / "docs/architecture.md").read_text()
    for room in {
        path.parts[1] for path in files() if path.parts[0] == "npu_gr" and len(path.parts) > 2
    }:
        assert f"`npu_gr/{room}/`" in table, room
    drawn = [set(re.findall(r"│ ([a-z_]+) ", line)) for line in drawing.splitlines()]
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ][0]
    floors = [set(floor.replace("|", " ").split()) for floor in contract["layers"]]
    assert [rooms for rooms in drawn if rooms][: len(floors)] == floors


def test_the_readme_is_read_in_a_minute() -> None:
    readme = (ROOT / "README.md").read_text()
    assert 60 <= len(readme.splitlines()) <= 80
    figures = readme.partition("## Five figures\n")[2].partition("\n\nOn ")[0]
    assert len([line for line in figures.splitlines() if line.startswith("| [")]) == 5
    assert len(LINK.findall(readme.partition("## More\n")[2])) == 6


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text()
    for page in PAGES:
        if page.parent == Path("docs") and page.name != "README.md":
            assert f"]({page.name})" in index, page
    decisions = (ROOT / "docs/decisions/README.md").read_text()
    for page in PAGES:
        if page.parent == Path("docs/decisions") and page.name != "README.md":
            assert f"]({page.name})" in decisions, page
            for part in (
                "**Context.**",
                "**Decision.**",
                "**Consequences.**",
                "**What would change it.**",
            ):
                assert part in (ROOT / page).read_text(), page


COMMAND = re.compile(r"(?:`|^|bin/)npu-gr((?: +[^\s`|&;#)\\]+)+)", re.M)


def _unknown_options(words_after: list[str]) -> list[str]:
    """List the words of a command line that are no command and no option of `npu-gr`."""
    command: click.Command = main
    while isinstance(command, click.Group):
        if not words_after or words_after[0].startswith("-") or words_after[0].isupper():
            break
        if words_after[0] not in command.commands:
            return words_after[:1]
        command, words_after = command.commands[words_after[0]], words_after[1:]
    known = {
        "--help",
        *(name for one in command.params for name in (*one.opts, *one.secondary_opts)),
    }
    return [
        word
        for word in words_after
        if word.startswith("--") and word.partition("=")[0].strip("`.,:") not in known
    ]


def test_commands_that_pages_name_exist() -> None:
    unknown = [
        f"{at(text, found.start())}: npu-gr{found[1]}"
        for text in words()
        # of what went, too
        if text.path.suffix == ".md" and text.path.name not in ("CHANGELOG.md", "upgrading.md")
        for found in COMMAND.finditer(text.text)
        if _unknown_options(found[1].split())
    ]
    assert not unknown, "\n" + "\n".join(unknown)


def test_make_targets_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        named = set(
            re.findall(
                r"(?:`|^)make "
                r"([a-z][\w-]*)(?:`|\s+#)",
                (ROOT / page).read_text(),
                re.M,
            )
        )
        assert named <= targets, page
