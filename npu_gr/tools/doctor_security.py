"""What a configuration leaves open, and to whom: the answer of `npu-gr doctor --security`.

Each line is one way in: an address, a key, a store, a file, a call to somewhere else. It says who
can use it, and for what. Nothing is tried: the configuration and the files that it names are read,
and no address is called.
"""

from __future__ import annotations

import re
import stat
import time
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec.inspect import CustomType

from npu_gr.core import settings
from npu_gr.core.errors import ConfigError
from npu_gr.core.kinds import Scope
from npu_gr.core.secret import SecretUrl
from npu_gr.core.setting_types import options, settings_of
from npu_gr.core.tls import ServerTlsConfig
from npu_gr.route import config as router_config
from npu_gr.route.config import InstanceConfig, PickerConfig, RouterConfig
from npu_gr.server.auth.keys import Key, KeyEntry, in_utc, read_keys
from npu_gr.server.auth.rules import is_loopback_name, rules
from npu_gr.service.config import Config, load

# The last names of settings that are files or folders.
_FILE = "path|folder|(.*_)?file|certificate|key|ca|client_ca|checkpoint|catalogue|vectors|popular|hstu_library"
# How the line about a setting begins, where it does not begin with the setting; None: it is part of
# another one's.
LINES: dict[str, str | None] = {
    "server.host": "server ",
    "server.port": "server ",
    "server.admin_host": "server",
    "server.admin_port": "server",
    "server.grpc_port": "server.grpc ",
    "server.agent_port": "server.agent ",
    "server.api_keys_file": "key",
    "history_store.path": None,  # the files of the store, which may not be there yet
    "history_store.url": None,  # of a store that may not be Redis
    "record.folder": None,  # each recording
    "host": "router ",
    "port": "router ",
    "admin_host": "router.admin ",
    "admin_port": "router.admin ",
    "api_keys_file": "key",
    "picker.host": "router.picker ",
    "picker.port": "router.picker ",
    **dict.fromkeys(
        f"discovery.{section}.{name}"
        for section in ("instances", "dns")
        for name in ("host", "port", "admin_port", "agent_port")
    ),
}

SOON_S = 14 * 86_400.0  # a key that ends within it is told


class Openness(StrEnum):
    """Who can use a way in."""

    CLOSED = "closed"  # those who should, alone
    LOCAL = "local"  # whoever has an account on this machine
    OPEN = "open"  # somebody who need not have it


class WayIn(NamedTuple):
    """One way in, and what to do if it is open."""

    what: str
    openness: Openness
    whom: str
    remedy: str = ""


def examine(path: Path, overrides: Sequence[str] = ()) -> list[WayIn]:
    """Look at everything that a configuration opens: a router's, if it says where instances are, or an instance's.

    Args:
        path: YAML.
        overrides: `section.key=value`.

    Raises:
        ConfigError: it is neither.
    """
    is_router = "discovery" in settings.read_table(path)
    config = router_config.load(path, overrides) if is_router else load(path, overrides)
    found = examine_router(config) if isinstance(config, RouterConfig) else examine_instance(config)
    return [*found, *_others(config, found)]


def ways_in(cls: type[msgspec.Struct]) -> list[str]:
    """Paths of all settings that are a way in, by their types and names: a host, a port, a file, a folder, a URL."""
    return [
        path
        for path, setting in settings_of(cls).items()
        if setting.section is None
        and (
            re.fullmatch(rf"(.*_)?(host|port|url|endpoint|socket)|{_FILE}", path.rpartition(".")[2])
            or any(isinstance(one, CustomType) for one in options(setting.field.type))
        )
    ]


def _others(config: Config | RouterConfig, found: list[WayIn]) -> Iterator[WayIn]:
    """The ways in that no line is about yet: files that others must not change.

    Anything else is a gap here.
    """
    for path in ways_in(type(config)):
        begin = LINES.get(path, path)
        if begin is None or any(way.what.startswith(begin) for way in found):
            continue
        value: Any = config
        for name in path.split("."):
            # a section may be absent, and one in a list has lines of its own
            value = getattr(value, name, None)
        if value is None:
            continue
        if re.fullmatch(_FILE, path.rpartition(".")[2]):
            is_secret = path.endswith(("key", "key_file"))
            yield from (
                _private(path, Path(value), 0o040) if is_secret else _unchanged(path, Path(value))
            )
        else:
            yield WayIn(
                f"{path} {value}",
                Openness.OPEN,
                "this report knows nothing of it",
                "report this line",
            )


