"""Sends erasures and changes of models or catalogue to every instance.

An instance that owned a user before the fleet changed may still have the user's prefix KV, and an
instance that misses a change of the catalogue serves other items. So these requests go to all
instances, with retries, and the answer names the instances that failed. They are idempotent, but
for rollbacks: a second one undoes the first, so one is repeated only where no instance was reached.
A delta goes to one instance first, so that those which share its log have it by then.

`npu-gr fleet` calls `ask_all`. Requests of clients to the router are forwarded by HAProxy to
`fan_out_app` on a private socket, with the client's key, which each instance checks.
"""

from __future__ import annotations

import asyncio
import io
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
from npu_gr.route.haproxy import LOAD_S, certified
from npu_gr.server.auth.rules import DELTA_BYTES
from npu_gr.server.http import from_error, problem

TRIES = 3
PAUSE_S = 0.2  # wait before the second try, doubled before the third
# Connection refused: the process has ended, so its memory is gone, but not its files.
UNREACHABLE = "unreachable"
_PASSED_ON = ("authorization", "content-type", "idempotency-key", "x-request-id", "x-tenant-id")


class Answered(NamedTuple):
    """The answer of one instance."""

    status: int  # 0 = no answer
    text: str  # body of the answer, or the reason why there is none


class Change(NamedTuple):
    """A request for every instance."""

    method: str
    target: str  # path and query, percent-encoded
    headers: Mapping[str, str]
    body: bytes = b""

    @property
    def is_erasure(self) -> bool:
        """Whether it erases a user; all other changes go to the admin addresses."""
        return self.method == ERASE.method

    @property
    def loads(self) -> bool:
        """Whether instances load models, a delta, catalogue or vectors for it."""
        return self.target.endswith(("/reload", "/rollback", "/delta"))

    @property
    def is_repeatable(self) -> bool:
        """Whether a second time changes nothing."""
        return not self.target.endswith("/rollback")


