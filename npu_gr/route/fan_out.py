"""What must reach every instance: erasures, and changes of models and catalogue.

An instance that had a user before the fleet changed may still keep their prefix KV, and one that
misses a change of the catalogue scores other items than the others. So these are sent to all, again
where there was no answer, and the answer names the instances that have not done it. Doing any of it
twice does no harm.

`npu-gr fleet` calls `ask_all` itself; what callers send through the router, HAProxy passes to
`FanOut` on a socket that nobody else reaches. The key of the caller goes along: each instance
checks it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from npu_gr.core.errors import NpuGrError, Unavailable
from npu_gr.core.kinds import ERASE
from npu_gr.core.logs import random_id
from npu_gr.core.tls import client_context
from npu_gr.route.config import InstanceConfig, RouterConfig, joined
from npu_gr.route.haproxy import certified
from npu_gr.server.http import from_error, problem

TRIES = 3
PAUSE_S = 0.2  # before the second try, and twice that before the third
UNREACHABLE = "unreachable"  # nobody listens: the instance has lost its memory, though not its disk
_PASSED_ON = ("authorization", "content-type", "idempotency-key", "x-request-id", "x-tenant-id")
_MOST_BYTES = 64 << 20  # of a body: items of a catalogue


class Answered(NamedTuple):
    """What one instance answered."""

    status: int  # 0 = there was no answer
    text: str  # the answer's body, or why there is none


class Change(NamedTuple):
    """A request for every instance."""

    method: str
    target: str  # path and query, as they came
    headers: Mapping[str, str]
    body: bytes = b""

    @property
    def is_erasure(self) -> bool:
        """Whether it erases a user.

        All else changes what the instances serve, on their admin addresses.
        """
        return self.method == ERASE.method


class Way:
    """How the instances are called: in clear, or over TLS."""

    def __init__(self, config: RouterConfig) -> None:
        """Read the certificates.

        Raises:
            OSError: they cannot be used.
        """
        tls = config.instances_tls
        self._scheme = "https" if tls else "http"
        self._trusts: ssl.SSLContext | bool = client_context(tls) if tls else True
        self._config = config

    def options(
        self, one: InstanceConfig, target: str, *, is_admin: bool = False
    ) -> dict[str, Any]:
        """Return the arguments of a request to an instance: where it goes, and whom it believes."""
        port = one.admin_port if is_admin else one.port
        url = URL(f"{self._scheme}://{joined(one.host, port)}{target}", encoded=True)
        return {"url": url, "ssl": self._trusts, "server_hostname": certified(self._config, one)}

    async def ready(self, instances: list[InstanceConfig], timeout_s: float) -> set[str]:
        """Ask instances whether they are ready. Returns the names of those that are."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as http:

            async def ask(one: InstanceConfig) -> bool:
                with suppress(aiohttp.ClientError, OSError):  # TimeoutError is an OSError
                    async with http.get(**self.options(one, "/readyz")) as answer:
                        return answer.status == 200
                return False

            answers = await asyncio.gather(*map(ask, instances))
        return {one.name for one, is_ready in zip(instances, answers, strict=True) if is_ready}


async def ask_all(
    way: Way, instances: list[InstanceConfig], change: Change, timeout_s: float
) -> dict[str, Answered]:
    """Send a change to all instances at the same time, again where there was no answer or a failure.

    Args:
        way: to the instances.
        instances: all of them.
        change: what they are to do.
        timeout_s: for one try at one instance.
    """

    async def tell(one: InstanceConfig) -> Answered:
        answer = Answered(0, "it has no admin_port")
        if not (one.admin_port or change.is_erasure):
            return answer
        for attempt in range(TRIES):
            await asyncio.sleep(attempt * PAUSE_S)
            answer = await _ask(way, one, change, timeout_s)
            if 0 < answer.status < 500:
                break
        return answer

    answers = await asyncio.gather(*map(tell, instances))
    return {one.name: answer for one, answer in zip(instances, answers, strict=True)}


async def _ask(way: Way, one: InstanceConfig, change: Change, timeout_s: float) -> Answered:
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    where = way.options(one, change.target, is_admin=not change.is_erasure)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            http.request(
                change.method, headers=change.headers, data=change.body or None, **where
            ) as answer,
        ):
            return Answered(answer.status, await answer.text())
    except TimeoutError:
        return Answered(0, "no answer in time")
    except aiohttp.ClientSSLError:  # somebody listens there
        return Answered(0, "TLS failed")
    except aiohttp.ClientConnectorError:
        return Answered(0, UNREACHABLE)
    except aiohttp.ClientError:
        return Answered(0, "broke off")


def missing(answers: Mapping[str, Answered]) -> dict[str, str]:
    """Name the instances that have not done it, each with the reason."""
    return {
        name: answer.text if not answer.status else f"{answer.status}"
        for name, answer in sorted(answers.items())
        if not 200 <= answer.status < 300
    }


def verdict(change: Change, answers: Mapping[str, Answered]) -> web.Response:
    """Decide on the answer to the caller.

    Returns:
        Of an erasure 204; 202 where an instance has yet to overwrite files; 200 where one could not
        be reached, whose disk may still hold the user. Of another change 200 with each instance's
        answer. A rejection that all agree on.

    Raises:
        Unavailable: an instance has not done it; it is named.
    """
    left = missing(answers)
    done = sorted(set(answers) - set(left))
    statuses = {answer.status for answer in answers.values()}
    if len(statuses) == 1 and 400 <= (status := next(iter(statuses))) < 500:
        return problem(status, "rejected", "every instance rejected", random_id(128))
    unreachable = [name for name, why in left.items() if why == UNREACHABLE and change.is_erasure]
    if not done or len(unreachable) < len(left):
        named = ", ".join(f"{name} ({why})" for name, why in left.items())
        raise Unavailable(f"not done at {named or 'any instance'}; ask again")
    if not change.is_erasure:
        return _json(200, {name: _parsed(answer.text) for name, answer in answers.items()})
    pending = sorted(name for name, answer in answers.items() if answer.status == 202)
    if not pending and not unreachable:
        return web.Response(status=204)
    return _json(
        200 if unreachable else 202,
        {"erased": done, "pending": pending, "unreachable": unreachable},
    )


def _json(status: int, body: object) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body), status=status, content_type="application/json"
    )


def _parsed(text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def fan_out_app(
    way: Callable[[], Way], instances: Callable[[], list[InstanceConfig]], timeout_s: float
) -> web.Application:
    """Make the application behind HAProxy's backend `everywhere`.

    What may be asked, HAProxy has decided.

    Args:
        way: to the instances, now.
        instances: all of them, now.
        timeout_s: for one try at one instance.
    """

    async def handle(request: web.Request) -> web.Response:
        headers = {
            name: value for name in _PASSED_ON if (value := request.headers.get(name)) is not None
        }
        change = Change(request.method, request.raw_path, headers, await request.read())
        try:
            return verdict(change, await ask_all(way(), instances(), change, timeout_s))
        except NpuGrError as error:
            return from_error(error, request.headers.get("X-Request-Id", random_id(128)))

    app = web.Application(client_max_size=_MOST_BYTES)
    app.router.add_route("*", r"/{path:[\s\S]*}", handle)
    return app
