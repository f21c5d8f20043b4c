"""Instances as Ray Serve replicas, one per device, with Ray's autoscaling.

Ray's proxies choose the replica by `npu_gr.route.ray_router`. A replica serves HTTP as `npu-gr
serve` does, on a private Unix socket, and sends erasures to every replica. Ray's Python proxy costs
milliseconds per request; where that matters, start the instances with Ray and put `npu-gr route` in
front of them.

Needs the extra `ray` on every node.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import tempfile
import threading
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from yarl import URL

from npu_gr.core.errors import ConfigError, NpuGrError
from npu_gr.core.kinds import RANK, Routing
from npu_gr.core.logs import random_id
from npu_gr.route.fan_out import Answered, Change, combined_answer
from npu_gr.route.placement import routing_of
from npu_gr.server.auth.rules import Address, is_loopback_name
from npu_gr.server.http import from_error
from npu_gr.server.run import listen_at, make_runner
from npu_gr.service.config import Config

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger(__name__)

USER_HEADER = "x-user-id"
QUEUE_DEPTH = "queue_depth"  # names of the statistics that a replica reports to Ray
LATE_RATIO = "late_ratio"
MAX_REMEMBERED = 1_000_000  # signals remembered by each proxy of Ray
EVERYWHERE_S = 10.0  # time limit of an erasure at all replicas
_NAME = "npu_gr"  # name of the application and of its deployment
_ROUTER = "npu_gr.route.ray_router.PlacementRouter"  # imported in Ray's proxies
_FORWARDED = (
    *(
        "content-type",
        "content-encoding",
        "accept",
        "authorization",
        "traceparent",
        USER_HEADER,
        "x-request-id",
    ),
    "idempotency-key",
    *("host", "origin", "sec-fetch-site"),
    *("x-request-timeout-ms", "grpc-timeout"),
)
_HOP_BY_HOP = (
    "connection",
    "keep-alive",
    "transfer-encoding",
    "content-length",
    "content-encoding",
    "date",
    "server",
)


@dataclass(frozen=True, slots=True)
class RayOptions:
    """Number of instances, their resource, the address, and the targets of autoscaling."""

    num_instances: int  # smallest number
    max_instances: int  # largest number
    resource: str = "CPU"  # NPU | GPU | CPU; each instance takes one
    host: str = "127.0.0.1"
    port: int = 8090
    target_queue_depth: float = 8.0  # jobs queued per device
    max_late_ratio: float = 0.005  # fraction of ranks that may take longer than their objective

    def __post_init__(self) -> None:
        if self.max_instances < self.num_instances:
            raise ConfigError(
                f"max_instances: {self.max_instances} is below instances: {self.num_instances}"
            )


def target_instances(
    current: int, queue_depths: list[float], late_ratios: list[float], options: RayOptions
) -> int:
    """Decide how many instances the current load needs.

    The number that brings the queues to their target, and at least one more while too many ranks
    are late. At most one less, and only if the queues of the others would stay below half of the
    target.

    Args:
        current: Current number of instances.
        queue_depths: Jobs queued for the device, per instance.
        late_ratios: Fraction of late ranks, per instance.
        options: Targets, and bounds of the result.
    """
    total = sum(queue_depths)
    late = max(late_ratios, default=0.0)
    by_queue = math.ceil(total / options.target_queue_depth)
    if late > options.max_late_ratio:
        by_queue = max(by_queue, current + 1)
    elif by_queue < current:
        is_quiet = total <= (current - 1) * options.target_queue_depth / 2
        by_queue = current - 1 if is_quiet else current
    return min(options.max_instances, max(options.num_instances, by_queue))


class ScalingPolicy:
    """Adapts `target_instances` to the interface of Ray's controller."""

    def __init__(self, **options: Any) -> None:
        self._options = RayOptions(**options)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the target number of instances, and an empty state."""
        statistics = context.aggregated_metrics or {}  # name -> replica -> value
        depths = list(statistics.get(QUEUE_DEPTH, {}).values())
        late = list(statistics.get(LATE_RATIO, {}).values())
        return target_instances(context.target_num_replicas, depths, late, self._options), {}


class RayReplica:
    """A replica: an instance in this process, with Unix sockets for its public and admin routes."""

    async def __init__(self, config: Config, host: str) -> None:  # type: ignore[misc]  # Ray awaits it
        from npu_gr.service.app import instance

        self._config = config
        self._stack = AsyncExitStack()
        app, self._service = await self._stack.enter_async_context(instance(config))
        runner = make_runner(app, config.server)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        folder = tempfile.mkdtemp(prefix="npu_gr")
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        # the proxy passes the client's Host on, which on loopback may be that of another site
        public = Address(
            is_admin=False,
            rejects_foreign_hosts=is_loopback_name(host) and not config.server.api_keys_file,
        )
        self._http = await self._listen(runner, app, public, f"{folder}/http")
        self._admin = await self._listen(runner, app, Address(is_public=False), f"{folder}/admin")
        self._ranks = (0.0, 0.0)  # counts at the last report: all ranks, and those within the SLO

    async def _listen(
        self, runner: web.AppRunner, app: web.Application, address: Address, path: str
    ) -> aiohttp.ClientSession:
        await listen_at(runner, app, address, path)
        http = aiohttp.ClientSession(
            "http://localhost", connector=aiohttp.UnixConnector(path, limit=0)
        )
        self._stack.push_async_callback(http.close)
        return http

    async def __call__(self, request: Request) -> Response:
        """Forward a request to the instance, or an erasure to all replicas."""
        from starlette.responses import Response

        headers = {
            name: value for name in _FORWARDED if (value := request.headers.get(name)) is not None
        }
        # as it was sent: the instance serves no other spelling of a path
        path = request.scope.get("raw_path", b"").decode("latin-1") or request.url.path
        target = path + (f"?{request.url.query}" if request.url.query else "")
        change = Change(request.method, target, headers, await request.body())
        if routing_of(request.method, path) is Routing.EVERYWHERE:
            made = await self._everywhere(change)
            return Response(made.body, made.status, dict(made.headers))
        async with self._ask(change) as answer:
            given = {
                name: value
                for name, value in answer.headers.items()
                if name.lower() not in _HOP_BY_HOP
            }
            given["X-NpuGr-Instance"] = str(os.getpid())
            return Response(await answer.read(), answer.status, given)

    def _ask(self, change: Change) -> Any:
        target = URL(change.target, encoded=True)
        return self._http.request(change.method, target, data=change.body, headers=change.headers)

    async def do(self, change: Change) -> tuple[str, Answered]:
        """Send a change to this instance; return its process id and its answer."""
        async with self._ask(change) as answer:
            return str(os.getpid()), Answered(answer.status, await answer.text())

    async def _everywhere(self, change: Change) -> web.Response:
        from ray import serve
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        try:
            calls = serve.get_deployment_handle(_NAME, _NAME).broadcast("do", change)
            answers = dict(await calls.results_async(timeout_s=EVERYWHERE_S))
        except (RayError, RayServeException, TimeoutError) as error:
            answers = {"a replica": Answered(0, str(error))}
        try:
            return combined_answer(change, answers)
        except NpuGrError as error:
            return from_error(error, change.headers.get("x-request-id", random_id(128)))

    def check_health(self) -> None:
        """Raise RuntimeError if the instance is not ready; Ray then replaces the replica."""
        is_ready, why = self._service.is_ready()
        if not is_ready:
            raise RuntimeError(why)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Report to `ScalingPolicy`: queue depth, and the ratio of late ranks since last time."""
        async with self._admin.get("/metrics", headers={"Accept": "text/plain"}) as answer:
            text = await answer.text()
        ranks = f"npu_gr_{RANK.name}_duration_seconds"
        objective_s = self._config.slo.objective_s(RANK.name)
        depth = 0.0
        count = 0.0
        within_slo = 0.0
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "npu_gr_queue_depth":
                    depth += sample.value
                elif sample.name == f"{ranks}_count":
                    count += sample.value
                elif sample.name == f"{ranks}_bucket" and float(sample.labels["le"]) == objective_s:
                    within_slo += sample.value
        count_before, within_slo_before = self._ranks
        self._ranks = (count, within_slo)
        late = (count - count_before) - (within_slo - within_slo_before)
        return {QUEUE_DEPTH: depth, LATE_RATIO: late / max(1.0, count - count_before)}

    async def __del__(self) -> None:  # Ray awaits it
        await self._stack.aclose()


