"""POST /v1/generate by a T5: the prompt of TIGER.

Every tier gives the same bits, for whole histories and deltas alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from npu_gr.core.errors import ConfigError
from npu_gr.engine.cost import CostModel
from npu_gr.model import hf_t5
from npu_gr.model.generative import UnsharedKV
from npu_gr.model.t5 import T5
from npu_gr.service.app import instance
from npu_gr.tools.check_config import examine
from tests.encoder_decoders import VARIANTS, Encoded, saved
from tests.models import CPU
from tests.server.test_generate_over_http import HISTORY, generate, write_catalogue
from tests.server.test_generate_over_http import section as decoder_section
from tests.serving import make_config, serving

USERS = {"first_token": 30, "count": 50}


def section(folder: Path, **changes: Any) -> dict[str, Any]:
    if not (folder / "t5").exists():
        saved(folder / "t5", **VARIANTS["t5 1.1"])
    framed = {"first_token": 2, "user_tokens": USERS, "tokens_after": [1], "max_prompt_tokens": 26}
    return decoder_section(folder) | {"checkpoint": str(folder / "t5")} | framed | changes


def best_of_all(model: T5, tokens: list[int], sids: dict[int, list[int]]) -> dict[int, float]:
    """The log-probability of every item, each scored by itself."""
    read = Encoded(model, np.array(tokens))
    paths = torch.tensor(list(sids.values())) + torch.tensor([2, 10, 18])
    num_layers, num_heads, head_dim = model.kv_shape
    keys, values = torch.zeros(2, num_layers, len(paths), 3, num_heads, head_dim)
    total, hidden = torch.zeros(len(paths)), read.begun.hidden.expand(len(paths), -1)
    for level, own in enumerate(paths.T):
        total += model.logits(hidden).log_softmax(1).gather(1, own[:, None])[:, 0]
        slots = UnsharedKV(slabs=lambda layer: (keys[layer], values[layer]), step=level)
        hidden = model.decode(CPU, [read.step(own, slots)])
    return dict(zip(sids, total.tolist(), strict=True))


async def test_a_t5_generates_from_the_prompt_that_it_was_trained_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begin token, user token, the items, end token.

    A beam as wide as the catalogue is brute force.
    """
    monkeypatch.setattr("npu_gr.relay.lookup.reload_pays", lambda *_: True)
    sids = write_catalogue(tmp_path / "items.jsonl")
    config = section(tmp_path, max_beams=600, tokens_before=[29])
    model = hf_t5.load(tmp_path / "t5")
    async with serving(tmp_path, checkpoint=None, generate=config) as (client, service):
        asked: dict[str, Any] = {
            "user_id": "1042",
            "num_items": 200,
            "beam_width": 600,
            "exclude_seen": False,
        }
        cold = await generate(client, **asked)
        items = [
            code + base
            for item in HISTORY["items"]
            for code, base in zip(sids[item], (2, 10, 18), strict=True)
        ]
        want = best_of_all(model, [29, 30 + 1042 % 50, *items, 1], sids)
        assert sorted(cold["items"]) == sorted(want)
        np.testing.assert_allclose(
            cold["scores"], [want[item] for item in cold["items"]], rtol=1e-5
        )
        assert (cold["outcome"], cold["history"]["num_tokens"]) == ("miss_full", 21)
        hit = await generate(client, **asked)
        assert (hit["outcome"], hit["prefix_tokens"]) == ("hbm_hit", 21)
        relay = service.versions.generator().relay
        await relay.settled()
        for entry in list(relay.tiers.pool._found.values()):
            relay.tiers.pool.drop(entry)
        from_dram = await generate(client, **asked)
        assert from_dram["outcome"] == "dram_hit"
        for again in (hit, from_dram):
            assert (again["items"], again["scores"]) == (cold["items"], cold["scores"])
        other = await generate(client, **asked | {"user_id": "ann"})  # another token: other scores
        assert other["scores"] != cold["scores"]


async def test_a_delta_is_the_whole_history_and_a_signal_is_a_hit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, checkpoint=None, generate=section(tmp_path, user_tokens=None)) as (
        client,
        service,
    ):
        base = (await generate(client))["history"]["fingerprint"]
        new = {"items": [45, 52, 59], "actions": [1] * 3, "timestamps": [9, 10, 11]}
        whole = {name: [*HISTORY[name], *new[name]] for name in new}
        want = await generate(client, history=whole, user_id="v")
        # eight items and the end: one is left out, not a step of 32
        assert want["history"]["num_tokens"] == 25
        got = await generate(client, history=new, base=base)
        assert got["outcome"] == "miss_full"
        assert (got["items"], got["scores"]) == (want["items"], want["scores"])
        async with client.post("/v1/signal", json={"user_id": "s", "history": whole}) as response:
            assert (await response.json())["generate_verdict"] == "preinfer"
        await service.versions.generator().relay.settled()
        hit = await generate(client, user_id="s", history=whole)
        assert (hit["outcome"], hit["prefix_tokens"]) == ("hbm_hit", 25)
        assert (hit["items"], hit["scores"]) == (want["items"], want["scores"])
        assert (await client.delete("/v1/users/s")).status == 204
        last = {name: values[-2:] for name, values in whole.items()}
        short = await generate(client, history=last, user_id="w", exclude_seen=False)
        monkeypatch.setattr("npu_gr.engine.cost.LEAST_TOKENS", 4)
        # 3 s a token, of 30 s
        service.versions.generator().engine.cost = CostModel(0.0, 3.0, 0.0, 0.0, 0.0)
        cut = await generate(client, user_id="s", history=whole, exclude_seen=False)
        assert (cut["outcome"], cut["history"]["num_tokens"]) == ("degraded", 7)
        assert cut["items"] == short["items"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tokens_after": None},
            r"generate\.tokens_after: required, since .* is an encoder-decoder",
        ),
        (
            {"tokens_after": [97]},
            r"generate\.tokens_after: the last token is 97, but the "
            r"vocabulary of .* has 97",
        ),
        ({"tokens_before": [200]}, r"generate\.tokens_before: the last token is 200"),
        (
            {"user_tokens": {"first_token": 90, "count": 8}},
            r"generate\.user_tokens: the last token is 97",
        ),
        ({"first_token": 90}, r"generate\.codes: the last token is 113"),
        (
            {"checkpoint": "decoder"},
            r"generate\.tokens_after: must be empty, since .* is a decoder: a cached",
        ),
    ],
    ids=str,
)
async def test_a_prompt_that_the_model_does_not_read_is_rejected(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any], message: str
) -> None:
    """By a start, and by check-config in the same words."""
    folder = tmp_path_factory.getbasetemp() / "t5"
    folder.mkdir(exist_ok=True)
    if "checkpoint" in changes:
        changes = {"checkpoint": decoder_section(folder)["checkpoint"]}
    config = make_config(folder, checkpoint=None, generate=section(folder, **changes))
    with pytest.raises(ConfigError, match=message) as rejected:
        async with instance(config):
            pass
    said = [each.words for each in examine(config) if each.key == "generate.checkpoint"]
    assert said == [str(rejected.value)]
