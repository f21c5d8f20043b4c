"""Sizes and times with a unit are exact numbers, and other texts are rejected."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_gr.core.errors import ConfigError
from npu_gr.core.setting_types import BYTES, IN_BYTES, SECONDS, number
from npu_gr.core.settings import Bytes, Count, Seconds, SomeBytes, parse


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    size: Bytes = 0
    some: SomeBytes | None = None
    limited: Annotated[int, msgspec.Meta(ge=256, extra_json_schema=IN_BYTES)] = 256
    time: Seconds = 1.0
    times: list[Seconds] = []
    by_name: dict[str, Seconds] = {}
    count: Count = 1
    name: str = ""
    either: str | Count = ""


def read(text: str) -> Any:
    return parse(text, Settings, "c")


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("size: 1GiB", Settings(size=2**30)),
        ("size: 512 MiB", Settings(size=512 * 2**20)),
        ("size: 64MB", Settings(size=64_000_000)),
        ("size: 1.5KiB", Settings(size=1536)),
        ("size: 2kB", Settings(size=2000)),
        ("size: 7 B", Settings(size=7)),
        ("size: 1TiB", Settings(size=2**40)),
        ("size: 1e9", Settings(size=10**9)),
        ("size: 1073741824", Settings(size=2**30)),
        ("some: 1KiB", Settings(some=1024)),
        ("limited: 1KiB", Settings(limited=1024)),
        ("time: 50ms", Settings(time=0.05)),
        ("time: 2s", Settings(time=2.0)),
        ("time: 10min", Settings(time=600.0)),
        ("time: 1h", Settings(time=3600.0)),
        ("time: 250us", Settings(time=0.00025)),
        ("time: 1d", Settings(time=86_400.0)),
        ("time: 0.1 s", Settings(time=0.1)),
        ("time: 1e-5", Settings(time=1e-5)),
        ("time: 1.0e5", Settings(time=1e5)),
        ("time: 3", Settings(time=3.0)),
        ("times: [50ms, 1, 2min]", Settings(times=[0.05, 1.0, 120.0])),
        ("by_name: {a: 50ms}", Settings(by_name={"a": 0.05})),
        ("count: 1e3", Settings(count=1000)),
        ("name: 1GiB", Settings(name="1GiB")),  # a text stays one
        ("either: 1e3", Settings(either="1e3")),
    ],
)
def test_what_is_written_is_the_number(text: str, want: Settings) -> None:
    assert read(text) == want


@pytest.mark.parametrize(
    "text",
    [
        *(
            "size: 1.5B",
            "size: -1GiB",
            "size: 1 gib",
            "size: 1GiBs",
            "size: GiB",
            "size: 1GiB 1MiB",
            "size: '5'",
        ),
        *(
            "size: 50ms",
            "size: ½GiB",
            "size: ١GiB",
            "size: 1e-5",
            "some: 0B",
            "limited: 255B",
            "size: 1e9999",
        ),
        *(
            "time: 5m",
            "time: 1GiB",
            "time: 0s",
            "time: -1s",
            "time: s",
            "time: 1e999",
            "time: 1 s s",
            "time: '1'",
        ),
        *("count: 1GiB", "count: 50ms", "count: 1.5e0", "times: [1x]"),
        f"size: {'9' * 50}GiB",
    ],
)
def test_what_is_no_such_number_is_rejected_with_the_forms(text: str) -> None:
    with pytest.raises(ConfigError) as rejected:
        read(text)
    key = text.partition(":")[0]
    forms = {
        "size": BYTES.forms,
        "some": BYTES.forms,
        "limited": BYTES.forms,
        "count": "a whole number",
    }
    assert str(rejected.value).startswith(f"c: {key}")
    assert forms.get(key, SECONDS.forms) in str(rejected.value)


@given(st.integers(0, 2**40), st.sampled_from(sorted(BYTES.factors)))
def test_every_size_is_exact_and_matches_the_schemas_pattern(size: int, word: str) -> None:
    assert number(f"{size}{word}", BYTES, whole=True) == size * BYTES.factors[word]
    assert re.search(BYTES.pattern, f"{size} {word}")


@given(st.text(max_size=30))
def test_no_text_raises(text: str) -> None:
    for unit in (BYTES, SECONDS, None):
        for whole in (True, False):
            found = number(text, unit, whole)
            assert found is None or isinstance(found, int if whole else float)
