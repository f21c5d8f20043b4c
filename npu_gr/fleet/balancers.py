"""The placement of the router in balancers that users already run: make their configuration from the router's.

How a balancer treats a request follows from `Kind.routing` in `core.kinds`. It forwards an allow-list, the routes that
`access.rules` has on the public address, and answers 404 to every other method and path. What it forwards is the path
that it has compared: another spelling of a path is brought into the usual form first, or is not on the list.

What the balancers have in common with the router:
- They hash the user header strictly. A bounded load would part a rank from its signal.
- They check `/readyz` of every instance, where the balancer can.
- They send a rank that failed once more, to another instance. They never resend a signal that an instance may have
  begun, nor a change.
- They answer 400 to a request without a user.

What they lack: ranks that follow their signal while instances come and go, deadlines of requests, a slow return of
instances, and erasing a user at every instance. They answer 501 to an erasure: send it to each instance yourself.

Each balancer places users in its own way, so use only one kind of balancer in front of a fleet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from npu_gr.core.errors import ConfigError
from npu_gr.core.kinds import KINDS, Routing
from npu_gr.fleet.envoy_picker import obeying, picker_cluster, picker_filter, told
from npu_gr.router.config import InstanceConfig, RouterConfig
from npu_gr.server.auth.rules import rules
from npu_gr.server.headers import NOT_TAKEN

_TYPE = "type.googleapis.com/envoy.extensions"
_FOLLOW_AGAIN = "connect-failure,refused-stream,reset,gateway-error"
_SIGNAL_AGAIN = "connect-failure,retriable-headers"  # no instance has begun it


def _paths(*routings: Routing) -> list[str]:
    """List the paths of the kinds that are routed like this; of a path with a user in it, the part before the user."""
    kinds = [kind for kind in KINDS.values() if kind.routing in routings]
    whole = [path for kind in kinds for path in kind.paths if "{version}" not in path]
    return [path.partition("{")[0] for path in whole]


_SIGNAL_PATHS = _paths(Routing.SIGNAL)
_RETRIED_PATHS = _paths(Routing.FOLLOW)
_USER_PATHS = _paths(Routing.SIGNAL, Routing.FOLLOW, Routing.ONCE)
_EVERYWHERE_PATHS = _paths(Routing.EVERYWHERE)
_EVERYWHERE_TEXT = "send this to every instance"
_NOT_HERE_TEXT = "no such route here"
# A parameter of a path: no encoding and no segment of dots, so nothing that two parsers read differently
_SEGMENT = "[A-Za-z0-9_-][A-Za-z0-9._-]*"


def _allowed() -> dict[str, tuple[list[str], list[str]]]:
    """List what is forwarded by method: paths, and regular expressions of the whole of paths that hold a parameter."""
    allowed: dict[str, tuple[list[str], list[str]]] = {}
    everywhere = {(kind.method, kind.path) for kind in KINDS.values() if kind.routing is Routing.EVERYWHERE}
    for (method, path), rule in rules().items():
        if rule.is_public and (method, path) not in everywhere:
            paths, patterns = allowed.setdefault(method, ([], []))
            if "{" in path:
                patterns.append(re.sub("{[^}]*}", _SEGMENT, path))
            else:
                paths.append(path)
    return allowed


def _forwarded(method: str) -> str:
    """The methods of requests that a route of this method answers."""
    return "GET|HEAD" if method == "GET" else method


def envoy(config: RouterConfig, instances: list[InstanceConfig]) -> str:
    """Make the JSON for `envoy -c`; with `picker`, the router chooses, and what follows is only the fallback.

    It uses MAGLEV, because Envoy's ring moves users of healthy instances (envoyproxy/envoy#22558).
    """
    special, normal = _services(instances)
    again = {
        **dict.fromkeys(_RETRIED_PATHS, _FOLLOW_AGAIN),
        **dict.fromkeys(_SIGNAL_PATHS, _SIGNAL_AGAIN),
        **dict.fromkeys(_paths(Routing.ONCE), ""),
    }
    routes = [_envoy_refusal({"prefix": path}, 501, _EVERYWHERE_TEXT) for path in _EVERYWHERE_PATHS]
    for method, (paths, patterns) in _allowed().items():
        by_method = {"name": ":method", "string_match": {"safe_regex": {"regex": _forwarded(method)}}}
        for path in paths:
            match = {"path": path, "headers": [by_method]}
            if path in again:
                normal_one = {"path": path, "headers": [by_method, _equals("x-npugr-service", "normal")]}
                routes.append(_envoy_route(normal_one, "normal", config))
                if config.picker is None:
                    named = {**match, "headers": [by_method, {"name": config.user_header, "present_match": True}]}
                    routes.append(_envoy_route(named, "special", config, again=again[path], by_user=True))
                    routes.append(_envoy_refusal(match, 400, f"{config.user_header}: missing"))
                else:  # the picker reads the user from the body as well
                    by_picker = _envoy_route(match, "special", config, again=again[path], by_user=True)
                    by_picker["response_headers_to_add"] = told(instances, is_signal=path in _SIGNAL_PATHS)
                    routes.append(by_picker)
            else:
                routes.append(_envoy_route(match, "normal", config))
        routes += [
            _envoy_route({"safe_regex": {"regex": pattern}, "headers": [by_method]}, "normal", config)
            for pattern in patterns
        ]
    routes.append(_envoy_refusal({"prefix": "/"}, 404, _NOT_HERE_TEXT))
    manager = {
        "@type": f"{_TYPE}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "npu_gr",
        "normalize_path": True,
        "merge_slashes": True,
        "path_with_escaped_slashes_action": "REJECT_REQUEST",
        "generate_request_id": True,
        "preserve_external_request_id": True,
        "request_headers_timeout": _seconds(config.header_timeout_s),
        "max_request_headers_kb": max(1, config.limits.max_header_bytes // 1024),
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        "http_filters": [
            *([] if config.picker is None else [picker_filter(config)]),
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{_TYPE}.filters.http.router.v3.Router"},
            },
        ],
    }
    listener: dict[str, Any] = {
        "name": "npu_gr",
        "address": _address(config.host, config.port),
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }
    by_user: dict[str, Any] = {"lb_policy": "MAGLEV", "maglev_lb_config": {"table_size": 65537}}
    by_load: dict[str, Any] = {"lb_policy": "LEAST_REQUEST"}
    if config.picker is not None:
        by_user = obeying("maglev", {"table_size": 65537})
        by_load = obeying("least_request", {})
        # a body that names its user is read whole first
        listener["per_connection_buffer_limit_bytes"] = config.limits.max_body_bytes
    clusters = [
        _envoy_cluster("special", special, config, by_user),
        _envoy_cluster("normal", normal, config, by_load),
        *([] if config.picker is None else [picker_cluster(config, config.picker)]),
    ]
    table = {
        "admin": {"address": _address(config.admin_host, config.admin_port)},
        "static_resources": {"listeners": [listener], "clusters": clusters},
    }
    return json.dumps(table, indent=2)


def _envoy_route(
    match: dict[str, Any],
    cluster: str,
    config: RouterConfig,
    *,
    again: str = "",
    by_user: bool = False,
) -> dict[str, Any]:
    action: dict[str, Any] = {"cluster": cluster, "timeout": _seconds(config.max_budget_s)}
    if by_user:
        action["hash_policy"] = [{"header": {"header_name": config.user_header}}]
    if again:
        predicate = f"{_TYPE}.retry.host.previous_hosts.v3.PreviousHostsPredicate"
        action["retry_policy"] = {
            "retry_on": again,
            "retriable_headers": [{"name": NOT_TAKEN, "present_match": True}],
            "num_retries": 1,
            "retry_host_predicate": [
                {"name": "envoy.retry_host_predicates.previous_hosts", "typed_config": {"@type": predicate}}
            ],
            # MAGLEV draws a host anew each time: with 5 attempts among two hosts, 1 request in 64 would fail
            "host_selection_retry_max_attempts": 32,
        }
    return {"match": match, "route": action}


def _envoy_refusal(match: dict[str, Any], status: int, why: str) -> dict[str, Any]:
    return {
        "match": match,
        "direct_response": {"status": status, "body": {"inline_string": f"{why}\n"}},
    }


def _envoy_cluster(
    name: str, instances: list[InstanceConfig], config: RouterConfig, policy: dict[str, Any]
) -> dict[str, Any]:
    endpoints = [
        {
            "endpoint": {"hostname": one.name, "address": _address(one.host, one.port)},
            "load_balancing_weight": max(1, round(100 * one.weight)),
        }
        for one in instances
    ]
    limits = config.limits
    health = config.health
    interval = _seconds(health.interval_s)
    most = limits.instance_inflight * max(1, len(instances))
    return {
        "name": name,
        "connect_timeout": _seconds(config.connect_timeout_s),
        "type": "STRICT_DNS",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
        "health_checks": [
            {
                "timeout": _seconds(health.timeout_s),
                "interval": interval,
                "no_traffic_interval": interval,  # its default of 60 s would hide a drain
                "unhealthy_threshold": health.fall,
                "healthy_threshold": health.rise,
                "http_health_check": {"path": health.path},
            }
        ],
        "circuit_breakers": {
            "thresholds": [
                {"max_connections": most, "max_pending_requests": most, "max_requests": most, "max_retries": 64}
            ]
        },
        "outlier_detection": {
            "consecutive_5xx": config.breaker.failures,
            "interval": interval,
            "base_ejection_time": _seconds(config.breaker.open_s),
            "max_ejection_time": _seconds(config.breaker.max_open_s),
            "max_ejection_percent": round(100 * config.breaker.max_open_ratio),
        },
        **policy,
    }


def haproxy(config: RouterConfig, instances: list[InstanceConfig]) -> str:
    """Make a configuration for HAProxy 2.6 and later; it serves its metrics at /metrics of the admin address."""
    special, normal = _services(instances)
    interval = f"{round(config.health.interval_s * 1e3)}ms"

    def servers(some: list[InstanceConfig], marks: str) -> str:
        check = f"check inter {interval} fall {config.health.fall} rise {config.health.rise}"
        return "\n".join(
            f"  server {one.name} {one.host}:{one.port} id {1 + instances.index(one)} "
            f"weight {min(256, max(1, round(100 * one.weight)))} maxconn {config.limits.instance_inflight} "
            f"{check} {marks}"
            for one in some
        )

    everywhere = f"if {{ path,url_dec -m beg {' '.join(_EVERYWHERE_PATHS)} }}"
    acls = []
    for method, (paths, patterns) in _allowed().items():
        acls += [f"  acl is_{method} method {_forwarded(method).replace('|', ' ')}"]
        acls += [f"  acl on_{method} path {' '.join(paths)}"] if paths else []
        acls += [f"  acl on_{method} path_reg ^{pattern}$" for pattern in patterns]
    lines = "\n".join(acls)
    allowed = " or ".join(f"is_{method} on_{method}" for method in _allowed())
    mark_down = f"observe layer7 error-limit {config.breaker.failures} on-error mark-down"
    by_user = f"""  balance hdr({config.user_header})
  hash-type consistent wt6 avalanche
  option httpchk GET {config.health.path}"""
    return f"""# made by npu-gr fleet haproxy
