"""Renders HAProxy's configuration from the router's settings and the list of instances.

`Kind.routing` in `core.kinds` decides how a request is routed. The rules of the routes make an
allow-list of methods and paths; raw paths are compared, so that no other spelling of a path reaches
an instance.

All requests by user go through one backend, because a queue with its priorities and `maxconn`
belong to a backend. Retries differ by kind: `retry-on` applies to all, and `disable-l7-retry`
limits signals and writes to retries of failed connects.

An instance's `id` is a hash of its name. HAProxy hashes users to ids, so routers agree without
communication, a new instance takes over only its own users, and entries of the stick table stay
valid across reloads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import xxhash

from npu_gr.core.kinds import KINDS, RANK, Kind, Routing, Scope
from npu_gr.core.tls import CIPHERS, ClientTlsConfig, ServerTlsConfig
from npu_gr.route.config import InstanceConfig, RouterConfig, joined
from npu_gr.route.placement import OF_USER
from npu_gr.server.auth.keys import KeyEntry
from npu_gr.server.auth.rules import is_loopback_name, rules

CONFIG = "haproxy.cfg"
# Placeholders of folders that `route.process` fills in: that of the sockets, and that of this file.
FOLDER, HERE = "{folder}", "{here}"
STATS, FAN_OUT = "stats.sock", "fan_out.sock"  # sockets of the runtime API and of `route.fan_out`
PEER = "peer.sock"  # socket over which a reload hands on the stick table
HOME, OTHER = "home.sock", "other.sock"  # sockets of the frontend `again`
# Fraction of the objective that a request may be queued; the instance needs the rest.
QUEUE_SHARE = 0.7
# A request without an answer after PATIENCE objectives is sent to another instance, if it may be
# retried.
PATIENCE = 5
LEAST_PATIENCE_S = 0.25
AGENT_MS = 100  # period of the agent-check
# Delay of a rejection while the queue is full, to slow down clients that retry at once.
PACED_MS = 50
# Parameter of a path. No percent-encoding and no dot segments, which parsers may read differently.
_SEGMENT = "[A-Za-z0-9_-][A-Za-z0-9._-]*"
# Connections over `limits.max_connections`, for the admin address and HAProxy's own sockets.
OWN_CONNECTIONS = 1_000
# While more than this fraction of the connections is open, no address may open one that has half of
# them: the connections of one client never shut all others out.
CROWDED = 0.75
# routes that the router itself answers
_OWN_ROUTES = ("/readyz", "/healthz", "/v2/health/ready", "/v2/health/live")
_BY_USER = (Routing.SIGNAL, Routing.FOLLOW, Routing.ONCE)
# Time limit of one try of a reload, rollback or delta, which may load large models. A client that
# gives up earlier would cancel it.
LOAD_S = 600.0
# marks answers of an instance, as opposed to HAProxy's own
_ANSWERED = "  http-response set-var(txn.answered) bool(true)"
_TAGGED = f"""{_ANSWERED}
  http-response set-header X-NpuGr-Instance %[srv_name]
  http-response del-header X-NpuGr-Placement"""
_EVERYWHERE = f"""backend everywhere  # erasures and catalogue changes, sent to every instance
  retries 0
  http-request set-timeout server {LOAD_S + 10:.0f}s if {{ path_end /reload /rollback /delta }}
{_ANSWERED}
  server fan_out unix@{FOLDER}/{FAN_OUT} maxconn 64
"""
_PROBLEMS = {
    400: "bad request",
    401: "unauthorized",
    403: "forbidden",
    404: "not found",
    408: "request timeout",
    413: "too large",
    429: "overloaded",
    500: "internal error",
    502: "bad gateway",
    503: "overloaded",
    504: "deadline exceeded",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderInputs:
    """The inputs of the file other than the settings."""

    instances: list[InstanceConfig]
    addresses: dict[str, str]  # name of the instance -> IP address
    keys: list[KeyEntry]  # keys that have not expired


def ids(instances: Iterable[InstanceConfig]) -> dict[str, int]:
    """Map instances to HAProxy's ids: a hash of the name, or the next free number."""
    found: dict[str, int] = {}
    for name in sorted(one.name for one in instances):
        number = 1 + xxhash.xxh32_intdigest(name.encode()) % (2**31 - 2)
        while number in found.values():
            number += 1
        found[name] = number
    return found


