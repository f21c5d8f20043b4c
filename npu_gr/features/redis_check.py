"""Look for damage in a history store on Redis."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING

from npu_gr.core.errors import ConfigError
from npu_gr.features.base import EVENT, RedisTlsConfig
from npu_gr.features.checksum import CHECKED, count_bad
from npu_gr.features.damage import Found
from npu_gr.features.redis_features import RunGroup, count_bad_rows
from npu_gr.features.redis_scripts import FEATURES
from npu_gr.features.redis_tls import tls_options

if TYPE_CHECKING:
    from redis.asyncio import Redis

_READ_BYTES = 1 << 20  # at once, so that a long history does not hold the server up
_RUNS = 256  # of features at once


async def check_redis(url: str, tls: RedisTlsConfig | None = None) -> Found:
    """Read every user's records, and compare each with its checksum. Users that change meanwhile are read as they are.

    Args:
        url: of the server.
        tls: of a `rediss://` one.

    Raises:
        ConfigError: the package is missing, or nobody answers.
    """
    try:
        from redis.asyncio import from_url
        from redis.exceptions import RedisError
    except ImportError as error:
        raise ConfigError("redis:// needs pip install 'npu_gr[redis]'") from error
    found = Found()
    try:
        async with from_url(url, **tls_options(url, tls)) as client:
            async for name in client.scan_iter("npu_gr:{*}:log", count=1000):
                key = _user_key(name)
                if key is None:
                    found.damage.append(f"{name!r} is no name of ours")
                    continue
                found.num_entries += 1
                bad = num = 0
                while data := await client.getrange(name, num, num + _whole(_READ_BYTES) - 1):
                    assert isinstance(data, bytes)  # the client decodes nothing
                    bad += count_bad(key, data)
                    num += len(data)
                bad += await _count_bad_features(client, name, key)
                found.num_events += max(0, num // CHECKED.itemsize - bad)
                if bad:
                    found.bad_users.add(key)
                else:
                    found.num_users += 1
            async for name in client.scan_iter("npu_gr:{*}:events", count=1000):
                found.num_entries += 1
                found.num_unchecked += 1
                found.num_events += await client.strlen(name) // EVENT.itemsize
    except (RedisError, OSError, ValueError) as error:
        raise ConfigError(f"{type(error).__name__}: no answer from Redis") from error
    return found


async def _count_bad_features(client: Redis, name: bytes, key: bytes) -> int:
    """Read the features of a user piece by piece, each with the records of its events."""
    names = [name.removesuffix(b"log") + part for part in (b"log", b"first", b"features")]
    bad, after = 0, b"0"
    while answer := await client.eval(FEATURES, 3, *names, after, _RUNS, CHECKED.itemsize):
        after, first, records, runs = answer
        groups = [RunGroup(layout, end, str(len(rows)).encode(), rows) for end, layout, rows in runs]
        bad += count_bad_rows(key, groups, int(first), records)
    return bad


def _whole(num_bytes: int) -> int:
    return num_bytes // CHECKED.itemsize * CHECKED.itemsize


def _user_key(name: bytes) -> bytes | None:
    try:
        return base64.urlsafe_b64decode(name.split(b"{", 1)[1].split(b"}", 1)[0])
    except (IndexError, binascii.Error):
        return None
