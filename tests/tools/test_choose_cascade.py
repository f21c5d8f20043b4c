"""`judge --choose` asks a service in every way, and writes what was chosen into a configuration."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from npu_gr.core.errors import ConfigError, Unavailable
from npu_gr.service.config import load
from npu_gr.tools.choose_cascade import choose_over_http, write
from npu_gr.tools.evaluate_service import evaluate
from npu_gr.train.cascade import CascadeChoice, CascadeWay
from npu_gr.train.next_event import next_events
from tests.models import tiny_order
from tests.serving import FIRST_ID, serving, write_checkpoint
from tests.tools.test_evaluate_service import log

SOURCES = {"trunk": 30, "transitions": 12}


async def test_every_way_is_asked_and_the_best_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", tiny_order(), retrieval=True)
    events = log(num_users=4)
    cases = next_events(events, np.arange(4 * 12) < 4 * 11)
    seen = list[int]()
    async with serving(tmp_path, watched=False, recommend={"sources": SOURCES}) as (client, _):
        url = str(client.make_url("/"))
        found = await choose_over_http(url, url, cases, lambda done, _: seen.append(done))
        assert seen == [1, 2, 3, 4]
        assert found.num_users == 2
        assert CascadeWay(("trunk", "transitions"), "fitted") in {row.way for row in found.rows}
        with pytest.raises(Unavailable, match="takes two"):
            await choose_over_http(url, url, cases[:1])
        figures = (await evaluate(url, url, cases, range(FIRST_ID, FIRST_ID + 300))).as_dict()
        assert set(figures["ways"]) == {"trunk", "transitions", "rank", "recommend"}
        assert figures["order"] == "fitted"
        assert "recommend" in figures["why"]


def chosen(*sources: str, order: str = "fitted") -> CascadeChoice:
    return CascadeChoice(CascadeWay(sources, order), [], [], 1)  # type: ignore[arg-type]


GIVEN = """checkpoint: ranker
recommend:                        # the cascade
{lines}
  max_candidates: 50  # at most
kv:
  hbm_bytes: 8000000
"""
FORMS = [
    "  sources: {match: 6, trunk: 30}  # of each\n  order: rank  # by its task",
    "  sources:\n    match: 6\n    trunk: 30",
    "  order: fused\n  sources: {match: 6, trunk: 30}",
]


@pytest.mark.parametrize("lines", FORMS)
def test_it_is_written_and_the_rest_stays(tmp_path: Path, lines: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(GIVEN.format(lines=lines) + "match: {vectors: vectors}\n")
    assert "sources {trunk: 30}, order fitted" in write(chosen("trunk"), path)
    now = load(path).recommend
    assert now is not None
    assert (dict(now.sources), now.order, now.max_candidates) == ({"trunk": 30}, "fitted", 50)
    text = path.read_text()
    for kept in ("# the cascade", "max_candidates: 50  # at most", "hbm_bytes", *(["# of each"] * ("# of" in lines))):
        assert kept in text


def test_what_cannot_be_written_is_said_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    for text, detail in (
        ("checkpoint: ranker\n", "no section recommend"),
        ("checkpoint: ranker\nrecommend: {sources: {trunk: 5}}\n", "not written as a block"),
        ("checkpoint: ranker\nrecommend:\n  sources: {transitions: 5}\n", r"no recommend\.sources\.trunk"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=detail):
            write(chosen("trunk"), path)
        assert path.read_text() == text
