"""`npu-gr doctor --security`: list what a configuration exposes, and to whom.

Each line is one entry point: an address, a key, a store, a file, or an outgoing call. It says who
can use it, and for what. The configuration and the files that it names are read; no address is
called.
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
from msgspec import inspect

from npu_gr.core import settings
from npu_gr.core.errors import ConfigError
from npu_gr.core.kinds import Scope
from npu_gr.core.secret import SecretUrl
from npu_gr.core.setting_types import options, settings_of
from npu_gr.core.tls import ServerTlsConfig
from npu_gr.history_store.redis_client import host_names
from npu_gr.route import config as router_config
from npu_gr.route.config import DNSConfig, InstanceConfig, PickerConfig, RouterConfig
from npu_gr.route.discovery import InstancesFile
from npu_gr.server.auth.keys import Key, KeyEntry, in_utc, read_keys
from npu_gr.server.auth.rules import is_loopback_name, rules
from npu_gr.service.config import Config, load

# Names (without the section) of texts that are files or folders.
_FILE = (
    "path|folder|(.*_)?file|certificate|key|ca|client_ca|checkpoint|catalogue|vectors|popular"
    "|hstu_library|change_log|deltas_from"
)
# The beginning of the line about a setting, where it is not the setting's name; None if it is used
# only together with another one, whose line covers it.
LINES: dict[str, str | None] = {
    "server.host": "server ",
    "server.port": "server ",
    "server.admin_host": "server",
    "server.admin_port": "server",
    "server.grpc_port": "server.grpc ",
    "server.agent_port": "server.agent ",
    "server.api_keys_file": "key",
    "history_store.path": None,  # covered by the files of the store, which may not exist yet
    "history_store.url": None,  # unused unless the store is Redis
    "record.folder": None,  # covered by each recording
    "host": "router ",
    "port": "router ",
    "admin_host": "router.admin ",
    "admin_port": "router.admin ",
    "api_keys_file": "key",
    "peers": "peers.",
    "picker.host": "router.picker ",
    "picker.port": "router.picker ",
    **{
        f"discovery.{section}.{name}": "agent " if name == "agent_port" else "instances "
        for section in ("instances", "dns")
        for name in ("host", "port", "admin_port", "agent_port")
    },
}
# texts that reach nothing by themselves: names, a key of values, and what the line of
# `feature_store.entry` covers
NO_WAY_IN = {
    *("feature_store.options", "kv_cache.pool_key"),
    *("calibration.version", "calibration.device"),
    *("recommend.rules.pin.item", "recommend.rules.diversity.by", "recommend.rules.cap.action"),
    *("discovery.instances.name", "instances_tls.server_name", "peer", "user_header"),
}
_CODE = ("recommend.hook", "recommend.hook_after", "feature_store.entry")

# HAProxy has neither keys nor TLS for these
_ONLY_ROUTERS = "allow only the routers to connect, then --accept {}"
SOON_S = 14 * 86_400.0  # warn of keys that expire sooner


class Openness(StrEnum):
    """Who can use an entry point."""

    CLOSED = "closed"  # only those who should
    LOCAL = "local"  # every account on this machine
    KNOWN = "known"  # others too, and the operator says so (`--accept`)
    OPEN = "open"  # others too


class WayIn(NamedTuple):
    """One entry point, and the remedy if it is open."""

    what: str
    openness: Openness
    whom: str
    remedy: str = ""


def examine(path: Path, overrides: Sequence[str] = ()) -> list[WayIn]:
    """List what a configuration exposes: a router's if it has `discovery`, else an instance's.

    Args:
        path: YAML file.
        overrides: Settings as `section.key=value`.

    Raises:
        ConfigError: the configuration is invalid.
    """
    is_router = "discovery" in settings.read_table(path)
    config = router_config.load(path, overrides) if is_router else load(path, overrides)
    found = examine_router(config) if isinstance(config, RouterConfig) else examine_instance(config)
    return [*found, *_others(config, found)]


def accept(found: list[WayIn], names: Sequence[str]) -> list[WayIn]:
    """Mark open entry points that begin with one of these names as known.

    Raises:
        ConfigError: Nothing open begins with a name.
    """
    for name in names:
        if not any(way.what.startswith(name) and way.openness is Openness.OPEN for way in found):
            raise ConfigError(f"--accept {name}: no open line begins so")
    return [
        way._replace(openness=Openness.KNOWN)
        if way.openness is Openness.OPEN and way.what.startswith(tuple(names))
        else way
        for way in found
    ]


def ways_in(cls: type[msgspec.Struct]) -> list[str]:
    """Return the paths of all settings that may be a host, port, path, URL or file, by their types.

    Each text, secret and port (a number up to 65535) is one, unless `NO_WAY_IN` has it.
    """
    return [
        path
        for path, setting in settings_of(cls).items()
        if path not in NO_WAY_IN and _may_reach(setting.field.type)
    ]


def _may_reach(kind: inspect.Type) -> bool:
    for one in options(kind):
        match one:
            case inspect.StrType() | inspect.CustomType() | inspect.IntType(le=65_535):
                return True
            case inspect.ListType(item_type=inner) | inspect.DictType(value_type=inner):
                if _may_reach(inner):
                    return True
            case _:
                pass
    return False


def _others(config: Config | RouterConfig, found: list[WayIn]) -> Iterator[WayIn]:
    """Yield lines for the settings that no line covers yet: files that others must not change.

    Any other such setting is a gap in this report, and shown as open.
    """
    for path in ways_in(type(config)):
        begin = LINES.get(path, path)
        if begin is None or any(way.what.startswith(begin) for way in found):
            continue
        value: Any = config
        for name in path.split("."):
            # the section may be absent, or a list, whose elements have their own lines
            value = getattr(value, name, None)
        if not value:  # absent, or port 0 of an agent: there is none
            continue
        if path in _CODE:
            yield WayIn(
                f"{path} {value}",
                Openness.CLOSED,
                "the operator's own code, with the rights of the process; it may call others",
            )
        elif re.fullmatch(_FILE, path.rpartition(".")[2]):
            is_secret = path.endswith(("key", "key_file"))
            yield from (
                _private(path, Path(value), 0o040) if is_secret else _unchanged(path, Path(value))
            )
        else:
            yield WayIn(
                f"{path} {value}",
                Openness.OPEN,
                "unknown to this report",
                "report this line",
            )


def _unchanged(setting: str, path: Path) -> Iterator[WayIn]:
    """Yield whether other users can change a file or folder that the process reads."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return
    if mode & 0o022:
        remedy = f"chmod go-w {path}"
        yield WayIn(
            f"{setting} {path}",
            Openness.OPEN,
            f"other users can change it, because its mode is {mode:o}",
            remedy,
        )
    else:
        yield WayIn(f"{setting} {path}", Openness.CLOSED, "only its owner can change it")


