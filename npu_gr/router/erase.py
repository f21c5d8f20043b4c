"""Erases a user at every instance: one that had the user before the ring changed may still keep their prefix KV.

An instance that nobody listens at has lost its memory, so it need not confirm; but the answer names it, because a
history store on its disk would still hold the user. Every other instance must confirm. Otherwise the answer is an error
that names the ones that did not; sending the request again does no harm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import aiohttp
import msgspec
from yarl import URL

from npu_gr.core.errors import Unavailable
from npu_gr.router.answers import Refused, plain
from npu_gr.router.config import InstanceConfig
from npu_gr.router.hop import Hop

_ERASED = ("204", "202")  # 202: files of the instance still hold bytes of the user, and it overwrites them
_UNREACHABLE = "unreachable"


async def ask_all(
    http: aiohttp.ClientSession,
    hop: Hop,
    instances: list[InstanceConfig],
    target: str,
    headers: Mapping[str, str],
    timeout_s: float,
) -> dict[str, str]:
    """Send DELETE to every instance.

    Args:
        http: sends the requests.
        hop: the way to the instances.
        instances: all of them get the request at the same time.
        target: path and query.
        headers: the same for every instance.
        timeout_s: for each instance.

    Returns:
        For each instance's name its answer's HTTP status, or in words why there is no answer.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def send(one: InstanceConfig) -> str:
        url = URL(f"{hop.url(one)}{target}", encoded=True)
        try:
            async with http.delete(url, headers=headers, timeout=timeout, **hop.options(one)) as answer:
                return str(answer.status)
        except TimeoutError:
            return "no answer in time"
        except aiohttp.ClientSSLError:  # somebody listens there
            return "TLS failed"
        except aiohttp.ClientConnectorError:
            return _UNREACHABLE
        except aiohttp.ClientError:
            return "broke off"

    answers = await asyncio.gather(*map(send, instances))
    return {one.name: answer for one, answer in zip(instances, answers, strict=True)}


def verdict(answers: Mapping[str, str], is_last: bool) -> tuple[int, bytes]:
    """Decide on the answer to the client.

    Args:
        answers: what `ask_all` returns.
        is_last: the connection is closed after the answer.

    Returns:
        The status and the whole answer: 204; 202 with the names of the instances that have not overwritten all yet;
        or 200, the same with the names of those that could not be reached.

    Raises:
        Refused: all instances refused, for the same reason.
        Unavailable: an instance that can be reached has not erased the user.
    """
    erased = [name for name, answer in answers.items() if answer in _ERASED]
    missing = {name: answer for name, answer in answers.items() if answer not in (*_ERASED, _UNREACHABLE)}
    reasons = set(missing.values())
    if not erased and len(reasons) == 1 and (reason := reasons.pop()).startswith("4"):
        raise Refused(int(reason), "every instance refused to erase")
    if missing or not erased:
        named = ", ".join(f"{name} ({answer})" for name, answer in sorted(answers.items()) if answer not in _ERASED)
        raise Unavailable(f"not erased at {named or 'any instance'}; ask again")
    pending = sorted(name for name, answer in answers.items() if answer == "202")
    unreachable = sorted(set(answers) - set(erased))
    if not pending and not unreachable:
        return 204, plain(204, b"", [], is_last)
    status = 200 if unreachable else 202
    body = msgspec.json.encode({"erased": sorted(erased), "pending": pending, "unreachable": unreachable})
    return status, plain(status, body, [b"Content-Type: application/json"], is_last)
