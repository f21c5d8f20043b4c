"""Erasing a user, at every instance: one that had the user before the ring changed may still keep their prefix KV.

Nothing is asked of an instance that nobody listens at, as its memory is gone; the answer names it, since a history
store on its disk is not. Any other instance must confirm, or the answer is an error that says who did not; asking
again does no harm.
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

_ERASED, _UNREACHABLE = "204", "unreachable"


async def ask_all(
    http: aiohttp.ClientSession,
    instances: list[InstanceConfig],
    target: str,
    headers: Mapping[str, str],
    timeout_s: float,
) -> dict[str, str]:
    """What each instance says to DELETE of `target`, by its name: an HTTP status, or in words why there is none."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def ask(one: InstanceConfig) -> str:
        url = URL(f"{one.url}{target}", encoded=True)
        try:
            async with http.delete(url, headers=headers, timeout=timeout) as answer:
                return str(answer.status)
        except TimeoutError:
            return "no answer in time"
        except aiohttp.ClientConnectorError:
            return _UNREACHABLE
        except aiohttp.ClientError:
            return "broke off"

    answers = await asyncio.gather(*map(ask, instances))
    return {one.name: answer for one, answer in zip(instances, answers, strict=True)}


def verdict(said: Mapping[str, str], is_last: bool) -> tuple[int, bytes]:
    """The status and the whole answer.

    Raises:
        Refused: everyone refused, for the same reason. Unavailable: not everyone who is there has erased.
    """
    erased = [name for name, answer in said.items() if answer == _ERASED]
    missing = {name: answer for name, answer in said.items() if answer not in (_ERASED, _UNREACHABLE)}
    reasons = set(missing.values())
    if not erased and len(reasons) == 1 and (reason := reasons.pop()).startswith("4"):
        raise Refused(int(reason), "every instance refused to erase")
    if missing or not erased:
        named = ", ".join(f"{name} ({answer})" for name, answer in sorted(said.items()) if answer != _ERASED)
        raise Unavailable(f"not erased at {named or 'any instance'}; ask again")
    if len(erased) == len(said):
        return 204, plain(204, b"", [], is_last)
    unreachable = sorted(set(said) - set(erased))
    body = msgspec.json.encode({"erased": sorted(erased), "unreachable": unreachable})
    return 200, plain(200, body, [b"Content-Type: application/json"], is_last)
