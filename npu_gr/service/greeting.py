"""What `serve` says once it listens: models, addresses, and a call that works."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

import numpy as np

from npu_gr.core.kinds import RANK, RECOMMEND
from npu_gr.handlers.service import Service
from npu_gr.server.config import ServerConfig

NEW_USER = "somebody-new"  # logs contain no user, so the example names none that exists


def greeting(service: Service, config: ServerConfig, port: int, admin_port: int) -> list[str]:
    """Return the lines.

    Args:
        service: A ready service.
        config: Addresses, and whether they need a key or TLS.
        port, admin_port: The ports that it listens on.
    """
    versions = {
        "ranker": service.versions.of_ranker(),
        "generator": service.versions.of_generator(),
        "vectors": service.vectors.versions(),
    }
    models = [f"{name} {found[0]}" for name, found in versions.items() if found]
    scheme = "https" if config.tls is not None else "http"
    public = f"{scheme}://{_address(config.host, port)}"
    admin = f"{scheme}://{_address(config.admin_host, admin_port)}"
    lines = [
        f"serving {', '.join(models)}",
        f"requests {public}, status page {admin}/, console {admin}/debug/console",
    ]
    return lines if (call := _call(service)) is None else [*lines, _curl(public, config, *call)]


def _call(service: Service) -> tuple[str, dict[str, Any]] | None:
    """Choose a request of a user without events: path and body; None = there is none."""
    body: dict[str, Any] = {"user_id": NEW_USER}
    if service.parts.histories.store is None:
        body["history"] = {"items": [], "actions": [], "timestamps": []}
    if RECOMMEND.name in service.parts.jobs:
        return RECOMMEND.path, body | {"num_items": 5}
    if RANK.name not in service.parts.jobs:
        return None
    vocabulary = service.versions.ranker().vocabulary
    ids = vocabulary.ids_of(np.arange(min(3, len(vocabulary))))
    return RANK.path, body | {"candidates": service.names.items(ids)}


def _curl(url: str, config: ServerConfig, path: str, body: dict[str, Any]) -> str:
    key = " -H 'authorization: Bearer YOUR-KEY'" if config.api_keys_file else ""
    text = shlex.quote(json.dumps(body, ensure_ascii=False))
    return f"try: curl -s {url}{path}{key} -H 'content-type: application/json' -d {text}"


def _address(host: str, port: int) -> str:
    with suppress(ValueError):  # a name
        if (address := ip_address(host)).is_unspecified:
            host = "127.0.0.1" if address.version == 4 else "::1"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
