"""Hooks of mkdocs: add the pages at the root of the repository, turn links to sources into text."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PROJECT = {  # page of the repository -> page of the site
    "README.md": "project/readme.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
}
BADGE = re.compile(r"(?m)^\[!\[.*\n")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages at the root of the repository, and an index of the runbooks."""
    for source, page in PROJECT.items():
        text = BADGE.sub("", (ROOT / source).read_text())  # the site loads nothing from elsewhere
        files.append(File.generated(config, page, content=_linked(text, source, page)))
    runbooks = sorted(path.stem for path in (ROOT / "docs/runbooks").glob("*.md"))
    lines = [f"- [{name}]({name}.md)" for name in runbooks]
    index = (
        ("# Runbooks\n\nOne page for each alert; the alert's annotation links to it.\n\n")
        + "\n".join(lines)
        + "\n"
    )
    files.append(File.generated(config, "runbooks/README.md", content=index))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links that leave the folder of the pages."""
    name = page.file.src_uri
    return markdown if name.startswith("project/") else _linked(markdown, f"docs/{name}", name)


def _linked(text: str, source: str, page: str) -> str:
    """Point links at pages of the site; a link to anything else becomes its text.

    Args:
        text: The page, as Markdown.
        source: Path of the page in the repository.
        page: Path of the page in the site.
    """

    def replaced(found: re.Match[str]) -> str:
        image, words, target, anchor = found.groups()
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        to = PROJECT.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if to is None or not (image or to.endswith(".md") or (ROOT / path).is_dir()):
            return words
        if (ROOT / path).is_dir():
            to = f"{to}/README.md"
        link = posixpath.relpath(to, posixpath.dirname(page) or ".")
        return f"{image}[{words}]({link}{anchor or ''})"

    return LINK.sub(replaced, text)
