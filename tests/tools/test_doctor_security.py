"""`npu-gr doctor --security` lists all entry points, who can use them, and remedies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import CliRunner

from npu_gr.cli.main import main
from npu_gr.core.kinds import Scope
from npu_gr.route.config import Port, RouterConfig
from npu_gr.service.config import Config
from npu_gr.simulate.config import SimulateConfig
from npu_gr.tools.check_config import table
from npu_gr.tools.doctor_security import LINES, Openness, WayIn, examine, is_closed, ways_in
from tests.keys import entry, write_keys

TLS = {"certificate": "tls.crt", "key": "tls.key", "client_ca": "ca.crt"}


def instance(folder: Path, **sections: Any) -> list[WayIn]:
    given = {"checkpoint": "model", "history_store": {"kind": "none"}, **sections}
    path = folder / "instance.yaml"
    path.write_text(yaml.safe_dump(given))
    return examine(path)


def router(folder: Path, **settings: Any) -> list[WayIn]:
    path = folder / "router.yaml"
    discovery = {
        "instances": [{"name": "a", "host": settings.pop("to", "127.0.0.1"), "port": 8080}]
    }
    path.write_text(yaml.safe_dump({"discovery": discovery, **settings}))
    return examine(path)


def of(found: list[WayIn], begin: str) -> WayIn:
    (one,) = [way for way in found if way.what.startswith(begin)]
    return one


@pytest.mark.parametrize("name", ["cpu.yaml", "router.yaml"])
def test_what_ships_is_open_to_this_machine_alone(name: str) -> None:
    found = examine(Path("configs") / name)
    assert {way.openness for way in found} <= {Openness.LOCAL, Openness.CLOSED}
    assert any("all users of this machine, with no key" in way.whom for way in found)


def test_an_address_without_keys_is_open(tmp_path: Path) -> None:
    found = instance(tmp_path, server={"host": "0.0.0.0", "allow_unauthenticated": True})
    assert of(found, "server 0.0.0.0:8080")[1:3] == (
        Openness.OPEN,
        "all hosts that can connect, with no key",
    )
    assert of(found, "server.admin 127.0.0.1:8081").openness is Openness.LOCAL
    assert not is_closed(found)


def test_keys_in_clear_are_open_and_over_tls_closed(tmp_path: Path) -> None:
    server = {
        "host": "0.0.0.0",
        "admin_host": "10.0.0.7",
        "api_keys_file": write_keys(tmp_path / "keys"),
    }
    (tmp_path / "keys").chmod(0o600)
    clear = instance(tmp_path, server=server)
    assert "an eavesdropper" in of(clear, "server 0").whom
    found = instance(tmp_path, server={**server, "tls": TLS})
    assert of(found, "server 0")[1:3] == (
        Openness.CLOSED,
        "clients with a key with the scope of the route (erase, infer, ingest, observe) and a "
        "certificate",
    )
    assert of(found, "server.admin 10")[1:3] == (
        Openness.CLOSED,
        "clients with a key with the scope of the route (admin, observe)",
    )


def test_one_address_for_both_is_open(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", entry("ops", scopes=[Scope.ADMIN]))
    server = {
        "host": "10.0.0.1",
        "admin_host": "10.0.0.1",
        "port": 8080,
        "admin_port": 8080,
        "api_keys_file": keys,
    }
    found = instance(tmp_path, server={**server, "tls": TLS})
    assert "(admin, erase, infer, ingest, observe)" in of(found, "server 10").whom
    assert of(found, "server.admin_port").openness is Openness.OPEN


def test_each_key_says_what_it_may(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write_keys(
        path,
        entry("everything"),
        entry("ranking", tenant="shop", scopes=[Scope.INFER, Scope.INGEST]),
    )
    path.chmod(0o620)
    found = instance(tmp_path, server={"api_keys_file": str(path)})
    assert of(found, "key everything").openness is Openness.OPEN
    assert of(found, "key ranking")[1:3] == (
        Openness.CLOSED,
        "infer, ingest for the tenant 'shop'; expires never",
    )
    assert "other users can add keys, because its mode is 620" in of(found, "api_keys_file").whom
    path.unlink()
    assert (
        of(instance(tmp_path, server={"api_keys_file": str(path)}), "api_keys_file").openness
        is Openness.OPEN
    )


def test_every_caller_as_a_proxy_is_open(tmp_path: Path) -> None:
    found = instance(tmp_path, server={"trusted_proxies": ["10.1.0.0/16", "0.0.0.0/0"]})
    assert of(found, "server.trusted_proxies 0.0.0.0/0").openness is Openness.OPEN
    assert of(found, "server.trusted_proxies 10.1").openness is Openness.CLOSED


@pytest.mark.parametrize(
    ("url", "openness"),
    [
        ("redis://127.0.0.1:6379/0", {Openness.LOCAL}),
        ("unix:///run/redis.sock", {Openness.LOCAL}),
        ("rediss://:hidden@db:6379/0", {Openness.CLOSED}),
        ("redis://:hidden@db:6379/0", {Openness.OPEN}),
        ("rediss://db:6379/0", {Openness.CLOSED, Openness.OPEN}),  # no password
    ],
)
def test_redis(tmp_path: Path, url: str, openness: set[Openness]) -> None:
    found = instance(tmp_path, history_store={"kind": "redis", "url": url})
    assert {way.openness for way in found if way.what.startswith("history_store.url")} == openness
    assert "hidden" not in table(found)


def test_files_that_others_can_read_are_open(tmp_path: Path) -> None:
    store, folder = tmp_path / "history.db", tmp_path / "traffic"
    folder.mkdir()
    for path, mode in ((store, 0o644), (folder / "traffic-1.jsonl", 0o600)):
        path.touch()
        path.chmod(mode)
    found = instance(
        tmp_path,
        history_store={"path": str(store)},
        record={"folder": str(folder), "users": "clear"},
        server={"otlp_endpoint": "http://me:hidden@collector:4318/v1/traces"},
    )
    assert of(found, f"history_store.path {store}")[1:] == (
        Openness.OPEN,
        "other users can read it, because its mode is 644",
        f"chmod 600 {store}",
    )
    assert of(found, f"record.folder {folder}/traffic-1").openness is Openness.CLOSED
    assert "recordings have user ids in clear text" in table(found)
    assert of(found, "server.otlp_endpoint").openness is Openness.OPEN
    assert "hidden" not in table(found)


def test_a_router(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", entry("ops", scopes=[Scope.ADMIN]))
    found = router(tmp_path, to="gr-0", host="0.0.0.0", api_keys_file=keys, tls=TLS)
    assert of(found, "router 0").openness is Openness.CLOSED
    assert of(found, "instances gr-0").openness is Openness.OPEN
    pair = {name: TLS[name] for name in ("certificate", "key")}
    found = router(
        tmp_path, to="gr-0", host="0.0.0.0", api_keys_file=keys, tls=TLS, instances_tls=pair
    )
    assert of(found, "instances gr-0")[1:3] == (
        Openness.CLOSED,
        "encrypted; the router presents a certificate",
    )


def test_a_routers_picker_and_peers(tmp_path: Path) -> None:
    found = router(tmp_path, picker={}, peers={"r0": "127.0.0.1:1024"}, peer="r0")
    assert of(found, "router.picker").openness is of(found, "peers.r0").openness is Openness.LOCAL
    keys = write_keys(tmp_path / "keys", entry("ops", scopes=[Scope.ADMIN]))
    given = {"api_keys_file": keys, "peers": {"r0": "10.0.0.1:1024"}, "peer": "r0"}
    found = router(tmp_path, picker={"host": "0.0.0.0"}, **given)
    assert of(found, "router.picker").openness is of(found, "peers.r0").openness is Openness.OPEN
    found = router(tmp_path, picker={"host": "0.0.0.0", "tls": TLS}, **given)
    assert of(found, "router.picker").openness is Openness.CLOSED


def test_the_command_fails_where_something_is_open(tmp_path: Path) -> None:
    run = CliRunner().invoke
    instance(tmp_path)
    path = str(tmp_path / "instance.yaml")
    done = run(main, ["doctor", "--security", "--config", path])
    assert (done.exit_code, done.output.split()[0]) == (0, "local")
    given = ["doctor", "--security", "--json", "--config", path]
    done = run(
        main, [*given, "--set", "server.host=0.0.0.0", "--set", "server.allow_unauthenticated=true"]
    )
    assert done.exit_code == 1
    printed = json.loads(done.output)
    assert printed["ok"] is False
    assert {way["openness"] for way in printed["ways_in"]} == {"open", "local"}
    assert run(main, ["doctor", "--security"]).exit_code == 2


def test_what_is_accepted_is_shown_and_does_not_fail(tmp_path: Path) -> None:
    run = CliRunner().invoke
    keys = write_keys(tmp_path / "keys", entry("one", scopes=[Scope.INFER]))
    server = {"host": "10.0.0.1", "api_keys_file": keys, "tls": TLS, "agent_port": 8082}
    instance(tmp_path, server=server)
    command = ["doctor", "--security", "--config", str(tmp_path / "instance.yaml")]
    assert run(main, command).exit_code == 1
    done = run(main, [*command, "--accept", "server.agent"])
    assert (done.exit_code, "known   server.agent 10.0.0.1:8082" in done.output) == (0, True)
    done = run(main, [*command, "--accept", "server.agent", "--accept", "picker"])
    assert "--accept picker: no open line begins so" in done.output
    assert done.exit_code == 2


# every setting that may be a host, port, path, URL or file, on addresses of others
INSTANCE: dict[str, Any] = {
    "checkpoint": "{folder}/model",
    "hstu_library": "{folder}/file",
    "server": {
        "host": "10.0.0.1",
        "admin_host": "10.0.0.2",
        "grpc_port": 8083,
        "agent_port": 8082,
        "trusted_proxies": ["10.0.0.3"],
        "log_user_key_file": "{folder}/file",
        "otlp_endpoint": "http://collector:4318",
        "api_keys_file": "{folder}/keys",
        "tls": dict.fromkeys(TLS, "{folder}/file"),
    },
    "history_store": {
        "kind": "redis",
        "url": "rediss://db:6379",
        "tls": dict.fromkeys(("ca", "certificate", "key"), "{folder}/file"),
    },
    "feature_store": {"entry": "shop.features:Source", "options": {"url": "http://features"}},
    "generate": {
        "checkpoint": "{folder}/model",
        "catalogue": "{folder}/file",
        "codes": [4],
        "change_log": "{folder}/file",
    },
    "match": {"vectors": "{folder}/model"},
    "models": {"deltas_from": "{folder}/model"},
    "recommend": {
        "hook": "shop.hook:run",
        "hook_after": "shop.hook:order",
        "popular": "{folder}/file",
    },
    "record": {"folder": "{folder}/traffic", "hash_key_file": "{folder}/file"},
}
ROUTER: dict[str, Any] = {
    "host": "10.0.0.1",
    "admin_host": "10.0.0.2",
    "api_keys_file": "{folder}/keys",
    "tls": dict.fromkeys(TLS, "{folder}/file"),
    "instances_tls": dict.fromkeys(("ca", "certificate", "key"), "{folder}/file"),
    "picker": {"host": "10.0.0.3", "tls": dict.fromkeys(TLS, "{folder}/file")},
    "peers": {"r0": "10.0.0.1:1024"},
    "peer": "r0",
}
ONE = {"host": "gr-0", "port": 8080, "agent_port": 8082}
DISCOVERIES: list[dict[str, Any]] = [
    {"instances": [{"name": "a", **ONE}]},
    {"dns": ONE},
    {"file": "{folder}/instances.yaml"},
]


def reported(folder: Path, table: dict[str, Any]) -> list[WayIn]:
    """The report of a configuration; `{folder}` in it is this folder, with all files."""
    (folder / "model").mkdir(exist_ok=True)
    for name in ("file", "history.db", "traffic/traffic-1.jsonl"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch(0o600)
    write_keys(folder / "keys", entry("one", scopes=[Scope.INFER]))
    (folder / "instances.yaml").write_text(yaml.safe_dump({"instances": [{"name": "a", **ONE}]}))
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(table).replace("{folder}", str(folder)))
    return examine(path)


@pytest.mark.parametrize("cls", [Config, RouterConfig])
def test_every_host_port_path_url_and_file_of_the_types_has_a_line(
    cls: type[Any], tmp_path: Path
) -> None:
    """A new text or port is a way in until somebody says what it is: it fails here first."""
    if cls is Config:
        embedded = {"history_store": {"path": "{folder}/history.db"}}
        pooled = {"kv_cache": {"pool": "mooncake://127.0.0.1:50051"}}
        stream = {"models": {"deltas_stream": "redis://db:6379"}}
        tables = [INSTANCE, {**INSTANCE, **embedded, **pooled, **stream}]
    else:
        tables = [{**ROUTER, "discovery": one} for one in DISCOVERIES]
    found = [way for table in tables for way in reported(tmp_path, table)]
    assert not [way for way in found if "unknown to this report" in way.whom]
    has_none = [
        path
        for path in ways_in(cls)
        if not any(way.what.startswith(LINES.get(path) or path) for way in found)
    ]
    assert has_none == []
    assert len(ways_in(cls)) > 20
    assert not is_closed(found)


class Server(msgspec.Struct, frozen=True):
    """A section of settings that are not ours yet."""

    host: str = "127.0.0.1"
    socket: str = "/run/x"


class New(msgspec.Struct, frozen=True):
    """Settings that are not ours yet."""

    server: Server = Server()
    hosts: list[str] = []
    by_name: dict[str, str] = {}
    port: Port = 1
    number: int = 1


def test_a_new_setting_is_open_until_it_has_a_line() -> None:
    assert ways_in(New) == ["server.host", "server.socket", "hosts", "by_name", "port"]


def test_the_settings_of_a_simulation_are_files_alone() -> None:
    found = ways_in(SimulateConfig)
    # its memory tiers are those of an instance, but it opens no pool
    assert [path for path in found if path != "kv_cache.pool"] == ["device", "users"]


@pytest.mark.parametrize(
    ("section", "field", "begin"),
    [
        ("server", "host", "server 10."),
        ("server", "admin_host", "server.admin 10."),
        ("server", "grpc_port", "server.grpc 10."),
        ("server", "agent_port", "server.agent 10."),
        ("", "host", "router 10."),
        ("", "admin_host", "router.admin 10."),
        ("picker", "host", "router.picker 10."),
        ("peers", "r0", "peers.r0"),
        ("discovery", "agent", "agent gr-0"),
        ("discovery", "instances", "instances gr-0"),
    ],
)
def test_an_address_of_others_in_clear_or_without_a_key_is_open(
    tmp_path: Path, section: str, field: str, begin: str
) -> None:
    given: dict[str, Any]
    if section == "server":
        server = {"host": "10.0.0.1", "admin_host": "10.0.0.2", "allow_unauthenticated": True}
        server |= {"grpc_port": 8083, "agent_port": 8082}
        tables = [{"checkpoint": "model", "server": server}]
    else:
        given = {"host": "10.0.0.1", "admin_host": "10.0.0.2", "allow_unauthenticated": True}
        given |= {name: ROUTER[name] for name in ("peers", "peer")}
        tables = [
            {**given, "picker": {"host": "10.0.0.3"}, "discovery": one} for one in DISCOVERIES
        ]
    for one in tables:
        assert of(reported(tmp_path, one), begin).openness is Openness.OPEN


def test_files_that_are_read_and_addresses_of_every_kind_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir(mode=0o755)
    (tmp_path / "popular.txt").touch()
    (tmp_path / "popular.txt").chmod(0o666)
    (tmp_path / "user.key").touch(0o600)
    found = instance(
        tmp_path,
        checkpoint=str(tmp_path / "model"),
        recommend={"popular": str(tmp_path / "popular.txt"), "sources": {"shared_encoder": 9}},
        server={
            "log_user_key_file": str(tmp_path / "user.key"),
            "grpc_port": 8083,
            "agent_port": 8082,
        },
    )
    assert of(found, "checkpoint").openness is Openness.CLOSED
    assert of(found, "recommend.popular")[1:3] == (
        Openness.OPEN,
        "other users can change it, because its mode is 666",
    )
    assert of(found, "server.log_user_key_file").openness is Openness.CLOSED
    assert of(found, "server.grpc").openness is Openness.LOCAL
    assert of(found, "server.agent").openness is Openness.LOCAL
    assert "unknown to this report" not in table(found)
