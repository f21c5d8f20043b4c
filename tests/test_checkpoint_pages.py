"""The code of docs/checkpoint.md and docs/from-pytorch.md runs, and their tables are whole."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_gr.model.config import HSTUConfig, TimeBuckets, TimePeriod
from npu_gr.model.weights import load
from tests.models import tiny_model
from tests.server.test_recommend_over_http import post
from tests.serving import serving
from tests.sources import ROOT

CHECKPOINT, TUTORIAL = (ROOT / f"docs/{name}.md" for name in ("checkpoint", "from-pytorch"))


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Run both pages' code; return the folder, and the page's model."""
    folder = tmp_path_factory.mktemp("page")
    names: dict[str, Any] = {}
    code = [*blocks(CHECKPOINT), *blocks(TUTORIAL)]
    assert len(code) == 4
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for block in code:
            exec(compile(block, "page", "exec"), names)  # noqa: S102 (our own page)
    (folder / "mine").rename(folder / "checkpoint")
    return folder, names["ranker"]


def test_the_writer_is_short() -> None:
    assert len(blocks(CHECKPOINT)[0].strip().splitlines()) <= 24


async def test_the_service_answers_what_the_pages_model_computes(made: tuple[Path, Any]) -> None:
    folder, ranker = made
    items, actions, candidates = [3, 8, 50, 51, 99], [0, 1, 1, 0, 1], [7, 50, 99, 3]
    with torch.inference_mode():
        want = ranker(*(torch.tensor(rows) for rows in (items, actions, candidates)))[:, 0]
    async with serving(folder) as (client, _):
        history = {
            "items": [5000 + row for row in items],
            "actions": [("view", "like")[action] for action in actions],
            "timestamps": [1_700_000_000 + 60 * place for place in range(len(items))],
        }
        body: dict[str, Any] = {
            "history": history,
            "candidates": [5000 + row for row in candidates],
        }
        for outcome in ("miss_full", "hbm_hit"):
            answer = await post(client, "/v1/rank", **body)
            assert answer["outcome"] == outcome
            got = torch.tensor(answer["scores"]["like"])
            assert float((got - want).abs().max()) < 1e-5 * float(want.std())


def test_every_key_of_the_model_is_on_the_page() -> None:
    told = set(re.findall(r"`(\w+)`", CHECKPOINT.read_text()))
    assert not set(HSTUConfig.__struct_fields__) - told


@pytest.mark.parametrize(
    "changes",
    [
        {"retrieval": True, "positions": "start"},
        {
            "norm": "head",
            "residual": "concat",
            "query_times": TimeBuckets(function="sqrt", count=9),
        },
        {
            "head": "product",
            "head_activation": "norm_gate",
            "head_periods": (TimePeriod(unit_s=3600, num_units=24),),
        },
    ],
    ids=str,
)
def test_every_tensor_is_on_the_page(changes: dict[str, Any]) -> None:
    """Compare names and shapes with the table, where numbers of layers and features are open."""
    told = set[str]()
    for row in re.findall(r"^\| (`[^|]+`) \| [^|]+ \|", CHECKPOINT.read_text(), re.M):
        whole = ""
        for name in re.findall(r"`([^`]+)`", row):
            whole = whole.rpartition(".")[0] + name if name.startswith(".") else name
            told.add(whole)
    names = {
        re.sub(r"\b(layers|feature)\.\d+", r"\1.<#>", name)
        for name in tiny_model(**changes).state_dict()
    }
    names = {re.sub(r"feature_ids_\d+", "feature_ids_<#>", name) for name in names}
    assert names <= {re.sub(r"<\w>", "<#>", name) for name in told}


def test_the_pages_checkpoint_loads(made: tuple[Path, Any]) -> None:
    checkpoint = load(made[0] / "checkpoint")
    assert checkpoint.name == "mine"
    assert checkpoint.item_ids[0] == 5000
