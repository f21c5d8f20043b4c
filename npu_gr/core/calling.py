"""What our clients send to a service: TLS files, API key, and headers for routing.

`npu-gr --ca FILE --cert FILE --cert-key FILE ...` stores its options in the environment, so that
child processes have them too.
"""

from __future__ import annotations

import os
import ssl
from urllib.parse import quote

from npu_gr.core.errors import ConfigError
from npu_gr.core.tls import ClientTlsConfig, client_context

CA = "NPU_GR_CA"
CERTIFICATE = "NPU_GR_CERT"
KEY = "NPU_GR_CERT_KEY"
VARIABLES = (CA, CERTIFICATE, KEY)
USER_HEADER = "X-User-Id"  # proxies route by it
TENANT_HEADER = "X-Tenant-Id"
MAX_NAME = 512  # characters of either header, the limit of proxies
_IN_A_HEADER = "!\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"  # not encoded, as are letters and digits


def calling_files() -> ClientTlsConfig:
    """Return the TLS files of the command line or the environment.

    Raises:
        ConfigError: there is a certificate without a key, or a key without a certificate.
    """
    ca, certificate, key = (os.environ.get(name) or None for name in VARIABLES)
    try:
        return ClientTlsConfig(ca=ca, certificate=certificate, key=key)
    except ValueError as error:
        raise ConfigError(f"--cert, --cert-key ({CERTIFICATE}, {KEY}): {error}") from error


def calling_headers(api_key: str | None) -> dict[str, str]:
    """Return the header with an API key, if there is one."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def placing_headers(user: str, tenant: str = "") -> dict[str, str]:
    """Return the headers by which proxies route a request of a user."""
    named = {USER_HEADER: _as_header(user)}
    return {**named, TENANT_HEADER: _as_header(tenant)} if tenant else named


def _as_header(name: str) -> str:
    """Percent-encode spaces, "%" and all but printable ASCII; long names are cut."""
    return quote(name, safe=_IN_A_HEADER)[:MAX_NAME]


def calling_context() -> ssl.SSLContext:
    """Make the TLS context of clients; without files it trusts the system's authorities.

    Raises:
        ConfigError: a file cannot be used.
    """
    files = calling_files()
    try:
        return client_context(files)
    except OSError as error:  # ssl.SSLError is one
        reason = getattr(error, "reason", None) or error.strerror
        named = ", ".join(filter(None, (files.ca, files.certificate, files.key)))
        raise ConfigError(
            f"--ca, --cert, --cert-key: {named}: not usable for TLS: {reason}"
        ) from error
