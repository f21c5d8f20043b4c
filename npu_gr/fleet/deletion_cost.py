"""Tells Kubernetes which pods a scale-down should take: the prefix KV of each, as `pod-deletion-cost`.

A pod that is removed takes the prefixes of its users with it. The controller of a ReplicaSet removes the pods with the
smallest cost first, so the cost is what would be lost: the MiB of prefix KV that a pod holds, in all tiers. It is a
hint that Kubernetes reads for ReplicaSets, and so for Deployments; a StatefulSet always removes the pod with the
highest number. Kubernetes asks that the annotation is not written often: a cost is written when it has changed by more
than a tenth.

The API server is asked over HTTPS with the token of the pod's service account, which may list and patch pods.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from npu_gr.core.errors import ConfigError

log = logging.getLogger(__name__)
ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_CHANGED = 0.1  # of a cost, before it is written again
_MIB = 1 << 20
_TIMEOUT_S = 10.0
_MAX_COST = 2**31 - 1  # the annotation is an int32


class PodMetadata(msgspec.Struct, frozen=True):
    """What the API server calls a pod, and what was written to it."""

    name: str
    annotations: dict[str, str] = {}
    deletion_timestamp: str | None = msgspec.field(name="deletionTimestamp", default=None)


class PodStatus(msgspec.Struct, frozen=True):
    """Where a pod is."""

    phase: str = ""
    pod_ip: str = msgspec.field(name="podIP", default="")


class Pod(msgspec.Struct, frozen=True):
    """The part of a pod that is read here."""

    metadata: PodMetadata
    status: PodStatus = PodStatus()

    @property
    def cost(self) -> int | None:
        """The cost that it has; None: none, or none that is a number."""
        try:
            return int(self.metadata.annotations[ANNOTATION])
        except (KeyError, ValueError):
            return None


class PodList(msgspec.Struct, frozen=True):
    """The API server's answer to a question for pods."""

    items: list[Pod]


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    """The pods that get a cost, and how their metrics are read."""

    api: str  # of the API server, e.g. https://10.0.0.1:443
    namespace: str
    selector: str  # labels, as kubectl takes them
    scheme: str = "https"  # of /metrics of a pod
    port: int = 8081
    server_name: str | None = None  # that the pods' certificates have
    api_key: str | None = None  # with the scope observe
    account: Path = ACCOUNT  # folder with token and ca.crt


class ApiFailed(Exception):
    """The API server did not do what it was asked for."""


def api_address() -> str:
    """Return the API server's address, as every pod has it in its environment.

    Raises:
        ConfigError: this is no pod.
    """
    try:
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    except KeyError as error:
        raise ConfigError(f"{error.args[0]}: not set: this is no pod, so name the API server with --api") from error
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def own_namespace(account: Path) -> str:
    """Return the namespace of the pod that this is.

    Raises:
        ConfigError: this is no pod with a service account.
    """
    return _read(account / "namespace").strip()


def cost_of(metrics: str) -> int:
    """Compute a pod's cost: the MiB of its prefix KV, rounded up, so that one with a prefix has at least 1.

    Args:
        metrics: as an instance's /metrics has them.

    Raises:
        ValueError: it is no such text, or says nothing of prefix KV.
    """
    held = list(_held_bytes(metrics))
    if not held:
        raise ValueError("there is no npu_gr_kv_bytes")
    return min(_MAX_COST, math.ceil(sum(held) / _MIB))


def _held_bytes(metrics: str) -> Iterator[float]:
    for family in text_string_to_metric_families(metrics):
        if family.name == "npu_gr_kv_bytes":
            for sample in family.samples:
                yield 0.0 if sample.labels["state"] == "free" else sample.value


def is_news(before: int | None, cost: int) -> bool:
    """Whether a cost is to be written over the one before."""
    return before is None or abs(cost - before) > _CHANGED * max(before, cost)


