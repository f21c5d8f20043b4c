"""Variables of the environment are settings or they are not; which, is told by the name alone."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from npu_gr.core.errors import ConfigError
from npu_gr.core.secret import SecretUrl
from npu_gr.core.settings import Bytes, Count, gather, load, variable
from npu_gr.core.settings import read_environment as read


class Tls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    key: str = ""


class Server(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    port: Count = 80
    size: Bytes = 0
    tls: Tls | None = None
    url: SecretUrl | None = None


class Named(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = ""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    port: Count = 8080
    backend: str = "cpu"
    server: Server = Server()
    others: list[Named] = []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "c.yaml"
    file.write_text("port: 1\nserver: {port: 2, size: 3}\n")
    return file


def test_file_then_environment_then_set(path: Path) -> None:
    variables = {"NPU_GR_PORT": "4", "NPU_GR_SERVER__PORT": "5", "NPU_GR_SERVER__SIZE": "1GiB"}
    assert load(path, Settings).server.port == 2
    assert load(path, Settings, [], variables) == Settings(
        port=4, server=Server(port=5, size=2**30)
    )
    assert load(path, Settings, ["server.port=6"], variables).server.port == 6
    assert gather(path, Settings, ["server.port=6"], variables).origins == {
        "port": "NPU_GR_PORT",
        "server.port": "--set",
        "server.size": "NPU_GR_SERVER__SIZE",
    }
    whole = gather(path, Settings, ["server={size: 8}"], {"NPU_GR_SERVER__PORT": "5"})
    assert whole.table["server"] == {"size": 8}
    # no word of the port that is gone
    assert whole.origins == {"port": str(path), "server.size": "--set"}


def test_a_section_that_may_be_absent_and_a_whole_section(path: Path) -> None:
    assert load(path, Settings, [], {"NPU_GR_SERVER__TLS__KEY": "k"}).server.tls == Tls(key="k")
    whole = {
        "NPU_GR_SERVER__PORT": "7",
        "NPU_GR_SERVER": "{size: 4}",
        "NPU_GR_OTHERS": "[{host: a}]",
    }
    found = load(path, Settings, [], whole)
    # the section first, whatever the order of the variables
    assert found.server == Server(port=7, size=4)
    assert found.others == [Named(host="a")]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "NPU_GR_SERVER__PROT",
            "NPU_GR_SERVER__PROT is not a setting; did you mean NPU_GR_SERVER__PORT?",
        ),
        ("NPU_GR_SEVER__PORT", "did you mean NPU_GR_SERVER__PORT?"),
        ("NPU_GR_OTHERS__HOST", "NPU_GR_OTHERS__HOST is not a setting"),
        ("NPU_GR_A__B", "NPU_GR_A__B is not a setting"),
        ("NPU_GR_server__port", "NPU_GR_server__port is not a setting"),
    ],
)
def test_a_setting_that_there_is_not_is_rejected(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read({name: "1"}, Settings)


def test_what_is_no_setting_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    others = {
        **dict.fromkeys(("NPU_GR_API_KEY", "NPU_GR_CA", "NPU_GR_CERT", "NPU_GR_CERT_KEY"), "x"),
        **dict.fromkeys(
            ("NPU_GR_FUZZ_MESSAGES", "NPU_GR_SOAK_S", "NPU_GR_DISENCDR", "_NPU_GR_COMPLETE"), "1"
        ),
        **dict.fromkeys(("NPU_GR_SERVICE_HOST", "NPU_GR_ROUTER_PORT_8090_TCP_ADDR"), "10.0.0.1"),
        # nearly NPU_GR_SERVER__PORT
        **dict.fromkeys(("NPU_GR_SERVICE_PORT", "NPU_GR_SERVICE_PORT_HTTP"), "8080"),
        "NPU_GR_PORT": "tcp://10.0.0.1:8080",  # of Kubernetes, for a Service named npu-gr
        "NPU_GR_SERVER_PORT": "tcp://10.0.0.1:8080",  # and for npu-gr-server
        "PATH": "/bin",
    }
    assert read(others, Settings) == []
    assert caplog.records == []


def test_what_is_nearly_a_setting_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert read({"NPU_GR_SERVER_PORT": "1", "NPU_GR_BACKEN": "cpu"}, Settings) == []
    assert (
        "NPU_GR_SERVER_PORT is not a setting and is ignored; did you mean NPU_GR_SERVER__PORT?"
    ) in caplog.text
    assert (
        "NPU_GR_BACKEN is not a setting and is ignored; did you mean NPU_GR_BACKEND?" in caplog.text
    )


@pytest.mark.parametrize("value", ["[redis://:s3cret@host", "{file: [s3cret]}", "&a [*a, s3cret]"])
def test_no_error_shows_a_secret(path: Path, value: str) -> None:
    with pytest.raises(ConfigError) as rejected:
        load(path, Settings, [], {"NPU_GR_SERVER__URL": value})
    assert "s3cret" not in str(rejected.value)


def test_a_value_that_is_none_is_named(path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"NPU_GR_SERVER__PORT server\.port: the value is "
        r"not YAML",
    ):
        load(path, Settings, [], {"NPU_GR_SERVER__PORT": "["})
    with pytest.raises(ConfigError, match=r"server\.port: expected a whole number, got nothing"):
        load(path, Settings, [], {"NPU_GR_SERVER__PORT": ""})
    path.write_text("server: 5")
    with pytest.raises(
        ConfigError,
        match=r"NPU_GR_SERVER__PORT server\.port: server is not a "
        r"section",
    ):
        load(path, Settings, [], {"NPU_GR_SERVER__PORT": "1"})


def test_the_name_of_a_variable() -> None:
    assert variable("server.tls.key") == "NPU_GR_SERVER__TLS__KEY"
    assert variable("backend") == "NPU_GR_BACKEND"
