"""A site is asked for users who did not choose its cascade; the zoo repeats as often as it says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import quality_served
from benchmarks.quality_served import repeating_log, served_lines
from npu_gr.dataset.build import prepare
from npu_gr.dataset.files import read_dataset
from npu_gr.train.cascade import NextEventCase
from npu_gr.train.metrics import F64
from npu_gr.train.site.choose import selection_cases
from npu_gr.train.site.configuration import SiteOptions
from npu_gr.train.site.verdict import RANKER


@pytest.mark.parametrize("share", quality_served.REPEATS)
def test_the_zoo_repeats_as_often_as_it_says(share: float) -> None:
    lines = repeating_log(share, 60).splitlines()
    assert lines[0] == "user,item,time"
    seen: set[tuple[str, str]] = set()
    repeats, begun = 0, set()
    for user, item, _ in (line.split(",") for line in lines[1:]):
        repeats += (user, item) in seen
        begun.add(user)
        seen.add((user, item))
    found = repeats / (len(lines) - 1 - len(begun))  # the first event of a user cannot repeat
    assert found == pytest.approx(share, abs=0.03)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """In the place of trainings: every user is tested, and one baseline misses everything."""
    made: list[Path] = []

    def train_site(data: Path, site: Path, *_: object) -> SimpleNamespace:
        names = read_dataset(data).interactions().user_names
        folder = site / "ranker" / "evaluated"
        folder.mkdir(parents=True)
        ranks = np.zeros((2, 2, len(names)))
        ranks[:, 1] = np.inf
        np.savez(folder / "ranks.npz", users=names, models=[RANKER, "popularity"], ranks=ranks)
        made.append(site)
        return SimpleNamespace(cascade=SimpleNamespace(exclude_seen=False))

    monkeypatch.setattr(quality_served, "train_site", train_site)
    return made


def log(folder: Path, num_users: int) -> Path:
    (folder / "log.csv").write_text(repeating_log(0.5, num_users, num_events=4))
    prepare(folder / "log.csv", folder / "data")
    return folder / "data"


def test_users_who_chose_are_not_asked_for(tmp_path: Path, trained: list[Path]) -> None:
    data = log(tmp_path, 950)
    asked: list[str] = []

    def ask(config: Path, _: Sequence[str], cases: Sequence[NextEventCase]) -> F64:
        assert config == trained[0] / "evaluated.yaml"
        asked.extend(case.user for case in cases)
        return np.where(np.arange(len(cases)) % 2, np.inf, 0.0)

    hit, gain = served_lines("planted", data, "quick", ask=ask)
    chose = selection_cases(read_dataset(data).interactions(), SiteOptions().selection_users)
    assert len(asked) == len(set(asked)) == 350
    assert not set(asked) & {case.user for case in chose}
    assert (hit.ours, hit.baseline, hit.baseline_value, hit.ok) == (0.5, "popularity", 0.0, True)
    assert (hit.unit, gain.unit) == ("HR@10", "NDCG@10")
    assert "served planted: recommend, all items, 350 users" in hit.case
