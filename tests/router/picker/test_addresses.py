"""A gateway is sent to addresses: those of names are looked up, and known as soon as they are."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from npu_gr.core.settings import from_table
from npu_gr.router.config import InstanceConfig, RouterConfig
from npu_gr.router.members import Members, ring_of
from npu_gr.router.picker import addresses as module
from npu_gr.router.picker.addresses import Addresses

FOUND = [
    InstanceConfig(name="a", host="10.0.0.1", port=80),
    InstanceConfig(name="b", host="b.internal", port=81),
    InstanceConfig(name="c", host="::1", port=82),
]


async def test_names_are_looked_up_and_keep_their_address_while_dns_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    config = from_table({"discovery": {"file": "unused"}, "picker": {}}, RouterConfig)
    members = Members(config)
    members.replace(FOUND, ring_of(FOUND))
    found: dict[str, str | None] = {"b.internal": "10.0.0.2"}

    async def look_up(host: str) -> str | None:
        return found[host]

    monkeypatch.setattr(module, "_look_up", look_up)
    addresses = Addresses(config, members)
    assert addresses.endpoints() == {"a": "10.0.0.1:80", "b": None, "c": "[::1]:82"}
    assert list(addresses.reach(None)[1]) == ["b"]
    await addresses.look_up()
    assert addresses.endpoints()["b"] == "10.0.0.2:81"
    assert not addresses.reach(None)[1]
    assert sorted(addresses.reach({"10.0.0.2:81"})[1]) == ["a", "c"]
    found["b.internal"] = None
    await addresses.look_up()
    assert addresses.endpoints()["b"] == "10.0.0.2:81"
    found["b.internal"] = "10.0.0.3"
    await addresses.look_up()
    assert addresses.endpoints()["b"] == "10.0.0.3:81"
    one = InstanceConfig(name="d", host="10.0.0.4", port=83)
    members.replace([*FOUND, one], ring_of([*FOUND, one]))
    assert addresses.endpoints()["d"] == "10.0.0.4:83", "who joins is known at once"


async def test_a_name_that_nobody_knows_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror("nobody")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    config = from_table({"discovery": {"file": "unused"}, "picker": {}}, RouterConfig)
    members = Members(config)
    members.replace(FOUND, ring_of(FOUND))
    addresses = Addresses(config, members)
    await addresses.look_up()
    assert list(addresses.reach(None)[1]) == ["b"]
