"""A ranker whose action indices differ from those in histories is never served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp.test_utils import TestClient

from npu_gr.core.errors import ConfigError, Unavailable
from npu_gr.core.history import Events, UserKey
from npu_gr.model.weights import Checkpoint, save
from npu_gr.service.reload import check_actions
from tests.models import tiny_model
from tests.serving import FIRST_ID, make_config, serving


def write_ranker(folder: Path, seed: int, *actions: str) -> str:
    model = tiny_model(seed=seed, actions=actions)
    ids = np.arange(model.config.num_items, dtype=np.int64) + FIRST_ID
    return save(
        Checkpoint(model=model, item_ids=ids, name=folder.name, action_names=actions), folder
    )


async def test_actions_grow_at_their_end_and_nowhere_else(tmp_path: Path) -> None:
    old = write_ranker(tmp_path / "old", 1, "view", "cart", "buy")
    write_ranker(tmp_path / "other", 2, "view", "buy", "cart")
    write_ranker(tmp_path / "fewer", 3, "view", "cart")
    more = write_ranker(tmp_path / "more", 4, "view", "cart", "buy", "return")
    use: dict[str, Any] = {"checkpoint": str(tmp_path / "old"), "relay": {"t_life_s": 0.2}}
    async with serving(tmp_path, read=lambda: make_config(tmp_path, **use), **use) as (
        client,
        service,
    ):

        async def reload(name: str, status: int) -> str:
            use["checkpoint"] = str(tmp_path / name)
            async with client.post("/v1/models/reload") as response:
                answer = await response.json(content_type=None)
                assert response.status == status, answer
                return str(answer.get("detail"))

        assert (await reload("other", 422)).startswith(
            "reload: checkpoint: the current version has other actions: action 1 is 'cart' "
            "there, and 'buy' here"
        )
        assert "action 2 is 'buy' there, and here there are only 2" in await reload("fewer", 422)
        assert service.versions.ranker().version == old
        assert not service.versions.is_draining
        await reload("more", 200)
        assert service.versions.ranker().version == more


@pytest.mark.parametrize(
    ("old", "new", "is_rejected"),
    [
        ("", "", False),
        ("", "a", False),
        ("ab", "ab", False),
        ("ab", "abc", False),
        ("ab", "a", True),
        ("ab", "ba", True),
        ("ab", "cab", True),
    ],
)
def test_the_new_ones_begin_with_the_old_ones(old: str, new: str, is_rejected: bool) -> None:
    if is_rejected:
        with pytest.raises(ConfigError, match=r"has other actions: action \d is '.' there, and "):
            check_actions(old, new)
    else:
        check_actions(old, new)


async def test_a_start_on_a_store_of_other_actions_is_rejected(tmp_path: Path) -> None:
    for seed, name, actions in (
        (1, "old", "abc"),
        (2, "other", "acb"),
        (3, "fewer", "a"),
        (4, "more", "abcd"),
    ):
        write_ranker(tmp_path / name, seed, *actions)

    def use(name: str) -> dict[str, Any]:
        return {"checkpoint": str(tmp_path / name)}

    async def append(client: TestClient[Any, Any], *numbers: int) -> None:
        raw = {
            "items": np.full(len(numbers), FIRST_ID, "<i8").tobytes(),
            "actions": np.array(numbers, "<i2").tobytes(),
            "timestamps": np.arange(len(numbers), dtype="<i8").tobytes(),
        }
        body = msgspec.msgpack.encode({"user_id": "u", "events": raw})
        headers = {"Content-Type": "application/msgpack"}
        async with client.post("/v1/events", data=body, headers=headers) as response:
            assert response.status == 200, await response.text()

    async with serving(tmp_path, **use("old")):
        pass
    async with serving(tmp_path, **use("other")):  # nothing was written: nothing is contradicted
        pass
    async with serving(tmp_path, **use("old")) as (client, _):
        await append(client, 0)
    async with serving(tmp_path, **use("other")):  # all that was written is the action 0
        pass
    async with serving(tmp_path, **use("more")) as (client, _):
        await append(client, 1, 0)
        await append(client, 2)
    for name, told in (
        ("other", "action 1 is 'b' there, and 'c' here"),
        ("fewer", "action 1 is 'b' there, and here there are only 1"),
    ):
        with pytest.raises(ConfigError) as error:
            async with serving(tmp_path, **use(name)):
                pass
        assert str(error.value).startswith(
            "history_store: the history store was filled with other actions than "
        )
        assert told in str(error.value)
        assert "another store (history_store.path" in str(error.value)
    async with serving(tmp_path, **use("old")) as (client, _):
        await append(client, 2)


async def test_an_append_under_other_names_is_rejected(tmp_path: Path) -> None:
    """Two instances began on one empty store; the first append decides."""
    write_ranker(tmp_path / "ranker", 1, "view", "buy")
    async with serving(tmp_path, checkpoint=str(tmp_path / "ranker")) as (_, service):
        store = service.parts.histories.store
        assert store is not None
        assert await store.name_actions(["view", "cart"]) == ("view", "cart")
        with pytest.raises(
            Unavailable, match="filled with other actions: action 1 is 'cart' there, and 'buy' here"
        ):
            await service.parts.histories.append(
                UserKey("", "u"), Events.make([FIRST_ID], [1], [0])
            )
        await service.parts.histories.append(UserKey("", "u"), Events.make([FIRST_ID], [0], [0]))
        assert await store.actions() == ("view", "cart")
