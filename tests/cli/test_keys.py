"""`npu-gr keys` shows a key once, writes its hash alone, and says what is wrong in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from npu_gr.cli.keys import MAX_CHARACTERS, SCOPES
from npu_gr.cli.main import main
from npu_gr.core.kinds import Scope
from npu_gr.server.auth.keys import MIN_CHARACTERS, KeyRing, read_keys


def keys(*words: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, ["keys", *words], input=stdin)


def new(path: Path, name: str = "ranking", *words: str, stdin: str | bytes | None = None) -> Result:
    return keys(
        "new",
        name,
        "--file",
        str(path),
        "--tenant",
        "shop",
        "--scope",
        "infer",
        *words,
        stdin=stdin,
    )


def test_the_scopes_are_those_that_there_are() -> None:
    assert tuple(scope.value for scope in Scope) == SCOPES


def test_a_new_key_opens_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    done = new(
        path, "ranking", "--scope", "ingest", "--rate-per-s", "500", "--expires", "2999-01-31"
    )
    assert done.exit_code == 0, done.output
    secret = done.stdout.strip()
    assert secret.startswith("ngr_")
    assert len(secret) >= MIN_CHARACTERS + 20
    assert secret not in path.read_text()
    key = KeyRing(path).find(f"Bearer {secret}".encode())
    assert (key.name, key.tenant, key.rate_per_s) == ("ranking", "shop", 500.0)
    assert key.scopes == {Scope.INFER, Scope.INGEST}
    assert new(path, "other").stdout.strip() != secret


def test_a_key_of_the_caller_s_own_is_not_printed(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    secret = "a-secret-from-the-vault-of-somebody"
    done = new(path, "own", "--from-stdin", stdin=f"{secret}\n")
    assert done.exit_code == 0, done.output
    assert secret not in done.output
    assert KeyRing(path).find(f"Bearer {secret}".encode()).name == "own"


@pytest.mark.parametrize(
    ("words", "stdin", "said"),
    [
        (["--from-stdin"], "x" * (MIN_CHARACTERS - 1), "must have 24 to 512 characters"),
        (["--from-stdin"], "x" * (MAX_CHARACTERS + 1), "must have 24 to 512 characters"),
        (["--from-stdin"], "\n", "must have 24 to 512 characters"),
        (["--from-stdin"], "two words of more than 24 characters", "without spaces"),
        (["--from-stdin"], b"\xff" * 30, "printable ASCII"),
        (["--from-stdin"], "x" * 24 + "\0", "printable ASCII"),
        (["--rate-per-s", "0"], None, "rate_per_s"),
        (["--rate-per-s", "nan"], None, "rate_per_s"),
        (["--expires", "soon"], None, "--expires: 'soon'"),
        (["--expires", "2999-01-31T00:00:00"], None, "no time zone"),
        (["--expires", "2001-01-31"], None, "is in the past"),
        (["--tenant", "x" * 129], None, "tenant"),
        (["--scope", "everything"], None, "'everything' is not one of"),
    ],
)
def test_what_is_no_key_is_rejected(
    tmp_path: Path, words: list[str], stdin: str | bytes | None, said: str
) -> None:
    done = new(tmp_path / "keys", "ranking", *words, stdin=stdin)
    assert done.exit_code == 2
    assert said in done.output
    assert "Traceback" not in done.output
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("name", ["", "a key", "-x", "x\n", "x" * 65, "käse"])
def test_a_name_is_short_and_plain(tmp_path: Path, name: str) -> None:
    done = keys(
        "new", "--file", str(tmp_path / "keys"), "--tenant", "", "--scope", "infer", "--", name
    )
    assert done.exit_code == 2
    assert "name" in done.output
    assert not (tmp_path / "keys").exists()


def test_a_name_is_taken_once(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    new(path)
    done = new(path)
    assert done.exit_code == 2
    assert "has a key 'ranking' already" in done.output


def test_the_list_shows_no_hash_whole(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    new(path, "ranking", "--rate-per-s", "500", "--expires", "2999-01-31")
    keys(
        "new", "ops", "--file", str(path), "--tenant", "*", "--scope", "observe", "--scope", "admin"
    )
    keys("new", "odd", "--file", str(path), "--tenant", "\x1b[2J", "--scope", "infer")
    sha256 = read_keys(path).keys[0].sha256
    done = keys("list", "--file", str(path))
    assert done.exit_code == 0
    assert sha256 not in done.output
    assert "\x1b" not in done.output
    rows = [line.split(maxsplit=5) for line in done.output.splitlines()]
    assert rows[1] == [
        "ranking",
        f"{sha256[:8]}...",
        "shop",
        "infer",
        "500",
        "2999-01-31 00:00 UTC",
    ]
    assert rows[2][:4] == ["ops", rows[2][1], "*", "observe,admin"]


def test_a_key_that_is_over_is_marked(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    new(path, "ranking", "--expires", "2999-01-31")
    path.write_text(path.read_text().replace("2999", "2001"))
    assert "2001-01-31 00:00 UTC (expired)" in keys("list", "--file", str(path)).output


def test_a_revoked_key_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    new(path, "a")
    new(path, "b")
    assert keys("revoke", "a", "--file", str(path)).exit_code == 0
    assert [key.name for key in read_keys(path).keys] == ["b"]
    done = keys("revoke", "a", "--file", str(path))
    assert done.exit_code == 2
    assert "has no key 'a'" in done.output
    assert "no key is left" in keys("revoke", "b", "--file", str(path)).output


@pytest.mark.parametrize("command", [["list"], ["revoke", "a"]])
def test_no_file(tmp_path: Path, command: list[str]) -> None:
    done = keys(*command, "--file", str(tmp_path / "keys"))
    assert done.exit_code == 2
    assert "No such file" in done.output or "has no key" in done.output
