"""Every message counts exactly once however the consumer ends, with real processes."""

from __future__ import annotations

import json
import re
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tests.cli.test_load import Histories, service, stored
from tests.cli.test_main import write
from tests.ports import free_port
from tests.serving import FIRST_ID, write_checkpoint
from tests.tools.kafka_broker import Broker

NUM_USERS = 20


def messages(num: int, first: int = 0) -> tuple[list[tuple[int, bytes]], Histories]:
    """Messages of users who have a partition each, and the histories that they make."""
    sent = []
    users: Histories = {f"u{number}": [] for number in range(NUM_USERS)}
    for number in range(first, first + num):
        user = number % NUM_USERS
        at = 1_600_000_000 + number
        table = {
            "user_id": f"u{user}",
            "item_id": FIRST_ID + number % 99,
            "event": number % 3 + 1,
            "timestamp": at * 1000,
        }
        sent.append((user, json.dumps(table).encode()))
        users[f"u{user}"].append((FIRST_ID + number % 99, number % 3, at))
    return sent, users


@contextmanager
def consumer(broker: Broker, folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    command = [
        sys.executable,
        "-m",
        "npu_gr",
        "kafka-ingest",
        "--brokers",
        broker.address,
        "--topic",
        "events",
        *words,
    ]
    command += ["--dead-letters", str(folder / "dead.jsonl")]
    with (folder / "consumer.log").open("a") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> str:
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return out.strip()


def count(folder: Path) -> int:
    """Events in the store that a service has open."""
    with closing(sqlite3.connect(f"file:{folder}/history.db?mode=ro", uri=True)) as db:
        return int(db.execute("SELECT coalesce(sum(total), 0) FROM users").fetchone()[0])


def until(folder: Path, process: subprocess.Popen[str], num: int) -> None:
    ends_at = time.monotonic() + 120
    while count(folder) < num:
        assert process.poll() is None, (folder / "consumer.log").read_text()
        assert time.monotonic() < ends_at, (f"{count(folder)} of {num}: ") + (
            folder / "consumer.log"
        ).read_text()
        time.sleep(0.01)


def test_killed_in_the_middle_it_counts_each_message_once(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    broker = Broker()
    port = free_port()
    config = write(tmp_path, server={"port": port, "drain_grace_s": 0.1})
    sent, users = messages(500)
    poison = [
        (0, b"no JSON"),
        (1, b"{}"),
        (2, json.dumps({"user": "u", "item": 1, "event": "nap"}).encode()),
    ]
    broker.send([*sent[:150], *poison, *sent[150:250]])
    url = f"http://127.0.0.1:{port}"
    with service(config, port):
        with consumer(broker, tmp_path, "--url", url) as process:
            until(tmp_path, process, 1)
            process.send_signal(signal.SIGKILL)
            process.wait()
        metrics_port = free_port()
        with (
            consumer(
                broker, tmp_path, "--url", url, "--metrics-port", str(metrics_port)
            ) as process,
            consumer(broker, tmp_path, "--url", url) as other,
        ):
            until(tmp_path, process, 250)
            # the other one has joined the group, and takes half of the partitions
            broker.send(sent[250:400])
            until(tmp_path, other, 400)
            # its partitions come back
            assert re.fullmatch(r"\d+ written, \d+ known, \d+ dead", ended(other))
            broker.send(sent[400:])
            until(tmp_path, process, 500)
            with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics") as answer:
                text = answer.read().decode()
            printed = ended(process)
            assert re.fullmatch(r"\d+ written, \d+ known, \d+ dead", printed)
            assert 'npu_gr_consume_messages_total{result="written"}' in text
        # everything was committed: nothing comes again
        with consumer(broker, tmp_path, "--url", url) as process:
            last, more = messages(20, 500)
            broker.send(last)
            until(tmp_path, process, 520)
            assert ended(process) == "20 written, 0 known, 0 dead"
    assert stored(config, users) == {user: users[user] + more[user] for user in users}
    dead = [json.loads(line) for line in (tmp_path / "dead.jsonl").read_text().splitlines()]
    assert {line["reason"].split(":")[0] for line in dead} == {"no JSON", "no user", "event"}
    assert len({(line["partition"], line["offset"]) for line in dead}) == len(poison)


def test_a_service_that_comes_later_is_waited_for(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    broker = Broker()
    port = free_port()
    config = write(tmp_path, server={"port": port, "drain_grace_s": 0.1})
    sent, users = messages(60)
    broker.send(sent)
    with consumer(broker, tmp_path, "--url", f"http://127.0.0.1:{port}") as process:
        ends_at = time.monotonic() + 60
        while "next try in" not in (found := (tmp_path / "consumer.log").read_text()):
            assert process.poll() is None
            assert time.monotonic() < ends_at, found
            time.sleep(0.05)
        with service(config, port):
            until(tmp_path, process, 60)
            assert ended(process) == "60 written, 0 known, 0 dead"
    assert stored(config, users) == users
