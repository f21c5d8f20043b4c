"""A setting that would break a cached prefix is refused, with its name."""

from __future__ import annotations

import pytest

from npu_gr.model.config import inexact_fields
from tests.models import tiny_config


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("candidate_position", "list"),
        ("context", "bidirectional"),
        ("query_time_embedding", "token"),
        ("min_full_attention_tokens", 8),
        ("sequence_pooling", "mean"),
        ("target_attention", "full"),
    ],
)
def test_what_is_never_exact_is_never_served(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{field}.*E\d"):
        tiny_config(**{field: value})


@pytest.mark.parametrize(("field", "value"), [("scaling", "runtime"), ("positions", "reverse")])
def test_what_is_exact_without_a_cache_is_named(field: str, value: str) -> None:
    (line,) = inexact_fields(tiny_config(**{field: value}))
    assert f"model.{field}" in line


def test_the_default_is_exact() -> None:
    assert inexact_fields(tiny_config()) == []
    assert inexact_fields(tiny_config(positions="start")) == []


@pytest.mark.parametrize("field", ["actions", "tasks"])
@pytest.mark.parametrize("names", [(), ("a", "a")])
def test_names_are_given_once(field: str, names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=field):
        tiny_config(**{field: names})
