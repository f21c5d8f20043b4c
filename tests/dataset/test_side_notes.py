"""A side file that shares few names with the log causes a warning, and repeated rows a note."""

from __future__ import annotations

from pathlib import Path

import pytest

from npu_gr.core.text_format import counted
from npu_gr.dataset import prepare
from npu_gr.dataset.side import notes_of

NAMES = [f"u{n}" for n in range(20)]


def test_names_that_are_others_are_shown_side_by_side() -> None:
    assert list(notes_of("user", NAMES, {f"user_{n}": n for n in range(20)}, 0)) == [
        "WARNING: the users' file has 0 of the log's 20 users; the log has 'u0', the file 'user_0'"
    ]
    few = {"u0": 0, "x": 1}
    assert list(notes_of("user", NAMES, few, 0)) == [
        "WARNING: the users' file has 1 of the log's 20 users; the log has 'u1', the file 'x'"
    ]
    assert list(notes_of("user", NAMES, {"u0": 0}, 0)) == [
        "WARNING: the users' file has 1 of the log's 20 users"
    ]


def test_a_tenth_is_enough() -> None:
    assert list(notes_of("user", NAMES, {"u0": 0, "u7": 1}, 0)) == []
    assert list(notes_of("user", [], {"u0": 0}, 0)) == []


def test_a_long_name_is_shortened() -> None:
    (note,) = notes_of("item", ["i" * 5000], {"x" * 5000: 0}, 0)
    assert len(note) < 300


@pytest.mark.parametrize("what", ["item", "user"])
def test_the_summary_has_them(tmp_path: Path, what: str) -> None:
    (tmp_path / "log.csv").write_text(
        "user,item,timestamp\n" + "u1,i1,1600000000\nu2,i2,1600000001\n" * 2
    )
    own, other = {"item": ("i1", "i2"), "user": ("u1", "u2")}[what]
    (tmp_path / "good.csv").write_text(f"{what},age\n{own},20\n{own},30\n{own},40\n{other},50\n")
    (tmp_path / "other.csv").write_text(f"{what},age\nX{own},20\nX{other},30\n")
    found = {}
    for name in ("good", "other"):
        side = {f"{what}s": tmp_path / f"{name}.csv"}
        found[name] = prepare(tmp_path / "log.csv", tmp_path / name, **side).manifest["notes"]  # type: ignore[arg-type]
    again = f"2 rows of the {what}s' file repeat a {what}; the last row of each counts"
    assert again in found["good"]
    assert not any("WARNING" in note for note in found["good"])
    warning = (
        f"WARNING: the {what}s' file has 0 of the log's 2 {what}s; the log has '{own}', the "
        f"file 'X{own}'"
    )
    assert warning in found["other"]


def test_one_is_no_plural() -> None:
    assert [counted(n, "row") for n in (0, 1, 2, 12345)] == [
        "0 rows",
        "1 row",
        "2 rows",
        "12,345 rows",
    ]
