"""npu-gr import, then POST /v1/rank: the logits are those that the other project's code gave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from npu_gr.cli.main import main
from npu_gr.cli.train import FAMILIES
from npu_gr.model.convert.families import FAMILIES as KNOWN
from tests.model.convert.test_parity import DATA, DLRM, RECSYS, RESEARCH, fixture
from tests.server.test_recommend_over_http import post
from tests.serving import encoded, serving


def imported(
    folder: Path, family: str, name: str, settings: dict[str, Any], *more: str
) -> dict[str, torch.Tensor]:
    """Write a folder as the project's trainer does, and convert it; return inputs and outputs."""
    weights, known = fixture(name)
    source = folder / "theirs"
    source.mkdir()
    torch.save(
        {"model_state_dict": {f"module.{k}": v for k, v in weights.items()}}, source / "model_ep100"
    )
    (source / "run.gin").write_text(
        "".join(f"{key} = {value!r}\n" for key, value in settings.items())
    )
    arguments = [
        "import",
        "--from",
        family,
        str(source),
        "--out",
        str(folder / "checkpoint"),
        *more,
    ]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    return known


def test_the_command_knows_every_family() -> None:
    assert set(KNOWN) == set(FAMILIES)


async def test_generative_recommenders(tmp_path: Path) -> None:
    known = imported(tmp_path, "generative-recommenders", "research", RESEARCH["research"])
    asked: dict[str, Any] = {
        "relay": {"enabled": False},
        "service": {"cut_step_tokens": 1},
        "recommend": {"sources": {"shared_encoder": 10}, "order": "retrieval"},
    }
    async with serving(tmp_path, **asked) as (client, service):
        assert service.versions.ranker().model.ops["hstu_attention"] == "torch"
        for user, n in enumerate(known["in.lengths"].tolist()):
            history = {
                "items": known["in.ids"][user, :n].tolist(),
                "actions": ["seen"] * n,
                "timestamps": known["in.times"][user, :n].tolist(),
            }
            candidates, at = list(range(1, 31)), int(known["in.times"][user, n])
            answer = await post(
                client,
                "/v1/rank",
                user_id=f"u{user}",
                history=history,
                candidates=candidates,
                timestamp=at,
            )
            want = known["out.logits"][user].numpy()
            assert answer["history"]["num_tokens"] == n
            assert np.abs(answer["scores"]["next"] - want).max() < 1e-5 * want.std()
            found = await post(client, "/v1/recommend", history=history, num_items=5, timestamp=at)
            unseen = [row + 1 for row in np.argsort(-want) if row + 1 not in history["items"]]
            assert found["items"] == unseen[:5]


async def test_dlrmv3(tmp_path: Path) -> None:
    known = imported(tmp_path, "dlrmv3", "dlrm", DLRM)
    async with serving(tmp_path, relay={"enabled": False}, service={"cut_step_tokens": 1}) as (
        client,
        _,
    ):
        user, n = 2, int(known["in.lengths"][2])
        history = {
            "items": known["in.items"][user, :n].tolist(),
            "actions": [str(mask) for mask in known["in.actions"][user, :n].tolist()],
            "timestamps": known["in.times"][user, :n].tolist(),
        }
        body: dict[str, Any] = {"history": history, "candidates": known["in.candidates"].tolist()}
        answer = await post(client, "/v1/rank", **body, timestamp=int(known["in.times"][user, n]))
        want = known["out.logits"][user].numpy()
        got = np.stack([answer["scores"][f"task{index}"] for index in range(want.shape[1])], 1)
        assert np.abs(got - want).max() < 1e-5 * want.std()


async def test_the_cache_is_rejected_where_it_would_change_scores(tmp_path: Path) -> None:
    imported(tmp_path, "generative-recommenders", "research", RESEARCH["research"])
    with pytest.raises(Exception, match=r"model\.attention_time.*E10"):
        async with serving(tmp_path):
            pass


