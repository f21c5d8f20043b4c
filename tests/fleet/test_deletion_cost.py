"""The costs of pods, from metrics as instances write them, at an API server that does what Kubernetes' does."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from click.testing import CliRunner, Result
from prometheus_client import CollectorRegistry, generate_latest

from npu_gr.cli.main import main
from npu_gr.core.errors import ConfigError
from npu_gr.fleet.deletion_cost import ANNOTATION, ApiFailed, Costs, Watched, api_address, cost_of, is_news, watching
from npu_gr.metrics.registry import Metrics
from npu_gr.service.config import SLOConfig
from tests.certificates import Authority, Pair

MIB = 1 << 20


def metrics(**held_mib: float) -> str:
    """The text of an instance whose tiers hold so much, and have as much free."""
    registry = CollectorRegistry()
    made = Metrics(registry, SLOConfig().objectives())
    for tier, mib in held_mib.items():
        made.relay._bytes.labels(tier, "live").set(mib * MIB)
        made.relay._bytes.labels(tier, "free").set(1000 * MIB)
    return generate_latest(registry).decode()


def test_the_cost_is_what_would_be_lost() -> None:
    assert cost_of(metrics(hbm=0.0)) == 0
    assert cost_of(metrics(hbm=0.001)) == 1
    assert cost_of(metrics(hbm=100.0, dram=23.5)) == 124
    assert cost_of(metrics(hbm=1e12)) == 2**31 - 1
    with pytest.raises(ValueError, match="npu_gr_kv_bytes"):
        cost_of("a 1\n")


def test_small_changes_are_no_news() -> None:
    assert is_news(None, 0)
    assert not is_news(0, 0)
    assert is_news(0, 1)
    assert not is_news(100, 109)
    assert is_news(100, 112)
    assert is_news(112, 100)


class Cluster:
    """An API server and the metrics of its pods, on loopback addresses of their own."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.text: dict[str, str] = {}  # address -> metrics
        self.patches: list[tuple[str, dict[str, Any]]] = []
        self.refuses = False
        self.token = "secret"
        self.port = 0

    def add(self, name: str, address: str, text: str, phase: str = "Running", **metadata: Any) -> None:
        labels = {"app": "npu-gr"}
        self.pods[name] = {
            "metadata": {"name": name, "labels": labels, **metadata},
            "status": {"phase": phase, "podIP": address},
        }
        self.text[address] = text

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/shop/pods", self._list)
        app.router.add_patch("/api/v1/namespaces/shop/pods/{name}", self._patch)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _list(self, request: web.Request) -> web.Response:
        if request.headers["Authorization"] != f"Bearer {self.token}":
            return web.json_response({"kind": "Status", "message": "Unauthorized"}, status=401)
        assert request.query["labelSelector"] == "app=npu-gr"
        if self.refuses:
            return web.json_response({"kind": "Status", "message": "pods is forbidden"}, status=403)
        return web.json_response({"kind": "PodList", "items": list(self.pods.values())})

    async def _patch(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {self.token}"
        assert request.content_type == "application/merge-patch+json"
        name, patch = request.match_info["name"], await request.json()
        self.patches.append((name, patch))
        assert patch.keys() == {"metadata"}
        assert patch["metadata"].keys() == {"annotations"}
        self.pods[name]["metadata"].setdefault("annotations", {}).update(patch["metadata"]["annotations"])
        return web.json_response(self.pods[name])

    async def _metrics(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer observer"
        text = self.text.get(request.host.partition(":")[0])
        return web.Response(text=text) if text is not None else web.Response(status=503)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    runner = web.AppRunner(cluster.app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", 0).start()  # loopback has many addresses: one for each pod
    cluster.port = runner.addresses[0][1]
    yield cluster
    await runner.cleanup()


@pytest.fixture
async def costs(cluster: Cluster, tmp_path: Path) -> AsyncIterator[Costs]:
    async with watching(watched(cluster, tmp_path), ssl.create_default_context()) as made:
        yield made


def watched(cluster: Cluster, account: Path) -> Watched:
    (account / "token").write_text("secret\n")
    return Watched(
        api=f"http://127.0.0.1:{cluster.port}",
        namespace="shop",
        selector="app=npu-gr",
        scheme="http",
        port=cluster.port,
        api_key="observer",
        account=account,
    )


async def test_each_pod_gets_the_cost_of_its_prefixes_once(cluster: Cluster, costs: Costs) -> None:
    cluster.add("full", "127.0.0.2", metrics(hbm=300.0, dram=200.0), annotations={"other": "kept"})
    cluster.add("empty", "127.0.0.3", metrics(hbm=0.0))
    cluster.add("wrong", "127.0.0.4", metrics(hbm=5.0), annotations={ANNOTATION: "much"})
    cluster.add("silent", "127.0.0.5", "", annotations={ANNOTATION: "7"})
    cluster.add("starting", "127.0.0.6", metrics(hbm=9.0), phase="Pending")
    cluster.add("leaving", "127.0.0.7", metrics(hbm=9.0), deletionTimestamp="2026-01-01T00:00:00Z")
    del cluster.text["127.0.0.5"]
    assert await costs.write_once() == {"full": 500, "empty": 0, "wrong": 5}
    assert cluster.pods["full"]["metadata"]["annotations"] == {"other": "kept", ANNOTATION: "500"}
    assert cluster.pods["silent"]["metadata"]["annotations"] == {ANNOTATION: "7"}, "it keeps what it has"
    assert await costs.write_once() == {}
    cluster.text["127.0.0.2"] = metrics(hbm=520.0)
    assert await costs.write_once() == {}
    cluster.text["127.0.0.2"] = metrics(hbm=100.0)
    assert await costs.write_once() == {"full": 100}
    assert len(cluster.patches) == 4


async def test_an_api_server_that_refuses_is_said_in_words(cluster: Cluster, costs: Costs, tmp_path: Path) -> None:
    cluster.refuses = True
    with pytest.raises(ApiFailed, match=r"403: .*pods is forbidden"):
        await costs.write_once()
    (tmp_path / "token").unlink()
    with pytest.raises(ConfigError, match="token: No such file"):
        await costs.write_once()


@contextlib.contextmanager
def over_tls(cluster: Cluster, api: Pair, pods: Pair) -> Iterator[tuple[str, int]]:
    """Serve in a thread, for commands, each side with its certificate; yields the API's URL and the pods' port."""
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(cluster.app(), access_log=None)

    async def listen() -> None:
        await runner.setup()
        for host, pair in (("127.0.0.1", api), ("127.0.0.2", pods), ("127.0.0.3", pods), ("127.0.0.4", api)):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(pair.certificate, pair.key)
            port = 0 if host < "127.0.0.3" else runner.addresses[1][1]  # all pods have one
            await web.TCPSite(runner, host, port, ssl_context=context).start()

    loop.run_until_complete(listen())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"https://127.0.0.1:{runner.addresses[0][1]}", runner.addresses[1][1]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(runner.cleanup())
        loop.close()


def test_over_https_each_side_is_believed_by_its_own_authority(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster()
    kubernetes = Authority(tmp_path, "kubernetes")
    account = tmp_path / "account"
    account.mkdir()
    (account / "namespace").write_text("shop\n")
    (account / "token").write_text("secret\n")
    shutil.copyfile(kubernetes.ca, account / "ca.crt")
    cluster.add("full", "127.0.0.2", metrics(hbm=300.0))
    cluster.add("empty", "127.0.0.3", metrics(hbm=0.0))
    cluster.add("stranger", "127.0.0.4", metrics(hbm=9.0), annotations={ANNOTATION: "7"})  # shows another's certificate
    monkeypatch.setenv("NPU_GR_CA", str(authority.ca))  # as npu-gr --ca
    monkeypatch.setenv("NPU_GR_API_KEY", "observer")
    pairs = kubernetes.issue("127.0.0.1"), authority.issue("npu-gr.shop.svc")
    with over_tls(cluster, *pairs) as (url, port):
        words = ("--selector", "app=npu-gr", "--api", url, "--account", account, "--port", port, "--once")

        def asked(*more: str) -> Result:
            return CliRunner().invoke(main, ["fleet", "deletion-cost", *map(str, words), *more])

        told = asked("--server-name", "npu-gr.shop.svc")
        assert (told.exit_code, told.stdout) == (0, "empty  0\nfull  300\n")
        assert cluster.pods["stranger"]["metadata"]["annotations"] == {ANNOTATION: "7"}, "it is not believed"
        cluster.text["127.0.0.2"] = metrics(hbm=100.0)
        assert asked().stdout == "", "no certificate has the address of a pod"
        cluster.token = "renewed"
        refused = asked("--server-name", "npu-gr.shop.svc")
        assert (refused.exit_code, ": 401: " in refused.output) == (1, True)
        (account / "token").write_text("renewed\n")
        assert asked("--server-name", "npu-gr.shop.svc").stdout == "full  100\n"
        shutil.copyfile(authority.ca, account / "ca.crt")
        distrusted = asked("--server-name", "npu-gr.shop.svc")
        assert (distrusted.exit_code, "certificate verify failed" in distrusted.output) == (1, True)
        (account / "ca.crt").write_text("no certificate")
        broken = asked()
        assert broken.exit_code == 2
        assert f"{account / 'ca.crt'}: " in broken.output
    assert [name for name, _ in cluster.patches] == ["full", "empty", "full"]


def test_outside_of_a_pod_the_command_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    command = ["fleet", "deletion-cost", "--selector", "app=npu-gr", "--once", "--account", str(tmp_path)]
    told = CliRunner().invoke(main, command)
    assert told.exit_code == 2
    assert "this is no pod, so name the API server with --api" in told.output
    told = CliRunner().invoke(main, [*command, "--api", "http://127.0.0.1:1"])
    assert "namespace: No such file" in told.output
    (tmp_path / "token").write_text("a")
    told = CliRunner().invoke(main, [*command, "--api", "http://127.0.0.1:1", "--namespace", "shop"])
    assert told.exit_code == 1
    assert "Cannot connect to host 127.0.0.1:1" in told.output
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert api_address() == "https://[fd00::1]:443"
