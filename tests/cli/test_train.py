"""Each training reads a dataset as it is, writes item names by its model, and says what is next."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer
from click.testing import CliRunner

from npu_gr.catalogue.names import ItemNames
from npu_gr.catalogue.records import read_items
from npu_gr.cli.main import main
from npu_gr.core.errors import ConfigError, DataError
from npu_gr.core.names import KEY_BYTES, item_id, item_ids
from npu_gr.model.weights import load as load_ranker
from npu_gr.service.app import instance
from npu_gr.service.config import load as load_config
from npu_gr.train.options import read_training_data
from npu_gr.vector_search.vectors import load as load_vectors

ITEMS = [f"SKU-{number:03}" for number in range(20)]
TINY = ["epochs=1", "dim=16", "num_heads=1"]
RANKER = [*TINY, "qk_dim=8", "v_dim=8", "head_dim=16", "num_negatives=4"]
GENERATOR = [
    *TINY,
    "num_kv_heads=1",
    "head_dim=8",
    "mlp_dim=16",
    "history_items=6",
    "code_count=[5, 5]",
    "vector_dim=8",
]
GIVEN = [option for option in GENERATOR if not option.startswith("code_count")]  # with --codes
RETRIEVER = ["dim=4", "windows=[2]"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset of a small company: users by name, SKUs, event types, titles."""
    folder = tmp_path_factory.mktemp("company")
    random = np.random.default_rng(0)
    with (folder / "events.csv").open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["user_id", "sku", "timestamp", "event_type"])
        for user in range(12):
            start = int(random.integers(20))
            for place in range(10):
                event = "purchase" if random.random() < 0.3 else "view"
                out.writerow(
                    [
                        f"user-{user:04}",
                        ITEMS[(start + place) % 20],
                        1_700_000_000 + user + 3600 * place,
                        event,
                    ]
                )
    with (folder / "items.csv").open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["sku", "title", "color"])
        out.writerows(
            [item, f"Shirt {item}", "red" if place % 2 else "blue"]
            for place, item in enumerate(ITEMS)
        )
    arguments = [
        str(folder / "events.csv"),
        "--items",
        str(folder / "items.csv"),
        "--out",
        str(folder / "data"),
    ]
    main(["prepare", *arguments], standalone_mode=False)
    return folder / "data"


def run(*arguments: str | Path, options: list[str]) -> None:
    words = [word for option in options for word in ("--set", option)]
    main(["train", *map(str, arguments), *words, "--threads", "1"], standalone_mode=False)


