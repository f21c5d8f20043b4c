"""A site in service stays complete, or the next run completes it, wherever a run is killed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from npu_gr.core.errors import ConfigError, DataError
from npu_gr.train.site.folder import SiteFolder, digest, digest_of_files
from npu_gr.train.site.report import PartReport, SiteCascade, SiteReport

NAMES = ["ranker", "generator", "serve.yaml", "report.json"]


def part(made_from: str) -> PartReport:
    return PartReport(
        made_from=made_from, version="v", measured_on="", num_events=1, took_s=0.0, figures=()
    )


def make(place: Path, content: str) -> None:
    with SiteFolder.opened(place) as folder:
        stage(folder, content)
        folder.put_in_place(NAMES)


def stage(folder: SiteFolder, content: str) -> None:
    for name in ("ranker", "generator"):
        (folder.begin(name) / "weights").write_text(content)
        folder.finish(name, part(content))
    for name in ("serve.yaml", "report.json"):
        folder.write(name, content.encode())


def served(place: Path) -> list[str]:
    files = [
        place / "ranker" / "weights",
        place / "generator" / "weights",
        place / "serve.yaml",
        place / "report.json",
    ]
    return [path.read_text() if path.exists() else "-" for path in files]


def test_nothing_in_service_is_touched_before_all_is_made(tmp_path: Path) -> None:
    make(tmp_path, "old")
    with SiteFolder.opened(tmp_path) as folder:
        stage(folder, "new")
        assert served(tmp_path) == ["old"] * 4
    assert served(tmp_path) == ["old"] * 4
    with SiteFolder.opened(tmp_path) as folder:
        assert folder.finished("ranker") == part("new")  # so it is not made again
        folder.discard("ranker")
        assert folder.finished("ranker") is None


@pytest.mark.parametrize("num_renames", range(7))
def test_an_interruption_while_it_is_put_in_place_is_made_good_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_renames: int
) -> None:
    make(tmp_path, "old")
    rename = os.rename
    left = num_renames

    def failing(*args: Any) -> None:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        rename(*args)

    with SiteFolder.opened(tmp_path) as folder:
        stage(folder, "new")
        with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
            patched.setattr("os.rename", failing)
            folder.put_in_place(NAMES)
    with SiteFolder.opened(tmp_path):
        assert served(tmp_path) == ["new"] * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([".lock", ".new", *NAMES])
    assert list((tmp_path / ".new").iterdir()) == []


def test_who_has_a_file_open_keeps_it(tmp_path: Path) -> None:
    make(tmp_path, "old")
    with (
        (tmp_path / "ranker" / "weights").open() as weights,
        (tmp_path / "serve.yaml").open() as serve,
    ):
        make(tmp_path, "new")
        assert weights.read() + serve.read() == "oldold"


def test_what_the_run_does_not_name_stays(tmp_path: Path) -> None:
    (tmp_path / "history.db").write_text("events")
    make(tmp_path, "old")
    with SiteFolder.opened(tmp_path) as folder:
        stage(folder, "new")
        folder.put_in_place(["ranker", "report.json"])
    assert served(tmp_path) == ["new", "old", "old", "new"]
    assert (tmp_path / "history.db").read_text() == "events"


def test_the_log_of_the_catalogues_changes_moves_to_the_new_folder(tmp_path: Path) -> None:
    make(tmp_path, "old")
    (tmp_path / "ranker" / "items.jsonl.changes").write_text("withdrawn")
    make(tmp_path, "new")
    assert (tmp_path / "ranker" / "items.jsonl.changes").read_text() == "withdrawn"
    assert served(tmp_path) == ["new"] * 4


def test_two_do_not_make_one_site(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom npu_gr.train.site.folder import SiteFolder\n"
        "with SiteFolder.opened(Path(sys.argv[1])):\n  print('in', flush=True)\n  sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "in\n"
        with (
            pytest.raises(ConfigError, match="another process makes this site"),
            SiteFolder.opened(tmp_path),
        ):
            pass
        other.kill()  # whatever ends it, the lock is free
    make(tmp_path, "new")


def test_what_cannot_be_written_or_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(DataError, match="cannot be written"),
        SiteFolder.opened(tmp_path / "file" / "site"),
    ):
        pass
    with SiteFolder.opened(tmp_path / "site") as folder:
        assert folder.report() is None
        (tmp_path / "site" / "report.json").write_text("{")
        assert folder.report() is None
        (folder.staged / "ranker.json").write_text("{")
        assert folder.finished("ranker") is None


def test_a_digest_knows_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("1")
    first = digest_of_files(tmp_path, "*.parquet")
    (tmp_path / "rejected.jsonl").write_text("1")
    assert digest_of_files(tmp_path, "*.parquet") == first
    (tmp_path / "a.parquet").write_text("2")
    second = digest_of_files(tmp_path, "*.parquet")
    (tmp_path / "a.parquet").rename(tmp_path / "b.parquet")
    assert len({first, second, digest_of_files(tmp_path, "*.parquet")}) == 3
    assert digest("a", "b") != digest("ab")


def test_a_report_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    cascade = SiteCascade(sources={"shared_encoder": 7, "match": 5}, order="blended")
    report = SiteReport(
        made_at="", dataset="", num_events=1, num_users=1, num_items=1, parts={}, cascade=cascade
    )
    old = (
        msgspec.json.encode(report)
        .replace(b"shared_encoder", b"trunk")
        .replace(b"blended", b"fitted")
    )
    with SiteFolder.opened(tmp_path) as folder:
        (tmp_path / "report.json").write_bytes(old)
        assert folder.report() == report
        (tmp_path / "report.json").write_text("[]")
        assert folder.report() is None