def key_map(keys: Iterable[KeyEntry], scope: Scope | None = None) -> str:
    """Render HAProxy's map of accepted keys: SHA-256 in upper case -> name.

    `scope` None = all keys.
    """
    return "".join(
        f"{key.sha256.upper()} {key.name}\n" for key in keys if scope is None or scope in key.scopes
    )


def certified(config: RouterConfig, one: InstanceConfig) -> str | None:
    """Return the name that an instance's certificate must have; None = no TLS."""
    if config.instances_tls is None:
        return None
    dns = config.discovery.dns
    return config.instances_tls.server_name or (dns.host if dns is not None else one.host)


def files(config: RouterConfig, inputs: RenderInputs) -> dict[str, str]:
    """Render HAProxy's file and its maps: name of the file -> text.

    `route.process` adds the certificates.
    """
    made = {CONFIG: render(config, inputs)}
    if config.api_keys_file:
        made["keys.map"] = key_map(inputs.keys)
        made["observe.map"] = key_map(inputs.keys, Scope.OBSERVE)
        made["admin.map"] = key_map(inputs.keys, Scope.ADMIN)
    return made


def render(config: RouterConfig, inputs: RenderInputs) -> str:
    """Render HAProxy's file, for version 2.6 and later."""
    sections = (
        _process(config, inputs),
        _frontend(config, inputs),
        _admin(config),
        _users(config, inputs),
        _patient(config),
        _any(config, inputs),
        _EVERYWHERE,
    )
    return "# written by `npu-gr route`; do not edit, changes are overwritten\n" + "\n".join(
        sections
    )


def _process(config: RouterConfig, inputs: RenderInputs) -> str:
    peers = config.peers or {"npu_gr": f"unix@{FOLDER}/{PEER}"}
    local = config.peer or "npu_gr"
    lines = [f"  peer {name} {address}" for name, address in peers.items()]
    problems = "\n".join(
        f"  http-error status {status} content-type application/problem+json "
        f"string '{_problem(title)}' hdr Cache-Control no-store"
        for status, title in _PROBLEMS.items()
    )
    return f"""global
  nbthread {config.threads}
  maxconn {config.limits.max_connections + OWN_CONNECTIONS}
  no strict-limits  # a low limit of open files is a warning, not an error
  tune.bufsize {config.limits.buffer_bytes}  # bodies up to this size can be retried
  tune.maxrewrite 1024
  tune.ssl.default-dh-param 2048
  ssl-default-bind-ciphers {CIPHERS}
  ssl-default-server-ciphers {CIPHERS}
  stats socket unix@{FOLDER}/{STATS} mode 600 level admin
  hard-stop-after {_ms(config.shutdown_timeout_s)}  # of the old process at a reload, and at the end
  localpeer {local}
  set-var proc.draining bool(false)  # true during the grace after SIGTERM
  log stdout format raw local0 notice  # state changes of instances, not requests
peers routers  # copy the stick table to the new process at a reload, and to the other routers
{chr(10).join(lines)}
defaults
  mode http
  log global
{problems}
  timeout connect 250ms
  timeout check {_ms(config.health.timeout_s)}
  timeout client {_ms(config.max_budget_s)}
  timeout server {_ms(config.max_budget_s)}
  timeout queue {_ms(QUEUE_SHARE * config.objective_s)}  # queueing and serving within the objective
  timeout tarpit {PACED_MS}ms
  timeout http-request {_ms(config.header_timeout_s)}
  timeout http-keep-alive {_ms(config.idle_timeout_s)}
  option dontlognull
  option http-keep-alive  # and no idle-close-on-response: the old process has revoked keys
  http-reuse always
  retries 2
  option redispatch 1  # every retry goes to another instance
"""


