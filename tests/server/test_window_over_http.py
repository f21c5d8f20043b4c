"""A semi-local ranker that reads the newest events of a long stored history."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from npu_gr.core.history import Events
from tests.models import events
from tests.server.test_service_over_http import Client, post, rank
from tests.serving import columns, serving, write_checkpoint

MOST, STEP = 48, 16


async def test_cold_is_any_chain_of_appends_over_every_step_of_the_cut(tmp_path: Path) -> None:
    """Bit for bit; a late event, an erased user and an edited history are seen."""
    write_checkpoint(tmp_path / "checkpoint", attention_window_tokens=8, attention_first_tokens=2)
    limits = {"max_history_tokens": MOST, "cut_step_tokens": STEP}
    random = np.random.default_rng(0)
    whole = events(200, 1)
    async with serving(tmp_path, service=limits) as (client, service):

        async def is_cold(stored: Events, name: str) -> int:
            """Compare the stored user's scores with those of the same history of a new user."""
            signal = await post(client, "/v1/signal", 202, user_id="u")
            await service.versions.ranker().relay.settled()  # a slow prefill is no miss
            ranked = await rank(client)
            cold = await rank(client, f"cold {name}", history=columns(stored))
            await client.delete(f"/v1/users/cold {name}")
            assert cold["outcome"] == "miss_full"
            assert ranked["outcome"] == "hbm_hit", ranked["reason"]
            assert ranked["scores"] == cold["scores"], name
            assert ranked["history"]["fingerprint"] == cold["history"]["fingerprint"]
            assert signal["history"]["num_tokens"] <= MOST
            return int(ranked["history"]["cut_tokens"])

        cuts = set()
        done = 0
        while done < 150:
            more = int(random.choice([1, 1, 3, 20]))
            await _append(client, whole[done : done + more])
            done += more
            cuts.add(await is_cold(whole[:done], f"after {done}"))
        assert len(cuts) > 4, "the cut moved several times"

        stored = whole[:done]
        at = done - 4  # one in the window comes late
        late = Events.make([7], [1], stored.timestamps[at - 1 : at])
        await _append(client, late)
        edited = stored[:at] + late + stored[at:]
        before = await rank(client)
        assert await is_cold(edited, "a late one")
        await client.delete("/v1/users/u")
        assert (await rank(client))["history"]["num_tokens"] == 0
        await _append(client, stored)
        assert await is_cold(stored, "without it again")
        assert (await rank(client))["scores"] != before["scores"]


async def _append(client: Client, more: Events) -> None:
    await post(client, "/v1/events", user_id="u", events=columns(more))
