"""Access logs become the requests that they tell of; what is left out is counted, what is wrong is named."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from npu_gr.cli.main import main
from npu_gr.core.errors import ConfigError, DataError
from npu_gr.core.names import ActionNames, item_id
from npu_gr.replay.access_fields import read_time
from npu_gr.replay.access_log import AccessLog, AccessLogOptions
from npu_gr.replay.files import read
from npu_gr.replay.line_format import KNOWN, line_format, look_up
from npu_gr.replay.log import QueryRecord

AT = 1_791_640_536  # 2026-10-10 13:55:36 UTC
NGINX = KNOWN["combined"] + " $request_time"
QUERY = {"user_id": "request.query.u", "candidates": "request.query.items"}
LINES = [
    '10.0.0.1 - - [10/Oct/2026:13:55:36 +0000] "GET /rank?u=anna&items=SKU-1,7 HTTP/1.1" 200 9 "-" "\\x22b\\x22" 0.120',
    '10.0.0.1 - - [10/Oct/2026:13:55:36 +0000] "GET /healthz HTTP/1.1" 200 1 "-" "kube" 0.001',
    '10.0.0.2 - - [10/Oct/2026:15:55:36 +0200] "GET /rank?u=b%C3%B6b&items=3,4 HTTP/1.1" 502 9 "-" "x" 0.020',
    '10.0.0.2 - - [10/Oct/2026:13:55:37 +0000] "GET /rank?items=3,4 HTTP/1.1" 200 9 "-" "x" 0.020',
    '10.0.0.2 - - [10/Oct/2026:13:55:37 +0000] "OPTIONS /rank?u=a HTTP/1.1" 204 9 "-" "x" 0.020',
    '10.0.0.2 - - [10/Oct/2026:13:55:37 +0000] "GET /rank?u=a&items=3,4 HTTP/1.1" 401 9 "-" "x" 0.020',
    '10.0.0.2 - - [10/Oct/2026:13:55:38 +0000] "GET /rank?u=a&items=5 HTTP/1.1" 429 9 "-" "x" 0.500',
]


def converted(folder: Path, lines: list[str], actions: ActionNames | None = None, **options: Any) -> list[QueryRecord]:
    return list(access_log(folder, lines, actions, **options))


def access_log(folder: Path, lines: list[str], actions: ActionNames | None = None, **options: Any) -> AccessLog:
    (folder / "access.log").write_text("\n".join(lines) + "\n")
    return AccessLog([folder / "access.log"], AccessLogOptions(**options), actions)


def test_lines_of_nginx_become_ranks_at_their_arrival_and_the_others_are_counted(tmp_path: Path) -> None:
    log = access_log(tmp_path, LINES, format=NGINX, fields=QUERY, routes={"/rank": "rank"})
    first, second, third = log
    assert (first.user_id, first.candidates) == ("anna", [item_id("SKU-1"), 7])
    assert (second.user_id, second.candidates) == ("böb", [3, 4])
    arrivals = [AT - 0.12, AT + 0.5 - 0.02, AT + 2 - 0.5]  # spread over their second, less the duration
    assert [one.ts for one in (first, second, third)] == pytest.approx(arrivals)
    assert [one.answer.status for one in (first, second, third) if one.answer] == [200, 502, 429]
    assert first.answer is not None
    assert first.answer.latency_ms == pytest.approx(120)
    told = "\n".join(log.told(Path("out.jsonl")))
    assert told.startswith("3 of 7 lines are records in out.jsonl: 3 rank\n")
    for reason in (
        f"1  a path of no --route (first: {tmp_path}/access.log, line 2: /healthz)",
        f"1  no user_id (first: {tmp_path}/access.log, line 4: request has no 'query.u': it is 'GET /rank?items=3,4",
        f"1  OPTIONS asks for nothing (first: {tmp_path}/access.log, line 5)",
        f"1  status 401: refused for what it asked (first: {tmp_path}/access.log, line 6)",
        "3 times are whole seconds: requests of one second are spread over it evenly",
    ):
        assert reason in told
    assert list(log) == [first, second, third], "it may be read again, and counts anew"
    assert log.num_lines == 7


def test_json_lines_with_bodies_in_them_become_every_kind(tmp_path: Path) -> None:
    body = {
        "items": [{"id": "SKU-1"}, {"id": 2}],
        "log": {"what": ["buy"], "sku": ["SKU-9"], "at": [1_700_000_000_000]},
    }
    lines = [
        {"@timestamp": "2026-10-10T13:55:36.250Z", "http.path": "/api/de/rank", "body": json.dumps(body), "who": 17},
        {"@timestamp": "2026-10-10T13:55:36,500Z", "http.path": "/api/home", "n": "5", "who": "x", "took": 3.5},
        {
            "@timestamp": (AT + 1) * 1000 + 1,
            "http.path": "/api/did",
            "body": json.dumps(body),
            "who": "x",
            "tenant": "",
        },
    ]
    fields = {
        "ts": "@timestamp", "path": "http.path", "user_id": "who", "candidates": "body.items.*.id", "tenant": "tenant",
        "num_items": "n", "latency_ms": "took", "events.items": "body.log.sku", "events.actions": "body.log.what",
        "events.timestamps": "body.log.at",
    }  # fmt: skip
    routes = {"/api/*/rank": "rank", "/api/home": "recommend", "/api/did": "events"}
    actions = ActionNames(["view", "buy"])
    log = access_log(tmp_path, [json.dumps(line) for line in lines], actions, fields=fields, routes=routes)
    rank, home, did = log
    assert (rank.ts, rank.kind, rank.user_id, rank.candidates) == (AT + 0.25, "rank", "17", [item_id("SKU-1"), 2])
    assert (home.ts, home.kind, home.recommend and home.recommend.num_items) == (AT + 0.5, "recommend", 5)
    assert home.answer is not None
    assert (home.answer.status, home.answer.latency_ms) == (200, 3.5)
    assert (did.ts, did.kind) == (AT + 1.001, "events")
    assert did.events is not None
    assert (did.events.items, did.events.actions, did.events.timestamps) == ([item_id("SKU-9")], [1], [1_700_000_000])
    assert log.num_spread == 0
    with pytest.raises(DataError, match=r"line 3: events.actions: names, of which --checkpoint says the places"):
        converted(tmp_path, [json.dumps(line) for line in lines], fields=fields, routes=routes)


def test_envoys_own_format_is_known(tmp_path: Path) -> None:
    line = (
        '[2026-10-10T13:55:36.000Z] "POST /v1/rank?c=1,2 HTTP/2" 200 - 154 12 9 8 "10.0.0.9" "curl" "id-1" "shop" '
        '"10.0.0.2:8080"'
    )
    path = "REQ(X-ENVOY-ORIGINAL-PATH?:PATH)"
    fields = {"user_id": "REQ(X-FORWARDED-FOR)", "candidates": f"{path}.query.c"}
    (record,) = converted(tmp_path, [line], format="envoy", fields=fields)  # /v1/rank is a route of ours
    assert (record.ts, record.kind, record.user_id, record.candidates) == (AT, "rank", "10.0.0.9", [1, 2])
    assert record.answer is not None
    assert record.answer.latency_ms == pytest.approx(9)
    own = "%START_TIME(%s.%3f)% %REQ(X-USER-ID):16%"
    assert line_format(own).parse(b"1.5 me") == {"START_TIME(%s.%3f)": "1.5", "REQ(X-USER-ID)": "me"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "none of 0 lines became a record: they are empty"),
        ("nothing of it", r"line 1: not of the format: ' - ' does not come behind remote_addr; --bad-lines skip"),
        ("1 - - [", r"line 1: not of the format: '\] \"' does not come behind time_local"),
        (LINES[0].replace("SKU-1,7", ","), r"line 1: candidates=request.query.items: index 0: a name of 0 bytes"),
        (LINES[0].replace("&items=SKU-1,7", ""), r"line 1: candidates: request has no 'query.items'"),
        (LINES[0].replace("Oct", "Okt"), r"line 1: ts=time_local: '10/Okt/2026:13:55:36 \+0000' is no time"),
        (LINES[0].replace("0.120", "fast"), r"line 1: latency_s=request_time: 'fast' is no number"),
        (LINES[1], r"none of 1 lines became a record: 1 a path of no --route \(first: .*line 1: /healthz\)"),
    ],
)
def test_what_is_wrong_is_named_by_line_and_field(line: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=said):
        converted(tmp_path, [line], format=NGINX, fields=QUERY, routes={"/rank": "rank"})


def test_bad_lines_may_be_left_out_and_a_field_that_no_line_has_is_a_mistake(tmp_path: Path) -> None:
    log = access_log(
        tmp_path, ["{", "[]", '{"t": 5, "u": "a"}'], fields={"ts": "t", "user_id": "u"}, kind="match", bad_lines="skip"
    )
    assert [record.user_id for record in log] == ["a"]
    assert log.left_out["bad line"].num == 2
    assert "line 1: not JSON" in log.left_out["bad line"].first
    with pytest.raises(DataError, match=r"--field tenant=shop: no line has it: there is no 'shop'; the line has t, u"):
        converted(tmp_path, ['{"t": 5, "u": "a"}'], fields={"ts": "t", "user_id": "u", "tenant": "shop"}, kind="match")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fields": {"usr_id": "u"}}, "--field usr_id: none of ts, user_id, .*; did you mean user_id"),
        ({"fields": {"user_id": "u"}}, r"--field ts=\.\.\.: where does a line have it"),
        ({"fields": {"ts": "t", "user_id": "u"}}, "--kind: of which kind are these requests"),
        ({"fields": {"ts": "t", "user_id": "u"}, "kind": "ranks"}, "'ranks' is none of .*; did you mean rank"),
        ({"fields": {"ts": "t", "user_id": "u"}, "kind": "rank", "format": "combine"}, "did you mean combined"),
        ({"fields": {"ts": "t", "user_id": "u"}, "kind": "rank", "format": "$a$b"}, "nothing stands between a and b"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        AccessLog([Path("access.log")], AccessLogOptions(**options))


@pytest.mark.parametrize(
    ("value", "seconds", "is_whole"),
    [
        (AT, AT, True), (str(AT), AT, True), (f"{AT}.250", AT + 0.25, False), (AT * 1000 + 1, AT + 0.001, False),
        (AT * 1_000_000, AT, False), (AT * 1_000_000_000, AT, False), (float(AT), AT, False),
        ("2026-10-10T13:55:36Z", AT, True), ("2026-10-10 15:55:36.5+02:00", AT + 0.5, False),
        ("10/Oct/2026:13:55:36 +0000", AT, True),
    ],
)  # fmt: skip
def test_times_are_read_as_servers_write_them(value: Any, seconds: float, is_whole: bool) -> None:
    assert read_time(value)[0] == pytest.approx(seconds)
    assert read_time(value)[1] is is_whole


@pytest.mark.parametrize("value", [True, None, "soon", -1, 1e30, "nan", []])
def test_what_is_no_time_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="no time"):
        read_time(value)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_requests_of_one_second_stay_in_it_in_their_order(offsets: list[int]) -> None:
    log = AccessLog([], AccessLogOptions(fields={"ts": "t", "user_id": "u"}, kind="match"))
    lines = [json.dumps({"t": AT + offset, "u": str(place)}).encode() for place, offset in enumerate(offsets)]
    log._records = lambda: (made for line in lines for made in log._of_line("", line))  # type: ignore[method-assign]
    records = list(log)
    assert [int(record.ts) - AT for record in records] == offsets
    for before, after in pairwise(records):
        assert int(before.ts) != int(after.ts) or before.ts < after.ts


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\\"), max_size=8)


@given(st.lists(TEXT, min_size=2, max_size=2), TEXT)
def test_a_text_is_taken_apart_as_it_was_written(values: list[str], noise: str) -> None:
    found = line_format('"$a" - "$b"')
    for text in ('"{}" - "{}"'.format(*values), noise):
        try:
            taken = found.parse(text.encode())
        except ValueError:
            assert text == noise or '"' in "".join(values)
        else:
            assert '"{a}" - "{b}"'.format(**taken) == text


def test_a_value_is_found_by_its_place() -> None:
    line = {"a.b": 1, "c": {"d": "x"}, "request": "POST /p?q=1&q=2 HTTP/1.1", "none": "-", "url": "https://h/p?q=%20"}
    for source, value in {
        "a.b": 1, "c.d": "x", "request.query.q": ["1", "2"], "request.query.q.1": "2", "request.path": "/p",
        "request.method": "POST", "none": None, "none.more": None, "url.query.q": " ",
    }.items():  # fmt: skip
        assert look_up(line, source) == value


def test_the_command_writes_a_log_or_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "access.log").write_text("\n".join(LINES))
    out = tmp_path / "traffic.jsonl.gz"
    command = ["replay", "convert", "access-log", str(tmp_path / "access.log"), "--out", str(out), "--format", NGINX]
    command += ["--route", "/rank=rank", "--field", "user_id=request.query.u"]
    done = CliRunner().invoke(main, [*command, "--field", "candidates=request.query.items"])
    assert done.exit_code == 0, done.output
    assert f"next: npu-gr replay {out} --url" in done.output
    assert [record.user_id for record in read(out)] == ["anna", "böb", "a"]
    before = out.read_bytes()
    refused = CliRunner().invoke(main, command)
    assert (refused.exit_code, "line 1: candidates: needs some: --field candidates=" in refused.output) == (2, True)
    assert out.read_bytes() == before
    refused = CliRunner().invoke(main, [*command, "--field", "candidates"])
    assert (refused.exit_code, "--field candidates: expected two words" in refused.output) == (2, True)
