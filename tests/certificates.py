"""Certificates for tests, made by openssl: an authority, and what it signs."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any, NamedTuple


class Pair(NamedTuple):
    """A certificate and its key, as files."""

    certificate: Path
    key: Path

    def replace_by(self, other: Pair) -> None:
        """Write another pair into these files, the key first, as a careless operator would."""
        shutil.copyfile(other.key, self.key)
        shutil.copyfile(other.certificate, self.certificate)


class Authority:
    """Signs certificates. Its own is `ca`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._name = name
        self.ca = folder / f"{name}.crt"
        self._key = folder / f"{name}.key"
        self._num = 0
        _openssl(
            *("req", "-x509", *_NEW_KEY, "-keyout", self._key, "-out", self.ca),
            *(
                "-days",
                "2",
                "-subj",
                f"/CN={name}",
                "-addext",
                "keyUsage=critical,keyCertSign,cRLSign",
            ),
        )

    def issue(self, *names: str, days: int = 2) -> Pair:
        """Sign a certificate of these names or addresses; `days` below 0 = it has expired."""
        self._num += 1
        stem = self._folder / f"{self._name}-{self._num}"
        pair = Pair(stem.with_suffix(".crt"), stem.with_suffix(".key"))
        request, extensions = stem.with_suffix(".csr"), stem.with_suffix(".ext")
        given = [
            f"IP:{name}" if name[-1].isdigit() or ":" in name else f"DNS:{name}" for name in names
        ]
        extensions.write_text(
            f"subjectAltName={','.join(given)}\nkeyUsage=critical,digitalSignature\n"
        )
        _openssl("req", *_NEW_KEY, "-keyout", pair.key, "-out", request, "-subj", f"/CN={names[0]}")
        _openssl(
            *(
                "x509",
                "-req",
                "-in",
                request,
                "-CA",
                self.ca,
                "-CAkey",
                self._key,
                "-CAcreateserial",
            ),
            *("-out", pair.certificate, "-days", str(days), "-extfile", extensions),
        )
        pair.key.chmod(0o600)
        return pair

    def client(self, shows: Pair | None = None) -> ssl.SSLContext:
        """Make the context of a client that trusts this authority alone."""
        context = ssl.create_default_context(cafile=self.ca)
        if shows is not None:
            context.load_cert_chain(shows.certificate, shows.key)
        return context


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def _openssl(*arguments: Any) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
