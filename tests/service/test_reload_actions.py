"""Histories hold numbers of actions: a ranker in which one of them means another action does not come into service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_gr.core.errors import ConfigError
from npu_gr.model.weights import Checkpoint, save
from npu_gr.service.reload import check_actions
from tests.models import tiny_model
from tests.serving import FIRST_ID, make_config, serving


def write_ranker(folder: Path, seed: int, *actions: str) -> str:
    model = tiny_model(seed=seed, actions=actions)
    ids = np.arange(model.config.num_items, dtype=np.int64) + FIRST_ID
    return save(Checkpoint(model=model, item_ids=ids, name=folder.name, action_names=actions), folder)


async def test_actions_grow_at_their_end_and_nowhere_else(tmp_path: Path) -> None:
    old = write_ranker(tmp_path / "old", 1, "view", "cart", "buy")
    write_ranker(tmp_path / "other", 2, "view", "buy", "cart")
    write_ranker(tmp_path / "fewer", 3, "view", "cart")
    more = write_ranker(tmp_path / "more", 4, "view", "cart", "buy", "return")
    use: dict[str, Any] = {"checkpoint": str(tmp_path / "old"), "relay": {"t_life_s": 0.2}}
    async with serving(tmp_path, read=lambda: make_config(tmp_path, **use), **use) as (client, service):

        async def reload(name: str, status: int) -> str:
            use["checkpoint"] = str(tmp_path / name)
            async with client.post("/v1/models/reload") as response:
                answer = await response.json(content_type=None)
                assert response.status == status, answer
                return str(answer.get("detail"))

        assert (await reload("other", 422)).startswith(
            "reload: checkpoint: action 1 is 'cart' in the version that serves, and here it is 'buy'; histories hold"
        )
        assert "action 2 is 'buy' in the version that serves, and here there are only 2" in await reload("fewer", 422)
        assert service.versions.ranker().version == old
        assert not service.versions.is_draining
        await reload("more", 200)
        assert service.versions.ranker().version == more


@pytest.mark.parametrize(
    ("old", "new", "is_refused"),
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
def test_the_new_ones_begin_with_the_old_ones(old: str, new: str, is_refused: bool) -> None:
    if is_refused:
        with pytest.raises(ConfigError, match=r"checkpoint: action \d is '.' in the version that serves"):
            check_actions(old, new)
    else:
        check_actions(old, new)
