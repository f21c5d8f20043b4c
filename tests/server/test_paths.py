"""A route is served at its exact path alone, so whatever compares paths in front sees the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_gr.core.kinds import KINDS, Scope
from npu_gr.server.auth.rules import is_exact, rules
from tests.keys import entry, secret, write_keys
from tests.server.examples import EXAMPLES
from tests.server.raw import BODY, Raw, site

# other spellings of a path, which some parser reads as the path itself
SPELLINGS: dict[str, Callable[[str], str]] = {
    "escaped": lambda path: path[:-1] + f"%{ord(path[-1]):02x}",
    "escaped in upper case": lambda path: path[:4] + f"%{ord(path[4]):02X}" + path[5:],
    "escaped slash": lambda path: "/v1%2F" + path.removeprefix("/v1/"),
    "absolute": lambda path: f"http://h{path}",
    "absolute, other scheme": lambda path: f"HTTPS://localhost:1{path}",
    "two slashes": lambda path: f"/{path}",
    "two slashes within": lambda path: path.replace("/v1/", "/v1//"),
    "slash at the end": lambda path: f"{path}/",
    "parameter": lambda path: f"{path};a=b",
    "empty parameter": lambda path: f"{path};",
    "dot": lambda path: f"/.{path}",
    "dots": lambda path: f"/v1/x/..{path}",
    "escaped dots": lambda path: f"/v1/%2e%2e{path}",
    "dot within": lambda path: path.replace("/v1/", "/v1/./"),
    "fragment": lambda path: f"{path}#x",
    "upper case": lambda path: path.upper(),
    "space": lambda path: f"{path}%20",
    "zero": lambda path: f"{path}%00",
    "no slash": lambda path: path[1:],
    "backslash": lambda path: path.replace("/", "\\"),
    "authority": lambda path: f"//h{path}",
}
POSTED = sorted(path for kind in KINDS.values() if kind.method == "POST" for path in kind.paths)
V1 = [path for path in POSTED if path.startswith("/v1/")]


async def status(raw: Raw, target: str, key: str = "", method: str = "POST") -> int:
    head = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {key}\r\n" if key else ""
    raw.send(head.encode() + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
    return (await raw.answer())[0]


@pytest.mark.parametrize("name", SPELLINGS)
async def test_another_spelling_of_a_kind_is_not_found(name: str) -> None:
    async with site() as at:
        for path in V1:
            target = SPELLINGS[name](path)
            assert await status(await at.connect(), target) in (400, 404), target
        assert at.service.served == []
        # it belongs to no kind, so no kind's objective is spent on it
        assert at.count("requests_total", route="/v1/rank", code="404") is None
        assert await status(await at.connect(), "/v1/rank?a=b") == 200


async def test_another_spelling_needs_a_key_and_no_scope_helps(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", entry("ranks", scopes=[Scope.INFER]))
    async with site(api_keys_file=keys) as at:
        for target in ("/v1/%72ank", "http://localhost/v1/rank"):
            assert await status(await at.connect(), target) == 401
            assert await status(await at.connect(), target, secret("ranks")) == 404
        assert await status(await at.connect(), "/v1/rank", secret("ranks")) == 200
        assert len(at.service.served) == 1


async def test_a_body_for_another_spelling_is_not_read() -> None:
    async with site() as at:
        raw = await at.connect()
        raw.send(b"POST /v1/%72ank HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n{")
        assert (await raw.answer())[0] == 404
        assert at.admission.receiving_bytes == 0


@pytest.mark.parametrize("target", ["/v2/%6dodels/rank/infer", "/v2/models/rank/%69nfer"])
async def test_the_fixed_parts_of_a_path_with_variables_are_compared(target: str) -> None:
    async with site() as at:
        assert await status(await at.connect(), target) == 404
        raw = await at.connect()
        raw.send(b"DELETE /v1/%75sers/u HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await raw.answer())[0] == 404
        assert at.service.served == []
        raw.send(b"DELETE /v1/users/%75%2F HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await raw.answer())[0] == 204
        ((_, request, _),) = at.service.served
        assert request.user.user == "u/"


@given(st.text(max_size=20))
def test_only_the_table_is_exact(text: str) -> None:
    plain = {path for _, path in rules() if "{" not in path}
    for path in plain:
        assert is_exact(path, text) == (text.partition("?")[0] == path)
    for route in (path for _, path in rules() if "{" in path):
        before, _, after = route.partition("{")
        if is_exact(route, text):
            assert text.startswith(before)
            assert text.partition("?")[0].endswith(after.rpartition("}")[2])


def test_every_example_is_exact() -> None:
    for _, route in rules():
        path = (
            route.replace("{model}", "a%20b").replace("{version}", "1").replace("{user_id}", "a/b")
        )
        assert is_exact(route, path)
        assert is_exact(route, f"{path}?x=/y")
    assert set(EXAMPLES) == set(KINDS)