def _frontend(config: RouterConfig, inputs: RenderInputs) -> str:
    user = config.user_header
    most = config.limits.max_connections
    return f"""frontend npu_gr
  bind {joined(config.host, config.port)} backlog 4096{_bind_tls(config.tls)}
  maxconn {most}
  stick-table type ipv6 size 100k expire 10s store conn_cur
  tcp-request connection track-sc0 src
  tcp-request connection reject \
if {{ fe_conn gt {int(CROWDED * most)} }} {{ sc0_conn_cur gt {most // 2} }}
{_exact()}
{_ready()}
{_no_foreign_pages(config.host)}
{_keys(config, "keys.map")}
{_allowed()}
  acl everywhere method DELETE
  http-request deny deny_status 413 \
if {{ req.hdr_val(content-length) gt {config.limits.max_body_bytes} }}
  http-request set-var(txn.normal) bool(true) if {{ req.hdr(x-npugr-service) -m str normal }}
  # clients must not set the headers that the router sets
  http-request del-header X-NpuGr- -m beg
  http-request del-header Forwarded
  http-request del-header X-Forwarded -m beg
  http-request set-header X-Forwarded-For %[src]
  http-request set-header Via "1.1 npu_gr"  # with it an instance accepts the client's Host
{_acl("by_user", _paths(*_BY_USER))}
{_acl("follow", _paths(Routing.FOLLOW))}
  http-request set-var(txn.follow) bool(true) if follow
  acl normal var(txn.normal) -m bool
  # a slow sender occupies no instance; with the user in a header the body is not parsed
{_wait_for_body(config)}
  http-request set-var(txn.user) req.hdr({user}) if {{ req.hdr({user}) -m found }}
  http-request set-var(txn.user) req.hdr({user}),url_dec if {{ req.hdr({user}),url_dec -m found }}
  http-request set-var(txn.user) req.body,json_query('$.user_id') \
if by_user !{{ var(txn.user) -m found }}
  acl lookup path_beg {OF_USER}
  http-request set-var(txn.user) path,regsub(^{OF_USER},),url_dec \
if lookup !{{ var(txn.user) -m found }}
  acl named var(txn.user) -m len gt 0
  http-request return status 400 content-type application/problem+json \
string '{_problem(f"{user}: missing")}' if by_user !named !normal
  # While the queue is full, rejections are delayed to slow down clients that retry at once. The
  # queue of an instance (maxqueue) is twice as long, because HAProxy rejects at once if it is full.
  http-request tarpit deny_status 429 \
if by_user !normal {{ queue(users) gt {_most_queued(config, inputs)} }}
{_priorities(*KINDS.values())}
{_overloaded("users")}
  use_backend everywhere if everywhere
  use_backend users if lookup
{_full(inputs)}
  use_backend users if by_user !normal
  default_backend any
"""


def _admin(config: RouterConfig) -> str:
    tls = "" if is_loopback_name(config.admin_host) else _bind_tls(_without_clients(config.tls))
    changes = " ".join(
        sorted(
            {
                path
                for (_, path), rule in rules().items()
                if rule.is_admin and path.startswith("/v1/")
            }
        )
    )
    metrics = "http-request use-service prometheus-exporter if { path /metrics } METH_GET"
    return f"""frontend admin  # metrics, and what every instance is asked: changes, its models
  bind {joined(config.admin_host, config.admin_port)}{tls}
{_exact()}
{_ready()}
{_no_foreign_pages(config.admin_host)}
  acl metrics path /metrics
  acl changes path {changes}
  acl models path /v1/models
  http-request return status 404 content-type application/problem+json \
string '{_problem("not found")}' unless metrics METH_GET or models METH_GET or changes METH_POST
{_keys(config, "observe.map", "metrics")}
{_keys(config, "observe.map", "models")}
{_keys(config, "admin.map", "changes")}
{_wait_for_body(config)}
  {metrics}
  default_backend everywhere
"""


def _special(inputs: RenderInputs) -> list[InstanceConfig]:
    return [one for one in inputs.instances if one.special] or inputs.instances


