"""Every command of the runbooks that needs no fault has output on a live instance."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.metrics.live import demo_sections, listening, load, routed
from tests.metrics.test_dashboards import ROOT

RUNBOOKS = ROOT / "docs" / "runbooks"
# one may be empty, where the page says so
COMMAND = re.compile(r"`(curl [^`]+)`(?!,? which is empty unless)")
CHANGES = ("-X POST", "-X DELETE")  # they are for a fault
LOAD_S = 3.0


def commands() -> dict[str, set[str]]:
    """The commands, which may stand on two lines, and the pages that have them."""
    found: dict[str, set[str]] = {}
    for page in sorted(RUNBOOKS.glob("*.md")):
        for command in COMMAND.findall(" ".join(page.read_text().split())):
            found.setdefault(command, set()).add(page.name)
    return found


def output(command: str, folder: Path) -> str:
    """Run a command as an operator's shell does; files that it writes count as its output."""
    folder.mkdir()
    words = ("bash", "-o", "pipefail", "-c", command)
    done = subprocess.run(words, cwd=folder, capture_output=True, timeout=60)
    if done.returncode:
        return ""
    files = [path.name for path in folder.iterdir() if path.stat().st_size]
    return done.stdout.decode().strip() or " ".join(files)


async def test_every_command_has_output(tmp_path: Path) -> None:
    for program in ("curl", "jq", "haproxy"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program} (Debian: {program})")
    ran = {
        command: pages
        for command, pages in commands().items()
        if not any(word in command for word in CHANGES)
    }
    assert len(ran) > 20
    silent = []
    async with (
        listening(tmp_path, **demo_sections(tmp_path)) as (port, admin_port),
        routed(port) as (router_url, router_admin_url),
    ):
        await load(f"http://127.0.0.1:{port}", LOAD_S, router_url)
        for number, (command, pages) in enumerate(ran.items()):
            real = command.replace("seconds=10", "seconds=1")
            for name, url in (
                ("ROUTER_ADMIN", router_admin_url),
                ("INSTANCE", f"http://127.0.0.1:{port}"),
                ("ADMIN", f"http://127.0.0.1:{admin_port}"),
            ):
                real = real.replace(name, url)
            said = await asyncio.to_thread(output, real, tmp_path / f"run-{number}")
            if said in ("", "null") or '"status":404' in said:
                silent.append((command, sorted(pages), said))
    assert not silent, silent


def test_every_address_in_a_command_is_explained() -> None:
    """`ADMIN` alone says nothing to who is woken at night."""
    for page in sorted(RUNBOOKS.glob("*.md")):
        text = page.read_text()
        commanded = " ".join(COMMAND.findall(" ".join(text.split())))
        for name in ("ROUTER_ADMIN", "INSTANCE", "ADMIN"):
            if re.search(rf"\b{name}\b", commanded):
                assert re.search(rf"`{name}` (is|its|the)", " ".join(text.split())), (
                    page.name,
                    name,
                )
