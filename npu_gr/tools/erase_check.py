"""`npu-gr erase-check`: search all places for an erased user, and report places, never data.

store       rows and raw bytes of the files of the embedded store; keys of Redis
recordings  records under every pseudonym of the user, in all files, also in unfinished ones
logs        the user id and its keyed hash
memory      of running instances, through their admin addresses
vectors     raw bytes of the files of match
"""

from __future__ import annotations

import asyncio
import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec

from npu_gr.core.calling import calling_context, calling_headers
from npu_gr.core.errors import ConfigError, DataError, NpuGrError
from npu_gr.core.history import UserKey
from npu_gr.core.lines import raw_lines
from npu_gr.history_store.store import HistoryConfig, key_bytes
from npu_gr.replay import erased
from npu_gr.replay.erased import names_of, read_key
from npu_gr.replay.files import PART, PATTERN
from npu_gr.replay.recorder import RecordConfig
from npu_gr.server.access_log import hash_of, read_key_file
from npu_gr.service.config import Config

_PIECE_BYTES = 1 << 20
_TIMEOUT_S = 10.0

Verdict = Literal["not found", "found", "not searched"]


class Searched(msgspec.Struct, frozen=True, kw_only=True):
    """A searched place and the result."""

    place: str
    what: str  # file, address
    verdict: Verdict
    note: str = ""  # what was found, or why it was not searched


def search_files(config: Config, user: UserKey, logs: Iterable[Path]) -> list[Searched]:
    """Search the files that a configuration names, and logs; also of a running instance.

    Args:
        config: Configuration of the instance whose files are on this machine.
        user: The erased user.
        logs: Log files; .gz and .zst are unpacked.
    """
    found: list[Searched] = []
    if config.history_store.kind == "embedded":
        found += _embedded(Path(config.history_store.path), user)
    if config.record is not None:
        found += _recordings(config.record, user)
    if config.match is not None:
        folder = Path(config.match.vectors)
        found += [
            _raw("vectors", path, [user.user.encode(errors="surrogatepass")])
            for path in _files(folder, "*")
        ]
    found += _logs(config, user, logs)
    return found


async def search_redis(config: HistoryConfig, user: UserKey) -> list[Searched]:
    """Search the keys of a Redis store, but not the files and replicas of the server."""
    from npu_gr.history_store.redis import RedisStore
    from npu_gr.history_store.redis import num_keys as redis_keys

    files = Searched(
        place="store",
        what="files of Redis",
        verdict="not searched",
        note="AOF, RDB, replicas: see the handbook",
    )
    try:
        store = await RedisStore.connect(config)
    except ConfigError as error:
        return [
            Searched(place="store", what="Redis", verdict="not searched", note=str(error)),
            files,
        ]
    try:
        num_keys = await redis_keys(store, user)
    except NpuGrError as error:
        return [
            Searched(place="store", what="Redis", verdict="not searched", note=str(error)),
            files,
        ]
    finally:
        await store.close()
    return [_found("store", "keys of Redis", f"{num_keys} keys" if num_keys else ""), files]


async def search_memory(
    user: UserKey, instances: Iterable[str], api_key: str | None
) -> list[Searched]:
    """Ask running instances whether they hold data of the user.

    Args:
        user: The erased user.
        instances: Base URLs of their admin addresses.
        api_key: Key with the scope admin; None if the instances need none.
    """
    body = {"user_id": user.user, "tenant": user.tenant}
    headers = calling_headers(api_key)

    async def ask(http: aiohttp.ClientSession, url: str) -> Searched:
        try:
            async with http.post(url, json=body) as answer:
                if not answer.ok:
                    return Searched(
                        place="memory",
                        what=url,
                        verdict="not searched",
                        note=f"status {answer.status}",
                    )
                places: dict[str, bool] = (await answer.json(content_type=None))["places"]
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            return Searched(
                place="memory",
                what=url,
                verdict="not searched",
                note=str(error) or type(error).__name__,
            )
        return _found(
            "memory", url, ", ".join(name for name, is_known in places.items() if is_known)
        )

    urls = [f"{url.rstrip('/')}/debug/user" for url in instances]
    async with aiohttp.ClientSession(
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
        connector=aiohttp.TCPConnector(ssl=calling_context()),
    ) as http:
        return list(await asyncio.gather(*(ask(http, url) for url in urls)))


# ---- the embedded store


def _embedded(path: Path, user: UserKey) -> list[Searched]:
    if not path.exists():
        return [
            Searched(place="store", what=str(path), verdict="not searched", note="no such file")
        ]
    wanted = [key_bytes(user)]  # in every row of every table
    found = [_rows(path, user)]
    return found + [_raw("store", one, wanted) for one in _files(path.parent, f"{path.name}*")]


