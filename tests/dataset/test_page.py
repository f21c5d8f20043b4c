"""The files, commands, Python and output in docs/own-data.md are real."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest
from click import Command, Group
from click.testing import CliRunner

from npu_gr.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs/own-data.md").read_text()


def blocks(language: str) -> Iterator[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.M | re.S)
    yield from (text for of, text in fenced if of == language)


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the page shows, to stand in."""
    events, items = blocks("csv")
    (tmp_path / "events.csv").write_text(events)
    (tmp_path / "items.csv").write_text(items)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_prints_what_the_page_shows(shop: Path) -> None:
    command = next(blocks("")).split()
    shown = next(blocks("text"))
    done = CliRunner().invoke(main, command[1:], catch_exceptions=False)
    assert (done.exit_code, done.output) == (0, shown)


def test_the_python_runs(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {
        "frame": pyarrow.csv.read_csv(shop / "events.csv"),
        "items_frame": pyarrow.csv.read_csv(shop / "items.csv"),
    }
    for block in blocks("python"):
        exec(block, names)  # noqa: S102  (a page of ours)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "4 ('purchase', 'view')"
    assert said[1] == "4 ('purchase', 'view') ['Reading lamp, green', 'Desk', 'Desk']"


def command_of(*names: str) -> Command:
    found: Command = main
    for name in names:
        assert isinstance(found, Group)
        found = found.commands[name]
    return found


def test_the_options_of_the_page_are_there() -> None:
    commands = [command_of("prepare"), command_of("train", "all"), command_of("train", "rank")]
    commands.append(command_of("replay", "convert", "sql"))
    known = {
        name for command in commands for parameter in command.params for name in parameter.opts
    }
    assert set(re.findall(r"`(--[a-z-]+)", PAGE)) <= known


def test_the_columns_of_the_public_parquet_log_are_those_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = (text for text in blocks("text") if "completejourney" in text)
    commands = re.findall(r"^\$ npu-gr (prepare .*)$", block, re.M)
    monkeypatch.chdir(tmp_path)
    at = [datetime(2017, 1, day, 13, 28, 35) for day in (1, 1, 2, 3)]
    rows = {"household_id": [70, 70, 660, 70], "store_id": [380, 380, 380, 381]}
    rows |= {"basket_id": [1, 1, 2, 3], "product_id": [25, 26, 25, 26], "quantity": [1, 2, 0, 1]}
    files: dict[str, dict[str, list[Any]]] = {
        "transactions": rows | {"week": [1, 1, 1, 1], "transaction_timestamp": at},
        "products": {
            "product_id": [25, 26],
            "department": ["GROCERY", "DELI"],
            "brand": ["National", "Private"],
            "product_type": ["ICE", "HAM"],
        },
        "demographics": {"household_id": [70, 660], "age": ["65+", "45-54"], "income": ["A", "B"]},
    }
    for name, columns in files.items():
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / f"{name}.parquet")
    done = CliRunner().invoke(main, commands[0].split(), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    roles = ("user ", "item ", "time ", "items:", "feature ", "of the user")
    wanted = [line for line in block.splitlines() if line.strip().startswith(roles)]
    assert len(wanted) == 9
    assert [line for line in wanted if line not in done.output.splitlines()] == []
    assert "3 events, 2 users, 2 items" in done.output
