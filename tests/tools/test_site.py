"""From a log to recommendations with titles: prepare, train all, serve."""

from __future__ import annotations

import csv
import datetime
import http.client
import json
import random
import shlex
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from npu_gr.cli.main import main
from npu_gr.core.kinds import KINDS
from npu_gr.train.site import make
from npu_gr.train.site.folder import NEW_ITEM
from npu_gr.train.site.side_by_side import Training
from tests.cli.test_main import is_ready
from tests.cli.test_processes import until
from tests.ports import free_port

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


def one_after_the_other(jobs: Sequence[Training[Any]], _: int, __: Any, done: Any) -> None:
    """Train without the start of processes."""
    torch.set_num_threads(1)
    for job in jobs:
        done(job.name, job.work(lambda _: None))


def command(*arguments: object) -> str:
    done = CliRunner().invoke(main, ["--log-level", "WARNING", *map(str, arguments)])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


@contextmanager
def served(site: Path) -> Iterator[tuple[int, int]]:
    """Run `npu-gr serve --config site/serve.yaml`; yields the port and the admin port."""
    port, admin_port = free_port(), free_port()
    settings = [
        f"server.port={port}",
        f"server.admin_port={admin_port}",
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
            yield port, admin_port
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
        (call[1].removeprefix("localhost:"), json.loads(call[call.index("-d") + 1]))
        for call in calls
    ]


def said_call(log: str) -> tuple[str, dict[str, Any]]:
    """The address and the body of the call that `serve` says at the end of its start."""
    words = shlex.split(log.split(" try: ")[1].splitlines()[0])
    assert words[:2] == ["curl", "-s"]
    return words[2], json.loads(words[words.index("-d") + 1])


def check_answers(site: Path, titles: set[str], *, has_features: bool) -> None:
    calls = curls((site / "README.md").read_text())
    # where items have features, an item is added by them, and withdrawn
    changes = [path for path, _ in calls if path.startswith("8081/")]
    assert changes in ([], ["8081/v1/catalog/items"] * 2)
    assert bool(changes) == has_features
    assert [path.removeprefix("8080/v1/") for path, _ in calls if path not in changes] == [
        *("recommend", "recommend", "events", "recommend", "recommend")
    ]
    with served(site) as (port, admin_port):
        ports = {"8080": port, "8081": admin_port}
        found = [post(ports[path[:4]], path.removeprefix(path[:4]), body) for path, body in calls]
        until(lambda: " try: " in (site / "log").read_text())
        url, body = said_call((site / "log").read_text())
        assert url == f"http://127.0.0.1:{port}/v1/recommend"
        status, answer = post(port, "/v1/recommend", body)
        assert (status, len(answer["items"])) == (200, 5)
    assert [status for status, _ in found] == [200] * len(calls), found
    known, cold, told, cold_again, new_item = (body for _, body in found[:5])
    assert [body["num_items"] - NUM_ITEMS for _, body in found[5:]] == [1, 0][: len(changes)]
    for answer in (known, cold, cold_again, new_item):
        items = [one["item"] for one in answer["items"]]
        assert len(items) == len(set(items)) == 5
        assert all(isinstance(item, str) for item in items)
        assert {one["title"] for one in answer["items"]} <= titles
    assert told["num_events"] == 1
    assert calls[4][1]["history"]["items"][-1] == NEW_ITEM
    history = new_item["explain"]["history"]
    assert (history["unknown_items"], history["num_tokens"]) == (1, 3)


@pytest.mark.parametrize("make_log", [company_csv, recbole_with_asins])
def test_three_commands_from_a_log_to_recommendations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_log: Any
) -> None:
    log, items = make_log(tmp_path)
    site = tmp_path / "site"
    command("prepare", log, "--items", items, "--out", site / "data")
    tiny = [word for option in TINY for word in ("--set", option)]
    if make_log is not company_csv:  # the ranker alone, in this process
        tiny = ["--without", "generator", "--without", "vectors", *tiny]
        monkeypatch.setattr(make, "side_by_side", one_after_the_other)
    said = command("train", "all", site / "data", "--out", site, *tiny)
    assert f"npu-gr serve --config {site / 'serve.yaml'}" in said
    features = json.loads((site / "data" / "manifest.json").read_text())["features"]
    first = next((one["name"] for one in features if one["kind"] == "one"), "brand")
    rule = f'# rules: {{diversity: [{{by: "{first}", most: 2}}]}}'
    assert rule in (site / "serve.yaml").read_text()
    if make_log is company_csv:
        again = command("train", "all", site / "data", "--out", site, *tiny)
        assert again.count("reusing version") == 3
        assert "0 events added" in again
    with items.open(newline="") as file:
        titles = {
            row[1] for row in csv.reader(file, delimiter="\t" if items.suffix == ".item" else ",")
        }
    check_answers(site, titles, has_features=make_log is company_csv)
