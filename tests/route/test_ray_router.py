"""Ray's request router places as everything else does: here on the least of Ray that it needs."""

from __future__ import annotations

import importlib
import pickle
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest

from npu_gr.route.placement import Member, Ring

NAMES = [f"replica{i}" for i in range(4)]
FULL = 9


class Base:
    """What Ray's own class does with replicas, and with the steps that it is given."""

    def __init__(self) -> None:
        self.queues: dict[str, int] = {}
        self.replica_queue_len_cache = SimpleNamespace(
            get=lambda replica_id: self.queues.get(replica_id.unique_id)
        )
        self.replicas: list[Any] = []

    def update_replicas(self, replicas: list[Any]) -> None:
        self.replicas = replicas

    async def send(self, request: Any) -> str:
        for replicas in await self.choose_replicas(self.replicas, request):  # type: ignore[attr-defined]
            for replica in replicas:
                if self.queues.get(replica.replica_id.unique_id, 0) < FULL:
                    self.on_request_routed(request, replica.replica_id, None)  # type: ignore[attr-defined]
                    return str(replica.replica_id.unique_id)
        raise AssertionError("all are full")


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Any:
    ray, serve, module = (
        types.ModuleType(name) for name in ("ray", "ray.serve", "ray.serve.request_router")
    )
    for name in ("PendingRequest", "ReplicaID", "RunningReplica"):
        setattr(module, name, object)
    module.RequestRouter = Base  # type: ignore[attr-defined]
    for made in (ray, serve, module):
        monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.delitem(sys.modules, "npu_gr.route.ray_router", raising=False)
    made = importlib.import_module("npu_gr.route.ray_router").PlacementRouter()
    del sys.modules["npu_gr.route.ray_router"]  # it has the class of above as its base
    made.initialize_state(user_header="x-user-id", t_life_s=60.0, max_remembered=100)
    made.update_replicas(replicas(*NAMES))
    return made


def replicas(*names: str) -> list[Any]:
    return [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in names]


def asked(path: str, user: str | None = "u%20v") -> Any:
    headers = [] if user is None else [(b"accept", b"*/*"), (b"x-user-id", user.encode())]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    return SimpleNamespace(
        args=[pickle.dumps(SimpleNamespace(asgi_scope=scope))],
        routing_context=SimpleNamespace(should_backoff=False),
    )


WALK = list(Ring(map(Member, NAMES)).walk(b"u v"))


async def test_a_user_goes_to_its_owner_and_to_the_next_in_the_ring_where_that_is_full_or_gone(
    router: Any,
) -> None:
    request = asked("/v1/rank")
    assert await router.send(request) == WALK[0]
    assert request.routing_context.should_backoff  # Ray waits before it asks again
    router.queues[WALK[0]] = FULL
    assert await router.send(asked("/v1/rank")) == WALK[1]
    router.update_replicas(replicas(*WALK[2:]))
    assert await router.send(asked("/v1/rank")) == WALK[2]


async def test_a_rank_follows_its_signal_after_the_owner_has_room_again_or_has_joined(
    router: Any,
) -> None:
    router.queues[WALK[0]] = FULL
    assert await router.send(asked("/v1/signal")) == WALK[1]
    router.queues.clear()
    assert await router.send(asked("/v1/rank")) == WALK[1]
    assert await router.send(asked("/v1/events")) == WALK[1]
    assert await router.send(asked("/v1/signal")) == WALK[0]  # a signal chooses anew
    assert await router.send(asked("/v1/rank")) == WALK[0]
    router.update_replicas(replicas(*WALK[1:]))
    assert await router.send(asked("/v1/rank")) == WALK[1]


@pytest.mark.parametrize("request_", [asked("/v1/rank", None), asked("/v1/events/bulk")])
async def test_nobodys_request_goes_where_the_queue_is_short(router: Any, request_: Any) -> None:
    router.queues = dict(zip(NAMES, (8, 8, 8, 0), strict=True))
    steps = [await router.choose_replicas(router.replicas, request_) for _ in range(100)]
    assert {len(one) for one in steps} == {len(NAMES)}
    first = [one[0][0].replica_id.unique_id for one in steps]
    assert 25 < first.count(NAMES[3]) < 75  # half of all pairs have it


async def test_a_request_in_another_form_is_placed_by_load_and_said(
    router: Any, caplog: pytest.LogCaptureFixture
) -> None:
    other = SimpleNamespace(
        args=["call of a handle"], routing_context=SimpleNamespace(should_backoff=False)
    )
    assert await router.send(other) in NAMES
    assert "not that of Ray" in caplog.text
    assert await router.choose_replicas(router.replicas) == [router.replicas]
