"""A secret comes from the text, a file or the environment, and is never shown."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest

from npu_gr.core.errors import ConfigError
from npu_gr.core.secret import Secret, SecretUrl
from npu_gr.core.settings import from_table, parse, to_table

PASSWORD = "s3cret"


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    token: Secret | None = None
    url: SecretUrl = SecretUrl("redis://127.0.0.1:6379/0")


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    section: Section = Section()


def read(**section: Any) -> Section:
    return from_table({"section": section}, Settings).section


def test_it_comes_from_the_text_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(f"{PASSWORD}\n")
    monkeypatch.setenv("NPU_GR_TEST_TOKEN", PASSWORD)
    for given in (PASSWORD, {"file": str(tmp_path / "token")}, {"env": "NPU_GR_TEST_TOKEN"}):
        found = read(token=given).token
        assert type(found) is Secret
        assert found.reveal() == PASSWORD
    assert read(token=None).token is None
    text = f"section:\n  url: {{file: {tmp_path / 'token'}}}"
    assert parse(text, Settings, "c").section.url.reveal() == PASSWORD


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"file": "/nowhere/token"},
            r"section\.token: file /nowhere/token: No such file or "
            r"directory",
        ),
        (
            {"env": "NPU_GR_NO_SUCH"},
            r"section\.token: env NPU_GR_NO_SUCH: the variable is not set",
        ),
        (
            {"env": "A", "file": "b"},
            r"section\.token: expected a text, \{file: PATH\} or \{env: "
            r"NAME\}",
        ),
        ({"environment": "A"}, r"section\.token: expected a text"),
        ({"env": 7}, r"section\.token: expected a text"),
        ({}, r"section\.token: expected a text"),
        (7, r"section\.token: expected a text"),
        ([PASSWORD], r"section\.token: expected a text"),
    ],
)
def test_what_it_cannot_be_read_from_is_named_and_not_shown(given: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(token=given)
    assert PASSWORD not in str(caught.value)


def test_a_file_that_is_no_text_is_an_error_without_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"\xff" + PASSWORD.encode())
    with pytest.raises(ConfigError, match=r"section\.token: file .*token: not UTF-8") as caught:
        read(token={"file": str(tmp_path / "token")})
    assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"redis://:{PASSWORD}@db:6379/0", "redis://***@db:6379/0"),
        (f"rediss://me:{PASSWORD}@db:6379/0", "rediss://***@db:6379/0"),
        # as people write them, unencoded
        (f"redis://:{PASSWORD}/#?x@y@db:6379/0", "redis://***@db:6379/0"),
        (f"redis://db:6379/0?password={PASSWORD}", "redis://db:6379/0?password=***"),
        (f"unix://:{PASSWORD}@/run/redis.sock", "unix://***@/run/redis.sock"),
        (f"me:{PASSWORD}@db", "***"),  # no URL
        ("redis://db:6379/0", "redis://db:6379/0"),
        ("nonsense", "nonsense"),
    ],
)
def test_nothing_shows_it(url: str, shown: str, caplog: pytest.LogCaptureFixture) -> None:
    section = read(url=url, token=PASSWORD)
    assert section.url.reveal() == url
    assert to_table(section) == {"url": shown, "token": "***"}
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("npu_gr").debug("%s %r %s", section.url, section.url, section)
    texts = [
        str(section),
        repr(section),
        f"{section.url} {section.token}",
        f"{section.url!r}",
        caplog.text,
    ]
    assert not [text for text in texts if PASSWORD in text]
    with pytest.raises(TypeError):
        msgspec.json.encode(section)  # whoever forgets `to_table` sends nothing


def test_equal_texts_are_equal_and_go_to_another_process() -> None:
    section = read(url=f"redis://:{PASSWORD}@db", token=PASSWORD)
    assert section == read(url=f"redis://:{PASSWORD}@db", token=PASSWORD)
    assert section != read(url=f"redis://:{PASSWORD}2@db", token=PASSWORD)
    assert pickle.loads(pickle.dumps(section)) == section
    assert PASSWORD in {Secret(PASSWORD).reveal()}


def test_user_and_password_become_a_header() -> None:
    assert SecretUrl("http://c:4318/v1/traces").without_user() == ("http://c:4318/v1/traces", None)
    found = SecretUrl("http://me:p%40ss@c:4318/v1/traces?x=1").without_user()
    assert found == ("http://c:4318/v1/traces?x=1", "Basic bWU6cEBzcw==")
    with pytest.raises(ValueError, match="percent-encode") as caught:
        SecretUrl(f"http://[{PASSWORD}/v1").without_user()
    assert PASSWORD not in str(caught.value)


def test_a_broken_file_is_not_quoted_with_its_passwords() -> None:
    with pytest.raises(ConfigError, match="invalid YAML") as caught:
        parse(f"section: {{url: redis://:{PASSWORD}@db, token: }}}}", Settings, "c")
    assert PASSWORD not in str(caught.value)
    assert caught.value.__cause__ is None
