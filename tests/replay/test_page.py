"""The page shows every plot of a run, loads nothing, and looks right in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_gr.replay.page import SLICE_ANSWERS, page, svg
from npu_gr.replay.report import Report, Study, summarise
from npu_gr.replay.tally import MAX_POINTS, Tally
from tests.replay.test_report import sample

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
browser = pytest.mark.skipif(
    BROWSER is None, reason="needs Chromium (Debian: apt-get install chromium)"
)

OUTCOMES = ("hbm_hit", "joined", "dram_hit", "miss_full")
PLOTS = ("Goodput against offered load", "Latency over time", "Latency, cumulative", "Outcomes")


def run(rate: float, seed: int = 0) -> Report:
    random = np.random.default_rng(seed)
    tally = Tally(0.05)
    for i in range(1500):
        latency_s = float(random.lognormal(-4, 0.6))
        error = "504" if random.random() < 0.01 else ""
        tally.add(
            sample(
                due_at=i / rate,
                latency_s=latency_s,
                error=error,
                outcome=str(random.choice(OUTCOMES)),
            )
        )
    settings = {"closed": None, "rate": rate, "arrival": "poisson", "speed": 1.0, "seed": seed}
    return summarise(tally, settings)


@pytest.fixture(scope="module")
def text() -> str:
    study = Study(runs=[run(50.0), run(100.0, 1), run(200.0, 2)])
    return page(study, "A <title> & more")


class Strict(HTMLParser):
    """Every tag is closed in its turn; nothing is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe")
        assert not any(name in ("src", "srcset") for name, _ in attrs)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_loads_nothing(text: str) -> None:
    parser = Strict()
    parser.feed(text)
    assert parser.open == []
    words = re.sub(r"<pre>.*</pre>", "", text)
    assert "http" not in re.sub(r"http://(www.w3.org|purl.org|creativecommons.org)", "", words)
    assert "A &lt;title&gt; &amp; more" in text
    for title in PLOTS:
        assert text.count(f"<h3>{title}</h3>") == (1 if title.startswith("Goodput") else 3)


def test_the_same_figures_are_the_same_bytes_and_nothing_in_a_name_is_markup() -> None:
    drawn = [
        svg(lambda axes: axes.plot([1, 2], [2, 3], label="a <b> & $x$"), "x", "y") for _ in range(2)
    ]
    assert drawn[0] == drawn[1]
    assert "a &lt;b&gt; &amp; $x$" in drawn[0]


def test_without_matplotlib_a_plot_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "npu_gr[plot]" in svg(lambda axes: axes.plot([1, 2], [2, 3]), "x", "y")


def goodput(study: Study) -> str:
    return page(study, "x").split("<h3>Goodput against offered load</h3>")[1].split("</figure>")[0]


def test_one_run_is_a_point_in_the_cloud_of_its_slices_and_runs_are_a_line() -> None:
    one = run(100.0)
    alone = goodput(Study(runs=[one]))
    assert ">the run<" in alone
    assert ">slices of its time<" in alone
    several = goodput(Study(runs=[one, run(50.0, 1)]))
    assert ">runs<" in several
    assert "slices" not in several


def latency(run: Report) -> str:
    return page(Study(runs=[run]), "x").split("<h3>Latency over time</h3>")[1].split("</figure>")[0]


def test_latency_over_time_is_points_under_a_band_where_answers_are_enough_for_it() -> None:
    one = run(100.0)  # 1500 ranks in 15 s
    drawn = latency(one)
    outcomes = len({outcome for _, _, outcome in one.points})
    assert drawn.count("<use ") >= len(one.points) + outcomes
    assert len(one.points) == MAX_POINTS
    assert sum(part["num_answered"] for part in one.slices) == one.latencies[0].count
    enough = [part for part in one.slices if part["num_answered"] >= SLICE_ANSWERS]
    assert not enough  # in a slice of 0.25 s
    assert "P50 to P99" not in drawn
    for name in (*OUTCOMES, "error"):
        assert f">{name}<" in drawn
    dense = run(1000.0)
    enough = [part for part in dense.slices if part["num_answered"] >= SLICE_ANSWERS]
    assert len(enough) == 6
    for part in enough:
        assert part["p50_ms"] == pytest.approx(18.3, rel=0.3)
        assert part["p99_ms"] > 1.5 * part["p50_ms"]
    assert ">P50 to P99 of at least 100 answers<" in latency(dense)


def test_one_run_and_nothing_answered_make_a_page_too() -> None:
    settings = {"closed": 4, "rate": None, "arrival": "poisson", "speed": 1.0}
    for samples in ([], [sample()], [sample(error="timeout")]):
        tally = Tally(0.05)
        for each in samples:
            tally.add(each)
        text = page(Study(runs=[summarise(tally, settings, interrupted=True)]), "x")
        Strict().feed(text)
        assert "Interrupted" in text


_PROBE = """<script>
const box = e => e.getBoundingClientRect();
const svgs = [...document.querySelectorAll("svg")].map(svg => {
  const around = box(svg);
  const texts = [...svg.querySelectorAll("text")].map(t => ({name: t.textContent, box: box(t)}));
  const outside = texts.filter(t => t.box.left < around.left - 1 || t.box.right > around.right + 1
    || t.box.top < around.top - 1 || t.box.bottom > around.bottom + 1).map(t => t.name);
  const overlaps = [];
  texts.forEach((a, i) => texts.slice(i + 1).forEach(b => {
    if (a.box.left < b.box.right - 1 && b.box.left < a.box.right - 1
      && a.box.top < b.box.bottom - 2 && b.box.top < a.box.bottom - 2)
      overlaps.push(a.name + " | " + b.name);
  }));
  const shapes = [...svg.querySelectorAll("path")].filter(s => box(s).width > 50);
  return {width: around.width, height: around.height, outside, overlaps, shapes: shapes.length};
});
const out = document.createElement("pre");
out.id = "probe";
out.textContent = JSON.stringify({svgs, loads: performance.getEntriesByType("resource").length,
  wider: document.documentElement.scrollWidth > innerWidth + 1, title: document.title});
document.body.append(out);
</script>"""


def look(folder: Path, text: str, *words: str) -> str:
    assert BROWSER is not None
    (folder / "page.html").write_text(text)
    quiet = (
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
    )
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        *quiet,
        f"--user-data-dir={folder / 'profile'}",
    ]
    done = subprocess.run(
        [*command, "--window-size=1400,3000", *words, f"file://{folder / 'page.html'}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


@browser
def test_a_browser_draws_every_plot_with_its_words_inside_and_apart(
    tmp_path: Path, text: str
) -> None:
    shown = look(tmp_path, text.replace("</body>", _PROBE + "</body>"), "--dump-dom")
    found: dict[str, Any] = json.loads(
        unescape(shown.split('<pre id="probe">')[1].split("</pre>")[0])
    )
    assert found["title"] == "A <title> & more"
    assert (found["loads"], found["wider"]) == (0, False)
    assert len(found["svgs"]) == 1 + 3 * 3
    for plot in found["svgs"]:
        assert plot["width"] > 300
        assert plot["height"] > 100
        assert (plot["outside"], plot["overlaps"]) == ([], [])
        assert plot["shapes"] >= 1
