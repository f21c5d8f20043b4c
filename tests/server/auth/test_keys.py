"""A key file says who may do what; what is wrong with it is said by field and limit."""

from __future__ import annotations

from contextlib import suppress
from random import Random

import pytest

from npu_gr.core.errors import ConfigError, Forbidden
from npu_gr.core.kinds import Scope
from npu_gr.server.auth.keys import Key, KeyFile, hash_of, parse_keys, to_yaml

ENTRY = f"""
keys:
- name: ranking
  sha256: {hash_of(b"secret")}
  tenant: shop
  scopes: [infer, ingest]
  rate_per_s: 500.0
  expires: '2027-01-31T00:00:00Z'
"""


def test_an_entry_and_back() -> None:
    file = parse_keys(ENTRY, "f")
    key = Key.of(file.keys[0])
    assert (key.name, key.tenant, key.rate_per_s) == ("ranking", "shop", 500.0)
    assert key.scopes == {Scope.INFER, Scope.INGEST}
    assert key.expires_at == 1801353600.0
    assert parse_keys(to_yaml(file), "f") == file
    assert parse_keys("", "f") == KeyFile() == parse_keys(to_yaml(KeyFile()), "f")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ranking", "a key", r"f: keys\[0\]\.name: .*matching regex"),
        ("sha256: ", "sha256: x", r"f: keys\[0\]\.sha256"),
        (
            "[infer, ingest]",
            "[infers]",
            r"f: keys\[0\]\.scopes\[0\]: 'infers' must be one of .*; did "
            r"you mean infer\?",
        ),
        ("[infer, ingest]", "[]", r"f: keys\[0\]\.scopes"),
        ("500.0", "0.0", r"f: keys\[0\]\.rate_per_s: .*> 0"),
        ("00Z'", "00'", r"f: keys\[0\]: expires: 2027-01-31T00:00:00 has no time zone"),
        ("2027-01-31T00:00:00Z", "9999-12-31T23:00:00-14:00", r"f: keys\[0\]: expires: .*9998"),
        ("  tenant: shop\n", "", r"f: keys\[0\]: tenant is missing"),
        ("tenant", "tennant", r"f: unknown key keys\[0\]\.tennant; did you mean tenant\?"),
    ],
)
def test_what_is_wrong_is_named(old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_keys(ENTRY.replace(old, new, 1), "f")


@pytest.mark.parametrize(
    "text",
    [
        *("one-key-a-line", "[1]", "a: b", "? [1]\n: 2\nkeys: []", "keys: " + "[" * 5000),
        *(
            "keys: 2027-13-45",
            "keys: !!int x",
            "keys: !!bool x",
            "keys: !!timestamp x",
            "keys: " + "1" * 5000,
        ),
    ],
)
def test_what_is_no_key_file(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^f: "):
        parse_keys(text, "f")


def test_names_and_hashes_are_given_once() -> None:
    twice = ENTRY + ENTRY.split("keys:\n")[1]
    with pytest.raises(ConfigError, match="name ranking is given twice"):
        parse_keys(twice, "f")
    with pytest.raises(ConfigError, match=r"sha256 .* is given twice"):
        parse_keys(ENTRY + ENTRY.split("keys:\n")[1].replace("ranking", "other"), "f")


def test_scopes_and_tenants() -> None:
    key = Key.of(parse_keys(ENTRY, "f").keys[0])
    key.require(Scope.INFER)
    with pytest.raises(Forbidden, match="has the scopes infer, ingest; needs admin"):
        key.require(Scope.ADMIN)
    assert key.tenant_of("") == key.tenant_of("shop") == "shop"
    with pytest.raises(Forbidden, match="for the tenant 'shop' only"):
        key.tenant_of("bank")
    every = Key.of(parse_keys(ENTRY.replace("shop", "'*'"), "f").keys[0])
    assert every.tenant_of("bank") == "bank"


BROKEN = (
    *(
        "!!int x",
        "!!float y",
        "2027-13-45",
        "!!timestamp x",
        "*a",
        "&a [*a]",
        "<<: [1]",
        "? {}",
        "!!set {a}",
        "- - ",
    ),
    *("~", "", "\0", "\t", "'", "[", "{", ":", "\ud7ff"),
)


def test_no_file_whatever_is_in_it_ends_otherwise_than_in_words() -> None:
    """Another error would end the task that follows the file, and all later revocations."""
    random = Random(0)
    num_read = 0
    for _ in range(1500):
        text = list(ENTRY)
        for _ in range(random.randint(1, 3)):
            at = random.randrange(len(text))
            text[at : at + random.randint(0, 9)] = random.choice(BROKEN)
        with suppress(ConfigError):
            num_read += len(parse_keys("".join(text), "f").keys)
    assert num_read > 0