class InstanceCalls:
    """How to call the instances: URLs and TLS."""

    def __init__(self, config: RouterConfig) -> None:
        """Read the certificates.

        Raises:
            OSError: A certificate cannot be used.
        """
        tls = config.instances_tls
        self._scheme = "https" if tls else "http"
        self._trusts: ssl.SSLContext | bool = client_context(tls) if tls else True
        self._config = config

    def options(
        self, one: InstanceConfig, target: str, *, is_admin: bool = False
    ) -> dict[str, Any]:
        """Return aiohttp's arguments of a request to an instance: URL and TLS."""
        port = one.admin_port if is_admin else one.port
        url = URL(f"{self._scheme}://{joined(one.host, port)}{target}", encoded=True)
        return {"url": url, "ssl": self._trusts, "server_hostname": certified(self._config, one)}

    async def ready(self, instances: list[InstanceConfig], timeout_s: float) -> set[str]:
        """Return the names of the instances that are ready."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as http:

            async def ask(one: InstanceConfig) -> bool:
                with suppress(aiohttp.ClientError, OSError):  # TimeoutError is an OSError
                    async with http.get(**self.options(one, "/readyz")) as answer:
                        return answer.status == 200
                return False

            answers = await asyncio.gather(*map(ask, instances))
        return {one.name for one, is_ready in zip(instances, answers, strict=True) if is_ready}


async def ask_all(
    calls: InstanceCalls, instances: list[InstanceConfig], change: Change, timeout_s: float
) -> dict[str, Answered]:
    """Send a change to all instances in parallel, and retry after 5xx and missing answers.

    Args:
        calls: How to call the instances.
        instances: All instances.
        change: Request to send.
        timeout_s: Time limit of one try at one instance; `LOAD_S` if it loads something.

    Returns:
        Name of the instance -> its last answer.
    """

    async def ask(one: InstanceConfig) -> Answered:
        answer = Answered(0, "its admin_port is not configured")
        if not (one.admin_port or change.is_erasure):
            return answer
        for attempt in range(TRIES):
            await asyncio.sleep(attempt * PAUSE_S)
            answer = await _ask(calls, one, change, LOAD_S if change.loads else timeout_s)
            if 0 < answer.status < 500:
                break
            if not change.is_repeatable and (answer.status or answer.text != UNREACHABLE):
                break  # it may have been done
        return answer

    answers: list[Answered] = []
    if change.target.endswith("/delta"):
        while len(answers) < len(instances) and not any(one.status == 200 for one in answers):
            answers.append(await ask(instances[len(answers)]))
    answers += await asyncio.gather(*map(ask, instances[len(answers) :]))
    return {one.name: answer for one, answer in zip(instances, answers, strict=True)}


async def _ask(
    calls: InstanceCalls, one: InstanceConfig, change: Change, timeout_s: float
) -> Answered:
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    where = calls.options(one, change.target, is_admin=not change.is_erasure)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            http.request(
                change.method,
                headers=change.headers,
                data=io.BytesIO(change.body) if change.body else None,
                **where,
            ) as answer,
        ):
            return Answered(answer.status, await answer.text())
    except TimeoutError:
        return Answered(0, f"no answer within {timeout_s:g} s")
    except aiohttp.ClientSSLError:  # a subclass of ClientConnectorError
        return Answered(0, "TLS failed")
    except aiohttp.ClientConnectorError:
        return Answered(0, UNREACHABLE)
    except aiohttp.ClientError:
        return Answered(0, "the connection broke")


def missing(answers: Mapping[str, Answered]) -> dict[str, str]:
    """Map the instances that did not do it to the reason."""
    return {
        name: answer.text if not answer.status else f"{answer.status}"
        for name, answer in sorted(answers.items())
        if not 200 <= answer.status < 300
    }


def combined_answer(change: Change, answers: Mapping[str, Answered]) -> web.Response:
    """Combine the answers of all instances to one for the client.

    Returns:
        Erasure: 204; 202 if an instance still has to overwrite files; 200 if one was unreachable,
        whose files may still hold data of the user. Other changes: 200 with each instance's answer.
        If all instances reject the request with the same 4xx: that status.

    Raises:
        Unavailable: An instance did not do it; the message names it.
    """
    left = missing(answers)
    done = sorted(set(answers) - set(left))
    statuses = {answer.status for answer in answers.values()}
    if len(statuses) == 1 and 400 <= (status := next(iter(statuses))) < 500:
        body = _parsed(next(iter(answers.values())).text)
        why = f": {body.get('detail')}" if isinstance(body, dict) else ""
        return problem(
            status, "rejected", f"every instance rejected the request{why}", random_id(128)
        )
    unreachable = [name for name, why in left.items() if why == UNREACHABLE and change.is_erasure]
    if not done or len(unreachable) < len(left):
        named = ", ".join(f"{name} ({why})" for name, why in left.items())
        remedy = "repeat the request" if change.is_repeatable else "call those instances themselves"
        raise Unavailable(f"not done at {named or 'any instance'}; {remedy}")
    if not change.is_erasure:
        return _json(200, {name: _parsed(answer.text) for name, answer in answers.items()})
    pending = sorted(name for name, answer in answers.items() if answer.status == 202)
    if not pending and not unreachable:
        return web.Response(status=204)
    where: dict[str, str] = {}
    for name in pending:
        body = _parsed(answers[name].text)
        where |= body.get("where", {}) if isinstance(body, dict) else {}
    return _json(
        200 if unreachable else 202,
        {"erased": done, "pending": pending, "unreachable": unreachable, "where": where},
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
    calls: Callable[[], InstanceCalls],
    instances: Callable[[], list[InstanceConfig]],
    timeout_s: float,
) -> web.Application:
    """Make the application behind HAProxy's backend `everywhere`.

    HAProxy has checked the method, the path and the key.

    Args:
        calls: Returns the current way to call the instances.
        instances: Returns the current instances.
        timeout_s: Time limit of one try at one instance.
    """

    async def handle(request: web.Request) -> web.Response:
        headers = {
            name: value for name in _PASSED_ON if (value := request.headers.get(name)) is not None
        }
        change = Change(request.method, request.raw_path, headers, await request.read())
        try:
            return combined_answer(change, await ask_all(calls(), instances(), change, timeout_s))
        except NpuGrError as error:
            return from_error(error, request.headers.get("X-Request-Id", random_id(128)))

    app = web.Application(client_max_size=DELTA_BYTES)
    app.router.add_route("*", r"/{path:[\s\S]*}", handle)
    return app