def examine_instance(config: Config) -> list[WayIn]:
    """List what an instance's configuration exposes."""
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
                    "all clients of the public address can use the admin routes",
                    "set server.admin_port to another port",
                )
            )
    else:
        found += _address("server", server.host, server.port, PUBLIC, keys, tls)
        # kubelets have no certificate, so the admin address requests none
        admin_tls = None if tls is None else msgspec.structs.replace(tls, client_ca=None)
        found += _address(
            "server.admin", server.admin_host, server.admin_port, ADMIN, keys, admin_tls
        )
    if server.grpc_port is not None:
        found += _address("server.grpc", server.host, server.grpc_port, PUBLIC, keys, tls)
    if server.agent_port is not None:
        is_local = is_loopback_name(server.host)
        found.append(
            WayIn(
                f"server.agent {server.host}:{server.agent_port}",
                Openness.LOCAL if is_local else Openness.OPEN,
                "all hosts that can connect read the concurrency limit of the instance, and are "
                "not slowed down when rejected",
                "" if is_local else _ONLY_ROUTERS.format("server.agent"),
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
                "clients connect to the instance directly: nothing limits slow headers, connection "
                "floods and overload",
                "run `npu-gr route` in front of it, and set server.agent_port, which the router "
                "polls (docs/deploy.md)",
            )
        )
    found += _proxies(server.trusted_proxies)
    found += _store(config)
    found += _stream(config)
    found += _pool(config)
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
    """List what a router's configuration exposes."""
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
    """Whether nothing is open."""
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
        yield WayIn(what, Openness.LOCAL, f"all users of this machine, with {needs}")
        return
    if keys_file is None:
        yield WayIn(
            what,
            Openness.OPEN,
            "all hosts that can connect, with no key",
            "set api_keys_file: `npu-gr keys new`",
        )
    elif tls is None:
        yield WayIn(
            what,
            Openness.OPEN,
            f"all hosts that can connect, with {needs}; an eavesdropper reads keys and histories",
            "set tls: {certificate, key}",
        )
    else:
        certificate = " and a certificate" if tls.client_ca else ""
        yield WayIn(what, Openness.CLOSED, f"clients with {needs}{certificate}")


