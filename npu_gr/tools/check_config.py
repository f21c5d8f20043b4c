"""`npu-gr check-config`: check a configuration and all files that it names, without starting it.

Models, catalogue, vectors, keys and certificates are read as by `npu-gr serve`; a hook and a source
of features are imported. No other process is called, and no device is opened (`npu-gr doctor
--backend NAME` does that). Without torch (the extra `serve`) models are skipped with a note.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from npu_gr.catalogue.change_log import log_path, read_log
from npu_gr.catalogue.records import read_items, read_popular
from npu_gr.catalogue.trie import Codebooks
from npu_gr.catalogue.versions import make_snapshot
from npu_gr.core import settings
from npu_gr.core.errors import ConfigError, NpuGrError
from npu_gr.core.tls import ClientTls, ClientTlsConfig, ServerTls, ServerTlsConfig
from npu_gr.feature_store.user_features import open_source
from npu_gr.handlers.config import GenerateConfig
from npu_gr.handlers.hooks import load_hook
from npu_gr.history_store.store import HistoryConfig
from npu_gr.relay.config import calibration_path
from npu_gr.replay.erased import read_key
from npu_gr.route.config import RouterConfig
from npu_gr.route.config import load as load_router
from npu_gr.route.discovery import InstancesFile
from npu_gr.route.process import check_rendered
from npu_gr.server.access_log import read_key_file
from npu_gr.server.auth.keys import read_keys
from npu_gr.service.config import Config, load
from npu_gr.service.memory import size_errors
from npu_gr.vector_search import vectors
from npu_gr.vector_search.config import MatchConfig

SQLITE = b"SQLite format 3\0"


class OpenedState(StrEnum):
    """The state of a finding, as the report prints it."""

    OK = "ok"
    NOTE = "note"  # no error, but worth knowing
    BROKEN = "broken"  # `npu-gr serve` would fail


class Opened(NamedTuple):
    """A finding about a key of the configuration."""

    key: str
    state: OpenedState
    words: str
    remedy: str = ""


def read(path: Path, overrides: Sequence[str] = ()) -> Config | RouterConfig:
    """Read a configuration: a router's if it has the section `discovery`, else an instance's.

    Raises:
        ConfigError: a value is invalid; the message names the file, the field and the limit.
    """
    if "discovery" in settings.read_table(path):
        return load_router(path, overrides)
    return load(path, overrides)


def shown(config: Config | RouterConfig, path: Path, overrides: Sequence[str] = ()) -> str:
    """Format the complete configuration as YAML, with the origin of each value that is no default.

    Args:
        config: Result of `read`.
        path, overrides: Arguments of `read`.
    """
    table = settings.to_table(config)
    gathered, origins = settings.gather(path, type(config), overrides, os.environ)
    if table.get("calibration") and gathered.get("calibration") is None:
        origins.pop("calibration", None)  # the file has `calibration:` without a value
        origins |= {
            f"calibration.{key}": str(calibration_path(path)) for key in table["calibration"]
        }
    return "".join(_lines(table, origins, "", ""))


def _lines(table: dict[str, Any], origins: dict[str, str], at: str, indent: str) -> Iterator[str]:
    for key, value in table.items():
        path = f"{at}{key}"
        origin = origins.get(path) or next(
            (where for one, where in origins.items() if one.startswith(f"{path}.")), ""
        )
        if isinstance(value, dict) and value and path not in origins:
            yield f"{indent}{key}:\n"
            yield from _lines(value, origins, f"{path}.", f"{indent}  ")
            continue
        first, *others = yaml.safe_dump(
            {key: value}, sort_keys=False, width=float("inf")
        ).splitlines()
        yield f"{indent}{first}{f'  # {origin}' if origin else ''}\n"
        yield from (f"{indent}{line}\n" for line in others)


def examine(config: Config | RouterConfig, *, is_here: bool = True) -> list[Opened]:
    """Check everything that a configuration names.

    Args:
        config: The configuration.
        is_here: Whether it is for this machine, so that sizes must fit.
    """
    if isinstance(config, RouterConfig):
        return list(_of_router(config))
    return [*(_sizes(config) if is_here else ()), *_of_instance(config)]


def is_well(found: list[Opened]) -> bool:
    """Whether nothing is broken."""
    return all(one.state is not OpenedState.BROKEN for one in found)


def _sizes(config: Config) -> Iterator[Opened]:
    """Compare memory and threads with this machine."""
    remedy = "with --other-machine, sizes are not compared with this machine"
    for name, words in size_errors(config).items():
        yield Opened(name, OpenedState.BROKEN, words, remedy)
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if config.threads > (num_cpus or config.threads):
        words = f"{config.threads}, but this process can use {num_cpus} CPUs"
        yield Opened("threads", OpenedState.BROKEN, words, remedy)


def _of_instance(config: Config) -> Iterator[Opened]:
    if config.checkpoint is not None:
        folder = Path(config.checkpoint)
        yield _tried("checkpoint", lambda: _ranker(folder, config))
    if config.generate is not None:
        yield from _generator(config.generate, 2 if config.dtype == "bfloat16" else 4)
    if config.match is not None:
        yield from _vectors(config.match)
    if (recommend := config.recommend) is not None:
        for name, hook in (("hook", recommend.hook), ("hook_after", recommend.hook_after)):
            if hook is not None:
                yield _tried(f"recommend.{name}", partial(load_hook, name, hook), hook)
        if recommend.index == "ivf":
            yield from _extra("recommend.index", "faiss", "faiss")
        if recommend.popular is not None:
            popular = recommend.popular
            yield _tried(
                "recommend.popular", lambda: f"{popular}: {len(read_popular(popular))} items"
            )
    yield from _history(config.history_store)
    if (source := config.feature_store) is not None:
        yield _tried("feature_store", lambda: open_source(source), source.entry)
    if (record := config.record) is not None:
        yield _tried("record.folder", lambda: _writable(Path(record.folder)))
        if record.hash_key_file is not None:
            key = Path(record.hash_key_file)
            yield _tried("record.hash_key_file", lambda: read_key(key), str(key))
        if record.suffix.endswith(".zst"):
            yield from _extra("record.suffix", "zstandard", "zstd")
    server = config.server
    yield from _keys("server.api_keys_file", server.api_keys_file)
    if server.log_user_key_file is not None:
        user_key = server.log_user_key_file
        yield _tried("server.log_user_key_file", lambda: read_key_file(user_key), user_key)
    if server.otlp_endpoint is not None:
        yield from _extra("server.otlp_endpoint", "opentelemetry.sdk", "otel")
    if server.grpc_port is not None:
        yield from _extra("server.grpc_port", "grpc", "grpc")
    yield from _server_tls("server.tls", server.tls)
    yield from _port("server.port", server.host, server.port)
    if not server.has_one_address:
        yield from _port("server.admin_port", server.admin_host, server.admin_port)


def _of_router(config: RouterConfig) -> Iterator[Opened]:
    if config.discovery.file is not None:
        path = Path(config.discovery.file)
        yield _tried(
            "discovery.file",
            lambda: f"{path}: {len(settings.load(path, InstancesFile).instances)} instances",
        )
    yield from _keys("api_keys_file", config.api_keys_file)
    yield from _server_tls("tls", config.tls)
    if config.instances_tls is not None:
        yield _client_tls("instances_tls", config.instances_tls)
    if config.picker is not None:
        yield from _extra("picker", "grpc", "picker")
    yield _tried(
        "haproxy", lambda: f"{config.host}:{config.port}: {asyncio.run(check_rendered(config))}"
    )
    yield from _port("port", config.host, config.port)
    yield from _port("admin_port", config.admin_host, config.admin_port)


def _tried(key: str, work: Callable[[], object], words: str | None = None) -> Opened:
    """Run a check of a key.

    Args:
        key: Path of the key in the configuration.
        work: The check; returns the text of the finding, or raises the error that `npu-gr serve`
            would report.
        words: Text of the finding, instead of the check's result.
    """
    try:
        done = work()
        return Opened(key, OpenedState.OK, str(done) if words is None else words)
    except NpuGrError as error:
        return Opened(key, OpenedState.BROKEN, str(error).removeprefix(f"{key}: "))
    except OSError as error:
        return Opened(key, OpenedState.BROKEN, f"{error.filename}: {error.strerror}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        return Opened(
            key,
            OpenedState.NOTE,
            "not read, because torch is not installed",
            "pip install 'npu_gr[serve]'",
        )


def _ranker(folder: Path, config: Config) -> str:
    import torch

    from npu_gr.engine.sanity import check_weights
    from npu_gr.model import weights

    found = weights.load(folder, is_served=True)
    if found.rows is not None:
        found.rows.check_all()
    check_weights(found.model, f"checkpoint {folder}")
    shape = found.model.config
    if config.recommend is not None:
        config.recommend.check_ranker(
            str(folder),
            retrieves=shape.retrieval,
            has_blend=found.order is not None,
            has_neighbours=found.order is not None and found.order.neighbours is not None,
        )
    spare = "no room for new items, because it was trained without row dropout"
    if shape.scores_new_items:
        is_wide = (config.dtype if config.dtype != "checkpoint" else found.model.dtype) in (
            "float32",
            torch.float32,
        )
        each = shape.dim * (4 if is_wide else 6 if shape.retrieval else 2)
        count = config.service.spare_items
        spare = f"room for {count} new items, {count * each / 2**20:.1f} MiB of device memory"
    return f"{folder}: {found.name}, version {found.version}, {len(found.item_ids)} items; {spare}"


def _generator(section: GenerateConfig, element_bytes: int) -> Iterator[Opened]:
    folder = Path(section.checkpoint)

    def model() -> str:
        from npu_gr.model import generators, hf_files

        found = generators.examine(folder)
        section.check_model(section.checkpoint, found.vocab_size, is_divisible=found.is_divisible)
        beams = section.check_beams(
            section.checkpoint, found.kv_shape, found.vocab_size, element_bytes
        )
        version = hf_files.version(folder)
        return (
            f"{folder}: version {version}, {found.vocab_size} tokens; room for {beams} beams, "
            f"max_beams is {section.max_beams}"
        )

    def catalogue() -> str:
        items = read_items(Path(section.catalogue))
        make_snapshot(items, Codebooks.stacked(section.codes, section.first_token))
        return f"{section.catalogue}: {len(items)} items"

    yield _tried("generate.checkpoint", model)

    def changes() -> str:
        path = log_path(section.catalogue, section.change_log)
        if path is None:
            return "none: changes are lost when the instance stops"
        found = read_log(path)
        if found is None:
            return f"{path}: no changes yet"
        counts = len(found.changes.added), len(found.changes.withdrawn | found.changes.removed)
        return f"{path}: {{}} items added, {{}} withdrawn".format(*counts)

    yield _tried("generate.catalogue", catalogue)
    yield _tried("generate.change_log", changes)


def _vectors(section: MatchConfig) -> Iterator[Opened]:
    def folder() -> str:
        found = vectors.load(Path(section.vectors))
        return f"{section.vectors}: version {found.version}, {len(found.item_ids)} items"

    yield _tried("match.vectors", folder)
    if section.index == "ivf":
        yield from _extra("match.index", "faiss", "faiss")


def _history(section: HistoryConfig) -> Iterator[Opened]:
    if section.kind == "embedded":
        yield _tried("history_store.path", lambda: _store(Path(section.path)))
    elif section.kind == "redis":
        yield from _extra("history_store.kind", "redis", "redis")
        yield Opened("history_store.url", OpenedState.NOTE, f"{section.redis_url} was not called")
        if section.tls is not None:
            named = {key: getattr(section.tls, key) for key in ("ca", "certificate", "key")}
            yield _client_tls("history_store.tls", ClientTlsConfig(**named))


def _store(path: Path) -> str:
    if not path.exists():
        return f"{_writable(path.parent)}; {path.name} will be created"
    with path.open("rb") as file:
        if file.read(len(SQLITE)) not in (b"", SQLITE):
            raise ConfigError(f"{path} is no SQLite file")
    if not os.access(path, os.W_OK):
        raise ConfigError(f"{path} cannot be written")
    _writable(path.parent)  # for the write-ahead log
    return str(path)


def _writable(folder: Path) -> str:
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise ConfigError(f"{there} is no folder")
    try:
        with tempfile.TemporaryFile(dir=there):  # unnamed, so nothing is left
            return str(folder)
    except OSError as error:
        raise ConfigError(f"{there} cannot be written: {error.strerror}") from error


def _keys(key: str, path: str | None) -> Iterator[Opened]:
    if path is not None:
        yield _tried(key, lambda: f"{path}: {len(read_keys(Path(path)).keys)} keys")


def _server_tls(key: str, section: ServerTlsConfig | None) -> Iterator[Opened]:
    if section is not None:
        yield _tried(key, lambda: ServerTls(section, key), section.certificate)


def _client_tls(key: str, section: ClientTlsConfig) -> Opened:
    return _tried(
        key, lambda: ClientTls(section, key), section.ca or "the authorities of the system"
    )


def _extra(key: str, module: str, extra: str) -> Iterator[Opened]:
    """Yield a finding if a module that a key needs is not installed."""
    with suppress(ModuleNotFoundError):
        if importlib.util.find_spec(module) is not None:
            return
    yield Opened(
        key,
        OpenedState.BROKEN,
        f"needs {module}, which is not installed",
        f"pip install 'npu_gr[{extra}]'",
    )


def _port(key: str, host: str, port: int) -> Iterator[Opened]:
    """Check that an address is free.

    One in use is only a note, since this configuration may be running.
    """
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        socket.create_server(found[0][4][:2], family=found[0][0]).close()
    except socket.gaierror as error:
        yield Opened(key, OpenedState.BROKEN, f"{host}: {error.strerror}")
    except OSError as error:
        yield Opened(key, OpenedState.NOTE, f"{host}:{port}: {error.strerror}")
    else:
        yield Opened(key, OpenedState.OK, f"{host}:{port}" if port else f"{host}, any free one")


def table(
    findings: Sequence[tuple[str, StrEnum, str, str] | tuple[str, StrEnum, str, str, str]],
) -> str:
    """Format findings for people: one line each, with the remedy below.

    Args:
        findings: (name, state, text, remedy or "", optional section of the report) each.
    """
    width = max(len(name) for name, *_ in findings)
    lines: list[str] = []
    last = ""
    for name, state, found, remedy, *of_section in findings:
        section = of_section[0] if of_section else ""
        if section != last:
            lines.append(f"\n{section}".rstrip() if lines else section)
            last = section
        lines.append(f"{state.value:8}{name:{width}}  {found}")
        if remedy:
            lines.append(f"{'':8}{'':{width}}  -> {remedy}")
    return "\n".join(lines)
