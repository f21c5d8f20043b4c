"""A history store over TLS: a real server with certificates, and every failure of trust."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from npu_gr.cli.main import main
from npu_gr.core.errors import ConfigError
from npu_gr.core.history import UserKey
from npu_gr.core.secret import SecretUrl
from npu_gr.core.settings import from_table
from npu_gr.core.tls import TlsFiles
from npu_gr.history_store.open import open_store
from npu_gr.history_store.redis_client import is_in_clear
from npu_gr.history_store.store import HistoryConfig
from tests.certificates import Authority, Pair
from tests.models import events


@contextmanager
def redis_tls(folder: Path, pair: Pair, client_ca: Path, asks: bool = True) -> Iterator[int]:
    """Run a server that speaks TLS only, and yield its port.

    Skip the test where there is no redis-server.
    """
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("no redis-server on PATH (Debian: apt-get install redis-server)")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {
        "port": "0",
        "tls-port": str(port),
        "tls-cert-file": str(pair.certificate),
        "tls-key-file": str(pair.key),
        "tls-ca-cert-file": str(client_ca),
        "tls-auth-clients": "yes" if asks else "no",
        "dir": str(folder),
        "save": "",
    }
    command = [binary, *(word for name, value in settings.items() for word in (f"--{name}", value))]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            for _ in range(200):
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except OSError:
                    time.sleep(0.05)
            yield port
        finally:
            server.terminate()


@pytest.fixture(scope="module")
def port(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with redis_tls(
        tmp_path_factory.mktemp("redis"), authority.issue("127.0.0.1"), authority.ca
    ) as port:
        yield port


def config(port: int, **tls: Any) -> HistoryConfig:
    files = TlsFiles(**{name: str(path) for name, path in tls.items()})
    return HistoryConfig(
        kind="redis", url=SecretUrl(f"rediss://127.0.0.1:{port}/0"), timeout_s=10.0, tls=files
    )


async def test_histories_are_kept_over_mutual_tls(authority: Authority, port: int) -> None:
    own = authority.issue("instance")
    opened = await open_store(
        config(port, ca=authority.ca, certificate=own.certificate, key=own.key)
    )
    assert opened is not None
    user = UserKey("t", "u")
    assert (await opened.append(user, events(7))).num_events == 7
    read = await opened.read(user, 10)
    assert read.events.fingerprint() == events(7).fingerprint()
    await opened.close()


async def test_an_unknown_certificate_on_either_side_is_rejected(
    authority: Authority, port: int, tmp_path: Path
) -> None:
    strangers = Authority(tmp_path, "strangers")
    own, other = authority.issue("instance"), strangers.issue("instance")
    wrong: list[dict[str, Path]] = [
        {"ca": authority.ca},  # shows no certificate
        {"ca": authority.ca, "certificate": other.certificate, "key": other.key},
        {"ca": strangers.ca, "certificate": own.certificate, "key": own.key},
        {"certificate": own.certificate, "key": own.key},  # the system does not know this authority
    ]
    for files in wrong:
        with pytest.raises(ConfigError, match=r"history_store\.url: no answer from "):
            await open_store(config(port, **files))


async def test_another_servers_certificate_is_rejected(
    authority: Authority, tmp_path: Path
) -> None:
    pair = authority.issue("elsewhere.example")
    rejected = pytest.raises(ConfigError, match=r"no answer from .*CERTIFICATE_VERIFY_FAILED")
    with redis_tls(tmp_path, pair, authority.ca, asks=False) as port, rejected:
        await open_store(config(port, ca=authority.ca))


def test_the_store_is_checked_over_tls(authority: Authority, port: int) -> None:
    own = authority.issue("operator")
    url = f"rediss://127.0.0.1:{port}/0"
    files = ["--ca", str(authority.ca), "--cert", str(own.certificate), "--cert-key", str(own.key)]
    with pytest.MonkeyPatch.context() as patch:  # the command writes into the environment
        for name in ("NPU_GR_CA", "NPU_GR_CERT", "NPU_GR_CERT_KEY"):
            patch.setenv(name, "")
        good = CliRunner().invoke(main, [*files, "store", url])
        assert good.exit_code == 0, good.output
        assert "entries" in good.output
        patch.setenv("NPU_GR_CA", "")
        assert CliRunner().invoke(main, ["store", url]).exit_code == 2


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://redis:6379/0", True),
        ("redis://:secret@10.0.0.1:6379/0", True),
        ("redis://127.0.0.1:6379/0", False),
        ("redis://[::1]:6379/0", False),
        ("redis://localhost/0", False),
        ("redis:///0", False),
        ("rediss://redis:6379/0", False),
        ("unix:///run/redis.sock", False),
    ],
)
def test_what_crosses_the_network_in_clear_is_known(url: str, expected: bool) -> None:
    assert is_in_clear(url) == expected


async def test_a_server_elsewhere_in_clear_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError):
        await open_store(
            HistoryConfig(
                kind="redis", url=SecretUrl("redis://:hidden@192.0.2.1:1/0"), timeout_s=0.05
            )
        )
    assert "cross the network unencrypted" in caplog.text
    assert "hidden" not in caplog.text


def test_files_without_tls_and_half_a_pair_are_rejected() -> None:
    with pytest.raises(ConfigError, match="tls: needs a url that begins with rediss"):
        from_table({"kind": "redis", "tls": {"ca": "a"}}, HistoryConfig)
    with pytest.raises(ConfigError, match="certificate, key: give both or neither"):
        from_table({"url": "rediss://a", "tls": {"key": "a"}}, HistoryConfig)
