"""Text that is no configuration is rejected in words, whatever it is, and within a moment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import pytest
from click.testing import CliRunner

from npu_gr.cli.main import main
from npu_gr.core.errors import ConfigError
from npu_gr.core.settings import GONE, Count, Seconds, gather, load, override, parse


class Inner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    count: Count = 1


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    inner: Inner = Inner()
    names: list[str] = []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("? [a, b]\n: 1\n", "invalid YAML"),
        ("? {a: b}\n: 1\n", "invalid YAML"),
        ("[" * 5_000, "invalid YAML"),
        ("{" * 5_000, "invalid YAML"),
        ("names: " + "[" * 5_000 + "]" * 5_000, "invalid YAML"),
        ("inner: {count: 0}\n", "inner.count"),
        ("inner: {cuont: 1}\n", "did you mean count"),
        ("inner: &a {count: 1}\ninner: *a\n", "given twice"),
        ("!!python/object/apply:os.system ['true']\n", "invalid YAML"),
        ("- 1\n", "expected `key: value` lines"),
        ("\x00", "invalid YAML"),
        ("", "expected `key: value` lines"),
    ],
)
def test_what_is_no_configuration_is_rejected_in_words(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as rejected:
        parse(text, Settings, "here")
    assert "here" in str(rejected.value) or "given twice" in words


def test_what_is_one_is_read() -> None:
    assert parse("inner: {count: 3}\nnames: [a]\n", Settings, "here") == Settings(
        inner=Inner(count=3), names=["a"]
    )


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GONE, "inner.workers", "inner.count")
    monkeypatch.setitem(GONE, "front", "an instance for each core")
    monkeypatch.setitem(GONE, "inner.count", "is a key here: this row is another process's")


@pytest.mark.usefixtures("gone")
def test_keys_that_went_are_named_with_what_takes_their_place(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("inner: {workers: 1, count: 2}\nfront: {a: 1}\n")
    with pytest.raises(ConfigError) as rejected:
        load(path, Settings)
    assert str(rejected.value) == (
        f"config {path}: inner.workers was removed: inner.count; "
        "front was removed: an instance for each core"
    )
    path.write_text("inner: {count: 2}\n")
    assert load(path, Settings).inner.count == 2
    with pytest.raises(ConfigError, match=r"inner.workers was removed: inner.count"):
        load(path, Settings, ["inner.workers=3"])
    for name in ("NPU_GR_FRONT__A", "NPU_GR_FRONT"):
        with pytest.raises(
            ConfigError, match=f"environment: {name} was removed: an instance for each core"
        ):
            gather(path, Settings, variables={name: "1"})


class Numbers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 1
    idle_s: Seconds = 1.0
    share: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    by_name: dict[str, float] = {}
    rows: list[Inner | Annotated[float, msgspec.Meta(ge=0)]] = []
    name: str = ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port: 1:30", "port: expected a whole number, got '1:30'"),
        ("port: +1:30", r"port: expected a whole number, got '\+1:30'"),
        ("port: 0100", "port: expected a whole number, got '0100'"),
        ("port: 0_1", "port: expected a whole number, got '0_1'"),
        ("idle_s: 1:30", "idle_s: expected a number of seconds"),
        ("idle_s: 1:30.5", "idle_s: expected a number of seconds"),
        ("idle_s: 00.5", "idle_s: expected a number of seconds"),
        ("idle_s: .inf", "idle_s: expected a finite number, got inf"),
        ("idle_s: 1.0e+999", "idle_s: expected a finite number, got inf"),
        ("idle_s: 1e999", "idle_s: expected a number of seconds"),
        ("idle_s: .nan", "idle_s: expected a finite number, got nan"),
        ("port: .inf", "port: expected a finite number, got inf"),
        ("share: -.inf", "share: expected a finite number, got -inf"),
        ("share: .NaN", "share: expected a finite number, got nan"),
        ("by_name: {a: .inf}", "by_name.a: expected a finite number, got inf"),
        ("rows: [1.0, .inf]", r"rows\[1\]: expected a finite number, got inf"),
        ("name: .inf", "name: expected a finite number, got inf"),
    ],
)
def test_a_number_that_is_none_is_rejected_with_its_field(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^here: {words}"):
        parse(text, Numbers, "here")
    name, _, value = text.partition(": ")
    if not value.startswith(("{", "[")):
        with pytest.raises(ConfigError, match=words):
            override(Numbers(), [f"{name}={value}"])


@pytest.mark.parametrize("depth", [0, 30])
def test_aliases_are_read_once(depth: int) -> None:
    """A list within itself, and lists that would be a billion when written out."""
    lines = [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, depth + 1)]
    text = "\n".join(["a0: &a0 [*a0]" if not depth else "a0: &a0 [.inf]", *lines, "rows: *a0"])
    with pytest.raises(ConfigError, match=r"^here: "):
        parse(text, Numbers, "here")


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("port: 8080", Numbers(port=8080)),
        ("port: 0", Numbers(port=0)),
        ("port: 0x50", Numbers(port=80)),
        ("idle_s: 0.5", Numbers(idle_s=0.5)),
        ("idle_s: 1_000", Numbers(idle_s=1000.0)),
        ("name: 0042", Numbers(name="0042")),
        ("name: 1:30", Numbers(name="1:30")),
    ],
)
def test_numbers_and_texts_that_resemble_them_are_read(text: str, want: Numbers) -> None:
    assert parse(text, Numbers, "here") == want


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("server.idle_timeout_s=.inf", "server.idle_timeout_s: expected a finite number"),
        ("server.port=1:30", "server.port: expected a whole number"),
        ("slo.rank_s=.nan", "slo.rank_s: expected a finite number"),
    ],
)
def test_serve_and_check_config_say_the_same(setting: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("checkpoint: model\n")
    for command in ("serve", "check-config"):
        done = CliRunner().invoke(main, [command, "--config", str(path), "--set", setting])
        assert done.exit_code != 0
        assert words in f"{done.output}{done.exception}"