def _unchanged(setting: str, path: Path) -> Iterator[WayIn]:
    """Tell whether others can change a file or a folder that is read."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return
    if mode & 0o022:
        remedy = f"chmod go-w {path}"
        yield WayIn(
            f"{setting} {path}",
            Openness.OPEN,
            f"other users can change it: its mode is {mode:o}",
            remedy,
        )
    else:
        yield WayIn(f"{setting} {path}", Openness.CLOSED, "the user that it belongs to changes it")


def examine_instance(config: Config) -> list[WayIn]:
    """Look at everything that an instance's configuration opens."""
    server = config.server
    keys, tls = server.api_keys_file, server.tls
    found: list[WayIn] = []
    if server.has_one_address:
        every = sorted({rule.scope for rule in rules().values() if rule.scope is not None})
        found += _address("server", server.host, server.port, every, keys, tls)
        if not is_loopback_name(server.host):
            found.append(
                WayIn(
                    "server.admin_port",
                    Openness.OPEN,
                    "whoever reaches the public address reaches the routes of operators",
                    "give server.admin_port a port of its own",
                )
            )
    else:
        found += _address("server", server.host, server.port, PUBLIC, keys, tls)
        # kubelets have no certificate, so nobody is asked for one there
        admin_tls = None if tls is None else msgspec.structs.replace(tls, client_ca=None)
        found += _address(
            "server.admin", server.admin_host, server.admin_port, ADMIN, keys, admin_tls
        )
    if server.grpc_port is not None:
        found += _address("server.grpc", server.host, server.grpc_port, PUBLIC, keys, tls)
    if server.agent_port is not None:
        found.append(
            WayIn(
                f"server.agent {server.host}:{server.agent_port}",
                Openness.LOCAL,
                "whoever reaches it reads how many requests the instance takes at once, and is not "
                "paced when rejected",
                "" if is_loopback_name(server.host) else "let only the routers reach it",
            )
        )
    found += _keys(keys)
    if (
        not is_loopback_name(server.host)
        and not server.trusted_proxies
        and server.agent_port is None
    ):
        found.append(
            WayIn(
                "server.trusted_proxies",
                Openness.OPEN,
                "clients reach the instance itself: nothing bounds slow headers, floods of "
                "connections and overloads",
                "put `npu-gr route` in front of it, and set server.agent_port, which it asks "
                "(docs/deploy.md)",
            )
        )
    found += _proxies(server.trusted_proxies)
    found += _store(config)
    found += _recordings(config)
    if server.otlp_endpoint is not None:
        found += _call(
            "server.otlp_endpoint",
            server.otlp_endpoint,
            "routes and request ids of sampled requests",
        )
    if tls is not None:
        found += _private("server.tls.key", Path(tls.key), allowed=0o040)
    return found


def examine_router(config: RouterConfig) -> list[WayIn]:
    """Look at everything that a router's configuration opens."""
    keys, tls = config.api_keys_file, config.tls
    admin_tls = None if tls is None else msgspec.structs.replace(tls, client_ca=None)
    found = [
        *_address("router", config.host, config.port, PUBLIC, keys, tls),
        *_address("router.admin", config.admin_host, config.admin_port, ADMIN, keys, admin_tls),
        *_keys(keys),
        *_instances(config),
        *_peers(config),
    ]
    if (picker := config.picker) is not None:
        picker_tls = picker.tls or tls
        found.append(_picker(picker, picker_tls))
    if tls is not None:
        found += _private("tls.key", Path(tls.key), allowed=0o040)
    return found


def is_closed(found: list[WayIn]) -> bool:
    """Whether nothing is open to somebody who need not have it."""
    return all(each.openness is not Openness.OPEN for each in found)


# ---- addresses


