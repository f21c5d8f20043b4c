"""TLS of servers and clients, reloaded when the files change.

    a file changes            new connections use it within LOOK_S; existing ones are unchanged
    the files are invalid     the previous context is used; `is_stale` and the log report it

Certificates are PEM, as cert-manager writes them: `tls.crt` (with intermediate certificates),
`tls.key`, `ca.crt`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Literal

import msgspec

from npu_gr.core.certificate import expires_at
from npu_gr.core.errors import ConfigError
from npu_gr.core.health import Worker
from npu_gr.core.lifetime import running

log = logging.getLogger(__name__)

LOOK_S = 1.0  # interval of checking the files
# for TLS 1.2: only forward secrecy and authenticated encryption, as TLS 1.3 always has
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
_CERTIFICATE = re.compile("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


class ServerTlsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The certificate of a server, and the authority of client certificates."""

    certificate: str  # PEM file: the certificate, then intermediate ones
    key: str  # PEM file, without a password
    # PEM file; clients need a certificate of one of these authorities
    client_ca: str | None = None
    min_version: Literal["1.2", "1.3"] = "1.2"  # with client_ca always 1.3


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The trusted authorities of a client, and its certificate."""

    ca: str | None = None  # PEM file; None = the system's authorities
    certificate: str | None = None  # PEM file, for servers that require one
    key: str | None = None  # PEM file, without a password

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate, key: give both or neither")


class ClientTlsConfig(TlsFiles, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The trusted authorities of a client, its certificate, and the server's name."""

    # expected name in the server's certificate; None = the host of its address
    server_name: str | None = None


class FollowedContext:
    """A TLS context that is made again when its files change."""

    def __init__(
        self, where: str, files: tuple[str | None, ...], make: Callable[[], ssl.SSLContext]
    ) -> None:
        """Make the context.

        Args:
            where: Section of the configuration, for errors.
            files: Files that `make` reads; the first one is the own certificate. None for an absent
                one.
            make: Function that makes the context from the files.

        Raises:
            ConfigError: a file cannot be read, or the files do not match.
        """
        self._where = where
        self._files = files
        self._make = make
        self._read = b""
        self._trouble = ""  # why the files cannot be used
        self._expires_at = float("inf")  # earliest expiry in the own certificate file
        self.context = self._use(self._content())

    def _content(self) -> dict[str, bytes]:
        found = {}
        for name in filter(None, self._files):
            try:
                found[name] = Path(name).read_bytes()
            except OSError as error:
                raise ConfigError(f"{self._where}: {name}: {error.strerror}") from error
        return found

    def _use(self, content: dict[str, bytes]) -> ssl.SSLContext:
        try:
            # not from `content`, since ssl reads only files; the next check sees changes in between
            context = self._make()
            shown = (
                []
                if self._files[0] is None
                else _CERTIFICATE.findall(content[self._files[0]].decode("latin-1"))
            )
            self._expires_at = min(
                (expires_at(ssl.PEM_cert_to_DER_cert(one)) for one in shown), default=float("inf")
            )
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            named = ", ".join(content)
            reason = (
                getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
            )
            raise ConfigError(f"{self._where}: {named}: not usable for TLS: {reason}") from error
        self._read = _digest(content)
        return context

    def reload_if_changed(self) -> None:
        """Use the files if their content changed; invalid files change nothing."""
        try:
            content = self._content()
            if _digest(content) == self._read:
                return
            self.context = self._use(content)
        except ConfigError as error:
            if str(error) != self._trouble:
                log.error("the previous certificate is still used: %s", error)
            self._trouble = str(error)
            self._read = b""
        else:
            self._trouble = ""
            log.info("%s: a new certificate is used", self._where)

    @property
    def is_stale(self) -> bool:
        """Whether the files are invalid, so that the previous context is used."""
        return bool(self._trouble)

    def expiry(self) -> float:
        """Return when the current certificate expires, in unix seconds."""
        return self._expires_at

    async def follow(self, worker: Worker | None = None) -> None:
        """Check the files every `LOOK_S` in a thread, until cancelled."""
        async for _ in (worker or Worker()).turns(LOOK_S):
            await asyncio.to_thread(self.reload_if_changed)