global
  maxconn {config.limits.max_connections}
defaults
  mode http
  timeout connect {round(config.connect_timeout_s * 1e3)}ms
  timeout check {round(config.health.timeout_s * 1e3)}ms
  timeout client {round(config.idle_s)}s
  timeout http-request {round(config.header_timeout_s)}s
  timeout server {round(config.max_budget_s * 1e3)}ms
  timeout queue 1s
  option http-keep-alive
frontend npu_gr
  bind {config.host}:{config.port}
  acl by_user path {" ".join(_USER_PATHS)}
  http-request return status 501 content-type text/plain string "{_EVERYWHERE_TEXT}" {everywhere}
{lines}
  http-request return status 404 content-type text/plain string "{_NOT_HERE_TEXT}" unless {allowed}
  acl normal req.hdr(x-npugr-service) -m str normal
  acl known req.hdr({config.user_header}) -m found
  http-request deny deny_status 413 if {{ req.hdr_val(content-length) gt {config.limits.max_body_bytes} }}
  http-request deny deny_status 400 if by_user !known !normal
  use_backend normal if normal or !by_user
  use_backend rank if {{ path {" ".join(_RETRIED_PATHS)} }}
  default_backend once
frontend admin
  bind {config.admin_host}:{config.admin_port}
  http-request use-service prometheus-exporter if {{ path /metrics }}
