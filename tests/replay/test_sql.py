"""Any log becomes records by a query; the queries of docs/own-data.md run as they stand there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from npu_gr.cli.main import main
from npu_gr.core.errors import DataError
from npu_gr.core.names import ActionNames, item_ids
from npu_gr.replay.convert import SqlSource
from npu_gr.replay.files import read
from npu_gr.replay.log import QueryRecord
from tests.sources import ROOT

PAGE = (ROOT / "docs" / "own-data.md").read_text()
QUERIES = dict(re.findall(r"```sql\n-- (\w+)\.sql\n(.*?)```", PAGE, re.S))
NGINX = """\
10.0.0.1 - - [28/Nov/2026:10:00:00 +0000] "GET /api/rank?user=anna&items=a,b HTTP/1.1" 200 512 "-" "curl/8" 0.250
10.0.0.1 - - [28/Nov/2026:10:00:00 +0000] "GET /api/rank?user=b%C3%B6b&items=a HTTP/1.1" 499 0 "-" "a \\"q\\" one" 0.000
10.0.0.1 - - [28/Nov/2026:10:00:01 +0000] "GET /api/rank?user=anna&items=c HTTP/1.1" 403 0 "-" "curl/8" 0.001
10.0.0.1 - - [28/Nov/2026:10:00:01 +0000] "GET /api/rank?items=c HTTP/1.1" 200 0 "-" "curl/8" 0.001
10.0.0.1 - - [28/Nov/2026:10:00:01 +0000] "GET /healthz HTTP/1.1" 200 0 "-" "probe" 0.001
"""  # noqa: E501
AT_S = 1_795_860_000.0  # 28 November 2026, 10:00:00 UTC


def records(query: str, actions: ActionNames | None = None) -> list[QueryRecord]:
    return list(SqlSource(query, actions))


def test_a_log_of_nginx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("access.log").write_text(NGINX)
    first, second = sorted(records(QUERIES["nginx"]), key=lambda one: one.user_id)
    assert (first.kind, first.user_id, second.user_id) == ("rank", "anna", "böb")
    assert first.candidate_ids().tolist() == item_ids(["a", "b"]).tolist()
    assert sorted([first.ts + 0.25, second.ts]) == [AT_S, AT_S + 0.5], "spread over their second"


def test_json_lines_of_a_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen = [{"sku": "x", "what": "cart", "time": 7}, {"sku": "y", "what": "view", "time": 9}]
    payload = {"user": {"id": 42}, "items": [{"sku": "a"}], "seen": seen}
    lines = [
        {"time": "2026-11-28T10:00:01.5Z", "path": "/rank", "payload": payload},
        {
            "time": "2026-11-28T10:00:00Z",
            "path": "/recommend",
            "payload": {"user": {"id": 7}, "items": [], "seen": None},
        },
        {"time": "2026-11-28T10:00:00Z", "path": "/livez", "payload": None},
    ]
    Path("service-1.jsonl").write_text("\n".join(map(json.dumps, lines)))
    second, first = records(QUERIES["service"], ActionNames(["view", "cart"]))
    assert (first.ts, first.kind, first.user_id, second.kind) == (
        AT_S + 1.5,
        "rank",
        "42",
        "recommend",
    )
    assert first.history is not None
    assert (first.history.items, first.history.actions) == (item_ids(["x", "y"]).tolist(), [1, 0])
    assert first.history.timestamps == [7, 9]
    assert second.history is None


def test_every_field_of_a_record_may_come(tmp_path: Path) -> None:
    query = """
        SELECT 1.5 AS ts, 'recommend' AS kind, 'u' AS user_id, 't' AS tenant,
            TIMESTAMP '2026-11-28 10:00:00' AS timestamp, 250 AS deadline_ms, NULL AS base,
            {'num_items': 5, 'deny_items': ['a', 'b'], 'context': MAP {'page': 'home'}} AS
            recommend, {'status': 200, 'latency_ms': 3.25} AS answer
    """
    (one,) = records(query)
    assert (one.ts, one.tenant, one.timestamp, one.deadline_ms) == (1.5, "t", int(AT_S), 250)
    assert one.recommend is not None
    assert (one.recommend.num_items, one.recommend.context) == (5, {"page": "home"})
    assert one.recommend.deny_items == item_ids(["a", "b"]).tolist()
    assert one.answer is not None
    assert one.answer.latency_ms == 3.25


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("SELEC 1", "the query fails: Parser Error"),
        ("SELECT 1 AS ts, 'rank' AS kind", "lacks the columns user_id"),
        (
            "SELECT 1 AS ts, 'rank' AS kind, 'u' AS user_id, [1] AS candidate",
            "unknown column candidate; did you mean candidates",
        ),
        ("SELECT 1 AS ts, 'rank' AS kind, 'u' AS user_id WHERE false", "returns no row"),
        (
            "SELECT 1 AS ts, 'rank' AS kind, 'u' AS user_id",
            "row 1 of the query: candidates: a rank needs at least one",
        ),
        (
            "SELECT 1 AS ts, 'rank' AS kind, 7 AS user_id, [1] AS candidates",
            "row 1 of the query: Expected `str`, got `int`",
        ),
        (
            "SELECT 1 AS ts, 'rank' AS kind, 'u' AS user_id, [-1] AS candidates",
            "row 1 of the query: candidates: ",
        ),
        (
            "SELECT 1 AS ts, 'rank' AS kind, 'u' AS user_id, 'a,b' AS candidates",
            "'a,b' is not a list of items",
        ),
        ("SELECT * FROM read_json('/nowhere.jsonl')", "the query fails: IO Error"),
    ],
)
def test_what_is_wrong_is_said(query: str, says: str) -> None:
    with pytest.raises(DataError, match=re.escape(says)):
        records(query)


def test_actions_that_the_model_lacks_are_named() -> None:
    query = """SELECT 1 AS ts, 'signal' AS kind, 'u' AS user_id,
        {'items': ['a'], 'actions': ['buy'], 'timestamps': [1]} AS history"""
    with pytest.raises(
        DataError, match='row 1 of the query: history: actions: "buy" at index 0 is not an action'
    ):
        records(query, ActionNames(["view"]))


def test_the_command_writes_a_log_or_leaves_what_was_there(tmp_path: Path) -> None:
    query, out = tmp_path / "q.sql", tmp_path / "traffic.jsonl.gz"
    query.write_text(
        "SELECT i / 2 AS ts, 'rank' AS kind, 'u' || i AS user_id, ['a'] AS candidates FROM "
        "range(4) AS t(i)"
    )
    command = ["replay", "convert", "sql", str(query), "--out", str(out)]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    assert f"4 records in {out}: 4 rank" in done.output
    assert [record.user_id for record in read(out)] == ["u0", "u1", "u2", "u3"]
    before = out.read_bytes()
    query.write_text("SELECT 1")
    assert CliRunner().invoke(main, command).exit_code == 2
    assert out.read_bytes() == before
