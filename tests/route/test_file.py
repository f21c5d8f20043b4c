"""HAProxy takes the file for each setting, and each setting is in it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.core.errors import ConfigError
from npu_gr.core.kinds import KINDS, Routing
from npu_gr.core.settings import from_table
from npu_gr.route.config import InstanceConfig, RouterConfig
from npu_gr.route.haproxy import RenderInputs, ids, render
from npu_gr.route.process import Proxy, Route
from tests.certificates import Authority
from tests.keys import entry, write_keys
from tests.ports import free_port

INSTANCES = [
    {"name": "gr-0", "host": "127.0.0.1", "port": 1, "agent_port": 7},
    {"name": "gr-1", "host": "::1", "port": 2, "weight": 0.5},
    {"name": "only-special", "host": "127.0.0.1", "port": 3, "normal": False},
    {"name": "only-normal", "host": "127.0.0.1", "port": 4, "special": False, "weight": 0.0},
]


async def written(folder: Path, **table: Any) -> str:
    """Write the files, let HAProxy check them, and return the main one."""
    given = {
        "port": free_port(),
        "admin_port": free_port(),
        "discovery": {"instances": INSTANCES},
        **table,
    }
    config = from_table(given, RouterConfig)
    proxy = Proxy(folder)
    route = Route(lambda: config, proxy)
    made = await route.made_now()
    await proxy.put(made)
    return (folder / "current" / "haproxy.cfg").read_text()


@pytest.mark.parametrize(
    ("table", "lines"),
    [
        (
            {},
            ["hash-type consistent", "nbthread 1", "timeout queue 35ms", "maxconn 64 maxqueue 128"],
        ),
        ({"threads": 2}, ["nbthread 2"]),
        (
            {"objective_s": 0.1},
            ["timeout queue 70ms", "set-timeout server 500ms if { path /v1/rank"],
        ),
        ({"user_header": "x-uid"}, ["req.hdr(x-uid),url_dec"]),
        ({"max_budget_s": 7.0}, ["timeout server 7000ms"]),
        ({"header_timeout_s": 3.0}, ["timeout http-request 3000ms", "wait-for-body time 3000ms"]),
        ({"idle_timeout_s": 9.0}, ["timeout http-keep-alive 9000ms"]),
        ({"shutdown_timeout_s": 4.0}, ["hard-stop-after 4000ms"]),
        ({"host": "::", "allow_unauthenticated": True}, ["bind [::]:"]),
        (
            {"health": {"interval_s": 0.2, "fall": 3, "rise": 2}},
            ["check inter 200ms fall 3 rise 2"],
        ),
        (
            {"health": {"timeout_s": 0.3, "failures": 9, "slow_start_s": 2.0}},
            ["timeout check 300ms", "slowstart 2000ms"],
        ),
        ({"health": {"failures": 9}}, ["observe layer7 error-limit 9 on-error mark-down"]),
        ({"limits": {"max_connections": 77}}, ["  maxconn 77\n"]),
        (
            {"limits": {"instance_inflight": 5, "instance_queue": 6}},
            ["maxconn 5 maxqueue 12", "queue(users) gt 18"],
        ),
        ({"limits": {"max_body_bytes": 1234}}, ["req.hdr_val(content-length) gt 1234"]),
        ({"limits": {"buffer_bytes": 32768}}, ["tune.bufsize 32768"]),
        ({"relay": {"t_life_s": 3.0, "max_remembered": 10}}, ["size 10 expire 3000ms"]),
        ({"relay": {"load_factor": 1.25}}, ["hash-balance-factor 125"]),
        (
            {"peers": {"r0": "127.0.0.1:1024", "r1": "10.0.0.2:1024"}, "peer": "r0"},
            ["localpeer r0", "peer r0 127.0.0.1:1024", "peer r1 10.0.0.2:1024"],
        ),
    ],
    ids=str,
)
async def test_each_setting_is_in_the_file_and_haproxy_takes_it(
    tmp_path: Path, table: dict[str, Any], lines: list[str]
) -> None:
    text = await written(tmp_path, **table)
    for line in lines:
        assert line in text


async def test_each_instance_has_its_place(tmp_path: Path) -> None:
    text = await written(tmp_path)
    users, _, rest = text.partition("\nbackend users")[2].partition("\nbackend any")
    anybody = rest.partition("\nbackend everywhere")[0]
    assert "server gr-0 127.0.0.1:1 id " in users
    assert "weight 100 agent-check agent-port 7 agent-inter 100ms" in users
    assert "server gr-1 [::1]:2 id " in users
    assert "weight 50" in users
    assert ("only-special" in users, "only-special" in anybody) == (True, False)
    assert ("only-normal" in users, "only-normal" in anybody) == (False, True)
    assert "agent-check" not in anybody


async def test_files_that_hold_secrets_are_private(tmp_path: Path, authority: Authority) -> None:
    pair, own = authority.issue("npu-gr"), authority.issue("router")
    text = await written(
        tmp_path,
        host="0.0.0.0",
        api_keys_file=write_keys(tmp_path / "keys", entry()),
        tls={
            "certificate": str(pair.certificate),
            "key": str(pair.key),
            "client_ca": str(authority.ca),
        },
        instances_tls={
            "ca": str(authority.ca),
            "certificate": str(own.certificate),
            "key": str(own.key),
            "server_name": "npu-gr",
        },
    )
    assert (
        f"ssl crt {tmp_path}/1/listen.pem alpn h2,http/1.1 ssl-min-ver TLSv1.3 ca-file "
        f"{authority.ca} verify required" in text
    )
    assert f"ssl verify required ca-file {authority.ca} crt {tmp_path}/1/call.pem" in text
    assert "verifyhost npu-gr sni str(npu-gr) check-sni npu-gr" in text
    assert text.count(f"map_str({tmp_path}/1/keys.map)") == 1
    folder = tmp_path / "current"
    assert {path.name for path in folder.iterdir()} >= {
        "keys.map",
        "listen.pem",
        "call.pem",
        "haproxy.cfg",
    }
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


async def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="/nowhere"):
        await written(tmp_path, tls={"certificate": "/nowhere", "key": "/nowhere"})
    with pytest.raises(ConfigError, match="HAProxy does not compare IP addresses"):
        await written(tmp_path, instances_tls={"ca": "x"})


def test_no_kind_may_be_sent_twice_but_those_that_follow() -> None:
    """One line keeps a begun signal from a second instance, and a write from being done twice."""
    config = from_table({"discovery": {"instances": INSTANCES[:1]}}, RouterConfig)
    inputs = RenderInputs(instances=[], addresses={}, keys=[])
    text = render(config, inputs)
    (follow,) = (line for line in text.splitlines() if line.startswith("  acl follow path /"))
    again = {kind.name for kind in KINDS.values() if kind.path in follow.split()}
    assert again == {kind.name for kind in KINDS.values() if kind.routing is Routing.FOLLOW}
    assert text.count("disable-l7-retry unless") == 2


@settings(deadline=None, max_examples=50)
@given(
    names=st.lists(
        st.from_regex(r"[a-z][a-z0-9.-]{0,10}[a-z0-9]", fullmatch=True), min_size=1, unique=True
    )
)
def test_the_numbers_of_instances_are_their_own(names: list[str]) -> None:
    """An instance that joins or leaves changes nobody else's number, so nobody else's users."""
    instances = [InstanceConfig(name=name, host="h", port=1) for name in names]
    number = ids(instances)
    assert len(set(number.values())) == len(names)
    assert all(0 < one < 2**31 for one in number.values())
    assert ids(instances[1:]).items() <= number.items()


def test_shown_is_what_would_be_written(tmp_path: Path) -> None:
    from npu_gr.route.process import rendered

    path = tmp_path / "router.yaml"
    path.write_text("discovery: {instances: [{name: gr-0, host: 127.0.0.1, port: 1}]}\n")
    text = asyncio.run(rendered(path))
    assert "server gr-0 127.0.0.1:1" in text
    assert "/run/npu-gr-router/stats.sock" in text
