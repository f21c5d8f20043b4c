"""`npu-gr init` writes a configuration that serves what it is given, or says why it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from npu_gr.core.errors import ConfigError
from npu_gr.service.config import load
from npu_gr.tools.init import init, section_of
from tests.serving import write_checkpoint


def generator(folder: Path, codes: list[int]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    section = {"checkpoint": "/elsewhere", "catalogue": "/elsewhere/items.jsonl", "codes": codes, "beam_width": 20}
    (folder / "serve.yaml").write_text(yaml.safe_dump({"generate": section}))
    return folder


def vectors(folder: Path) -> Path:
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    (folder / "vectors.safetensors").write_bytes(b"")
    return folder


def test_models_are_known_by_their_files_and_served_together(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "ranker")
    models = [vectors(tmp_path / "v"), generator(tmp_path / "g", [4, 4]), tmp_path / "ranker"]
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "popular.txt").write_text("1\n")
    paths = init(tmp_path / "site", models)
    config = load(paths[0])
    assert config.checkpoint == str(tmp_path / "ranker")
    assert config.generate is not None
    assert config.generate.items == (str(tmp_path / "g" / "items.jsonl"), (4, 4), 0)
    assert (config.generate.checkpoint, config.generate.beam_width) == (str(tmp_path / "g"), 20)
    assert config.match is not None
    assert config.match.vectors == str(tmp_path / "v")
    assert config.recommend is not None
    assert config.recommend.sources == {"generate": 100, "match": 100}
    assert config.recommend.popular == str(tmp_path / "site" / "popular.txt")
    text = paths[0].read_text()
    assert text.startswith("# yaml-language-server: $schema=file://")
    assert "  port: 8080                       # 0 = any free one" in text.splitlines()
    assert str(paths[0]) in paths[1].read_text()


def test_a_ranker_alone_and_a_generator_alone(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "ranker")
    assert load(init(tmp_path / "a", [tmp_path / "ranker"])[0]).recommend is None
    write_checkpoint(tmp_path / "trunk", retrieval=True)
    alone = load(init(tmp_path / "c", [tmp_path / "trunk"])[0]).recommend
    assert alone is not None
    assert (dict(alone.sources), alone.order) == ({"trunk": 200}, None)
    config = load(init(tmp_path / "b", [generator(tmp_path / "g", [4])])[0])
    assert config.checkpoint is None
    assert config.generate is not None


def test_without_models_every_key_is_there(tmp_path: Path) -> None:
    path, readme = init(tmp_path / "site")
    assert load(path).checkpoint == f"{tmp_path}/site/ranker"
    assert "# generate:" in path.read_text()
    assert f"npu-gr train rank {tmp_path}/site/data --out {load(path).checkpoint}\n" in readme.read_text()


def test_what_cannot_be_served_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "ranker")
    broken = generator(tmp_path / "broken", [4])
    (broken / "serve.yaml").write_text("generate: {codes: [4]}")
    bare = generator(tmp_path / "bare", [4])
    (bare / "serve.yaml").unlink()
    nonsense = tmp_path / "nonsense"
    nonsense.mkdir()
    (nonsense / "config.json").write_text("{")
    for models, words in (
        ([tmp_path / "none"], "no model"),
        ([tmp_path / "ranker", tmp_path / "ranker"], "a second model for checkpoint"),
        ([vectors(tmp_path / "v")], "an instance ranks or generates"),
        ([broken], "needs a section generate with a catalogue"),
        ([bare], "a generator without serve.yaml"),
        ([nonsense], "config.json"),
        ([generator(tmp_path / "zero", [0])], r"generate\.codes\[0\]: the number 0 is out of range"),
    ):
        with pytest.raises(ConfigError, match=words):
            init(tmp_path / "site", models)
    assert not (tmp_path / "site").exists()
    with pytest.raises(ConfigError, match="no model"):
        section_of(tmp_path)


def test_nothing_is_replaced_unless_told(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "ranker")
    path, _ = init(tmp_path / "site")
    path.write_text("mine")
    with pytest.raises(ConfigError, match="there already; --force"):
        init(tmp_path / "site", [tmp_path / "ranker"])
    assert path.read_text() == "mine"
    init(tmp_path / "site", [tmp_path / "ranker"], replace=True)
    assert load(path).checkpoint == str(tmp_path / "ranker")
    with pytest.raises(ConfigError, match="/proc"):
        init(Path("/proc/none"))
