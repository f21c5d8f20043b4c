"""The site has no broken link, and the metrics, settings and pictures of its pages exist."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from prometheus_client import CollectorRegistry

from npu_gr.core.renamed import KEYS
from npu_gr.core.setting_types import settings_of
from npu_gr.core.settings import GONE
from npu_gr.metrics.registry import Metrics
from npu_gr.route.config import RouterConfig
from npu_gr.service.config import Config, SLOConfig
from npu_gr.train.site.configuration import SiteOptions
from tests.sources import ROOT

DOCS = ROOT / "docs"
# pages that say what to set
OPERATORS = ("quickstart", "using", "deploy", "tuning", "limits", "upgrading", "http")
PAGES = sorted(DOCS.glob("*.md"))
A_LETTER = 7.2  # pixels of the pictures, at most, on an average of a line
CODE = re.compile(r"`([^`\n]+)`")
# those two have registries of their own
METRIC = re.compile(r"(?<!lib)npu_gr_(?!router|consume|ascend)[a-z_]+")
SUFFIX = re.compile(r"_(total|bucket|count|sum|info)$")


def _drawn() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw", DOCS / "pictures/draw.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_link_of_the_site_leads_somewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, "\n".join(
        line for line in done.stderr.splitlines() if "INFO" not in line
    )
    for page in (
        "index.html",
        "project/changelog/index.html",
        "runbooks/index.html",
        "configuration/index.html",
    ):
        assert (tmp_path / page).is_file(), page
    texts = [path.read_text() for path in tmp_path.rglob("*.html")]
    assert not [
        text
        for text in texts
        if re.search(r"<(?:script|link|img)[^>]+(?:src|href)=\"https?://", text)
    ]


def test_the_pictures_are_current() -> None:
    module = _drawn()
    for name, draw in module.PICTURES.items():
        assert (DOCS / f"pictures/{name}.svg").read_text() == draw(), "python docs/pictures/draw.py"


def test_the_words_of_a_picture_end_within_it() -> None:
    share = {"start": 0.0, "middle": 0.5, "end": 1.0}
    for name, draw in _drawn().PICTURES.items():
        picture = draw()
        width = int(re.findall(r'viewBox="0 0 (\d+) ', picture)[0])
        texts = re.findall(r'<text x="([\d.]+)" [^>]*text-anchor="(\w+)"[^>]*>([^<]*)<', picture)
        assert texts
        for x, anchor, words in texts:
            left = float(x) - share[anchor] * len(words) * A_LETTER
            assert left >= 0, (name, words)
            assert left + len(words) * A_LETTER <= width, (name, words)


def test_the_last_picture_reads_the_measured_table() -> None:
    rates = {
        name: _drawn().relay_rates((DOCS / "measured/relay.md").read_text(), name)
        for name in ("1.5x", "3x")
    }
    assert [list(rows) for rows in rates.values()] == [[1024, 2048, 4096]] * 2
    assert all(min(row) > 0 for row in rates["3x"].values())
    # it keeps that at no rate
    assert all(full < 0 < min(relay) for full, *relay in rates["1.5x"].values())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_metrics_that_a_page_names_exist(page: Path) -> None:
    registry = CollectorRegistry()
    Metrics(registry, SLOConfig().objectives())
    known = {family.name for family in registry.collect()} | {
        sample.name for family in registry.collect() for sample in family.samples
    }
    named = {name for code in CODE.findall(page.read_text()) for name in METRIC.findall(code)}
    missing = sorted(
        name
        for name in named
        if not {name, SUFFIX.sub("", name)} & known and not name.endswith("_")
    )
    assert page.stem == "upgrading" or not missing  # that page names what went


@pytest.mark.parametrize(
    "page", [DOCS / f"{name}.md" for name in OPERATORS], ids=lambda page: page.stem
)
def test_settings_that_a_page_names_exist(page: Path) -> None:
    known = {path for cls in (Config, RouterConfig, SiteOptions) for path in settings_of(cls)}
    if page.stem == "upgrading":  # it names the keys of before, too
        known |= {*GONE, *KEYS, *KEYS.values(), "features.url"}
    sections = {path.partition(".")[0] for path in known if "." in path}
    named = set(re.findall(r"`([a-z_]+\.[a-z_.]+)(?:[:=] ?[^`]*)?`", page.read_text()))
    named = {name for name in named if name.partition(".")[0] in sections}
    files = {name for name in named if name.endswith((".py", ".yaml", ".md", ".json", ".db"))}
    unknown = sorted(name for name in named - files if name not in known)
    assert not unknown