def _rows(path: Path, user: UserKey) -> Searched:
    num = 0
    is_in_use = path.with_name(path.name + "-wal").exists()
    # `immutable` creates no lock files next to a store that is not in use
    options = "mode=ro" if is_in_use else "mode=ro&immutable=1"
    try:
        with closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?{options}", uri=True, isolation_level=None)
        ) as db:
            for table in ("users", "chunks", "keys"):
                sql = f"SELECT count(*) FROM {table} WHERE user = ?"  # noqa: S608  (the names are those above)
                num += db.execute(sql, (key_bytes(user),)).fetchone()[0]
    except sqlite3.Error as error:
        return Searched(
            place="store", what=f"rows of {path}", verdict="not searched", note=str(error)
        )
    return _found("store", f"rows of {path}", f"{num} rows" if num else "")


# ---- recordings


def _recordings(config: RecordConfig, user: UserKey) -> list[Searched]:
    folder = Path(config.folder)
    if not folder.is_dir():
        return [
            Searched(
                place="recordings", what=str(folder), verdict="not found", note="no such folder"
            )
        ]
    try:
        key = None if config.hash_key_file is None else read_key(Path(config.hash_key_file))
        names = set(names_of(user, folder, key))
        listed = erased.read(folder)
    except (ConfigError, DataError, OSError) as error:
        return [
            Searched(place="recordings", what=str(folder), verdict="not searched", note=str(error))
        ]
    files = [*_files(folder, PATTERN), *_files(folder, f".purge-{PATTERN}")]
    return [_recording(path, names, listed) for path in files]


def _recording(path: Path, names: set[UserKey], listed: erased.ErasedUsers) -> Searched:
    users = {name.user for name in names}
    num = num_hidden = num_unreadable = 0
    decode = msgspec.json.Decoder(_Who).decode
    suffixed = path.with_suffix("") if path.name.endswith(PART) else path
    why = ""
    try:
        for line in raw_lines(path, suffix=suffixed.suffix):
            if not line.strip():
                continue
            try:
                record = decode(line)
            except (msgspec.MsgspecError, ValueError):
                num_unreadable += 1
                continue
            if record.user_id in users and UserKey(record.tenant, record.user_id) in names:
                num += 1
                num_hidden += listed.hides(UserKey(record.tenant, record.user_id), record.ts)
    except FileNotFoundError:
        why = "it was renamed or deleted during the search; search again"
    except (OSError, EOFError, zlib.error, DataError) as error:
        if not path.name.endswith(PART):  # an unfinished file has no end
            why = f"its end cannot be read: {error}"
    if num:
        note = f"{num} records, {num_hidden} of them hidden from readers until the purge"
        return Searched(place="recordings", what=str(path), verdict="found", note=note)
    if why or num_unreadable:
        why = why or f"{num_unreadable} lines are not records"
        return Searched(place="recordings", what=str(path), verdict="not searched", note=why)
    return Searched(place="recordings", what=str(path), verdict="not found")


class _Who(msgspec.Struct, frozen=True):
    ts: float
    user_id: str
    tenant: str = ""


# ---- logs, and raw bytes


def _logs(config: Config, user: UserKey, logs: Iterable[Path]) -> Iterator[Searched]:
    wanted = [user.user.encode(errors="surrogatepass")]
    if config.server.log_user_key_file is not None:
        try:
            wanted.append(hash_of(user, read_key_file(config.server.log_user_key_file)).encode())
        except ConfigError as error:
            yield Searched(
                place="logs", what="hashed users", verdict="not searched", note=str(error)
            )
    for path in logs:
        yield _raw("logs", path, wanted)


def _raw(place: str, path: Path, wanted: list[bytes]) -> Searched:
    """Search the unpacked bytes of a file."""
    most = max(map(len, wanted)) - 1
    num = 0
    tail = b""
    try:
        for piece in _pieces(path):
            data = tail + piece
            num += sum(data.count(one) for one in wanted)
            tail = data[max(0, len(data) - most) :]
            num -= sum(tail.count(one) for one in wanted)  # the next piece counts it again
        num += sum(tail.count(one) for one in wanted)
    except (OSError, EOFError, zlib.error, DataError) as error:
        return Searched(place=place, what=str(path), verdict="not searched", note=str(error))
    return _found(place, str(path), f"{num} times in its bytes" if num else "")


def _pieces(path: Path) -> Iterator[bytes]:
    if path.suffix in (".gz", ".zst"):
        for line in raw_lines(path):
            yield line + b"\n"
        return
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece


def _files(folder: Path, pattern: str) -> list[Path]:
    return [path for path in sorted(folder.glob(pattern)) for path in _within(path)]


def _within(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from (one for one in sorted(path.rglob("*")) if one.is_file())
    else:
        yield path


def _found(place: str, what: str, note: str) -> Searched:
    return Searched(place=place, what=what, verdict="found" if note else "not found", note=note)


def exit_code(found: Iterable[Searched]) -> int:
    """Return 1 if the user was found; else 2 if a place could not be searched; else 0."""
    verdicts: set[Any] = {one.verdict for one in found}
    return 1 if "found" in verdicts else 2 if "not searched" in verdicts else 0