def _proxies(networks: list[str]) -> Iterator[WayIn]:
    for network in networks:
        if network.endswith("/0"):
            yield WayIn(
                f"server.trusted_proxies {network}",
                Openness.OPEN,
                "all clients count as a proxy, so none is slowed down when rejected",
                "list only the addresses of the routers",
            )
        else:
            yield WayIn(
                f"server.trusted_proxies {network}",
                Openness.CLOSED,
                "proxies, which may name any host, and are not slowed down when rejected",
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
            "api_keys_file",
            Openness.OPEN,
            str(error),
            "correct the file; the process does not start",
        )
        return
    if mode & 0o022:
        yield WayIn(
            f"api_keys_file {path}",
            Openness.OPEN,
            f"other users can add keys, because its mode is {mode:o}",
            f"chmod 600 {path}",
        )
    for entry in file.keys:
        yield _key(entry)


def _key(entry: KeyEntry) -> WayIn:
    key = Key.of(entry)
    what = f"key {entry.name}"
    tenant = "any tenant" if key.tenant is None else f"the tenant {key.tenant!r}"
    whom = f"{', '.join(sorted(key.scopes))} for {tenant}; expires {in_utc(entry)}"
    left_s = key.expires_at - time.time()
    if left_s <= 0:
        return WayIn(what, Openness.CLOSED, f"{whom}: expired", f"npu-gr keys revoke {entry.name}")
    if left_s < SOON_S:
        return WayIn(what, Openness.CLOSED, whom, "it expires soon; create another one")
    if Scope.ADMIN in key.scopes and len(key.scopes) > 2:
        return WayIn(
            what, Openness.OPEN, f"{whom}: one key for everything", "create one key per task"
        )
    return WayIn(what, Openness.CLOSED, whom)


# ---- stores and recordings of behaviours


def _store(config: Config) -> Iterator[WayIn]:
    store = config.history_store
    if store.kind == "redis":
        yield from _redis("history_store.url", store.redis_url, "behaviours of all tenants")
    elif store.kind == "embedded":
        for path in (Path(store.path + ending) for ending in ("", "-wal", "-shm")):
            yield from _private("history_store.path", path)


def _stream(config: Config) -> Iterator[WayIn]:
    url = config.models.deltas_stream
    if url is not None:
        yield from _redis("models.deltas_stream", url, "weights and items that all serve")


def _redis(setting: str, url: SecretUrl, carries: str) -> Iterator[WayIn]:
    yield from _call(setting, url, carries)
    parts = urlsplit(url.reveal())
    if parts.password is None and not all(map(is_loopback_name, host_names(url.reveal()))):
        yield WayIn(
            f"{setting} {url}",
            Openness.OPEN,
            "all hosts that can connect, with no password",
            "set a password",
        )


def _pool(config: Config) -> Iterator[WayIn]:
    url = config.kv_cache.pool
    if url is None:
        return
    if all(map(is_loopback_name, host_names(url))):
        yield WayIn(f"kv_cache.pool {url}", Openness.LOCAL, "in clear; carries prefixes of users")
    else:
        yield WayIn(
            f"kv_cache.pool {url}",
            Openness.OPEN,
            "all hosts that reach the pool can read and erase prefixes"
            + (", and change scores" if config.kv_cache.pool_key is None else ""),
            "set kv_cache.pool_key, and keep the pool and its instances in a network of their own",
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
            "recordings have user ids in clear text",
            "remove `users: clear`",
        )
    for path in sorted(folder.glob("traffic-*")) if folder.is_dir() else ():
        yield from _private("record.folder", path)


