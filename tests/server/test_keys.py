"""A key opens what its scopes say, for its own tenant alone, whatever the route and the request."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from npu_gr.core.kinds import KINDS, Kind, Scope
from npu_gr.metrics.registry import Metrics
from npu_gr.server.auth.rules import rules
from npu_gr.server.config import ServerConfig
from npu_gr.server.debug import stacks as profile
from npu_gr.server.openapi import document
from npu_gr.server.recording import OwnRecorder, add_record_routes
from npu_gr.server.routes import build_web_app
from tests.keys import bearer, entry, write_keys
from tests.server.examples import EXAMPLES
from tests.server.fake import FakeService, metrics_of_all_kinds, serving_fake
from tests.serving import InstanceServer

SCOPED = [(*route, rule.scope) for route, rule in rules().items() if rule.scope is not None]
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def fake() -> FakeService:
    return FakeService({name: example.answer for name, example in EXAMPLES.items()})


def count(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"npu_gr_{name}", labels)


def path_of(pattern: str) -> str:
    return (
        pattern.replace("{model}", "fake")
        .replace("{version}", "1")
        .replace("{user_id}", "u")
        .replace("{item_id}", "7")
    )


async def ask(
    client: TestClient[Any, Any],
    kind: Kind[Any, Any],
    tenant: str | None,
    key: str,
    msgpack: bool = False,
) -> tuple[int, str]:
    """Send the kind's example, about a user of this tenant; None = it names none."""
    example = EXAMPLES[kind.name]
    headers = {
        "Content-Type": "application/msgpack" if msgpack else "application/json",
        **bearer(key),
    }
    named = {} if tenant is None else {"tenant": tenant}
    if example.body is None:
        path = example.path.partition("?")[0]
        async with client.request(kind.method, path, params=named, headers=bearer(key)) as response:
            return response.status, await response.text()
    body = {name: value for name, value in example.body.items() if name != "tenant"} | named
    data = msgspec.msgpack.encode(body) if msgpack else msgspec.json.encode(body)
    async with client.request(kind.method, example.path, data=data, headers=headers) as response:
        return response.status, await response.text()


@pytest.mark.parametrize(
    ("method", "pattern", "scope"), SCOPED, ids=[f"{m} {p}" for m, p, _ in SCOPED]
)
async def test_a_route_needs_its_scope(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, pattern: str, scope: Scope
) -> None:
    monkeypatch.setattr(profile, "folded_stacks", lambda _seconds, _stop: "main;run 1\n")
    others = entry("others", scopes=[one for one in Scope if one is not scope])
    path = write_keys(tmp_path / "keys", others, entry("this", scopes=[scope]))
    metrics = metrics_of_all_kinds()
    app = build_web_app(fake(), ServerConfig(api_keys_file=path), metrics)
    add_record_routes(app, OwnRecorder(None))
    async with TestClient(InstanceServer(app)) as client:
        async with client.request(method, path_of(pattern), headers=bearer("others")) as rejected:
            assert rejected.status == 403
            body = await rejected.json(content_type=None)
            assert body["title"] == "forbidden"
            assert body["detail"].endswith(f"; needs {scope.value}")
        assert count(metrics, "api_keys_rejected_total", reason="scope") == 1
        async with client.request(method, path_of(pattern), headers=bearer("this")) as allowed:
            assert allowed.status not in (401, 403)


def test_the_document_says_what_needs_a_key() -> None:
    for path, item in document()["paths"].items():
        for method, operation in item.items():
            if method != "parameters":
                needs_key = rules()[method.upper(), path].scope is not None
                assert {"401", "403", "429"} & set(operation["responses"]) == (
                    {"401", "403", "429"} if needs_key else set()
                )
                assert (operation.get("security") == []) == (not needs_key)


