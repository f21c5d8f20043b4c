"""TLS of an address that listens and of calls to other processes; both follow their files.

    a file changes                    new connections have what is in it within LOOK_S; the old ones stay
    what is in the files is no pair   what was in force stays; `is_stale` and the log say so

Certificates are PEM, as cert-manager writes them: `tls.crt` with the intermediate ones behind,
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
from npu_gr.core.lifetime import running

log = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks at the files
# of TLS 1.2: forward secrecy and authenticated encryption only; TLS 1.3 has nothing else
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
_CERTIFICATE = re.compile("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


class ServerTlsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The certificate of an address that listens, and whose certificates its callers need."""

    certificate: str  # PEM file: the certificate, then the intermediate ones
    key: str  # PEM file, without a password
    # PEM file; callers need a certificate that one of these authorities signed
    client_ca: str | None = None
    min_version: Literal["1.2", "1.3"] = "1.2"  # with client_ca always 1.3


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whom a connection over TLS believes, and the certificate that it shows."""

    ca: str | None = None  # PEM file; None = the authorities that the system trusts
    certificate: str | None = None  # PEM file, for a server that wants to know who calls
    key: str | None = None  # PEM file, without a password

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate, key: give both or neither")


class ClientTlsConfig(TlsFiles, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whom a client believes over TLS, and the certificate that it shows."""

    # that the server's certificate must have; None = the name in its address
    server_name: str | None = None


class FollowedContext:
    """The context of some files, made again when their content changes."""

    def __init__(
        self, where: str, files: tuple[str | None, ...], make: Callable[[], ssl.SSLContext]
    ) -> None:
        """Make the context.

        Args:
            where: the section of the configuration, for errors.
            files: what `make` reads; the first one holds the certificate that is shown. None =
                there is no such file.
            make: reads the files.

        Raises:
            ConfigError: a file cannot be read, or they do not belong together.
        """
        self._where = where
        self._files = files
        self._make = make
        self._read = b""
        self._trouble = ""  # why the files cannot be used; what is in force is older
        self._expires_at = float("inf")  # of the first of the certificates that are shown
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
            # not from `content`, because ssl reads files only; if one changed in between, the next
            # look sees it
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
        """Read the files again; other content is in force at once.

        Files that cannot be used change nothing.
        """
        try:
            content = self._content()
            if _digest(content) == self._read:
                return
            self.context = self._use(content)
        except ConfigError as error:
            if str(error) != self._trouble:
                log.error("the old certificate stays in force: %s", error)
            self._trouble = str(error)
            self._read = b""
        else:
            self._trouble = ""
            log.info("%s: a new certificate is in force", self._where)

    @property
    def is_stale(self) -> bool:
        """Whether the files cannot be used, so that what is in force is older."""
        return bool(self._trouble)

    def expiry(self) -> float:
        """Return when the certificate in force expires, in seconds since 1970."""
        return self._expires_at

    async def follow(self) -> None:
        """Look once a second whether the files have changed, in a thread, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(self.reload_if_changed)


@asynccontextmanager
async def following(*contexts: FollowedContext | None) -> AsyncIterator[None]:
    """Follow the files of some contexts while the block runs."""
    async with AsyncExitStack() as stack:
        for one in contexts:
            if one is not None:
                await stack.enter_async_context(running(one.follow()))
        yield


class ServerTls(FollowedContext):
    """TLS of the addresses that listen.

    Theirs stay the same, and each new connection gets what is in force.
    """

    def __init__(self, config: ServerTlsConfig, where: str, protocol: str = "http/1.1") -> None:
        """Read the files.

        Args:
            config: names them.
            where: the section of the configuration, for errors.
            protocol: that is spoken over it, as ALPN names it.

        Raises:
            ConfigError: a file cannot be read, or they do not belong together.
        """
        warn_of_wide_key(config.key, where)
        files = (config.certificate, config.key, config.client_ca)
        super().__init__(where, files, lambda: _server_context(config, protocol))
        # asks callers for a certificate where `client_ca` says so
        self.public = _server_context(config, protocol)
        # never does: kubelets and Prometheus have keys at most
        self.admin = _server_context(msgspec.structs.replace(config, client_ca=None), protocol)
        # OpenSSL asks before it chooses the certificate, also where the caller names no server.
        # What is swapped is the certificate and the authorities; whether a caller needs one stays
        # with the connection.
        self.public.sni_callback = self.admin.sni_callback = self._swap

    def _swap(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self.context


class ClientTls(FollowedContext):
    """TLS of calls to other processes: `context` is for new connections."""

    def __init__(self, config: ClientTlsConfig, where: str) -> None:
        """Read the files.

        Raises:
            ConfigError: a file cannot be read, or they do not belong together.
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
    # or OpenSSL asks the terminal for one
    context.load_cert_chain(config.certificate, config.key, password="")
    context.set_alpn_protocols([protocol])
    if config.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(config.client_ca)
        # A resumed session is not verified again: an authority that was taken out of the file would
        # live on in it. TLS 1.3 without tickets has none; those of TLS 1.2 have a cache as well,
        # which Python cannot switch off.
        context.num_tickets = 0
    return context


def client_context(config: ClientTlsConfig) -> ssl.SSLContext:
    """Make the context of a client; certificate and name of the server are always checked.

    Raises:
        OSError: a file cannot be read, or they do not belong together.
    """
    context = ssl.create_default_context(cafile=config.ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if config.certificate is not None:
        context.load_cert_chain(config.certificate, config.key, password="")
    return context


def warn_of_wide_key(path: str, where: str) -> None:
    """Log a warning if others may read a key.

    The group may: Kubernetes gives it to the pod's own by fsGroup.
    """
    try:
        mode = Path(path).stat().st_mode & 0o777
    except OSError:
        return  # reading it says why
    if mode & 0o037:
        log.warning(
            "%s.key: %s has mode %04o: others may read the key; chmod 600", where, path, mode
        )


def _digest(content: dict[str, bytes]) -> bytes:
    return hashlib.sha256(
        b"".join(hashlib.sha256(one).digest() for one in content.values())
    ).digest()
