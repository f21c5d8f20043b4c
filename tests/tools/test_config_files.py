"""The shipped YAML files, schemas and the reference of settings are complete and current."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml

from npu_gr.core import settings
from npu_gr.core.errors import ConfigError
from npu_gr.core.setting_types import settings_of
from npu_gr.service.config import Config
from npu_gr.tools.config_docs import KINDS, example, notes, reference, schema, schema_text
from npu_gr.tools.config_docs import read_notes as read

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "configs").glob("*.yaml"))
KIND_OF = {"router.yaml": "router", "simulate.yaml": "simulation"}  # the others are an instance's


def validator(kind: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_is_explained_and_no_other(kind: str) -> None:
    commented, known = notes(kind), settings_of(KINDS[kind][0])
    assert [path for path in known if path not in commented] == []
    assert [
        path for path, setting in known.items() if not commented[path] and setting.section is None
    ] == []
    if kind != "simulation":  # whose words are in part an instance's
        assert [path for path in commented if path not in known] == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_schema_that_ships_is_current(kind: str) -> None:
    assert (ROOT / KINDS[kind][2]).read_text() == schema_text(kind), (
        "npu-gr config KIND --schema > configs/..."
    )
    jsonschema.Draft202012Validator.check_schema(schema(kind))


def test_the_reference_is_current() -> None:
    page = reference()
    assert (ROOT / "docs/configuration.md").read_text() == page, (
        "npu-gr config --reference > docs/configuration.md"
    )
    for kind in KINDS:
        if kind != "simulation":
            assert [
                path for path, one in settings_of(KINDS[kind][0]).items() if f"`{path}`" not in page
            ] == []
    for option in (
        "npu-gr train rank",
        "`learning_rate`",
        "npu-gr train generate",
        "npu-gr train match",
    ):
        assert option in page


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_names_its_schema_and_fits_it(path: Path) -> None:
    first = path.read_text().partition("\n")[0]
    name = first.removeprefix("# yaml-language-server: $schema=")
    assert f"configs/{name}" == KINDS[KIND_OF.get(path.name, "instance")][2]
    validator(KIND_OF.get(path.name, "instance")).validate(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_to_begin_with_is_right_and_names_the_schema(kind: str) -> None:
    settings.parse(example(kind), KINDS[kind][0], kind)
    assert example(kind).startswith(
        f"# yaml-language-server: $schema=file://{ROOT}/{KINDS[kind][2]}\n"
    )


def uncommented(text: str) -> dict[str, Any]:
    """A file with its commented keys enabled."""
    lines = [
        line.replace("# ", "", 1) if read(line) and line.lstrip().startswith("# ") else line
        for line in text.splitlines()
    ]
    return dict(yaml.safe_load("\n".join(lines)))


def test_a_key_that_is_commented_out_can_be_taken_as_it_stands() -> None:
    table = uncommented(
        (ROOT / "configs/cpu.yaml").read_text().replace("calibration: null", "calibration:")
    )
    table["history_store"] |= {"kind": "redis", "url": "rediss://127.0.0.1:6379/0"}
    table["kv_cache"]["pool_key"] = "the content of that file, in 32 bytes and more"
    config = settings.from_table(table, Config)
    validator("instance").validate(table)
    for path in settings_of(Config):
        assert _has(table, path), path
    assert config.generate is not None
    assert config.calibration is not None


def _has(table: Any, path: str) -> bool:
    for key in path.split("."):
        if isinstance(table, list):  # the keys of its first element count
            table = table[0]
        if key not in table:
            return False
        table = table[key]
    return True


@pytest.mark.parametrize(
    ("table", "is_right"),
    [
        ({"kv_cache": {"hbm_bytes": "1GiB", "dram_ttl_s": "50ms"}}, True),
        ({"kv_cache": {"hbm_bytes": 5, "dtype": None}}, True),
        ({"kv_cache": {"hbm_bytes": "1GX"}}, False),
        ({"kv_cache": {"hbm_bytes": 0}}, False),
        ({"kv_cache": {"page_tokens": 100}}, False),
        ({"backend": "gpu"}, False),
        ({"srever": {}}, False),
        ({"history_store": {"url": "redis://h"}}, True),
        ({"history_store": {"url": {"file": "f"}}}, True),
        ({"history_store": {"url": {"env": "E"}}}, True),
        ({"history_store": {"url": {"file": "f", "env": "E"}}}, False),
        ({"history_store": {"url": 5}}, False),
        ({"generate": {"checkpoint": "c", "catalogue": "c", "codes": [4]}}, True),
        ({"generate": {"checkpoint": "c", "codes": [4]}}, False),
        ({"recommend": {"sources": {"match": 5}}, "match": {"vectors": "v"}}, True),
        ({"recommend": {"sources": {"other": 5}}}, False),
        ({"admission": {"tenant_weights": {"shop": 0}}}, False),
        ({"trigger": {"rank_budget_s": "40ms"}}, True),
        ({"trigger": {"rank_budget_s": "fast"}}, False),
        ({"server": {"tls": None}}, True),
        ({"server": {"trusted_proxies": "10.0.0.0/8"}}, False),
    ],
)
def test_the_schema_takes_what_a_start_takes(
    table: dict[str, Any], is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("E", "redis://h")
    table = {"checkpoint": "x"} | table
    assert validator("instance").is_valid(table) is is_right
    if table.get("history_store", {}).get("url") == {"file": "f"}:
        return  # is not there
    try:
        settings.from_table(table, Config)
    except ConfigError:
        assert not is_right
    else:
        assert is_right


def test_what_a_comment_is_and_whose() -> None:
    text = (
        "a: 1  # first\n# b: # second\n#   c: x    # third\n  # d: y\nl:\n  - e: 1 # fourth\n    "
        "f: '#'\n"
    )
    assert read(f"{text}# Prose: no key\n") == {
        "a": "first",
        "b": "second",
        "b.c": "third",
        "b.d": "",
        "l": "",
        "l.e": "fourth",
        "l.f": "",
    }


def test_every_default_of_the_schema_is_the_structs() -> None:
    found = msgspec.to_builtins(Config(checkpoint="x"), enc_hook=str)
    properties = schema("instance")["properties"]
    for section in ("server", "kv_cache", "history_store", "trigger"):
        for key, one in properties[section]["properties"].items():
            assert one["default"] == found[section][key], (section, key)
