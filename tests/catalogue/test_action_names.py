"""Names of actions beside a generator are read, or refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from npu_gr.catalogue import action_names
from npu_gr.core.errors import DataError


def test_no_file_is_no_names(tmp_path: Path) -> None:
    assert action_names.load(tmp_path) is None


def test_the_place_of_a_name_is_its_index(tmp_path: Path) -> None:
    (tmp_path / action_names.FILE).write_text('["view", "5"]')
    found = action_names.load(tmp_path)
    assert found is not None
    assert found.indices([5, "view"]).tolist() == [1, 0]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '["a", "a"]', '["'])
def test_a_broken_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / action_names.FILE).write_text(text)
    with pytest.raises(DataError, match=action_names.FILE):
        action_names.load(tmp_path)