async def test_recsys_examples_from_a_cached_prefix(tmp_path: Path) -> None:
    """Two tokens a behaviour: the prefix of a signal is found, and the window counts tokens."""
    names = ("--actions", "a,b,c,d,e", "--tasks", "x,y,z")
    known = imported(tmp_path, "recsys-examples", "recsys_fused", RECSYS, *names)
    async with serving(tmp_path, service={"cut_step_tokens": 4}) as (client, service):
        user, n = 3, int(known["in.lengths"][3])
        history = {
            "items": known["in.items"][user, :n].tolist(),
            "actions": ["abcde"[a] for a in known["in.actions"][user, :n].tolist()],
            "timestamps": list(range(n)),
        }
        body: dict[str, Any] = {"user_id": "u", "history": history}
        assert (await post(client, "/v1/signal", 202, **body))["history"]["num_tokens"] == 2 * n
        await encoded(service.versions.ranker().relay)
        answer = await post(
            client, "/v1/rank", candidates=known["in.candidates"].tolist(), timestamp=99, **body
        )
        assert (answer["outcome"], answer["prefix_tokens"]) == ("hbm_hit", 2 * n)
        want = known["out.logits"][user].numpy()
        got = np.stack([answer["scores"][task] for task in "xyz"], 1)
        assert np.abs(got - want).max() < 1e-5 * want.std()
        # 36 tokens, and 20 fit
        longer = {name: sorted(column * 2) for name, column in history.items()}
        answer = await post(
            client, "/v1/rank", user_id="v", history=longer, candidates=[1], timestamp=99
        )
        assert answer["history"]["num_tokens"] == 20
        assert answer["history"]["cut_tokens"] == 8


async def test_contextual_tokens_of_torcheasyrec(tmp_path: Path) -> None:
    """Causal ones are a part of a cached prefix.

    Those that see the whole history want full inference.
    """
    source = tmp_path / "theirs"
    (source / "model").mkdir(parents=True)
    for name, is_cached in (("torcheasyrec_causal", True), ("torcheasyrec", False)):
        weights, known = fixture(name)
        torch.save(weights, source / "model/weights.pt")
        (source / "pipeline.config").write_text((DATA / f"{name}.config").read_text())
        arguments = [
            "import",
            "--from",
            "torcheasyrec",
            str(source),
            "--out",
            str(tmp_path / "checkpoint"),
        ]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
        assert is_cached == ("relay.enabled: false" not in result.output)
        user, n = 1, int(known["in.lengths"][1])
        user_id, age, city = known["in.context"][user].tolist()
        body: dict[str, Any] = {
            "user_id": "u",
            "history": {
                "items": known["in.items"][user, :n].tolist(),
                "actions": [str(mask) for mask in known["in.actions"][user, :n].tolist()],
                "timestamps": known["in.times"][user, :n].tolist(),
            },
            "features": {
                "user": {
                    "user_id": user_id,
                    "age": age,
                    "city": [None, "x", "oslo", "rome", "lima"][city],
                }
            },
        }
        asked: dict[str, Any] = {"candidates": known["in.candidates"].tolist()}
        asked["timestamp"] = int(known["in.times"][user, n])
        sections: dict[str, Any] = {
            "service": {"cut_step_tokens": 1},
            "relay": {"enabled": is_cached},
        }
        async with serving(tmp_path, **sections) as (client, service):
            if is_cached:
                assert (await post(client, "/v1/signal", 202, **body))["history"][
                    "num_tokens"
                ] == 2 * n + 3
                await encoded(service.versions.ranker().relay)
            answer = await post(client, "/v1/rank", **body, **asked)
            want = known["out.logits"][user].numpy()
            got = np.stack([*map(np.array, answer["scores"].values())], 1)
            assert np.abs(got - want).max() < 1e-5 * want.std()
            assert not is_cached or (answer["outcome"], answer["prefix_tokens"]) == (
                "hbm_hit",
                2 * n + 3,
            )
    with pytest.raises(Exception, match=r"model\.context.*E4"):
        async with serving(tmp_path):
            pass
