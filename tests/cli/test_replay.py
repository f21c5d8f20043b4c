"""`npu-gr replay` from outside: its files, its words, Ctrl-C, and one line for what is wrong."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from npu_gr.replay.answers import read_answers
from npu_gr.replay.files import write
from npu_gr.replay.log import QueryRecord
from tests.ports import free_port
from tests.replay.fake import Fake, service


async def start(*words: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "npu_gr", "replay", *words, stdout=pipe, stderr=pipe
    )


async def run(*words: str) -> tuple[int | None, str, str]:
    process = await start(*words)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, out.decode(), err.decode()


def log(folder: Path, num: int = 30, gap_s: float = 0.01) -> str:
    records = [
        QueryRecord(ts=i * gap_s, kind="rank", user_id=f"u{i % 7}", candidates=[1, 2])
        for i in range(num)
    ]
    write(folder / "log.jsonl.gz", records)
    return str(folder / "log.jsonl.gz")


async def test_a_sweep_leaves_its_report_as_tables_json_page_and_answers(tmp_path: Path) -> None:
    async with service() as fake:
        words = ("--url", fake.url, "--rate", "100", "--rate", "200", "--signal-lead-ms", "5")
        code, out, err = await run(log(tmp_path), *words, "--out", str(tmp_path / "out"))
    assert code == 0, err
    assert "poisson 200/s" in out
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [run["settings"]["rate"] for run in report["runs"]] == [100, 200]
    assert [run["num_ranks"] for run in report["runs"]] == [30, 30]
    assert fake.kinds().count("signal") == 60
    assert "</html>" in (tmp_path / "out" / "report.html").read_text()
    for name in ("answers.jsonl.gz", "answers-2.jsonl.gz"):
        assert sorted(line.number for line in read_answers(tmp_path / "out" / name)) == list(
            range(30)
        )


async def test_ctrl_c_gives_the_report_so_far(tmp_path: Path) -> None:
    came = asyncio.Event()

    async def tell(_fake: Fake, _body: dict[str, Any]) -> None:
        came.set()

    async with service(tell) as fake:
        process = await start(
            log(tmp_path, 2, gap_s=3600.0), "--url", fake.url, "--no-signals", "--json"
        )
        await asyncio.wait_for(came.wait(), 60)
        await asyncio.sleep(0.5)  # for the answer to arrive
        process.send_signal(signal.SIGINT)
        out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err
    (report,) = json.loads(out)["runs"]
    assert (report["interrupted"], report["num_ranks"]) == (True, 1)


async def test_a_run_that_got_only_errors_fails(tmp_path: Path) -> None:
    async def reject(_fake: Fake, body: dict[str, Any]) -> web.Response | None:
        return web.Response(status=422) if body["kind"] == "rank" else None

    async with service(reject) as fake:
        code, out, err = await run(log(tmp_path), "--url", fake.url, "--signal-lead-ms", "5")
    assert (code, "signal" in fake.kinds()) == (1, True)
    assert "error: nothing was answered: 30 x rank 422" in err
    assert "rank 422" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--speed", "2", "--rate", "3"), "--speed and --rate exclude each other"),
        (("--closed", "2", "--rate", "3"), "closed"),
        (("--rank-delay-ms", "5", "--signal-lead-ms", "5"), "rank_delay_s"),
        (("--sample-users", "2"), "sample_users"),
    ],
)
async def test_what_does_not_go_together_is_one_line(
    tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    code, _, err = await run(log(tmp_path, 2), *words)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err


async def test_a_port_where_nothing_listens_is_said_at_once(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    code, out, err = await run(log(tmp_path, num=10**4), "--url", url)
    assert (code, out) == (2, "")
    assert f"{url}: no connection" in err
    assert "start the service with npu-gr serve" in err