def _users(config: RouterConfig, inputs: RenderInputs) -> str:
    limits, health = config.limits, config.health
    factor = (
        f"  hash-balance-factor {round(100 * config.relay.load_factor)}\n"
        if config.relay.load_factor >= 1
        else ""
    )
    servers = "\n".join(
        f"  {_server(config, inputs, one)}{_agent(one)}" for one in _special(inputs)
    )
    signal = f"{{ path {' '.join(_paths(Routing.SIGNAL))} }}"
    return f"""backend users  # signals, ranks and other requests of one user
  balance hash var(txn.user)
  hash-type consistent
{factor}  # a rank follows its signal even if the owner has changed since
  stick-table type string len 128 size {config.relay.max_remembered} \
expire {_ms(config.relay.t_life_s)} peers routers
  stick store-request var(txn.user) if {signal}
  stick match var(txn.user) unless {signal}
  # Signals and writes are retried only if the connection failed. Ranks are also retried, at another
  # instance, without an answer or after the 503 of an instance that starts or drains.
  retry-on conn-failure empty-response response-timeout 503
  http-request disable-l7-retry unless {{ var(txn.follow) -m bool }}
{_late(config, Routing.FOLLOW, Routing.SIGNAL)}
{_check(config)}
  default-server slowstart {_ms(health.slow_start_s)} observe layer7 error-limit {health.failures} \
on-error mark-down maxconn {limits.instance_inflight} maxqueue {2 * limits.instance_queue}
{_TAGGED}
{servers}
"""


def _patient(config: RouterConfig) -> str:
    """Send a rank on when it timed out in the queue of its user's instance.

    Requests cannot leave the queue of an instance that is frozen and not yet marked down (HAProxy
    3.2 adds `hash-preserve-affinity`). So while an instance is full and others are not, ranks pass
    through HAProxy twice: the server `home` answers with the queue's 503, and the retry goes to the
    server `other`, which takes the instance with the fewest requests. That may be the same one,
    by a connection that does not wait in the queue; a frozen one is left again after `_late`.
    """
    user = config.user_header
    return f"""backend patient
  balance first
  retry-on 503
  http-request set-header {user} %[var(txn.user),url_enc]
  http-response set-var(txn.answered) bool(true) if {{ res.hdr(X-NpuGr-Instance) -m found }}
  server home unix@{FOLDER}/{HOME}
  server other unix@{FOLDER}/{OTHER}
frontend again
  bind unix@{FOLDER}/{HOME} mode 600
  bind unix@{FOLDER}/{OTHER} mode 600 name other
  http-request set-var(txn.user) req.hdr({user}),url_dec
  http-request set-var(txn.follow) bool(true)
{_priorities(*routed(Routing.FOLLOW))}
  use_backend any if {{ so_name other }}
  default_backend users
"""


def _any(config: RouterConfig, inputs: RenderInputs) -> str:
    normal = [one for one in inputs.instances if one.normal] or inputs.instances
    servers = "\n".join(f"  {_server(config, inputs, one)}" for one in normal)
    return f"""backend any  # requests without a single user, and ranks without a prefix
  balance leastconn
  timeout queue 1s
  retry-on conn-failure empty-response response-timeout 503
  http-request disable-l7-retry unless METH_GET or {{ var(txn.follow) -m bool }}
{_late(config, Routing.FOLLOW, when=" { fe_name again }")}
{_check(config)}
  default-server maxconn {8 * config.limits.instance_inflight}
{_TAGGED}
{servers}
"""


# ---- parts of sections


def _exact() -> str:
    """Reject `GET http://host/path`, which HAProxy's ACLs read as `/path`; h2 is never sent so."""
    rejection = f"content-type application/problem+json string '{_problem('not found')}'"
    return (
        f"  http-request return status 404 {rejection} if {{ req.ver 1.0 1.1 }} !{{ url -m beg / }}"
    )


def _wait_for_body(config: RouterConfig) -> str:
    return f"  http-request wait-for-body time {_ms(config.header_timeout_s)}"


def _ready() -> str:
    ready = (
        "{ path "
        + " ".join(path for path in _OWN_ROUTES if path.endswith(("ready", "readyz")))
        + " } METH_GET"
    )
    return f"""  http-request return status 503 content-type application/json \
string '{{"ready":false}}' if {ready} {{ var(proc.draining) -m bool }}
  http-request return status 503 content-type application/json \
string '{{"ready":false}}' if {ready} {{ nbsrv(users) lt 1 }}
  http-request return status 200 content-type application/json string '{{}}' \
if {{ path {" ".join(_OWN_ROUTES)} }} METH_GET"""


