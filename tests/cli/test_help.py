"""The help of a group explains each command in one whole line, and every option has a help."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from npu_gr.cli.main import GONE, main
from npu_gr.core.renamed import COMMANDS


def commands(
    group: click.Group, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, group
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


ALL = dict(commands(main))


@pytest.mark.parametrize(
    "path", [path for path, one in ALL.items() if isinstance(one, click.Group)], ids=" ".join
)
def test_no_line_of_a_groups_help_is_cut(path: tuple[str, ...]) -> None:
    done = CliRunner().invoke(main, [*path, "--help"], terminal_width=80)
    assert done.exit_code == 0, done.output
    listed = done.output.partition("Commands:\n")[2].splitlines()
    group = ALL[path]
    assert isinstance(group, click.Group)
    assert len(listed) == len(group.commands)  # a line each
    assert [line for line in listed if line.endswith("...")] == []


def test_json_is_explained_everywhere() -> None:
    options = [
        (path, one)
        for path, command in ALL.items()
        for one in command.params
        if "--json" in one.opts
    ]
    assert len(options) > 5
    assert [
        path for path, one in options if not isinstance(one, click.Option) or not one.help
    ] == []


def test_there_are_few_commands() -> None:
    assert sum(not isinstance(one, click.Group) for one in ALL.values()) <= 42


@pytest.mark.parametrize("name", GONE)
def test_a_command_that_went_says_what_takes_its_place(name: str) -> None:
    done = CliRunner().invoke(main, [*name.split(), "x"])
    assert done.exit_code == 2
    assert f"npu-gr {name} was removed; use: {GONE[name]}" in done.output
    assert tuple(name.split()) not in ALL


@pytest.mark.parametrize(("old", "new"), COMMANDS.items())
def test_an_old_name_of_a_command_works_with_a_warning(old: str, new: str) -> None:
    done = CliRunner().invoke(main, [old, "--help"])
    assert done.exit_code == 0
    assert f"npu-gr {old} is now npu-gr {new}" in done.stderr
    assert f"Usage: main {new}" in done.stdout
    assert f"\n  {old} " not in CliRunner().invoke(main, ["--help"]).output
