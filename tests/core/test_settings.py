"""Text that is no configuration is refused in words, whatever it is, and within a moment."""

from __future__ import annotations

import msgspec
import pytest

from npu_gr.core.errors import ConfigError
from npu_gr.core.settings import Count, parse


class Inner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    count: Count = 1


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    inner: Inner = Inner()
    names: list[str] = []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("? [a, b]\n: 1\n", "not YAML that we read"),
        ("? {a: b}\n: 1\n", "not YAML that we read"),
        ("[" * 5_000, "not YAML that we read"),
        ("{" * 5_000, "not YAML that we read"),
        ("names: " + "[" * 5_000 + "]" * 5_000, "not YAML that we read"),
        ("inner: {count: 0}\n", "inner.count"),
        ("inner: {cuont: 1}\n", "did you mean count"),
        ("inner: &a {count: 1}\ninner: *a\n", "given twice"),
        ("!!python/object/apply:os.system ['true']\n", "not YAML that we read"),
        ("- 1\n", "needs `key: value` lines"),
        ("\x00", "not YAML that we read"),
        ("", "needs `key: value` lines"),
    ],
)
def test_what_is_no_configuration_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        parse(text, Settings, "here")
    assert "here" in str(refused.value) or "given twice" in words


def test_what_is_one_is_read() -> None:
    assert parse("inner: {count: 3}\nnames: [a]\n", Settings, "here") == Settings(inner=Inner(count=3), names=["a"])
