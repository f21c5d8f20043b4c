"""The list of popular items holds names as the company writes them, one a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from npu_gr.catalogue.popular import read_popular
from npu_gr.core.errors import ConfigError
from npu_gr.core.names import item_id


def test_a_line_is_a_name_and_a_number_its_own_id(tmp_path: Path) -> None:
    path = tmp_path / "popular.txt"
    path.write_bytes("\ufeffSKU-0042-C\r\n\r\n  42 \nblue shoes, size 42\n42\nGrün\n007\n".encode())
    names: list[str | int] = ["SKU-0042-C", 42, "blue shoes, size 42", "Grün", "007"]
    assert read_popular(str(path)).tolist() == [item_id(name) for name in names]


def test_no_list_is_no_item() -> None:
    assert len(read_popular(None)) == 0


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"\n  \n", "holds no item"),
        (b"1\n" + b"x" * 513 + b"\n", "line 2: a name of 513 bytes is no item"),
        (b"1\n\xff\n", "codec can't decode"),
    ],
)
def test_a_list_that_cannot_be_read_is_told(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "popular.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_popular(str(path))
    assert str(error.value).startswith(f"recommend.popular: {path}")
    assert word in str(error.value)


def test_a_missing_list_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"recommend\.popular: .*No such file"):
        read_popular(str(tmp_path / "none.txt"))
