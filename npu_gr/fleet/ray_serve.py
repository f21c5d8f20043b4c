"""Instances as Ray Serve replicas, one a device: for users who run Ray and want its placement and autoscaling.

Signal and rank meet through Ray's own ConsistentHashRouter, keyed by our user header. A replica runs the same door as
`npu-gr serve`, behind a Unix socket of its own. Ray's proxy in Python costs milliseconds a request: where that matters,
put `npu-gr route` or Envoy before instances that Ray only places.

Needs the extra `ray`. RAY_SERVE_SESSION_ID_HEADER_KEY must be the user header on every node; `deploy` sets it for the
cluster that it starts itself.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from npu_gr.core.errors import ConfigError
from npu_gr.service.config import Config, from_table, to_table

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger(__name__)

USER_HEADER = "x-user-id"
QUEUE_DEPTH, LATE_RATIO = "queue_depth", "late_ratio"
_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_PASSED = ("content-type", "accept", "authorization", "traceparent", "x-user-id", "x-request-id")
_TIMES = ("x-request-timeout-ms", "grpc-timeout")


@dataclass(frozen=True, slots=True)
class RayOptions:
    """How many, on what, reached where."""

    num_instances: int  # at least
    max_instances: int  # autoscaled between the two
    resource: str = "CPU"  # NPU | GPU | CPU; one of it an instance
    host: str = "127.0.0.1"
    port: int = 8090
    target_queue_depth: float = 8.0  # jobs waiting for one device
    max_late_ratio: float = 0.005  # of ranks over the objective

    def __post_init__(self) -> None:
        if self.max_instances < self.num_instances:
            raise ConfigError(f"max_instances: {self.max_instances} is less than instances: {self.num_instances}")


def wanted(current: int, queue_depths: list[float], late_ratios: list[float], options: RayOptions) -> int:
    """Instances for this load: as many as bring the queues to their target, one more while ranks are late.

    Pure. Fewer only where nothing is late and the queues of one less would still be under half the target.
    """
    least, most = options.num_instances, options.max_instances
    total, late = sum(queue_depths), max(late_ratios, default=0.0)
    by_queue = math.ceil(total / options.target_queue_depth)
    if late > options.max_late_ratio:
        by_queue = max(by_queue, current + 1)
    elif by_queue < current:
        is_quiet = total <= (current - 1) * options.target_queue_depth / 2
        by_queue = current - 1 if is_quiet else current
    return min(most, max(least, by_queue))


class Scale:
    """`wanted` as Ray's controller calls it."""

    def __init__(self, **options: Any) -> None:
        self._options = RayOptions(**options)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Instances wanted, and no state."""
        found = context.aggregated_metrics or {}
        depths, late = (list(found.get(name, {}).values()) for name in (QUEUE_DEPTH, LATE_RATIO))
        return wanted(context.target_num_replicas, depths, late, self._options), {}


class Instance:
    """One replica: an instance in this process, its door on a Unix socket."""

    async def __init__(self, table: dict[str, Any]) -> None:  # type: ignore[misc]  # Ray awaits it
        from npu_gr.service.app import instance

        self._config = from_table(table)
        self._stack = AsyncExitStack()
        app, self._service = await self._stack.enter_async_context(instance(self._config))
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        folder = tempfile.mkdtemp(prefix="npu_gr")
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        path = str(Path(folder) / "door")
        await web.UnixSite(runner, path).start()
        self._http = aiohttp.ClientSession("http://instance", connector=aiohttp.UnixConnector(path, limit=0))
        self._stack.push_async_callback(self._http.close)
        self._ranks = (0.0, 0.0)  # all, in time; when last read

    async def __call__(self, request: Request) -> Response:
        """The door's answer."""
        from starlette.responses import Response

        headers = {name: value for name in (*_PASSED, *_TIMES) if (value := request.headers.get(name)) is not None}
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        async with self._http.request(request.method, target, data=await request.body(), headers=headers) as answer:
            given = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
            given["X-NpuGr-Instance"] = str(os.getpid())
            return Response(await answer.read(), answer.status, given)

    def check_health(self) -> None:
        """Raises RuntimeError: Ray replaces the replica."""
        is_ready, why = self._service.is_ready()
        if not is_ready:
            raise RuntimeError(why)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `scale` reads: the device's queue, and the ratio of late ranks since the last look."""
        async with self._http.get("/metrics", headers={"Accept": "text/plain"}) as answer:
            text = await answer.text()
        depth, count, in_time = 0.0, 0.0, 0.0
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "npu_gr_queue_depth":
                    depth += sample.value
                elif sample.name == "npu_gr_rank_duration_seconds_count":
                    count += sample.value
                elif sample.name == "npu_gr_rank_duration_seconds_bucket":
                    in_time += (
                        sample.value if float(sample.labels["le"]) == self._config.slo.objective_s("rank") else 0.0
                    )
        (count_before, in_time_before), self._ranks = self._ranks, (count, in_time)
        late = (count - count_before) - (in_time - in_time_before)
        return {QUEUE_DEPTH: depth, LATE_RATIO: late / max(1.0, count - count_before)}

    async def __del__(self) -> None:  # Ray awaits it
        await self._stack.aclose()