@asynccontextmanager
async def following(
    *contexts: FollowedContext | None, worker: Worker | None = None
) -> AsyncIterator[None]:
    """Follow the files of contexts during the block; `worker` shows whether it moves."""
    async with AsyncExitStack() as stack:
        for one in contexts:
            if one is not None:
                await stack.enter_async_context(running(one.follow(worker)))
        yield


class ServerTls(FollowedContext):
    """TLS of listening addresses.

    Their contexts stay, and each new connection switches to the current one.
    """

    def __init__(self, config: ServerTlsConfig, where: str, protocol: str = "http/1.1") -> None:
        """Read the files.

        Args:
            config: Configuration of the files.
            where: Section of the configuration, for errors.
            protocol: ALPN name of the protocol.

        Raises:
            ConfigError: a file cannot be read, or the files do not match.
        """
        warn_of_wide_key(config.key, where)
        files = (config.certificate, config.key, config.client_ca)
        super().__init__(where, files, lambda: _server_context(config, protocol))
        # requires a client certificate if `client_ca` is set
        self.public = _server_context(config, protocol)
        # never requires one, since kubelets and Prometheus have none
        self.admin = _server_context(msgspec.structs.replace(config, client_ca=None), protocol)
        # OpenSSL calls it before choosing the certificate, also if the client names no server. It
        # swaps certificate and authorities; whether a client certificate is required stays.
        self.public.sni_callback = self.admin.sni_callback = self._swap

    def _swap(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self.context


class ClientTls(FollowedContext):
    """TLS of outgoing calls; use `context` for new connections."""

    def __init__(self, config: ClientTlsConfig, where: str) -> None:
        """Read the files.

        Raises:
            ConfigError: a file cannot be read, or the files do not match.
        """
        if config.key is not None:
            warn_of_wide_key(config.key, where)
        self.server_name = config.server_name
        super().__init__(
            where, (config.certificate, config.key, config.ca), lambda: client_context(config)
        )


def _server_context(config: ServerTlsConfig, protocol: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    needs_newest = config.min_version == "1.3" or config.client_ca is not None
    context.minimum_version = ssl.TLSVersion.TLSv1_3 if needs_newest else ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    context.options |= ssl.OP_NO_RENEGOTIATION
    # else OpenSSL prompts on the terminal
    context.load_cert_chain(config.certificate, config.key, password="")
    context.set_alpn_protocols([protocol])
    if config.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(config.client_ca)
        # A resumed session is not verified again, so a removed authority would still be accepted.
        # TLS 1.3 without tickets has no resumption; TLS 1.2 also has a session cache, which Python
        # cannot disable.
        context.num_tickets = 0
    return context


def client_context(config: ClientTlsConfig) -> ssl.SSLContext:
    """Make the context of a client, which always verifies certificate and name of the server.

    Raises:
        OSError: a file cannot be read, or the files do not match.
    """
    context = ssl.create_default_context(cafile=config.ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if config.certificate is not None:
        context.load_cert_chain(config.certificate, config.key, password="")
    return context


def warn_of_wide_key(path: str, where: str) -> None:
    """Warn if other users may read a key; the group may, as with fsGroup in Kubernetes."""
    try:
        mode = Path(path).stat().st_mode & 0o777
    except OSError:
        return  # reading it raises the error
    if mode & 0o037:
        log.warning(
            "%s.key: %s has mode %04o, so other users may read the key; chmod 600 it",
            where,
            path,
            mode,
        )


def _digest(content: dict[str, bytes]) -> bytes:
    return hashlib.sha256(
        b"".join(hashlib.sha256(one).digest() for one in content.values())
    ).digest()