def _private(setting: str, path: Path, allowed: int = 0) -> Iterator[WayIn]:
    """Yield whether other users can read a file; a missing file will be created with 0600.

    Args:
        setting: Path of the setting.
        path: The file.
        allowed: Bits of the mode that may be set besides the owner's.
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
            f"other users can read it, because its mode is {mode:o}",
            f"chmod 600 {path}",
        )
    else:
        yield WayIn(what, Openness.CLOSED, "only its owner can read it")


# ---- outgoing calls


def _call(setting: str, url: SecretUrl, carries: str) -> Iterator[WayIn]:
    parts = urlsplit(url.reveal())
    what = f"{setting} {url}"
    if parts.scheme.startswith(("rediss", "https")):
        yield WayIn(what, Openness.CLOSED, f"encrypted; carries {carries}")
    elif all(map(is_loopback_name, host_names(url.reveal()))):
        yield WayIn(what, Openness.LOCAL, f"in clear on this machine; carries {carries}")
    else:
        secure = parts.scheme.replace("redis", "rediss").replace("http", "https")
        yield WayIn(
            what,
            Openness.OPEN,
            f"an eavesdropper reads {carries}",
            f"use {secure}:// and a certificate",
        )


def _instances(config: RouterConfig) -> Iterator[WayIn]:
    discovery = config.discovery
    # host -> its agent ports
    hosts: dict[str, list[int]] = {}
    instances: list[InstanceConfig | DNSConfig] = [*discovery.instances]
    if discovery.dns is not None:
        instances.append(discovery.dns)
    if discovery.file is not None:
        try:
            instances += settings.load(Path(discovery.file), InstancesFile).instances
        except ConfigError as error:
            yield WayIn(f"instances of {discovery.file}", Openness.OPEN, str(error))
    for one in instances:
        hosts.setdefault(one.host, []).extend([one.agent_port] if one.agent_port else [])
    for host in hosts:
        if config.instances_tls is not None:
            shown = (
                "presents a certificate"
                if config.instances_tls.certificate
                else "presents no certificate"
            )
            yield WayIn(f"instances {host}", Openness.CLOSED, f"encrypted; the router {shown}")
        elif is_loopback_name(host):
            yield WayIn(f"instances {host}", Openness.LOCAL, "in clear on this machine")
        else:
            yield WayIn(
                f"instances {host}",
                Openness.OPEN,
                "an eavesdropper reads keys and histories",
                "set instances_tls: {ca, certificate, key}, and server.tls on the instances",
            )
    for host, ports in hosts.items():
        for port in ports:
            yield _agent(host, port)


def _agent(host: str, port: int) -> WayIn:
    what = f"agent {host}:{port}"
    if is_loopback_name(host):
        return WayIn(
            what,
            Openness.LOCAL,
            "in clear on this machine; has the concurrency limit of the instance",
        )
    return WayIn(
        what,
        Openness.OPEN,
        "in clear, as HAProxy requires; an attacker on the network path can drain the instance, "
        "but reads no personal data",
        _ONLY_ROUTERS.format("agent"),
    )


def _picker(picker: PickerConfig, tls: ServerTlsConfig | None) -> WayIn:
    what = f"router.picker {picker.host}:{picker.port}"
    whom = "can query which instance holds a user"
    if is_loopback_name(picker.host):
        return WayIn(what, Openness.LOCAL, f"all users of this machine {whom}")
    if tls is not None and tls.client_ca:
        return WayIn(what, Openness.CLOSED, "gateways with a certificate")
    return WayIn(
        what,
        Openness.OPEN,
        f"all hosts that can connect {whom}",
        "set picker.tls: {certificate, key, client_ca}",
    )


def _peers(config: RouterConfig) -> Iterator[WayIn]:
    for name, address in config.peers.items():
        host = address.rpartition(":")[0]
        if is_loopback_name(host):
            yield WayIn(
                f"peers.{name} {address}",
                Openness.LOCAL,
                "in clear on this machine; has user ids",
            )
        else:
            yield WayIn(
                f"peers.{name} {address}",
                Openness.OPEN,
                "all hosts that can connect read user ids, and can redirect their ranks",
                f"remove `peers`, or {_ONLY_ROUTERS.format('peers')}",
            )