_HOP_BY_HOP = ("connection", "keep-alive", "transfer-encoding", "content-length", "content-encoding", "date", "server")


def application(config: Config, options: RayOptions) -> Any:
    """The Serve application; `ray` must be started."""
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

    resources: dict[str, Any] = {"num_cpus": 1}
    if options.resource == "GPU":
        resources = {"num_cpus": 1, "num_gpus": 1}
    elif options.resource != "CPU":
        resources = {"num_cpus": 1, "resources": {options.resource: 1}}
    count: dict[str, Any] = {"num_replicas": options.num_instances}
    if options.max_instances > options.num_instances:
        policy = AutoscalingPolicy(policy_function=f"{__name__}:Scale", policy_kwargs=asdict(options))
        limits = {"min_replicas": options.num_instances, "max_replicas": options.max_instances}
        count = {"autoscaling_config": AutoscalingConfig(**limits, policy=policy)}
    deployment = serve.deployment(
        Instance,
        name="npu_gr",
        max_ongoing_requests=config.service.max_inflight,
        ray_actor_options=resources,
        graceful_shutdown_wait_loop_s=config.server.drain_grace_s,
        graceful_shutdown_timeout_s=config.server.shutdown_timeout_s,
        request_router_config=RequestRouterConfig(
            request_router_class=_ROUTER, request_router_kwargs={"num_virtual_nodes": 256, "num_fallback_replicas": 1}
        ),
        **count,
    )
    return deployment.bind(to_table(config))


def deploy(config: Config, options: RayOptions, until: threading.Event | None = None) -> None:
    """Run the application until SIGTERM or SIGINT (or `until`), on the cluster of RAY_ADDRESS or on one of its own.

    Raises:
        ConfigError: Ray is not installed.
    """
    os.environ.setdefault("RAY_SERVE_SESSION_ID_HEADER_KEY", USER_HEADER)  # read when ray is imported
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        from ray import serve
        from ray.serve.config import HTTPOptions
    except ImportError as error:
        raise ConfigError(f"npu-gr fleet ray needs the extra `ray`: pip install 'npu_gr[ray]' ({error})") from error
    stop = until or threading.Event()
    if until is None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False)
    else:  # pretended devices on a machine without any; a fresh folder, since a stale session fails the next one
        pretended = {options.resource: options.max_instances} if options.resource not in ("CPU", "GPU") else None
        folder = tempfile.mkdtemp(prefix="ray")
        cpus = max(2 * options.max_instances, os.cpu_count() or 1)
        ray.init(
            address="local",
            num_cpus=cpus,
            resources=pretended,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=200 << 20,
            _temp_dir=folder,
        )
    try:
        serve.start(http_options=HTTPOptions(host=options.host, port=options.port))
        serve.run(application(config, options), route_prefix="/", name="npu_gr")
        log.info("%d instances behind Ray Serve on %s:%d", options.num_instances, options.host, options.port)
        stop.wait()
    finally:
        serve.shutdown()
        ray.shutdown()
