"""From a log to recommendations with titles: prepare, train all, serve."""

from __future__ import annotations

import csv
import datetime
import http.client
import json
import random
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from npu_gr.cli.main import main
from npu_gr.core.kinds import KINDS
from npu_gr.train.site.folder import NEW_ITEM
from tests.cli.test_main import free_port, is_ready
from tests.cli.test_processes import until

NUM_USERS, NUM_EVENTS, NUM_ITEMS = 60, 30, 80
TINY = (
    *(
        "rank.epochs=1",
        "rank.dim=16",
        "rank.head_dim=16",
        "rank.qk_dim=8",
        "rank.v_dim=8",
        "rank.test_users=20",
    ),
    *(
        "generate.epochs=1",
        "generate.dim=16",
        "generate.mlp_dim=16",
        "generate.code_count=[16, 16]",
    ),
    *(
        "generate.test_users=20",
        "generate.validation_users=10",
        "generate.vector_dim=8",
        "retrieve.dim=8",
    ),
    *(
        "retrieve.windows=[5]",
        "retrieve.powers=[0.5]",
        "retrieve.decays=[0.8]",
        "retrieve.priors=[0.1]",
    ),
)


def company_csv(folder: Path) -> tuple[Path, Path]:
    """Users are UUIDs, items SKUs, times ISO with zones, one row in fifty is broken."""
    draw = random.Random(0)
    users = [str(uuid.UUID(int=draw.getrandbits(128), version=4)) for _ in range(NUM_USERS)]
    skus = [f"SKU-{number:05d}-{draw.choice('ABC')}" for number in range(NUM_ITEMS)]
    began_at = datetime.datetime(2026, 9, 1, tzinfo=datetime.UTC)
    rows = []
    for user in users:
        at, item = (
            began_at + datetime.timedelta(hours=draw.random() * 100),
            draw.randrange(NUM_ITEMS),
        )
        for _ in range(NUM_EVENTS):
            at += datetime.timedelta(minutes=draw.expovariate(1 / 60))
            item = (item * 7 + 3) % NUM_ITEMS if draw.random() < 0.7 else draw.randrange(NUM_ITEMS)
            event = draw.choices(["view", "cart", "purchase"], [8, 2, 1])[0]
            rows.append([user, skus[item], event, at.isoformat()])
    for place in draw.sample(range(len(rows)), len(rows) // 50):
        column, value = draw.choice([(0, ""), (1, ""), (3, "yesterday"), (3, "0000-00-00")])
        rows[place] = [value if at == column else cell for at, cell in enumerate(rows[place])]
    log, items = folder / "events.csv", folder / "items.csv"
    with log.open("w", newline="") as file:
        csv.writer(file).writerows([["visitor_id", "sku", "event_type", "event_time"], *rows])
    with items.open("w", newline="") as file:
        named = [
            [sku, f'Thing "{number}", großes', draw.choice(["toys", "tools"])]
            for number, sku in enumerate(skus)
        ]
        csv.writer(file).writerows([["sku", "title", "category"], *named])
    return log, items


def recbole_with_asins(folder: Path) -> tuple[Path, Path]:
    """Atomic files as RecBole has Amazon's: tokens are texts, ratings floats."""
    draw = random.Random(1)
    asins = [f"B{draw.randrange(36**8):09X}"[:10] for _ in range(NUM_ITEMS)]
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    for user in range(NUM_USERS):
        at = 1_400_000_000 + draw.randrange(10**7)
        for _ in range(NUM_EVENTS):
            at += draw.randrange(86_400)
            lines.append(f"A{user:013d}\t{draw.choice(asins)}\t{draw.randint(1, 5)}.0\t{at}")
    log, items = folder / "amazon.inter", folder / "amazon.item"
    log.write_text("\n".join(lines) + "\n")
    titles = [f"{asin}\tThing {number}" for number, asin in enumerate(asins)]
    items.write_text("\n".join(["item_id:token\ttitle:token", *titles]) + "\n")
    return log, items


def command(*arguments: object) -> str:
    done = CliRunner().invoke(main, ["--log-level", "WARNING", *map(str, arguments)])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


@contextmanager
def served(site: Path) -> Iterator[int]:
    """Run `npu-gr serve --config site/serve.yaml`; yields the port."""
    port = free_port()
    settings = [
        f"server.port={port}",
        f"server.admin_port={free_port()}",
        "server.drain_grace_s=0.1",
    ]
    settings += [
        "history_store.read_timeout_s=5.0",
        "history_store.timeout_s=10.0",
    ]  # a busy machine
    settings += [f"slo.{kind}_s=5.0" for kind in KINDS]
    line = [sys.executable, "-m", "npu_gr", "serve", "--config", str(site / "serve.yaml")]
    line += [word for setting in settings for word in ("--set", setting)]
    with (
        (site / "log").open("wb") as log,
        subprocess.Popen(line, stdout=log, stderr=log) as process,
    ):
        try:
            until(lambda: is_ready(port) or process.poll() is not None)
            assert process.poll() is None, (site / "log").read_text()
            yield port
            process.terminate()
            assert process.wait(30) == 0
        finally:
            process.kill()


def post(port: int, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        headers = {"Content-Type": "application/json", "X-Request-Timeout-Ms": "20000"}
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def curls(readme: str) -> list[tuple[str, dict[str, Any]]]:
    """The path and the body of every call in a README, as a shell reads them."""
    lines = [line for line in readme.splitlines() if line.startswith("curl ")]
    words = subprocess.run(
        ["bash", "-c", "curl() { printf '%s\\0' \"$@\"; printf '\\0\\0'; }; eval \"$(cat)\""],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    calls = [call.split("\0") for call in words.split("\0\0\0") if call]
    return [
        (call[1].removeprefix("localhost:8080"), json.loads(call[call.index("-d") + 1]))
        for call in calls
    ]


def check_answers(site: Path, titles: set[str]) -> None:
    calls = curls((site / "README.md").read_text())
    assert [path for path, _ in calls] == ["/v1/recommend"] * 2 + ["/v1/events"] + [
        "/v1/recommend"
    ] * 2
    with served(site) as port:
        found = [post(port, path, body) for path, body in calls]
    assert [status for status, _ in found] == [200] * len(calls), found
    known, cold, told, cold_again, new_item = (body for _, body in found)
    for answer in (known, cold, cold_again, new_item):
        assert len(answer["items"]) == len(set(answer["items"])) == 5
        assert all(isinstance(item, str) for item in answer["items"])
        assert set(answer["titles"]) <= titles
    assert known["history"]["source"] == "store"
    assert known["history"]["num_tokens"] > 5
    assert set(cold["origins"]) <= {"shared_encoder", "popular", "match"}
    assert told["num_events"] == 1
    assert cold_again["history"]["num_tokens"] == 1
    assert calls[-1][1]["history"]["items"][-1] == NEW_ITEM
    assert new_item["history"]["unknown_items"] == 1
    assert new_item["history"]["num_tokens"] == 3


@pytest.mark.parametrize("make_log", [company_csv, recbole_with_asins])
def test_three_commands_from_a_log_to_recommendations(tmp_path: Path, make_log: Any) -> None:
    log, items = make_log(tmp_path)
    site = tmp_path / "site"
    command("prepare", log, "--items", items, "--out", site / "data")
    tiny = [word for option in TINY for word in ("--set", option)]
    said = command("train", "all", site / "data", "--out", site, *tiny)
    assert f"npu-gr serve --config {site / 'serve.yaml'}" in said
    if make_log is company_csv:
        again = command("train", "all", site / "data", "--out", site, *tiny)
        assert again.count("reusing version") == 3
        assert "0 events added" in again
    with items.open(newline="") as file:
        titles = {
            row[1] for row in csv.reader(file, delimiter="\t" if items.suffix == ".item" else ",")
        }
    check_answers(site, titles)