class Trained(NamedTuple):
    """A model of the company, and what the command said at its end."""

    folder: Path
    text: str
    body: dict[str, Any]  # of the request that the words hold


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """Each command's result on the company's dataset."""
    home = tmp_path_factory.mktemp("models")
    codes = home / "codes.json"
    codes.write_text(
        json.dumps({item: [place % 4, place // 4, 0] for place, item in enumerate(ITEMS)})
    )
    found = {}
    commands: list[tuple[str, str, list[str | Path], list[str]]] = [
        ("rank", "rank", [], RANKER),
        ("generate", "generate", [], GENERATOR),
        ("given", "generate", ["--codes", codes, "--preset", "beauty-given"], GIVEN),
        ("retrieve", "retrieve", [], RETRIEVER),
    ]
    for name, command, words, options in commands:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            run(command, data, "--out", home / name, *words, options=options)
        text = out.getvalue()
        body = json.loads(text[text.index(" -d '") + 5 : text.rindex("'")])
        found[name] = Trained(home / name, text, body)
    return found


def ids_of_items(folder: Path) -> list[int]:
    names = ItemNames.load(folder)
    assert names is not None
    ids: list[int] = item_ids(ITEMS, names.key).tolist()
    return ids


def test_names_and_titles_lie_beside_every_model(trained: dict[str, Trained]) -> None:
    for model in trained.values():
        names = ItemNames.load(model.folder)
        assert names is not None
        assert len(names.key) == KEY_BYTES
        ids = np.array([item_id(ITEMS[3], names.key)])
        assert names.names(ids) == [ITEMS[3]]
        assert names.titles(ids) == [f"Shirt {ITEMS[3]}"]


def test_the_ranker_has_the_companys_events_and_features(trained: dict[str, Trained]) -> None:
    folder, text, body = trained["rank"]
    checkpoint = load_ranker(folder)
    assert set(checkpoint.action_names) == {"view", "purchase"}
    assert checkpoint.model.config.tasks == ("next", "purchase")
    assert [feature.name for feature in checkpoint.model.config.item_features] == ["color"]
    assert checkpoint.metrics["num_served"] == 120
    assert "the most frequent, 'view'" in text
    assert f"npu-gr serve --config {folder}/serve.yaml &" in text
    assert set(body["candidates"]) <= set(ITEMS)
    assert set(body["history"]["actions"]) <= {"view", "purchase"}


def test_the_generators_catalogue_has_ids_of_names(trained: dict[str, Trained]) -> None:
    folder, _, body = trained["generate"]
    items = read_items(folder / "items.jsonl")
    assert set(items.item_ids.tolist()) == set(ids_of_items(folder))
    assert items.attributes.keys() == {"color"}
    assert set(body["history"]["items"]) <= set(ITEMS)


def test_given_codes_by_name_become_a_token_for_each_beginning(trained: dict[str, Trained]) -> None:
    """And the items below a beginning stay together: only the numbers of the codes differ."""
    folder, text, _ = trained["given"]
    assert "codes: 4 x 5 x 1" in text
    assert "ready-made; a token for each of the 44 prefixes" in text  # 4, 20 and 20
    items = read_items(folder / "items.jsonl")
    sid_of = dict(zip(items.item_ids.tolist(), items.sids.tolist(), strict=True))
    # by the given codes, in their order
    nodes = [place % 4 * 5 + place // 4 for place in range(len(ITEMS))]
    assert sid_of == {
        item: [node // 5, node, node]
        for item, node in zip(ids_of_items(folder), nodes, strict=True)
    }
    served = load_config(folder / "serve.yaml").generate
    assert served is not None
    assert served.normalise == "valid"


def test_the_vectors_know_the_companys_users(trained: dict[str, Trained]) -> None:
    vectors = load_vectors(trained["retrieve"].folder)
    assert {(key.tenant, key.user) for key in vectors.user_keys} == {
        ("", f"user-{user:04}") for user in range(12)
    }


async def test_the_commands_that_are_printed_work(trained: dict[str, Trained]) -> None:
    """Each folder is served as the words say, and answers the request that they hold."""
    small = ["server.port=0", "server.admin_port=0", "server.drain_grace_s=0.1"]
    vectors = f"match.vectors={trained['retrieve'].folder}"
    for command, words, paths in (
        ("rank", [vectors], {"rank": "/v1/rank", "retrieve": "/v1/match"}),
        ("generate", [], {"generate": "/v1/generate"}),
        ("given", [], {"given": "/v1/generate"}),
    ):
        config = load_config(trained[command].folder / "serve.yaml", [*small, *words])
        async with instance(config) as (app, _), TestClient(TestServer(app)) as client:
            for asked, path in paths.items():
                body = trained[asked].body
                async with client.post(
                    path, json=body, headers={"X-Request-Timeout-Ms": "30000"}
                ) as response:
                    assert response.status == 200, await response.text()
                    answer = await response.json()
                items = answer["items"] if "items" in answer else body["candidates"]
                assert items
                assert set(items) <= set(ITEMS)
                assert answer.get("history", {}).get("unknown_items", 0) == 0
                assert answer.get("basis", "target") == "target"


@pytest.mark.parametrize("command", ["rank", "generate", "retrieve", "match"])
def test_the_keys_of_set_are_listed_whatever_else_is_missing(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["train", command, "--set", "help"], standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("--set KEY=VALUE")
    assert any(line.startswith("  seed=0 ") for line in lines)
    assert all(len(line.split(maxsplit=1)) == 2 for line in lines)  # every key has a description


def test_a_key_that_is_none_is_rejected_with_the_nearest(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("rank", "generate"):
        with pytest.raises(SystemExit):
            run(command, data, "--out", tmp_path, options=["epoch=3"])
        assert "unknown key epoch; did you mean epochs?" in capsys.readouterr().err


def test_the_features_of_a_dataset_are_chosen_by_name(data: Path, tmp_path: Path) -> None:
    assert [feature.name for feature in read_training_data(data, columns=["color"]).features] == [
        "color"
    ]
    with pytest.raises(ConfigError, match="has no 'size'; there are color"):
        read_training_data(data, columns=["size"])
    with pytest.raises(ConfigError, match="--items: the dataset"):
        read_training_data(data, items=tmp_path / "items.item")


def test_models_to_do_without_are_an_option_of_the_site(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[str, ...]] = []

    def train_site(*args: Any, **_: Any) -> None:
        given.append(args[2])
        raise DataError("enough")

    monkeypatch.setattr("npu_gr.train.site.make.train_site", train_site)
    command = ["train", "all", str(data), "--out", str(tmp_path / "site"), "--set", "num_own=5"]
    CliRunner().invoke(main, [*command, *["--without", "generator"] * 2, "--without", "vectors"])
    assert given == [("num_own=5", "without=[generator, vectors]")]
    refused = CliRunner().invoke(main, [*command, "--without", "ranker"])
    assert refused.exit_code == 2
    assert "'ranker' is not one of 'generator', 'vectors'" in refused.stderr


def test_models_that_are_trained_stay_if_the_history_is_not_loaded(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_given: object) -> None:
        raise ConfigError("history_store.path: in use by another process")

    monkeypatch.setattr("npu_gr.train.site.make.train_site", lambda *_given, **_named: None)
    monkeypatch.setattr("npu_gr.cli.data.load_config", fails)
    done = CliRunner().invoke(main, ["train", "all", str(data), "--out", str(tmp_path / "site")])
    assert done.exit_code == 3
    assert "is trained and can be served" in done.stderr
    assert "in use by another process" in done.stderr
    assert f"npu-gr load --config {tmp_path}/site/serve.yaml {data}" in done.stderr
    assert "serve with: npu-gr serve" in done.stdout
