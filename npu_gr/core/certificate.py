"""Read the expiry of a certificate from its DER.

`ssl` exposes the fields of peers and authorities only, and a dependency for one date would be the
largest one with access to our keys.

    Certificate ::= SEQUENCE { TBSCertificate ::= SEQUENCE {
        [0] version?, serial, algorithm, issuer,
        Validity ::= SEQUENCE { notBefore, notAfter }, ... }, ... }           (RFC 5280, 4.1)
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

_VERSION = 0xA0
_UTC_TIME = 0x17
_GENERALIZED_TIME = 0x18
_BEFORE_VALIDITY = 3  # serial, algorithm, issuer


class _Element(NamedTuple):
    tag: int
    value: bytes
    rest: bytes  # the bytes after it


def expires_at(der: bytes) -> float:
    """Return when a certificate expires, in seconds since 1970.

    Raises:
        ValueError: it is not a certificate.
    """
    fields = _first(_first(der).value).value
    if _first(fields).tag == _VERSION:
        fields = _first(fields).rest
    for _ in range(_BEFORE_VALIDITY):
        fields = _first(fields).rest
    not_after = _first(_first(_first(fields).value).rest)
    if not_after.tag not in (_UTC_TIME, _GENERALIZED_TIME):
        raise ValueError("the certificate has no expiry date")
    text = not_after.value.decode("ascii")
    if not_after.tag == _UTC_TIME:  # the year has two digits: 1950 to 2049
        text = ("19" if text[:2] >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _first(data: bytes) -> _Element:
    if len(data) < 2:
        raise ValueError("the certificate is truncated")
    tag, size = data[0], data[1]
    begin = 2
    if size & 0x80:  # the low bits are the number of bytes of the length
        begin += size & 0x7F
        size = int.from_bytes(data[2:begin])
    end = begin + size
    if end > len(data):
        raise ValueError("the certificate is truncated")
    return _Element(tag, data[begin:end], data[end:])
