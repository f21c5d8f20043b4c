"""The picker behind the real Envoy, with the configuration that `npu-gr fleet envoy` makes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from npu_gr.core.settings import from_table
from npu_gr.router.config import RouterConfig
from npu_gr.router.router import Router
from npu_gr.router.run import listening
from tests.fleet.test_balancers import started
from tests.router.chaos import free_port
from tests.router.fake import Fake, table
from tests.serving import until

USERS = [f"user-{i}" for i in range(40)]


class Gateway:
    """Fakes behind Envoy, and the router that Envoy asks."""

    def __init__(self, fakes: list[Fake], url: str, http: aiohttp.ClientSession, config: RouterConfig) -> None:
        self.fakes, self.http, self.config = fakes, http, config
        self.router: Router | None = None
        self.url = url

    async def post(
        self, path: str, user: str | None, body: bytes = b"{}", **headers: str
    ) -> tuple[int, dict[str, Any], Any]:
        given = {"Content-Type": "application/json", **{key.replace("_", "-"): one for key, one in headers.items()}}
        if user:
            given["x-user-id"] = user
        async with self.http.post(f"{self.url}/v1/{path}", data=body, headers=given) as answer:
            return answer.status, await answer.json(content_type=None), answer.headers

    def chosen(self, instance: str) -> str:
        """What the picker chose for the last request at an instance; empty: nobody picked."""
        fake = next(fake for fake in self.fakes if fake.name == instance)
        return fake.seen[-1].headers.get("x-gateway-destination-endpoint", "")

    @asynccontextmanager
    async def picker(self) -> AsyncIterator[Router]:
        """The router runs, and Envoy has seen it."""
        async with listening(self.config) as (router, _, _):
            self.router = router
            async with asyncio.timeout(20):
                while not self.chosen((await self.post("rank", "warm-up"))[1]["instance"]):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            yield router
        self.router = None

    def owner(self, user: str) -> str:
        assert self.router is not None
        return self.router.members.ring.owner(user.encode())


async def homes(g: Gateway) -> dict[str, str]:
    """Where the signals of all users go; none is refused."""
    found = {}
    for user in USERS:
        status, answer, _ = await g.post("signal", user)
        assert status == 202
        found[user] = answer["instance"]
    return found


@asynccontextmanager
async def gateway(folder: Path, **sections: Any) -> AsyncIterator[Gateway]:
    fakes = [Fake(f"i{i}") for i in range(3)]
    for fake in fakes:
        await fake.start()
    settings = table(fakes, port=free_port(), admin_port=free_port(), picker={"port": free_port()}, **sections)
    settings |= {"connect_timeout_s": 5.0, "health": {"interval_s": 0.1, "timeout_s": 5.0}}
    config = from_table(settings, RouterConfig)
    envoy_port = free_port()
    of_envoy = msgspec.structs.replace(config, port=envoy_port, admin_port=free_port())
    try:
        with started("envoy", folder, of_envoy) as process:
            async with aiohttp.ClientSession() as http:
                g = Gateway(fakes, f"http://127.0.0.1:{envoy_port}", http, config)
                async with asyncio.timeout(60):
                    while True:
                        assert process.poll() is None, (folder / "stderr").read_text()[-2000:]
                        try:
                            if (await g.post("rank", "u"))[0] == 200:
                                break
                        except (aiohttp.ClientError, json.JSONDecodeError):
                            pass
                        await asyncio.sleep(0.05)
                yield g
    finally:
        for fake in fakes:
            await fake.stop()


async def test_envoy_goes_where_the_ring_says_and_without_a_picker_nobody_gets_an_error(tmp_path: Path) -> None:
    async with gateway(tmp_path) as g:
        async with g.picker() as router:
            for user in USERS:
                status, signalled, headers = await g.post("signal", user)
                assert status == 202
                assert signalled["instance"] == headers["X-NpuGr-Instance"] == g.owner(user)
                assert headers["X-NpuGr-Placement"] == f"{g.owner(user)}@{router.members.ring.epoch}"
                status, ranked, _ = await g.post("rank", user)
                assert (status, ranked["instance"], ranked["hit"]) == (200, signalled["instance"], True)
            assert {fake.name for fake in g.fakes if fake.prefixes} == {"i0", "i1", "i2"}, "every one has users"
            assert g.chosen("i0").startswith(f"127.0.0.1:{g.fakes[0].port},"), "a rank has a second endpoint"
            counted = router.metrics.requests
            await until(lambda: counted.value(kind="signal") == len(USERS))
            assert counted.value(kind="signal", status="0") == len(USERS), "no answer was waited for"

            # a request counts as in flight until its answer is there, though nobody is asked about the answer
            owner = router.members.instances[g.owner("slow")]
            for fake in g.fakes:
                fake.delay_s = 0.2
            slow = asyncio.create_task(g.post("rank", "slow"))
            await until(lambda: owner.in_flight == 1)
            await slow
            await until(lambda: owner.in_flight == 0)
            assert owner.rank_times_s[-1] > 0.2
            for fake in g.fakes:
                fake.delay_s = 0.0

            # where the header is missing, the body says whose it is: the same place, and the body arrives whole
            filler = "x" * 300_000
            for user in USERS[:6]:
                body = json.dumps({"user_id": user, "x": filler}).encode()
                status, ranked, _ = await g.post("rank", None, body)
                assert (status, ranked["instance"], ranked["size"]) == (200, g.owner(user), len(body))
                packed = msgspec.msgpack.encode({"user_id": user, "history": {"items": [1, 2]}})
                _, ranked, _ = await g.post("rank", None, packed, Content_Type="application/msgpack")
                assert (ranked["instance"], ranked["size"]) == (g.owner(user), len(packed))
            status, problem, _ = await g.post("rank", None, b'{"user": 1}')
            assert (status, "user_id" in problem["detail"]) == (422, True)
            assert (await g.post("rank", None, b"[", X_NpuGr_Service="normal"))[0] == 200

            # what no gateway may pass on reaches nobody
            num = sum(len(fake.seen) for fake in g.fakes)
            for path, refused in (("users/u", 501), ("unknown", 404)):
                async with g.http.delete(f"{g.url}/v1/{path}") as answer:
                    assert answer.status == refused
            assert sum(len(fake.seen) for fake in g.fakes) == num

            # what the client sends as the gateway's own header decides nothing
            other = next(fake for fake in g.fakes if fake.name != g.owner("u"))
            _, ranked, _ = await g.post("rank", "u", x_gateway_destination_endpoint=f"127.0.0.1:{other.port}")
            assert ranked["instance"] == g.owner("u")

            # a placement that a rank brings beats the ring, and a draining instance gets no signals
            _, ranked, _ = await g.post("rank", "v", X_NpuGr_Placement=f"{other.name}@01234567")
            assert ranked["instance"] == other.name
            router.members.instances[g.owner("u")].drain(asyncio.get_running_loop().time())
            _, signalled, _ = await g.post("signal", "u")
            assert signalled["instance"] != g.owner("u")
            await until(lambda: all(one.in_flight == 0 for one in router.members.instances.values()))
            assert router.in_flight == 0

            # an instance that is gone: its rank is tried at the second endpoint, and the router learns of it
            await g.fakes[1].stop()
            user = next(user for user in USERS if g.owner(user) == "i1")
            status, ranked, headers = await g.post("rank", user)
            assert (status, ranked["instance"]) == (200, headers["X-NpuGr-Instance"])
            assert ranked["instance"] != "i1"
            # a signal's answer names who took it, and its rank goes there
            status, signalled, headers = await g.post("signal", user)
            assert (status, headers["X-NpuGr-Placement"].partition("@")[0]) == (202, signalled["instance"])
            _, ranked, _ = await g.post("rank", user, X_NpuGr_Placement=headers["X-NpuGr-Placement"])
            assert (ranked["instance"], ranked["hit"]) == (signalled["instance"], True)
            await g.fakes[1].start()

        # no picker: Envoy's own hash, one place for each user, no error; the instance that was gone comes back
        rounds: list[dict[str, str]] = []
        async with asyncio.timeout(20):  # each of Envoy's threads learns by itself who is back
            while set((first := await homes(g)).values()) != {"i0", "i1", "i2"} or rounds[-3:] != [first] * 3:
                rounds.append(first)
                await asyncio.sleep(0.05)
        for user in USERS:
            status, ranked, headers = await g.post("rank", user)
            assert (status, ranked["hit"], ranked["instance"]) == (200, True, first[user])
            assert headers["X-NpuGr-Instance"] == ranked["instance"]
            assert not g.chosen(ranked["instance"]), "nobody picked"

        # and one that comes back is asked again
        async with g.picker(), asyncio.timeout(20):
            owners = [g.owner(user) for user in USERS]
            while [(await g.post("rank", user))[1]["instance"] for user in USERS] != owners:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