def application(config: Config, options: RayOptions) -> Any:
    """Make the Ray Serve application; `ray.init` must have been called."""
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

    resources: dict[str, Any] = {"num_cpus": 1}
    if options.resource == "GPU":
        resources = {"num_cpus": 1, "num_gpus": 1}
    elif options.resource != "CPU":
        resources = {"num_cpus": 1, "resources": {options.resource: 1}}
    count: dict[str, Any] = {"num_replicas": options.num_instances}
    if options.max_instances > options.num_instances:
        policy = AutoscalingPolicy(
            policy_function=f"{__name__}:ScalingPolicy", policy_kwargs=asdict(options)
        )
        limits = {"min_replicas": options.num_instances, "max_replicas": options.max_instances}
        count = {"autoscaling_config": AutoscalingConfig(**limits, policy=policy)}
    deployment = serve.deployment(
        RayReplica,
        name=_NAME,
        max_ongoing_requests=config.admission.max_inflight,
        ray_actor_options=resources,
        graceful_shutdown_wait_loop_s=config.server.drain_grace_s,
        graceful_shutdown_timeout_s=config.server.shutdown_timeout_s,
        request_router_config=RequestRouterConfig(
            request_router_class=_ROUTER,
            request_router_kwargs={
                "user_header": USER_HEADER,
                "t_life_s": config.relay.t_life_s,
                "max_remembered": MAX_REMEMBERED,
            },
        ),
        **count,
    )
    return deployment.bind(config, options.host)


