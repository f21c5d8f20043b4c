"""The models of a site: the same data and options give the same files; they are trained on."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from npu_gr.catalogue.records import read_items
from npu_gr.core.settings import override
from npu_gr.dataset.build import add, prepare
from npu_gr.model import hf
from npu_gr.model.weights import load
from npu_gr.train.site.configuration import PRESETS, PartName, SiteOptions
from npu_gr.train.site.parts import EVALUATED, PARTS, Start, train_part
from npu_gr.train.site.report import PartReport
from npu_gr.train.steps import TrainingProgress
from tests.tools.test_site import TINY

OPTIONS = override(PRESETS["quick"], TINY)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    rows = [
        f"u{user},i{(user * 3 + event * 7) % 20},{('view', 'buy')[event % 4 == 3]},"
        f"{1_700_000_000 + 60 * event + user}"
        for user in range(16)
        for event in range(10)
    ]
    log = folder / "log.csv"
    log.write_text("\n".join(["user_id,item_id,event,timestamp", *rows]))
    prepare(log, folder / "data")
    return folder / "data"


def train(
    data: Path,
    site: Path,
    name: PartName,
    start: Start | None = None,
    options: SiteOptions = OPTIONS,
) -> tuple[PartReport, list[TrainingProgress]]:
    (site / name).mkdir(parents=True)
    seen: list[TrainingProgress] = []
    report = train_part(name, data, options, site / name, "digest", start, seen.append)
    return report, seen


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("site")
    for name in PARTS:
        train(data, place, name)
    return place


@pytest.mark.parametrize("name", list(PARTS))
def test_two_trainings_give_equal_files(
    tmp_path: Path, data: Path, site: Path, name: PartName
) -> None:
    torch.set_num_threads(1)
    train(data, tmp_path, name)
    files = partial(Path.rglob, pattern="*")
    made = sorted(path.relative_to(site) for path in files(site / name) if path.is_file())
    again = sorted(path.relative_to(tmp_path) for path in files(tmp_path / name) if path.is_file())
    assert made == again
    assert any(EVALUATED in path.parts for path in made)
    for path in made:
        assert (site / path).read_bytes() == (tmp_path / path).read_bytes(), path


def with_a_new_day(data: Path, folder: Path) -> Path:
    """Copy the dataset, and add a day with a new item."""
    log = folder / "day.csv"
    log.write_text(
        "user_id,item_id,event,timestamp\nu1,i3,buy,1700009000\nu1,new,view,1700009001\n"
        "u2,new,view,1700009002\nu2,i3,view,1700009003\n"
    )
    prepare(data.parent / "log.csv", folder / "data")
    add(log, folder / "data")
    return folder / "data"


def sids_of(generator: Path) -> dict[int, list[int]]:
    items = read_items(generator / "items.jsonl")
    return dict(zip(items.item_ids.tolist(), items.sids.tolist(), strict=True))


def test_nodes_keep_their_numbers_and_rows_on_a_new_day(tmp_path: Path, data: Path) -> None:
    """Also the ranker has codes, not nodes; a configuration serves the nodes of both nights."""
    options = override(OPTIONS, ["generate.own_tokens=nodes", "generate.learning_rate=1e-12"])
    place = tmp_path / "site"
    before, _ = train(data, place, "generator", options=options)
    start = Start(place, "before", before.code_count)
    today = with_a_new_day(data, tmp_path)
    after, _ = train(today, tmp_path / "new", "generator", start, options)
    assert before.node_count == after.node_count == (16, 32), "there is room for the new item"
    train(today, tmp_path / "new", "ranker", options=options)
    ranker = load(tmp_path / "new" / "ranker")
    assert ranker.model.config.item_codes == before.code_count
    for own in (EVALUATED, ""):
        old, new = (site / "generator" / own for site in (place, tmp_path / "new"))
        kept = sids_of(old)
        assert {item: sid for item, sid in sids_of(new).items() if item in kept} == kept
        tables = [hf.load(folder).embedding.weight for folder in (old, new)]
        rows = [16 + sid[1] for sid in kept.values()]
        assert torch.allclose(tables[0][rows], tables[1][rows], atol=1e-6)


def test_a_new_day_is_trained_on_and_items_keep_their_codes(
    tmp_path: Path, data: Path, site: Path
) -> None:
    today = with_a_new_day(data, tmp_path)
    alone = tmp_path / "alone"  # a site may have no generator; the ranker keeps its codes
    alone.mkdir()
    (alone / "ranker").symlink_to(site / "ranker")
    for name, place in (("generator", site), ("ranker", alone)):
        start = Start(place, "before", ())
        report, seen = train(today, tmp_path / "new", name, start)  # type: ignore[arg-type]
        assert report.started_from == "before"
        assert {step.total for step in seen if "train" in step.stage} == {1}
    sids: dict[int, list[int]] = {}
    for own in (EVALUATED, ""):
        before = sids_of(site / "generator" / own)
        sids = sids_of(tmp_path / "new" / "generator" / own)
        assert len(sids) == len(before) + 1
        assert {item: sid for item, sid in sids.items() if item in before} == before
    ranker = load(tmp_path / "new" / "ranker")
    evaluated = load(tmp_path / "new" / "ranker" / EVALUATED)
    of_item = sids_of(tmp_path / "new" / "generator" / EVALUATED)
    assert evaluated.model.codes.of_item.tolist() == [
        of_item[item] for item in evaluated.item_ids.tolist()
    ]
    assert ranker.model.codes.of_item.tolist() == [sids[item] for item in ranker.item_ids.tolist()]
