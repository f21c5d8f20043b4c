"""Certificates follow their files; what is no pair changes nothing.

Who shakes no hands is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import subprocess
import time
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from npu_gr.core.certificate import expires_at
from npu_gr.core.errors import ConfigError
from npu_gr.core.settings import from_table
from npu_gr.core.tls import ClientTls, ClientTlsConfig, ServerTls, ServerTlsConfig
from tests.certificates import Authority, Pair
from tests.serving import until

DAY_S = 86_400.0


def server_tls(pair: Pair, **more: Any) -> ServerTls:
    return ServerTls(
        ServerTlsConfig(certificate=str(pair.certificate), key=str(pair.key), **more), "server.tls"
    )


class Echo(asyncio.Protocol):
    """Answers what it is sent."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)  # type: ignore[attr-defined]


@asynccontextmanager
async def listening(tls: ssl.SSLContext) -> AsyncIterator[int]:
    """Echo over TLS; yields the port."""
    server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def echoed(port: int, tls: ssl.SSLContext, name: str = "127.0.0.1") -> ssl.SSLObject:
    """Send and receive; returns the connection's TLS.

    Raises:
        OSError: the two do not trust each other.
    """
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=tls, server_hostname=name
        )
        try:
            writer.write(b"hello")
            if await reader.read(5) != b"hello":
                raise ConnectionResetError("rejected after the handshake")
            found: ssl.SSLObject = writer.get_extra_info("ssl_object")
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
    return found


