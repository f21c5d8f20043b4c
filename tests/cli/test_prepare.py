"""`npu-gr prepare` says what it took and why, what it could not use, and what to run next."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from npu_gr.cli.main import main
from npu_gr.dataset import read_dataset
from tests.dataset.logs import EVENTS, write_csv


def run(*args: str | Path) -> str:
    done = CliRunner().invoke(main, ["prepare", *map(str, args)], catch_exceptions=False)
    return done.output if done.exit_code == 0 else f"exit {done.exit_code}: {done.output}"


def test_it_says_what_it_found(tmp_path: Path) -> None:
    log = write_csv(tmp_path / "log.csv", [*EVENTS, EVENTS[0]])
    with log.open("a") as file:
        file.write("garbage\n")
    (tmp_path / "items.csv").write_text("item_id,title,price\nSKU-000242-C,A lamp,9.5\n")
    said = run(log, "--out", tmp_path / "site/data", "--items", tmp_path / "items.csv")
    for line in (
        f"{log}: cells separated by ','",
        "  user           'user_id' (its name)",
        "  item           'item_id' (its name)",
        "  time           'timestamp' (its name)",
        "  event          'event_type' (its name)",
        "  items: title   'title' (its name)",
        "  times          seconds since 1970, by the size of the numbers, 2023-11-14 to 2023-11-14",
        "  actions        cart (1), purchase (1), view (3)",
        "5 events, 2 users, 2 items",
        "1 row like another one in user, item, time and action: left out (--keep-duplicates "
        "keeps them)",
        "1 row cannot be used:",
        "          1  wrong number of cells (first: 8)",
        f"next: npu-gr train all {tmp_path}/site/data --out {tmp_path}/site",
    ):
        assert line in said.splitlines(), said
    assert read_dataset(tmp_path / "site/data").manifest["events"] == 5


def test_everything_can_be_told(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(
        "ann;x1;14.11.2023 22:13;3.5;buy\nann;x1;14.11.2023 22:13;3.5;buy\nbob;x2;15.11.2023 "
        "07:00;4;view\n"
    )
    base = [str(tmp_path / "log.txt"), "--out", str(tmp_path / "data"), "--format", "csv"]
    base += [
        "--columns",
        "who,what,when,stars,did",
        "--user",
        "who",
        "--item",
        "what",
        "--time",
        "when",
    ]
    base += ["--time-format", "%d.%m.%Y %H:%M"]
    assert "actions        buy (1), view (1)" in run(*base, "--event", "did", "--value", "none")
    (tmp_path / "data/manifest.json").unlink()
    for path in (tmp_path / "data").iterdir():
        path.unlink()
    assert "actions        3.5 (2), 4 (1)" in run(*base, "--value", "stars", "--keep-duplicates")


def test_an_error_is_a_line_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user_id,customer_id,sku,ts\nu,c,i,1700000000\n")
    said = run(tmp_path / "log.csv", "--out", tmp_path / "data")
    assert said.startswith(f"exit 2: npu-gr: {tmp_path}/log.csv: 2 columns could be the user")
    assert "--user user_id or --user customer_id" in said
    assert len(said.splitlines()) == 1


def test_rows_without_a_time_are_in_order(tmp_path: Path) -> None:
    (tmp_path / "log.tsv").write_text("user_id\titem_id\nu\tb\nv\tc\nu\ta\n")
    assert "--no-time if there is none" in run(tmp_path / "log.tsv", "--out", tmp_path / "data")
    assert "none: the row number in the log is its time" in run(
        tmp_path / "log.tsv", "--out", tmp_path / "data", "--no-time"
    )
    dataset = read_dataset(tmp_path / "data")
    log = dataset.interactions()
    assert dataset.names.names(log.items) == ["b", "c", "a"]