async def test_a_head_needs_what_its_get_needs(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys", entry("feed", scopes=[Scope.INGEST]))
    async with serving_fake(fake(), api_keys_file=path) as (client, _):
        assert (await client.head("/metrics", headers=bearer("feed"))).status == 403
        assert (await client.head("/healthz")).status == 200


async def test_what_is_not_there_is_told_to_any_key(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys", entry("feed", scopes=[Scope.INGEST]))
    async with serving_fake(fake(), api_keys_file=path) as (client, _):
        assert (await client.get("/nowhere", headers=bearer("feed"))).status == 404
        assert (await client.get("/v1/rank", headers=bearer("feed"))).status == 405


@each_kind
@pytest.mark.parametrize("msgpack", [False, True], ids=["json", "msgpack"])
async def test_a_request_is_about_the_key_s_tenant(
    tmp_path: Path, kind: Kind[Any, Any], msgpack: bool
) -> None:
    path = write_keys(
        tmp_path / "keys", entry("mine", tenant="mine"), entry("any"), entry("nobody", tenant="")
    )
    async with serving_fake(service := fake(), api_keys_file=path) as (client, metrics):
        for key, tenant, of in (
            *(("mine", None, "mine"), ("mine", "", "mine"), ("mine", "mine", "mine")),
            *(("any", None, ""), ("any", "mine", "mine"), ("any", "yours", "yours")),
            *(("nobody", None, ""), ("nobody", "", "")),
        ):
            assert (await ask(client, kind, tenant, key, msgpack))[0] == kind.status
            assert service.served[-1][1].user.tenant == of
        num = len(service.served)
        for key, tenant in (("mine", "yours"), ("mine", "Mine"), ("mine", "*"), ("nobody", "mine")):
            status, text = await ask(client, kind, tenant, key, msgpack)
            assert status == 403
            assert "only" in json.loads(text)["detail"]
        assert len(service.served) == num
        assert count(metrics, "api_keys_rejected_total", reason="tenant") == 4


async def test_a_tenant_that_the_query_has_twice_is_the_first_one(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys", entry("mine", tenant="mine"))
    async with serving_fake(service := fake(), api_keys_file=path) as (client, _):
        url = "/v1/users/u?tenant=mine&tenant=yours"
        assert (await client.delete(url, headers=bearer("mine"))).status == 204
        assert service.served[-1][1].user == ("mine", "u")
        assert (
            await client.delete("/v1/users/u?tenant=yours&tenant=mine", headers=bearer("mine"))
        ).status == 403


async def test_nobody_takes_another_tenant_s_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose turn a request takes is the key's tenant, not what the body says."""
    path = write_keys(tmp_path / "keys", entry("mine", tenant="mine"), entry("any"))
    service = fake()
    arrived: list[str] = []
    enter = service.admission.enter

    async def noted(kind: str, tenant: str, *rest: Any) -> Any:
        arrived.append(tenant)
        return await enter(kind, tenant, *rest)

    monkeypatch.setattr(service.admission, "enter", noted)
    async with serving_fake(service, api_keys_file=path) as (client, _):
        for key, tenant in (("mine", "yours"), ("mine", None), ("any", "yours")):
            await ask(client, KINDS["rank"], tenant, key)
    assert arrived == ["mine", "mine", "yours"]


async def test_the_log_has_the_key_s_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_keys(tmp_path / "keys", entry("ranking"), entry("feed", scopes=[Scope.INGEST]))
    with caplog.at_level(logging.INFO):
        async with serving_fake(fake(), api_keys_file=path) as (client, _):
            await ask(client, KINDS["rank"], None, "ranking")
            await ask(client, KINDS["rank"], None, "feed")
            await client.get("/metrics", headers=bearer("feed"))
            await client.get("/healthz")
        async with serving_fake(fake()) as (client, _):
            await client.get("/v1/models")
    lines = [json.loads(r.getMessage()) for r in caplog.records if r.name == "npu_gr.request"]
    assert [(line["route"], line.get("key")) for line in lines] == [
        *(
            ("/v1/rank", "ranking"),
            ("/v1/rank", "feed"),
            ("/metrics", "feed"),
            ("/healthz", None),
            ("/v1/models", None),
        ),
    ]
    assert "a request was rejected for its API key 'feed': scope" in caplog.text
    assert bearer("feed")["Authorization"].removeprefix("Bearer ") not in caplog.text


async def test_an_embedded_application_checks_the_same(tmp_path: Path) -> None:
    """The middleware finds the key and spends its rate, whatever runner the application has."""
    path = write_keys(
        tmp_path / "keys", entry(rate_per_s=1.0), entry("feed", scopes=[Scope.INGEST])
    )
    app: web.Application = build_web_app(
        fake(), ServerConfig(api_keys_file=path), metrics_of_all_kinds()
    )
    async with TestClient(TestServer(app)) as client:
        assert (await client.get("/v1/models")).status == 401
        assert (await client.get("/healthz")).status == 200
        assert (await client.get("/v1/models", headers=bearer("feed"))).status == 403
        assert (await client.get("/v1/models", headers=bearer())).status == 200
        async with client.get("/v1/models", headers=bearer()) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
            assert "Retry-After-Ms" not in response.headers