def deploy(config: Config, options: RayOptions, until: threading.Event | None = None) -> None:
    """Serve on the cluster of RAY_ADDRESS, or on a local cluster, until SIGTERM or SIGINT.

    Args:
        config: Configuration of every instance.
        options: Number of instances, resource and address.
        until: Stop when this event is set, instead of at a signal.

    Raises:
        ConfigError: Ray is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        from ray import serve
        from ray.serve.config import HTTPOptions
    except ImportError as error:
        raise ConfigError(
            f"npu-gr fleet ray needs the extra `ray`: pip install 'npu_gr[ray]' ({error})"
        ) from error
    stop = until or threading.Event()
    if until is None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False)
    else:
        # declare the devices, which a local cluster does not detect
        resources = (
            {options.resource: options.max_instances}
            if options.resource not in ("CPU", "GPU")
            else None
        )
        # a new folder, since the session of a killed cluster makes the next start fail
        folder = tempfile.mkdtemp(prefix="ray")
        cpus = max(2 * options.max_instances, os.cpu_count() or 1)
        ray.init(
            address="local",
            num_cpus=cpus,
            resources=resources,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=200 << 20,
            _temp_dir=folder,
        )
    try:
        serve.start(http_options=HTTPOptions(host=options.host, port=options.port))
        serve.run(application(config, options), route_prefix="/", name=_NAME)
        log.info(
            "%d instances behind Ray Serve on %s:%d",
            options.num_instances,
            options.host,
            options.port,
        )
        stop.wait()
    finally:
        serve.shutdown()
        ray.shutdown()