def _no_foreign_pages(host: str) -> str:
    """Reject requests of pages of other sites, as `auth.rules` does in an instance."""
    lines = [
        "  acl foreign req.hdr(sec-fetch-site) -m found",
        "  acl own_site req.hdr(sec-fetch-site) -m str -i same-origin none",
        "  http-request deny deny_status 403 if foreign !own_site",
        "  http-request set-var(txn.host) req.hdr(host),lower",
        '  http-request set-var(txn.origin) req.hdr(origin),lower,regsub("^https?://","")',
        "  acl has_origin req.hdr(origin) -m found",
        "  acl own_origin var(txn.origin),strcmp(txn.host) eq 0",
        "  http-request deny deny_status 403 if has_origin !own_origin",
    ]
    if is_loopback_name(host):  # against DNS rebinding
        lines += [
            r"  acl loopback var(txn.host) -m reg ^(localhost|localhost\.localdomain|ip6-localhost|"
            r"127\.[0-9.]+|\[::1\])(:[0-9]+)?$",
            "  http-request deny deny_status 403 unless loopback",
        ]
    return "\n".join(lines)


def _keys(config: RouterConfig, name: str, condition: str = "") -> str:
    """Reject requests without a valid key before their bodies; instances check the scopes."""
    if not config.api_keys_file:
        return "  # no keys: allow_unauthenticated, or loopback"
    known = f"{{ var(txn.key),map_str({HERE}/{name}) -m found }}"
    condition = f"{condition} " if condition else ""
    return f"""  http-request set-var(txn.key) \
req.hdr(authorization),regsub("^[Bb]earer +",""),sha2(256),hex
  http-request return status 401 content-type application/problem+json \
string '{_problem("unauthorized")}' hdr WWW-Authenticate Bearer if {condition}!{known}"""


def _allowed() -> str:
    """Allow only the methods and paths that an instance serves to clients."""
    lines = []
    names = []
    by_method: dict[str, list[str]] = {}
    for (method, path), rule in rules().items():
        if rule.is_public and rule.scope is not None:
            by_method.setdefault(method, []).append(path)
    for method, paths in by_method.items():
        names.append(f"is_{method} on_{method}")
        lines.append(f"  acl is_{method} method {'GET HEAD' if method == 'GET' else method}")
        lines.append(_acl(f"on_{method}", paths))
    rejection = f"content-type application/problem+json string '{_problem('not found')}'"
    lines.append(f"  http-request return status 404 {rejection} unless {' or '.join(names)}")
    return "\n".join(lines)


def _priorities(*kinds: Kind[Any, Any]) -> str:
    return "\n".join(
        f"  http-request set-priority-class int({int(kind.priority)}) if {{ {_on(kind)} }}"
        for kind in kinds
        if kind.priority
    )


def _full(inputs: RenderInputs) -> str:
    """Send ranks to `patient` while an instance is full and the others are not.

    During `slowstart` HAProxy reduces the limit of an instance, and ranks that arrive together may
    all see its one free place. So an instance with a reduced weight counts as full.
    """
    lines = []
    for one in _special(inputs):
        lines.append(f"  acl full srv_conn_free(users/{one.name}) le 0")
        if _weight(one) > 1:
            lines.append(f"  acl full srv_weight(users/{one.name}) 1:{_weight(one) - 1}")
    if lines:  # without instances that take ranks there is no ACL `full`
        lines.append("  use_backend patient if follow !normal full { be_conn_free(users) gt 0 }")
    return "\n".join(lines)


def _late(config: RouterConfig, *routings: Routing, when: str = "") -> str:
    """Set the time without an answer after which a request is retried at another instance."""
    return "\n".join(
        "  http-request set-timeout server "
        f"{_ms(max(LEAST_PATIENCE_S, PATIENCE * _objective_s(kind, config)))} "
        f"if {{ {_on(kind)} }}{when}"
        for kind in routed(*routings)
    )