PUBLIC = sorted(
    {rule.scope for rule in rules().values() if rule.is_public and rule.scope is not None}
)
ADMIN = sorted(
    {rule.scope for rule in rules().values() if rule.is_admin and rule.scope is not None}
)


def _address(
    name: str,
    host: str,
    port: int,
    scopes: list[Scope],
    keys_file: str | None,
    tls: ServerTlsConfig | None,
) -> Iterator[WayIn]:
    what = f"{name} {host}:{port}"
    needs = f"a key with the scope of the route ({', '.join(scopes)})" if keys_file else "no key"
    if is_loopback_name(host):
        yield WayIn(what, Openness.LOCAL, f"whoever is on this machine, with {needs}")
        return
    if keys_file is None:
        yield WayIn(
            what,
            Openness.OPEN,
            "whoever reaches it, with no key",
            "set api_keys_file: `npu-gr keys new`",
        )
    elif tls is None:
        yield WayIn(
            what,
            Openness.OPEN,
            f"whoever reaches it, with {needs}; who listens on the way reads keys and histories",
            "set tls: {certificate, key}",
        )
    else:
        caller = " and a certificate" if tls.client_ca else ""
        yield WayIn(what, Openness.CLOSED, f"whoever has {needs}{caller}")


def _proxies(networks: list[str]) -> Iterator[WayIn]:
    for network in networks:
        if network.endswith("/0"):
            yield WayIn(
                f"server.trusted_proxies {network}",
                Openness.OPEN,
                "every caller counts as a proxy: none that is rejected is ever paced",
                "name the addresses of the routers",
            )


# ---- keys


def _keys(path: str | None) -> Iterator[WayIn]:
    if path is None:
        return
    try:
        file = read_keys(Path(path))
        mode = stat.S_IMODE(Path(path).stat().st_mode)
    except (ConfigError, OSError) as error:
        yield WayIn(
            "api_keys_file", Openness.OPEN, str(error), "the process does not start with it"
        )
        return
    if mode & 0o022:
        yield WayIn(
            f"api_keys_file {path}",
            Openness.OPEN,
            f"others can add keys: its mode is {mode:o}",
            f"chmod 600 {path}",
        )
    for entry in file.keys:
        yield _key(entry)


def _key(entry: KeyEntry) -> WayIn:
    key = Key.of(entry)
    what = f"key {entry.name}"
    tenant = "any tenant" if key.tenant is None else f"the tenant {key.tenant!r}"
    whom = f"{', '.join(sorted(key.scopes))} for {tenant}; ends {in_utc(entry)}"
    left_s = key.expires_at - time.time()
    if left_s <= 0:
        return WayIn(what, Openness.CLOSED, f"{whom}: over", f"npu-gr keys revoke {entry.name}")
    if left_s < SOON_S:
        return WayIn(what, Openness.CLOSED, whom, "it ends soon: make another one")
    if Scope.ADMIN in key.scopes and len(key.scopes) > 2:
        return WayIn(what, Openness.OPEN, f"{whom}: one key for everything", "make one key a task")
    return WayIn(what, Openness.CLOSED, whom)


# ---- what holds behaviours


def _store(config: Config) -> Iterator[WayIn]:
    store = config.history_store
    if store.kind == "redis":
        yield from _redis(store.redis_url)
    elif store.kind == "embedded":
        for path in (Path(store.path + ending) for ending in ("", "-wal", "-shm")):
            yield from _private("history_store.path", path)


def _redis(url: SecretUrl) -> Iterator[WayIn]:
    yield from _call("history_store.url", url, "behaviours of all tenants")
    parts = urlsplit(url.reveal())
    if (
        parts.scheme != "unix"
        and parts.password is None
        and not is_loopback_name(parts.hostname or "")
    ):
        yield WayIn(
            f"history_store.url {url}",
            Openness.OPEN,
            "whoever reaches it, with no password",
            "give it a password",
        )


def _recordings(config: Config) -> Iterator[WayIn]:
    record = config.record
    if record is None:
        return
    folder = Path(record.folder)
    if record.users == "clear":
        yield WayIn(
            f"record.folder {folder}",
            Openness.OPEN,
            "recordings name users in clear",
            "remove `users: clear`",
        )
    for path in sorted(folder.glob("traffic-*")) if folder.is_dir() else ():
        yield from _private("record.folder", path)


