"""Text that is no configuration is rejected in words, whatever it is, and within a moment."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from npu_gr.core.errors import ConfigError
from npu_gr.core.settings import GONE, Count, gather, load, parse


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