def _overloaded(backend: str) -> str:
    """Turn the 503 of a queue timeout into 429 with Retry-After: overload, not an error."""
    own = "!{ var(txn.answered) -m bool }"
    return f"""  http-after-response set-status 429 reason "Too Many Requests" \
if {{ status 503 }} {own} {{ nbsrv({backend}) gt 0 }}
  http-after-response set-header Retry-After 1 if {{ status 429 503 }} {own}
  http-after-response set-header Retry-After-Ms %[rand(75),add(20)] if {{ status 429 }} {own}"""


def _check(config: RouterConfig) -> str:
    health = config.health
    tls = _server_tls(config.instances_tls)
    every = f"inter {_ms(health.interval_s)} fall {health.fall} rise {health.rise}"
    return f"""  option httpchk
  http-check send meth GET uri /readyz ver HTTP/1.1 hdr Host router
  http-check expect status 200
  default-server check {every}{tls}"""


def _server(config: RouterConfig, inputs: RenderInputs, one: InstanceConfig) -> str:
    at = joined(inputs.addresses[one.name], one.port)
    number = ids(inputs.instances)[one.name]
    name = certified(config, one)
    tls = f" verifyhost {name} sni str({name}) check-sni {name}" if name else ""
    return f"server {one.name} {at} id {number} weight {_weight(one)}{tls}"


def _weight(one: InstanceConfig) -> int:
    return round(100 * one.weight)


def _agent(one: InstanceConfig) -> str:
    """Enable the agent-check, by which the instance sets its limit or drains."""
    return (
        f" agent-check agent-port {one.agent_port} agent-inter {AGENT_MS}ms"
        if one.agent_port
        else ""
    )


def _bind_tls(tls: ServerTlsConfig | None) -> str:
    if tls is None:
        return ""
    least = "1.3" if tls.client_ca else tls.min_version
    clients = f" ca-file {tls.client_ca} verify required" if tls.client_ca else ""
    return f" ssl crt {HERE}/listen.pem alpn h2,http/1.1 ssl-min-ver TLSv{least}{clients}"


def _without_clients(tls: ServerTlsConfig | None) -> ServerTlsConfig | None:
    """Return the TLS settings without client certificates, for the admin address."""
    return tls and ServerTlsConfig(
        certificate=tls.certificate, key=tls.key, min_version=tls.min_version
    )


def _server_tls(tls: ClientTlsConfig | None) -> str:
    if tls is None:
        return ""
    shown = f" crt {HERE}/call.pem" if tls.certificate and tls.key else ""
    return f" ssl verify required ca-file {tls.ca or '@system-ca'}{shown}"


def routed(*routings: Routing) -> list[Kind[Any, Any]]:
    """List the kinds with one of these routings."""
    return [kind for kind in KINDS.values() if kind.routing in routings]


def _paths(*routings: Routing) -> list[str]:
    return [path for kind in routed(*routings) for path in kind.paths]


def _acl(name: str, paths: Iterable[str]) -> str:
    """Render an ACL: plain paths, and regular expressions of paths with parameters."""
    plain = [path for path in paths if "{" not in path]
    patterns = [_pattern(path) for path in paths if "{" in path]
    lines = [f"  acl {name} path {' '.join(plain)}"] if plain else []
    return "\n".join(lines + ([f"  acl {name} path_reg {' '.join(patterns)}"] if patterns else []))


def _pattern(path: str) -> str:
    if any(name in path for name in ("{user_id}", "{item_id}")):  # any encoded text
        return "^" + re.sub("{[^}]*}", "[^/?]+", path) + "$"
    return "^" + re.sub("{[^}]*}", _SEGMENT, path) + "$"


def _on(kind: Kind[Any, Any]) -> str:
    plain = [path for path in kind.paths if "{" not in path]
    return f"path {' '.join(plain)}"


def _objective_s(kind: Kind[Any, Any], config: RouterConfig) -> float:
    """Scale the rank's objective by the default ratio of the kind's to the rank's."""
    return config.objective_s * kind.objective_s / RANK.objective_s


def _most_queued(config: RouterConfig, inputs: RenderInputs) -> int:
    return config.limits.instance_queue * max(1, sum(one.special for one in inputs.instances))


def _problem(title: str) -> str:
    return f'{{"type":"about:blank","title":"{title}"}}'


def _ms(seconds: float) -> str:
    return f"{max(1, round(1e3 * seconds))}ms"