backend rank
{by_user}
  retries 1
  retry-on conn-failure empty-response 502 503
  option redispatch 1
  http-response set-header X-NpuGr-Instance %[srv_name]
{servers(special, mark_down)}
backend once
{by_user}
  retries 0
  http-response set-header X-NpuGr-Instance %[srv_name]
{servers(special, mark_down)}
backend normal
  balance leastconn
  option httpchk GET {config.health.path}
  http-response set-header X-NpuGr-Instance %[srv_name]
{servers(normal, "")}
"""


def nginx(config: RouterConfig, instances: list[InstanceConfig]) -> str:
    """Make a whole nginx.conf.

    Open-source nginx has no active checks: it leaves a draining instance only when that refuses a request.
    """
    special, normal = _services(instances)
    variable = "$http_" + config.user_header.replace("-", "_")

    def upstream(name: str, policy: str, some: list[InstanceConfig]) -> str:
        passive = f"max_fails={config.breaker.failures} fail_timeout={max(1, round(config.breaker.open_s))}s"
        lines = "\n".join(
            f"    server {one.host}:{one.port} weight={max(1, round(100 * one.weight))} {passive};" for one in some
        )
        return f"""  upstream {name} {{
    {policy}
{lines}
    keepalive {config.limits.instance_idle};
    keepalive_requests 1000000;
  }}"""

    def location(match: str, to: str, method: str, next_upstream: str, needs_user: bool) -> str:
        refuse = f'      if ({variable} = "") {{ return 400; }}\n' if needs_user else ""
        return f"""    location {match} {{
      if ($request_method !~ "^({_forwarded(method)})$") {{ return 404; }}
{refuse}      proxy_pass http://{to};
      proxy_next_upstream {next_upstream};
    }}"""

    again = "error timeout http_502 http_503 non_idempotent"
    locations = [f'    location {path} {{ return 501 "{_EVERYWHERE_TEXT}"; }}' for path in _EVERYWHERE_PATHS]
    for method, (paths, patterns) in _allowed().items():
        for path in paths:
            if path in _USER_PATHS:
                resend = again if path in _RETRIED_PATHS else "off"
                locations.append(location(f"= {path}", f"special{path}", method, resend, needs_user=True))
            else:
                locations.append(location(f"= {path}", f"normal{path}", method, "error timeout", needs_user=False))
        locations += [
            location(f'~ "^{pattern}\\z"', "normal$uri$is_args$args", method, "error timeout", needs_user=False)
            for pattern in patterns
        ]
    locations.append(f'    location / {{ return 404 "{_NOT_HERE_TEXT}"; }}')
    text = "\n".join(locations)
    return f"""# made by npu-gr fleet nginx