def _private(setting: str, path: Path, allowed: int = 0) -> Iterator[WayIn]:
    """Tell whether others can read a file; one that does not exist yet is made with 0600.

    Args:
        setting: names it.
        path: of the file.
        allowed: bits of the mode that may be set beyond the owner's.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return
    what = f"{setting} {path}"
    if mode & 0o077 & ~allowed:
        yield WayIn(
            what,
            Openness.OPEN,
            f"other users can read it: its mode is {mode:o}",
            f"chmod 600 {path}",
        )
    else:
        yield WayIn(what, Openness.CLOSED, "the user that it belongs to")


# ---- calls to somewhere else


def _call(setting: str, url: SecretUrl, carries: str) -> Iterator[WayIn]:
    parts = urlsplit(url.reveal())
    what = f"{setting} {url}"
    if parts.scheme in ("rediss", "https"):
        yield WayIn(what, Openness.CLOSED, f"encrypted; carries {carries}")
    elif parts.scheme == "unix" or is_loopback_name(parts.hostname or ""):
        yield WayIn(what, Openness.LOCAL, f"in clear on this machine; carries {carries}")
    else:
        yield WayIn(
            what,
            Openness.OPEN,
            f"who listens on the way reads {carries}",
            f"use {parts.scheme}s:// and a certificate",
        )


def _instances(config: RouterConfig) -> Iterator[WayIn]:
    discovery = config.discovery
    hosts = [instance.host for instance in discovery.instances]
    agents = [instance for instance in discovery.instances if instance.agent_port]
    if discovery.dns is not None:
        hosts.append(discovery.dns.host)
    if discovery.file is not None:
        hosts.append(f"those of {discovery.file}")
    for host in dict.fromkeys(hosts):
        if config.instances_tls is not None:
            shown = (
                ("shows a certificate")
                if config.instances_tls.certificate
                else "shows none of its own"
            )
            yield WayIn(f"instances {host}", Openness.CLOSED, f"encrypted; the router {shown}")
        elif is_loopback_name(host):
            yield WayIn(f"instances {host}", Openness.LOCAL, "in clear on this machine")
        else:
            yield WayIn(
                f"instances {host}",
                Openness.OPEN,
                "who listens on the way reads keys and histories",
                "set instances_tls: {ca, certificate, key}, and server.tls on the instances",
            )
    yield from map(_agent, agents)


def _agent(one: InstanceConfig) -> WayIn:
    what = f"agent {one.host}:{one.agent_port}"
    if is_loopback_name(one.host):
        return WayIn(
            what,
            Openness.LOCAL,
            "in clear on this machine; says how many requests the instance takes",
        )
    return WayIn(
        what,
        Openness.LOCAL,
        "in clear, as HAProxy has it; who is on the way can drain the instance, and reads nothing "
        "of a user",
        "let only the routers reach it",
    )


def _picker(picker: PickerConfig, tls: ServerTlsConfig | None) -> WayIn:
    what = f"router.picker {picker.host}:{picker.port}"
    whom = "chooses instances, and learns where a user lives"
    if is_loopback_name(picker.host):
        return WayIn(what, Openness.LOCAL, f"whoever is on this machine {whom}")
    if tls is not None and tls.client_ca:
        return WayIn(what, Openness.CLOSED, "gateways that have a certificate")
    return WayIn(
        what,
        Openness.OPEN,
        f"whoever reaches it {whom}",
        "set picker.tls: {certificate, key, client_ca}",
    )


def _peers(config: RouterConfig) -> Iterator[WayIn]:
    for name, address in config.peers.items():
        host = address.rpartition(":")[0]
        if is_loopback_name(host):
            yield WayIn(
                f"peers.{name} {address}",
                Openness.LOCAL,
                "in clear on this machine; names of users",
            )
        else:
            yield WayIn(
                f"peers.{name} {address}",
                Openness.OPEN,
                "whoever reaches it reads the names of users, and says where their ranks go",
                "let only the routers reach it, or leave `peers` out",
            )
