"""The folder that training writes: transformers and the service read it as it is.

It appears whole or not at all.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from aiohttp.test_utils import TestClient, TestServer
from transformers import AutoModelForCausalLM

from npu_gr.catalogue.centroids import FILE
from npu_gr.catalogue.records import read_items
from npu_gr.cli.main import main
from npu_gr.core.errors import DataError
from npu_gr.history_store.interactions import ItemValues
from npu_gr.model import hf
from npu_gr.service.app import instance
from npu_gr.service.config import load
from npu_gr.train.generate.nodes import encode, next_logits
from npu_gr.train.generate.publish import FILES, GIVEN_CODES, how_to_serve, prepare, publish
from npu_gr.train.generate.train import TrainedGenerator, train_generator
from tests.decoders import hf_logits
from tests.train.generate.test_train import ONE
from tests.train.synthetic import NUM_ITEMS, planted

KINDS = [
    ItemValues("kind", ["even", "odd"], {item * 10: [item % 2] for item in range(1, NUM_ITEMS)}),
    ItemValues("tags", ["a", "b"], {0: [0, 1]}),
]
HISTORY = {"items": [30, 240, 210], "actions": [1, 1, 1], "timestamps": [1, 2, 3]}


@pytest.fixture(scope="module")
def trained() -> TrainedGenerator:
    return train_generator(planted(), KINDS, ONE)


@pytest.fixture(scope="module")
def folder(trained: TrainedGenerator, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("generator") / "new"
    publish(trained, KINDS, ONE, found)
    return found


def test_transformers_reads_it_as_it_is(trained: TrainedGenerator, folder: Path) -> None:
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    theirs.eval()
    tokens = torch.randint(0, 12, (4, 20), generator=torch.Generator().manual_seed(0))
    want = next_logits(trained.model, encode(trained.model, tokens))
    torch.testing.assert_close(hf_logits(theirs, tokens), want, atol=1e-5, rtol=1e-5)
    assert theirs.config.max_position_embeddings == 26


def test_we_read_it_bit_for_bit(trained: TrainedGenerator, folder: Path) -> None:
    loaded = hf.load(folder)
    assert loaded.config == trained.model.config
    state = trained.model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())


def test_the_catalogue_has_every_item_with_its_code_and_its_plain_features(
    trained: TrainedGenerator, folder: Path
) -> None:
    items = read_items(folder / "items.jsonl")
    assert np.array_equal(items.item_ids, trained.log.item_ids)
    assert np.array_equal(items.sids, trained.codes.sids)
    assert items.attributes["kind"].tolist() == ["", *["odd", "even"] * 14, "odd"]
    assert items.attributes.keys() == {"kind"}  # an item may have several tags


def test_the_configuration_is_one_that_the_service_reads(folder: Path) -> None:
    config = load(folder / "serve.yaml").generate
    assert config is not None
    assert config.codes == (6, 6)
    assert config.max_prompt_tokens == 24
    assert (folder / "report.json").exists()
    assert {path.name for path in folder.iterdir()} == set(FILES) - {GIVEN_CODES}


async def test_a_service_starts_from_it_and_answers_valid_items(
    trained: TrainedGenerator, folder: Path
) -> None:
    overrides = ["server.port=0", "server.drain_grace_s=0.1", "generate.hbm_bytes=4000000"]
    config = load(
        folder / "serve.yaml", [*overrides, f"history_store.path={folder.parent / 'history.db'}"]
    )
    sids = dict(zip(trained.log.item_ids.tolist(), trained.codes.sids.tolist(), strict=True))
    answers = []
    async with instance(config) as (app, _), TestClient(TestServer(app)) as client:
        for filters in ({}, {}, {"attributes": {"kind": ["odd"]}}):
            body = {"user_id": "u", "history": HISTORY, "num_items": 10, **filters}
            headers = {"X-Request-Timeout-Ms": "30000"}
            async with client.post("/v1/generate", json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
                answers.append(await response.json())
    for answer in answers:
        assert (answer["status"], len(set(answer["items"]))) == ("complete", 10)
        assert [answer["sids"][i * 2 : i * 2 + 2] for i in range(10)] == [
            sids[item] for item in answer["items"]
        ]
    assert answers[0]["items"] == answers[1]["items"]
    assert all(item // 10 % 2 == 1 for item in answers[2]["items"])


async def test_a_new_item_without_a_semantic_id_is_found_at_once(
    folder: Path, trained: TrainedGenerator
) -> None:
    """By the centroids of the training.

    The same features mean the codes of items that are alike.
    """
    overrides = [
        "server.port=0",
        "server.admin_port=0",
        "server.drain_grace_s=0.1",
        "generate.hbm_bytes=4000000",
    ]
    config = load(
        folder / "serve.yaml", [*overrides, f"history_store.path={folder.parent / 'history2.db'}"]
    )
    async with instance(config) as (app, _), TestClient(TestServer(app)) as client:

        async def asked(path: str, status: int, **body: Any) -> dict[str, Any]:
            headers = {"X-Request-Timeout-Ms": "30000"}
            async with client.post(path, json=body, headers=headers) as response:
                assert response.status == status, await response.text()
                answer: dict[str, Any] = await response.json()
                return answer

        new: dict[str, Any] = {"item_id": 7001, "order": 0.0, "attributes": {"kind": "odd"}}
        for features, message in (
            ({}, r"add[0].features"),
            ({"kind": "green"}, "one of kind, tags"),
        ):
            rejected = await asked("/v1/catalog/items", 422, add=[{**new, "features": features}])
            assert message in str(rejected)
        more = [
            {**new, "item_id": 7002, "features": {"tags": ["a", "b"]}},
            {**new, "item_id": 7003, "sid": [5, 5]},
        ]
        taken = {tuple(sid) for sid in trained.codes.sids.tolist()}
        more[1]["sid"] = next([a, b] for a in range(6) for b in range(6) if (a, b) not in taken)
        # its order and its attribute follow from the others' and from the feature
        odd = {"item_id": 7001, "title": "New", "features": {"kind": "odd"}}
        made = (await asked("/v1/catalog/items", 200, add=[odd, *more]))["sids"]
        assert made.keys() == {"7001", "7002"}
        found = await asked("/v1/generate", 200, user_id="u", history=HISTORY, num_items=33)
        again = {"user_id": "u", "history": HISTORY, "attributes": {"kind": ["odd"]}}
        assert 7001 in (await asked("/v1/generate", 200, num_items=33, **again))["items"]
    assert {7001, 7002, 7003} <= set(found["items"]), (
        "a beam as wide as the catalogue finds every item"
    )
    sids = [tuple(found["sids"][i * 2 : i * 2 + 2]) for i in range(len(found["items"]))]
    assert dict(zip(found["items"], sids, strict=True))[7001] == tuple(made["7001"])
    assert len(set(sids)) == len(sids) == 30, "all but the history's"


def test_ready_made_codes_leave_no_centroids(
    trained: TrainedGenerator, folder: Path, tmp_path: Path
) -> None:
    publish(trained, KINDS, ONE, tmp_path)
    assert (tmp_path / FILE).read_bytes() == (folder / FILE).read_bytes()
    assert (tmp_path / FILE).stat().st_mode == (tmp_path / "items.jsonl").stat().st_mode
    ready_made = trained._replace(codes=replace(trained.codes, centroids=()))
    publish(ready_made, KINDS, ONE, tmp_path)
    assert not (tmp_path / FILE).exists(), "those of other codes are gone"


def test_a_failure_on_the_way_leaves_what_was_there(
    trained: TrainedGenerator, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(trained, [], ONE, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def interrupted(*_: object) -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr("npu_gr.train.generate.publish.catalogue_lines", interrupted)
    with pytest.raises(KeyboardInterrupt):
        publish(trained, KINDS, ONE, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_that_cannot_be_written_fails_before_the_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file/out: cannot be written"):
        prepare(tmp_path / "file" / "out")


def test_the_words_on_serving_it_name_known_settings_and_a_real_history(
    trained: TrainedGenerator, folder: Path
) -> None:
    text = how_to_serve(yaml.safe_load((folder / "serve.yaml").read_text()), trained)
    body = json.loads(text.split(" -d '")[1].removesuffix("'"))
    assert set(body["history"]["items"]) <= set(trained.log.item_ids.tolist())
    assert f"npu-gr serve --config {folder}/serve.yaml" in text
    assert f"catalogue: {folder}/items.jsonl" in text


def test_the_command_trains_prints_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random = np.random.default_rng(0)
    log = {
        f"u{user}": ((int(random.integers(20)) + np.arange(9)) % 20).tolist() for user in range(12)
    }
    (tmp_path / "inter.json").write_text(json.dumps(log))
    (tmp_path / "index.json").write_text(
        json.dumps({str(item): [item % 5, item // 5] for item in range(20)})
    )
    words = ["epochs=1", "dim=16", "num_heads=2", "head_dim=8", "mlp_dim=16", "history_items=6"]
    arguments = [
        str(tmp_path / "inter.json"),
        "--out",
        str(tmp_path / "out"),
        "--codes",
        str(tmp_path / "index.json"),
    ]
    options = [part for word in words for part in ("--set", word)]
    main(["train", "generate", *arguments, *options, "--threads", "1"], standalone_mode=False)
    text = capsys.readouterr().out
    assert "popularity" in text
    assert "generate:" in text
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*FILES, "names.safetensors"} - {
        FILE
    }, "ready-made"
    with pytest.raises(SystemExit):
        main(["train", "generate", *arguments, "--set", "epoch=1"], standalone_mode=False)
    assert "unknown key epoch; did you mean epochs?" in capsys.readouterr().err