worker_processes auto;
error_log stderr;
pid nginx.pid;
daemon off;
events {{ worker_connections {config.limits.max_connections}; }}
http {{
  access_log off;
  client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi;
  scgi_temp_path scgi;
  client_max_body_size {config.limits.max_body_bytes};
  client_body_buffer_size {config.limits.stream_over_bytes};
  client_header_timeout {round(config.header_timeout_s)}s;
{upstream("special", f"hash {variable} consistent;", special)}
{upstream("normal", "least_conn;", normal)}
  server {{
    listen {config.host}:{config.port};
    keepalive_requests 1000000;
    proxy_http_version 1.1;
    proxy_set_header Connection "";
    proxy_set_header Host $http_host;
    proxy_connect_timeout {round(config.connect_timeout_s * 1e3)}ms;
    proxy_read_timeout {round(config.max_budget_s * 1e3)}ms;
    proxy_next_upstream_tries 2;
    add_header X-NpuGr-Instance $upstream_addr always;
{text}
  }}
}}
"""


BALANCERS: dict[str, Callable[[RouterConfig, list[InstanceConfig]], str]] = {
    "envoy": envoy,
    "haproxy": haproxy,
    "nginx": nginx,
}


def _services(instances: list[InstanceConfig]) -> tuple[list[InstanceConfig], list[InstanceConfig]]:
    special = [one for one in instances if one.special]
    if not special:
        raise ConfigError("discovery: no instance is special, so none would accept signals")
    return special, [one for one in instances if one.normal] or special


def _equals(name: str, value: str) -> dict[str, Any]:
    return {"name": name, "string_match": {"exact": value}}


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _seconds(value: float) -> str:
    return f"{value:.3f}s"