class Costs:
    """Writes the costs of some pods; `watching` makes one."""

    def __init__(self, watched: Watched, api: aiohttp.ClientSession, pods: aiohttp.ClientSession) -> None:
        self._watched = watched
        self._api = api
        self._pods = pods
        self._url = f"{watched.api}/api/v1/namespaces/{watched.namespace}/pods"

    async def write_once(self) -> dict[str, int]:
        """Read every pod's prefix KV and write the costs that have changed.

        A pod that does not answer keeps the cost that it has.

        Returns:
            The costs that were written, by the pod's name.

        Raises:
            ApiFailed: the API server does not list the pods, or refuses a cost.
        """
        pods = await self._list()
        costs = await asyncio.gather(*map(self._cost, pods))
        news = [
            (pod, cost) for pod, cost in zip(pods, costs, strict=True) if cost is not None and is_news(pod.cost, cost)
        ]
        for pod, cost in news:
            await self._write(pod, cost)
        return {pod.metadata.name: cost for pod, cost in news}

    async def keep_writing(self, period_s: float) -> None:
        """Write every `period_s`, until cancelled; what fails is tried again at the next time."""
        while True:
            try:
                for name, cost in (await self.write_once()).items():
                    log.info("%s: a deletion costs %d", name, cost)
            except ApiFailed as error:
                log.error("costs as before: %s", error)
            await asyncio.sleep(period_s)

    async def _list(self) -> list[Pod]:
        """List the pods that run, have an address, and are not being deleted."""
        body = await self._ask("GET", self._url, params={"labelSelector": self._watched.selector})
        try:
            found = msgspec.json.decode(body, type=PodList).items
        except msgspec.MsgspecError as error:
            raise ApiFailed(f"{self._url}: not a list of pods: {error}") from error
        return [
            pod
            for pod in found
            if pod.status.phase == "Running" and pod.status.pod_ip and pod.metadata.deletion_timestamp is None
        ]

    async def _cost(self, pod: Pod) -> int | None:
        watched = self._watched
        host = f"[{pod.status.pod_ip}]" if ":" in pod.status.pod_ip else pod.status.pod_ip
        url = f"{watched.scheme}://{host}:{watched.port}/metrics"
        try:
            async with self._pods.get(url, server_hostname=watched.server_name) as answer:
                answer.raise_for_status()
                return cost_of(await answer.text())
        except (aiohttp.ClientError, OSError, ValueError) as error:  # TimeoutError is an OSError
            log.warning("%s: %s: %s", pod.metadata.name, url, str(error) or type(error).__name__)
            return None

    async def _write(self, pod: Pod, cost: int) -> None:
        patch = {"metadata": {"annotations": {ANNOTATION: str(cost)}}}
        headers = {"Content-Type": "application/merge-patch+json"}
        await self._ask("PATCH", f"{self._url}/{pod.metadata.name}", data=msgspec.json.encode(patch), headers=headers)

    async def _ask(self, method: str, url: str, headers: dict[str, str] | None = None, **more: Any) -> bytes:
        """Ask the API server; the token is read each time, because it is replaced while it runs."""
        token = await asyncio.to_thread(_read, self._watched.account / "token")
        given = {"Authorization": f"Bearer {token.strip()}", **(headers or {})}
        try:
            async with self._api.request(method, url, headers=given, **more) as answer:
                body = await answer.read()
                if answer.status != 200:
                    raise ApiFailed(f"{method} {url}: {answer.status}: {body[:200].decode(errors='replace')}")
                return body
        except (aiohttp.ClientError, OSError) as error:
            raise ApiFailed(f"{method} {url}: {str(error) or type(error).__name__}") from error


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: the pod needs a service account's token") from error


@asynccontextmanager
async def watching(watched: Watched, trusts: ssl.SSLContext) -> AsyncIterator[Costs]:
    """Make the connections.

    Args:
        watched: which pods.
        trusts: for the pods' metrics; the API server is believed by the account's ca.crt.

    Yields:
        `Costs`.

    Raises:
        ConfigError: the account's files cannot be used.
    """
    context = trusts
    if watched.api.startswith("https:"):
        path = watched.account / "ca.crt"
        try:
            context = ssl.create_default_context(cafile=str(path))
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(f"{path}: {error.strerror or error}") from error
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    key = {} if watched.api_key is None else {"Authorization": f"Bearer {watched.api_key}"}
    api = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(ssl=context))
    pods = aiohttp.ClientSession(timeout=timeout, headers=key, connector=aiohttp.TCPConnector(ssl=trusts))
    async with api, pods:
        yield Costs(watched, api, pods)
