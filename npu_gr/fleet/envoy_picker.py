"""What Envoy needs to ask our router for an instance: the filter, the router's cluster, and clusters that obey it.

Envoy's own placement stays as the fallback: while no picker answers, users are hashed as without one, and nobody gets
an error for it. A user whose request comes then is a miss at most, because Envoy's hash is not our ring.
"""

from __future__ import annotations

from typing import Any

from npu_gr.core.errors import ConfigError
from npu_gr.router.config import InstanceConfig, PickerConfig, RouterConfig
from npu_gr.router.members import ring_of
from npu_gr.router.request import headers_read

CLUSTER = "picker"
_TYPE = "type.googleapis.com/envoy.extensions"
_SPACE = "envoy.lb"
_DESTINATION = "x-gateway-destination-endpoint"


def picker_filter(config: RouterConfig) -> dict[str, Any]:
    """Make the HTTP filter that asks the picker.

    It shows the picker the headers of a request that the picker reads, and the body only where they name no user. The
    answer waits for nobody: what the router adds to it, Envoy adds by itself (`told`), and what fails, Envoy takes out
    (`outlier_detection`). So a request costs one question.
    """
    shown = [":method", ":path", ":authority", *sorted(name.decode() for name in headers_read(config))]
    return {
        "name": "envoy.filters.http.ext_proc",
        "typed_config": {
            "@type": f"{_TYPE}.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": {"envoy_grpc": {"cluster_name": CLUSTER}},
            "failure_mode_allow": True,  # no picker: go on, by the fallback
            "message_timeout": f"{config.connect_timeout_s:.3f}s",
            "processing_mode": {
                "request_header_mode": "SEND",
                "request_body_mode": "BUFFERED",
                "response_header_mode": "SKIP",
                # Without this Envoy ends its call at the choice; so it ends with the request, which the picker counts
                # as in flight until then. Instances speak HTTP/1.1 and send no trailers, so nothing waits.
                "response_trailer_mode": "SEND",
            },
            "forward_rules": {
                "allowed_headers": {"patterns": [{"exact": name, "ignore_case": True} for name in shown]}
            },
            "route_cache_action": "RETAIN",  # no route depends on the choice
            "allow_mode_override": True,  # the picker does without most bodies
            "metadata_options": {
                "forwarding_namespaces": {"untyped": [_SPACE]},
                "receiving_namespaces": {"untyped": [_SPACE]},
            },
        },
    }


def picker_cluster(config: RouterConfig, picker: PickerConfig) -> dict[str, Any]:
    """Make the cluster of the picker. Its health is checked, so that one that hangs is soon asked no more.

    Raises:
        ConfigError: the picker serves over TLS.
    """
    if config.tls is not None:
        raise ConfigError("tls: whom Envoy trusts is not known here; make this configuration without, and add it there")
    http2 = {
        "@type": f"{_TYPE}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    address = {"socket_address": {"address": picker.host, "port_value": picker.port}}
    interval = f"{config.health.interval_s:.3f}s"
    return {
        "name": CLUSTER,
        "connect_timeout": f"{config.connect_timeout_s:.3f}s",
        "type": "STRICT_DNS",
        "load_assignment": {
            "cluster_name": CLUSTER,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}],
        },
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2},
        "circuit_breakers": {
            "thresholds": [{"max_requests": config.limits.max_inflight, "max_pending_requests": 1024}]
        },
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "health_checks": [
            {
                "timeout": f"{config.health.timeout_s:.3f}s",
                "interval": interval,
                "no_traffic_interval": interval,
                "unhealthy_threshold": config.health.fall,
                "healthy_threshold": config.health.rise,
                "grpc_health_check": {"service_name": "readiness"},
            }
        ],
    }


def told(instances: list[InstanceConfig], *, is_signal: bool) -> list[dict[str, Any]]:
    """Make the headers that the answer of an instance gets: who gave it, and of a signal where its ranks go.

    Args:
        instances: on the ring.
        is_signal: it answers one.
    """
    headers = {"X-NpuGr-Instance": "%UPSTREAM_HOST_NAME%"}
    if is_signal:  # the one that took it, which is not the one that was chosen if that failed
        headers["X-NpuGr-Placement"] = f"%UPSTREAM_HOST_NAME%@{ring_of(instances).epoch}"
    return [
        {"header": {"key": key, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
        for key, value in headers.items()
    ]


def obeying(fallback: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Make the policy of a cluster whose host the picker chooses.

    Args:
        fallback: Envoy's policy without a picker, and for the second try of what names one host only.
        settings: of that policy.

    The choice is read from the metadata, which no client can send; the header of the same name is for the instance.
    """
    message = "".join(part.title() for part in fallback.split("_"))
    policy = {
        "name": f"envoy.load_balancing_policies.{fallback}",
        "typed_config": {"@type": f"{_TYPE}.load_balancing_policies.{fallback}.v3.{message}", **settings},
    }
    override = {
        "@type": f"{_TYPE}.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"metadata": {"key": _SPACE, "path": [{"key": _DESTINATION}]}}],
        "selected_host_key": {"key": _SPACE, "path": [{"key": f"{_DESTINATION}-served"}]},
        "fallback_policy": {"policies": [{"typed_extension_config": policy}]},
    }
    named = {"name": "envoy.load_balancing_policies.override_host", "typed_config": override}
    return {"load_balancing_policy": {"policies": [{"typed_extension_config": named}]}}
