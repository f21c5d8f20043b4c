"""python -m tests.route.light NAME PORT VERSION: an instance without a model.

It is for faults that need a process, and ready in half a second. It remembers for some seconds who
was signalled, and drains as a real instance does.
"""

from __future__ import annotations

import asyncio
import sys
import time

import uvloop
from aiohttp import web

from npu_gr.core.process import stop_signals
from npu_gr.server.http import NOT_TAKEN

T_LIFE_S = 1.0
WORK_S = 0.002


async def main(name: str, port: int, version: str) -> None:
    prefixes: dict[str, float] = {}
    is_draining = False

    async def ready(_: web.Request) -> web.Response:
        return web.Response(status=503 if is_draining else 200)

    async def signal(request: web.Request) -> web.Response:
        if is_draining:
            return web.Response(status=503, headers={NOT_TAKEN: "1"})
        print(request.headers["X-Request-Id"], flush=True)  # noqa: T201  (the test counts them)
        await request.read()
        prefixes[request.headers["X-User-Id"]] = time.monotonic() + T_LIFE_S
        return web.json_response({"model_version": version}, status=202)

    async def rank(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(WORK_S)
        is_hit = prefixes.get(request.headers["X-User-Id"], 0.0) > time.monotonic()
        return web.json_response(
            {"model_version": version, "outcome": "hbm_hit" if is_hit else "miss_full"}
        )

    app = web.Application()
    app.add_routes(
        [web.get("/readyz", ready), web.post("/v1/signal", signal), web.post("/v1/rank", rank)]
    )
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    with stop_signals() as signals:
        await signals.get()
        is_draining = True
        await asyncio.sleep(1.5 * T_LIFE_S)
    await runner.cleanup()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