async def test_a_new_pair_is_in_force_for_new_connections_and_a_broken_one_is_not(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    pair = authority.issue("127.0.0.1")
    other = authority.issue("127.0.0.1", days=9)
    tls = server_tls(pair)
    first = tls.expiry()
    assert 1.9 * DAY_S < first - time.time() <= 2 * DAY_S
    async with listening(tls.public) as port:
        old = (await echoed(port, authority.client())).getpeercert()
        new_key = other.key.read_bytes()
        old_key = pair.key.read_bytes()
        pair.key.write_bytes(new_key)  # the certificate does not belong to it
        for _ in range(3):
            tls.reload_if_changed()
        assert tls.is_stale
        assert len([one for one in caplog.records if one.levelno == logging.ERROR]) == 1, (
            "one line, not one a look"
        )
        assert (await echoed(port, authority.client())).getpeercert() == old
        assert tls.expiry() == first
        pair.key.write_bytes(old_key)
        tls.reload_if_changed()
        assert not tls.is_stale
        pair.replace_by(other)
        tls.reload_if_changed()
        assert not tls.is_stale
        assert (await echoed(port, authority.client())).getpeercert() != old
        assert tls.expiry() - first > 6.9 * DAY_S


@pytest.mark.parametrize(
    "content",
    [b"", b"no certificate", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"],
)
async def test_nonsense_and_a_deleted_file_keep_the_old_certificate(
    authority: Authority, content: bytes
) -> None:
    pair = authority.issue("127.0.0.1")
    tls = server_tls(pair)
    async with listening(tls.public) as port:
        pair.certificate.write_bytes(content)
        tls.reload_if_changed()
        assert tls.is_stale
        pair.certificate.unlink()
        tls.reload_if_changed()
        assert tls.is_stale
        await echoed(port, authority.client())


async def test_files_are_followed(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npu_gr.core.tls.LOOK_S", 0.01)
    pair = authority.issue("127.0.0.1")
    tls = server_tls(pair)
    first = tls.expiry()
    following = asyncio.ensure_future(tls.follow())
    pair.replace_by(authority.issue("127.0.0.1", days=9))
    await until(lambda: tls.expiry() > first)
    following.cancel()


async def test_callers_need_a_certificate_of_the_authority_in_force(
    authority: Authority, tmp_path: Path
) -> None:
    strangers = Authority(tmp_path, "strangers")
    client_ca = tmp_path / "clients.crt"
    client_ca.write_bytes(authority.ca.read_bytes())
    friend = authority.client(authority.issue("router"))
    stranger = authority.client(strangers.issue("router"))
    tls = server_tls(authority.issue("127.0.0.1"), client_ca=str(client_ca))
    async with listening(tls.public) as port, listening(tls.admin) as admin_port:
        await echoed(port, friend)
        for other in (
            authority.client(),
            stranger,
            authority.client(authority.issue("router", days=-1)),
        ):
            with pytest.raises(OSError):  # noqa: PT011  (a reset or an alert, by timing)
                await echoed(port, other)
        await echoed(admin_port, authority.client())  # asks nobody
        client_ca.write_bytes(strangers.ca.read_bytes())
        tls.reload_if_changed()
        await echoed(port, stranger)
        with pytest.raises(OSError):  # noqa: PT011
            await echoed(port, friend)


async def test_no_session_outlives_the_authority_that_let_it_in(authority: Authority) -> None:
    client = authority.client(authority.issue("router"))
    pair = authority.issue("127.0.0.1")
    asking = server_tls(pair, client_ca=str(authority.ca))

    def is_reused(port: int) -> list[bool]:
        found, session = [], None
        for _ in range(2):
            with (
                socket.create_connection(("127.0.0.1", port)) as plain,
                client.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as secured,
            ):
                secured.sendall(b"hello")
                assert secured.recv(5) == b"hello"
                found.append(secured.session_reused is True)
                session = secured.session
        return found

    async with listening(asking.public) as port, listening(server_tls(pair).public) as open_port:
        assert await asyncio.to_thread(is_reused, port) == [False, False]
        assert await asyncio.to_thread(is_reused, open_port) == [False, True], (
            "nobody is verified there"
        )
        client.maximum_version = ssl.TLSVersion.TLSv1_2
        assert await asyncio.to_thread(is_reused, open_port) == [False, True]
        with pytest.raises(OSError):  # noqa: PT011
            await asyncio.to_thread(is_reused, port)


async def test_the_certificate_in_force_of_a_client_is_shown(
    authority: Authority, tmp_path: Path
) -> None:
    strangers = Authority(tmp_path, "strangers")
    shown = strangers.issue("router")
    client = ClientTls(
        ClientTlsConfig(
            ca=str(authority.ca), certificate=str(shown.certificate), key=str(shown.key)
        ),
        "instances_tls",
    )
    tls = server_tls(authority.issue("127.0.0.1"), client_ca=str(authority.ca))
    async with listening(tls.public) as port:
        with pytest.raises(OSError):  # noqa: PT011
            await echoed(port, client.context)
        shown.replace_by(authority.issue("router"))
        client.reload_if_changed()
        await echoed(port, client.context)


async def test_a_client_rejects_another_host_an_expired_certificate_and_another_authority(
    authority: Authority, tmp_path: Path
) -> None:
    client = ClientTls(ClientTlsConfig(ca=str(authority.ca)), "instances_tls").context
    for pair in (
        authority.issue("elsewhere.example"),
        authority.issue("127.0.0.1", days=-1),
        Authority(tmp_path, "strangers").issue("127.0.0.1"),
    ):
        async with listening(server_tls(pair).public) as port:
            with pytest.raises(ssl.SSLCertVerificationError):
                await echoed(port, client)
    async with listening(server_tls(authority.issue("elsewhere.example")).public) as port:
        await echoed(port, client, "elsewhere.example")


@pytest.mark.parametrize(
    ("newest", "ciphers", "is_accepted"),
    [
        (ssl.TLSVersion.TLSv1_2, "DEFAULT", True),
        (ssl.TLSVersion.TLSv1_1, "DEFAULT:@SECLEVEL=0", False),
        (ssl.TLSVersion.TLSv1_2, "ECDHE-ECDSA-AES128-SHA256", False),  # no authenticated encryption
    ],
)
async def test_old_versions_and_weak_ciphers_are_rejected(
    authority: Authority, newest: ssl.TLSVersion, ciphers: str, is_accepted: bool
) -> None:
    client = authority.client()
    client.set_ciphers(ciphers)
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        client.minimum_version = min(newest, ssl.TLSVersion.TLSv1_2)
        client.maximum_version = newest
    pair = authority.issue("127.0.0.1")
    async with listening(server_tls(pair).public) as port:
        if is_accepted:
            assert (await echoed(port, client)).version() == "TLSv1.2"
            assert (await echoed(port, authority.client())).version() == "TLSv1.3"
        else:
            with pytest.raises(OSError):  # noqa: PT011
                await echoed(port, client)
    async with listening(server_tls(pair, min_version="1.3").public) as port:
        with pytest.raises(OSError):  # noqa: PT011
            await echoed(port, client)


def test_what_cannot_be_used_is_rejected_in_words(authority: Authority, tmp_path: Path) -> None:
    pair, other = authority.issue("a"), authority.issue("b")
    with pytest.raises(
        ConfigError,
        match=r"server\.tls: .*: not usable for TLS: "
        r"KEY_VALUES_MISMATCH",
    ):
        server_tls(Pair(pair.certificate, other.key))
    with pytest.raises(ConfigError, match=r"server\.tls: .*none\.crt: No such file"):
        server_tls(Pair(tmp_path / "none.crt", pair.key))
    with pytest.raises(ConfigError, match="certificate, key: give both or neither"):
        from_table({"certificate": "a"}, ClientTlsConfig)
    with pytest.raises(ConfigError, match="min_version"):
        from_table({"certificate": "a", "key": "b", "min_version": "1.0"}, ServerTlsConfig)


def test_a_key_with_a_password_is_rejected_and_nobody_is_asked_for_it(
    authority: Authority, tmp_path: Path
) -> None:
    pair = authority.issue("a")
    locked = tmp_path / "locked.key"
    command = [
        "openssl",
        "ec",
        "-aes256",
        "-passout",
        "pass:secret",
        "-in",
        str(pair.key),
        "-out",
        str(locked),
    ]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(ConfigError, match="not usable for TLS"):
        server_tls(Pair(pair.certificate, locked))


@pytest.mark.parametrize(
    ("mode", "is_warned"), [(0o600, False), (0o640, False), (0o644, True), (0o660, True)]
)
def test_a_key_that_others_may_read_is_warned_of(
    authority: Authority, caplog: pytest.LogCaptureFixture, mode: int, is_warned: bool
) -> None:
    pair = authority.issue("a")
    pair.key.chmod(mode)
    server_tls(pair)
    assert ("other users may" in caplog.text) == is_warned


def test_the_end_of_a_certificate_is_read(authority: Authority) -> None:
    for days in (1, 20, 20_000, -1):  # after 2049 the year has four digits
        der = ssl.PEM_cert_to_DER_cert(authority.issue("a", days=days).certificate.read_text())
        assert expires_at(der) == pytest.approx(time.time() + days * DAY_S, abs=60)
        for size in range(0, len(der), 7):
            with pytest.raises(ValueError, match=r"^the certificate is truncated$"):
                expires_at(der[:size])


def test_the_first_end_of_a_chain_counts(authority: Authority) -> None:
    pair = authority.issue("a", days=9)
    pair.certificate.write_bytes(pair.certificate.read_bytes() + authority.ca.read_bytes())
    assert server_tls(pair).expiry() - time.time() < 2.1 * DAY_S
