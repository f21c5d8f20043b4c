"""Without the extra `serve` there is no torch.

What needs none works, and what needs it says in one line what to do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml

from npu_gr.cli.main import main
from tests.cli.test_processes import answers, until
from tests.ports import free_port

# what Python says where torch is not installed, on a machine where it is
HOOK = """
import sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotInstalled())
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a Python without torch."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sitecustomize.py").write_text(HOOK)
    root = Path(__file__).parent.parent.parent
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(root)))}


def run(bare: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=120, env=bare
    )


def test_the_hook_hides_torch(bare: dict[str, str]) -> None:
    done = run(bare, "-c", "import torch")
    assert "ModuleNotFoundError: No module named 'torch'" in done.stderr


def test_the_client_is_imported(bare: dict[str, str]) -> None:
    code = (
        "import sys, npu_gr, npu_gr.client; npu_gr.errors, npu_gr.RANK; print([m for m in "
        "sys.modules if 'torch' in m])"
    )
    done = run(bare, "-c", code)
    assert done.stdout.strip() == "[]", done.stderr


def _commands(group: click.Group, *before: str) -> list[tuple[str, ...]]:
    found = []
    for name, command in group.commands.items():
        words = (*before, name)
        found += _commands(command, *words) if isinstance(command, click.Group) else [words]
    return found


def test_every_command_says_what_it_does(bare: dict[str, str]) -> None:
    commands = _commands(main)
    code = f"""
from npu_gr.cli.main import main
for words in {commands!r}:
    try:
        main([*words, "--help"])
    except SystemExit as end:
        assert end.code == 0, words
"""
    done = run(bare, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage:") == len(commands)


def test_keys_are_made(bare: dict[str, str], tmp_path: Path) -> None:
    path = str(tmp_path / "keys.yaml")
    done = run(
        bare,
        "-m",
        "npu_gr",
        "keys",
        "new",
        "shop",
        "--file",
        path,
        "--tenant",
        "shop",
        "--scope",
        "infer",
    )
    assert done.returncode == 0, done.stderr
    done = run(bare, "-m", "npu_gr", "keys", "list", "--file", path)
    assert "shop" in done.stdout, done.stderr


def test_a_router_runs(bare: dict[str, str], tmp_path: Path) -> None:
    config, port = tmp_path / "router.yaml", free_port()
    instances = [{"name": "a", "host": "127.0.0.1", "port": free_port()}]
    table = {
        "port": free_port(),
        "admin_port": port,
        "discovery": {"instances": instances},
        "drain_grace_s": 0.1,
    }
    config.write_text(yaml.safe_dump(table))
    command = [sys.executable, "-m", "npu_gr", "route", "--config", str(config)]
    with subprocess.Popen(command, env=bare, stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: answers(port) or process.poll() is not None)
            assert process.poll() is None
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_a_replay_runs(bare: dict[str, str], tmp_path: Path) -> None:
    """As far as the connection: nothing listens."""
    log = tmp_path / "log.jsonl"
    log.write_text(
        json.dumps({"ts": 0.0, "kind": "rank", "user_id": "u", "candidates": [1, 2]}) + "\n"
    )
    words = (
        "replay",
        str(log),
        "--url",
        f"http://127.0.0.1:{free_port()}",
        "--no-signals",
        "--json",
    )
    done = run(bare, "-m", "npu_gr", *words)
    assert "torch" not in done.stderr
    assert done.returncode == 2
    assert "no connection" in done.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("serve", ("--config", "configs/cpu.yaml")),
        ("train", ("rank", "log.jsonl", "--out", "r")),
        ("train", ("generate", "log.jsonl", "--out", "g")),
        ("doctor", ()),
        ("demo", ()),
    ],
)
def test_what_needs_torch_says_so_in_one_line(
    bare: dict[str, str], name: str, words: tuple[str, ...]
) -> None:
    done = run(bare, "-m", "npu_gr", name, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"npu-gr: {name} needs torch: pip install 'npu_gr[serve]'\n"


def test_another_module_that_is_missing_is_a_fault_of_ours(bare: dict[str, str]) -> None:
    code = """
import click
from npu_gr.cli.main import main

@main.command()
def broken():
    import npu_gr.not_there

main(["broken"])
"""
    done = run(bare, "-c", code)
    assert done.returncode == 1
    assert "No module named 'npu_gr.not_there'" in done.stderr
