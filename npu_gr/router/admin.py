"""The operator's HTTP application, on its own address: metrics, the owner of a user, drains. Not the data path.

What each route needs is in `access/rules.py`: with a key file, a key of that scope. A page of another site is never let
in, and neither is a body that is not JSON.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.aiohttp import make_aiohttp_handler

from npu_gr import __version__
from npu_gr.core.errors import BadRequest, NpuGrError, Unauthorized, UnsupportedMedia
from npu_gr.metrics import status
from npu_gr.router.access import Access, placed_by
from npu_gr.router.instance import InstanceState
from npu_gr.router.router import Router
from npu_gr.server.auth.browsers import is_loopback_name, refuse_foreign_pages
from npu_gr.server.auth.rules import ROUTER_ADMIN
from npu_gr.server.codec.fields import UserBody
from npu_gr.server.debug.profile import Profiler
from npu_gr.server.debug.routes import DebugRoutes
from npu_gr.server.debug.stacks import own_stacks
from npu_gr.server.problem import from_error


def build_admin_app(router: Router) -> web.Application:
    """Build the application: status page, metrics, the owner of a user, drain and undrain, the configuration."""
    app = web.Application(middlewares=[_guard(router.access)])
    scrape = make_aiohttp_handler(router.metrics.registry)

    async def metrics(request: web.Request) -> web.StreamResponse:
        router.observe()
        return await scrape(request)

    started_at = time.monotonic()

    async def page(_: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": status.CONTENT_SECURITY_POLICY}
        return web.Response(text=status.page("/status"), content_type="text/html", headers=headers)

    async def state(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(_status(router, started_at)), content_type="application/json")

    async def instances(_: web.Request) -> web.Response:
        now_at = time.monotonic()
        rows = [_row(one, now_at) for one in router.members.instances.values()]
        return _json({"epoch": router.members.ring.epoch, "instances": rows})

    async def owner(request: web.Request) -> web.Response:
        tenant, user = request.query.get("tenant", ""), request.query.get("user", "")
        if not user:
            raise web.HTTPBadRequest(text="user: missing")
        order = list(router.members.ring.walk(placed_by(tenant.encode(), user.encode())))
        return _json({"epoch": router.members.ring.epoch, "order": order[:8]})

    async def user(request: web.Request) -> web.Response:
        try:
            body = msgspec.json.decode(await request.read(), type=UserBody)
        except (msgspec.MsgspecError, ValueError) as error:
            raise BadRequest(f"body: {error}") from error
        name = placed_by(body.user.tenant.encode(), body.user.user.encode())
        return _json({"places": {"placements": router.members.knows(name)}})

    def named(request: web.Request) -> InstanceState:
        instance = router.members.instances.get(request.match_info["name"])
        if instance is None:
            raise web.HTTPNotFound(text="no such instance")
        return instance

    async def drain(request: web.Request) -> web.Response:
        named(request).drain(time.monotonic())
        return _json(_row(named(request), time.monotonic()))

    async def undrain(request: web.Request) -> web.Response:
        named(request).undrain(time.monotonic())
        return _json(_row(named(request), time.monotonic()))

    async def config(_: web.Request) -> web.Response:
        return _json(msgspec.to_builtins(router.config))

    async def live(_: web.Request) -> web.Response:
        return _json({"live": True})

    async def bundle_texts() -> dict[str, str]:
        router.observe()
        now_at = time.monotonic()
        rows = [_row(one, now_at) for one in router.members.instances.values()]
        return {
            "config.json": msgspec.json.encode(router.config).decode(),
            "status.json": msgspec.json.encode(_status(router, started_at)).decode(),
            "instances.json": msgspec.json.encode(rows).decode(),
            "metrics.txt": generate_latest(router.metrics.registry).decode(),
        }

    app.add_routes(
        [
            *DebugRoutes(bundle_texts, own_stacks, Profiler().profile).routes(),
            web.get("/", page),
            web.get("/status", state),
            web.get("/metrics", metrics),
            web.get("/instances", instances),
            web.get("/owner", owner),
            web.post("/user", user),
            web.post("/instances/{name}/drain", drain),
            web.post("/instances/{name}/undrain", undrain),
            web.get("/config", config),
            web.get("/healthz", live),
        ]
    )
    return app


def _guard(access: Access) -> Any:
    """Make the middleware: who may ask, and how errors are told."""

    @web.middleware
    async def handle(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            _check(request, access)
            return await handler(request)
        except NpuGrError as error:
            answer = from_error(error, uuid.uuid4().hex)
            if isinstance(error, Unauthorized):
                await asyncio.sleep(access.throttle.hold_s())
                answer.force_close()
            return answer

    return handle


def _check(request: web.Request, access: Access) -> None:
    """Check that a request may be made.

    Raises:
        Forbidden: a page of another site sent it, or the key lacks the scope.
        Unauthorized: it has no key.
        Overloaded: the key is over its rate.
        UnsupportedMedia: it has a body that is not JSON.
    """
    resource = request.match_info.route.resource
    method = "GET" if request.method == "HEAD" else request.method
    if resource is not None and (method, resource.canonical) == ("GET", "/healthz"):
        return
    here = request.transport.get_extra_info("sockname") if request.transport else None
    refuse_foreign_pages(request.headers, is_loopback=here is not None and is_loopback_name(here[0]))
    scope = ROUTER_ADMIN[method, resource.canonical] if resource is not None else None
    if scope is not None or resource is None:
        access.key_of(_authorization(request), scope)
    if request.body_exists and request.content_type != "application/json":
        raise UnsupportedMedia(f"Content-Type: {request.content_type[:64]!r}: a body must be application/json")


def _authorization(request: web.Request) -> bytes | None:
    """Return the header as it came; of several, the first."""
    return next((value for name, value in request.raw_headers if name.lower() == b"authorization"), None)


def _status(router: Router, started_at: float) -> status.StatusReport:
    now_at = time.monotonic()
    rows = [
        status.InstanceStatus(
            name=one.name,
            state="draining" if one.is_drained else one.health,
            requests=router.metrics.placed_at(one.name),
            in_flight=one.in_flight,
        )
        for one in router.members.instances.values()
    ]
    ready = any(one.takes_ranks(now_at) for one in router.members.instances.values())
    return status.StatusReport(
        name="router",
        ready=ready,
        why_not="" if ready else "no instance takes ranks",
        uptime_s=now_at - started_at,
        versions={"npu_gr": __version__, "ring": str(router.members.ring.epoch)},
        queue={"requests_in_flight": float(sum(row.in_flight for row in rows))},
        instances=rows,
        links={"metrics": "/metrics", "configuration": "/config", "runbooks": "/debug/runbooks"},
    )


def _row(one: InstanceState, now_at: float) -> dict[str, Any]:
    return {
        "name": one.name,
        "address": f"{one.config.host}:{one.config.port}",
        "health": one.health,
        "is_drained": one.is_drained,
        "takes_ranks": one.takes_ranks(now_at),
        "share": round(one.breaker.share(now_at), 3),
        "in_flight": one.in_flight,
    }


def _json(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
