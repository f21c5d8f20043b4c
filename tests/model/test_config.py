"""A setting that would break a cached prefix is rejected, with its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_gr.core.errors import CheckpointError
from npu_gr.core.feature_schema.schema import Feature
from npu_gr.model.config import PINNED, TimeBuckets, inexact_fields, take_pinned, write_keys
from npu_gr.model.weights import Checkpoint, load, save
from tests.models import tiny_config, tiny_model


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("candidate_position", "list"),
        ("query_time_embedding", "token"),
        ("min_full_attention_tokens", 8),
        ("sequence_pooling", "mean"),
        ("target_attention", "full"),
    ],
)
def test_what_is_never_exact_is_never_served(tmp_path: Path, field: str, value: object) -> None:
    """A checkpoint that asks for it is rejected by the key's name and the rule's."""
    with pytest.raises(ValueError, match=rf"{field}.*E\d"):
        take_pinned({field: value})
    model = tiny_model()
    save(Checkpoint(model=model, item_ids=np.arange(model.config.num_items), name="tiny"), tmp_path)
    manifest = tmp_path / "config.json"
    keys = json.loads(manifest.read_text())
    assert keys["model"][field] == PINNED[field][0], "older versions want the key"
    keys["model"][field] = value
    manifest.write_text(json.dumps(keys))
    with pytest.raises(CheckpointError, match=rf"{field}.*E\d"):
        load(tmp_path)
    del keys["model"][field]
    manifest.write_text(json.dumps(keys))
    assert load(tmp_path).model.config == model.config


def test_pinned_keys_are_written_and_taken() -> None:
    keys = write_keys(tiny_config())
    assert set(PINNED) <= set(keys)
    assert take_pinned(keys) == {key: value for key, value in keys.items() if key not in PINNED}


@pytest.mark.parametrize(
    ("field", "value"), [("scaling", "runtime"), ("positions", "reverse"), ("context", "full")]
)
def test_what_is_exact_without_a_cache_is_named(field: str, value: str) -> None:
    (line,) = inexact_fields(tiny_config(**{field: value, "relative_bias": "none"}))
    assert f"model.{field}" in line


def test_tokens_of_the_user_are_checked() -> None:
    features = (
        Feature(name="a", of="user", kind="hashed", num_buckets=3),
        Feature(name="b", of="user", kind="number"),
    )
    assert tiny_config(features=features).num_user_tokens == 1
    assert tiny_config(features=features, user_tokens="each").num_user_tokens == 2
    assert tiny_config(user_tokens="each").num_user_tokens == 0
    assert "user_tokens" not in write_keys(tiny_config(features=features)), (
        "older versions know no such key"
    )
    with pytest.raises(ValueError, match="max_history_tokens"):
        tiny_config(features=features, user_tokens="each", max_history_tokens=2)
    with pytest.raises(ValueError, match="context"):
        tiny_config(features=features, context="full")
    with pytest.raises(ValueError, match="none of events"):
        tiny_config(features=(Feature(name="a", of="event", kind="number"),), token="interleaved")  # noqa: S106


def test_the_default_is_exact() -> None:
    assert inexact_fields(tiny_config()) == []
    assert inexact_fields(tiny_config(positions="start")) == []


@pytest.mark.parametrize("field", ["actions", "tasks"])
@pytest.mark.parametrize("names", [(), ("a", "a")])
def test_names_are_given_once(field: str, names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=field):
        tiny_config(**{field: names})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"positions": "reverse"}, r"positions.*E2"),
        ({"scaling": "runtime"}, r"scaling.*E1"),
        ({"context": "full", "relative_bias": "none"}, r"context.*E4"),
        ({"query_times": TimeBuckets(function="log", count=4)}, r"query_times.*E3"),
        ({"attention_window_tokens": 0}, "attention_first_tokens: only with"),
        (
            {
                "head": "dot", "attention_time": "next", "retrieval": True, "tasks": ("click",),
            },
            r"attention_time.*E10",
        ),
    ],
)  # fmt: skip
def test_what_depends_on_the_final_length_has_no_window(changes: dict[str, Any], says: str) -> None:
    window = {"attention_window_tokens": 8, "attention_first_tokens": 2}
    with pytest.raises(ValueError, match=says):
        tiny_config(**{**window, **changes})


def test_older_versions_read_a_checkpoint_without_a_window() -> None:
    assert not {"attention_window_tokens", "attention_first_tokens"} & set(
        write_keys(tiny_config())
    )
    window = {"attention_window_tokens": 8, "attention_first_tokens": 2}
    assert write_keys(tiny_config(**window)).items() >= window.items()
