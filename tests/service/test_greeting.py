"""The call that `serve` says works for every instance, and names no user that exists."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from yarl import URL

from npu_gr.server.config import ServerConfig
from npu_gr.service.greeting import NEW_USER, greeting
from tests.serving import serving


@pytest.mark.parametrize("has_store", [True, False])
async def test_the_call_is_answered(tmp_path: Path, has_store: bool) -> None:
    store: dict[str, Any] = {} if has_store else {"history_store": {"kind": "none"}}
    async with serving(tmp_path, **store) as (client, service):
        *_, said = greeting(service, ServerConfig(), 80, 81)
        words = shlex.split(said)
        body = json.loads(words[words.index("-d") + 1])
        assert body["user_id"] == NEW_USER
        async with client.post(URL(words[3]).path, json=body) as answer:
            assert answer.status == 200, await answer.text()
            assert len((await answer.json())["scores"]["click"]) == 3


async def test_addresses_that_a_shell_can_use(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    config = ServerConfig(host="0.0.0.0", admin_host="::1", api_keys_file=str(keys))
    async with serving(tmp_path) as (_, service):
        models, addresses, said = greeting(service, config, 8080, 8081)
        assert models == f"serving ranker {service.versions.ranker().version}"
    assert addresses.startswith("requests http://127.0.0.1:8080, status page http://[::1]:8081/")
    assert "-H 'authorization: Bearer YOUR-KEY'" in said
