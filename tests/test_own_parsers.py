"""SECURITY.md lists every module of ours that takes bytes of others apart, and why it does."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.sources import ROOT

# What talks to others: clients, gateways, instances, Redis, Kafka.
PLACES = (
    "npu_gr/server",
    "npu_gr/route",
    "npu_gr/client",
    "npu_gr/feature_store",
    "npu_gr/history_store/redis.py",
    "npu_gr/history_store/redis_records.py",
    "npu_gr/tools/consume_message.py",
    "npu_gr/tools/kafka_ingest.py",
    "npu_gr/core/logs.py",
)
# Functions that take bytes or texts apart, next to those of `re`.
TAKES_APART = {
    *("from_bytes", "frombuffer", "Struct", "unpack", "unpack_from", "iter_unpack", "memoryview"),
    *("unquote", "unquote_to_bytes", "urlsplit", "parse_qs", "b64decode", "urlsafe_b64decode"),
    *("readuntil", "readline", "readexactly", "recv", "FromString", "ParseFromString"),
}
# Modules in these places that take only our own texts apart.
OF_OUR_OWN = {
    "npu_gr/route/config.py": "the operator's configuration",
    "npu_gr/route/haproxy.py": "the table of kinds",
    "npu_gr/server/auth/keys.py": "the operator's key file",
    "npu_gr/server/openapi.py": "the table of kinds",
    "npu_gr/server/schemas/media.py": "messages of msgspec, which names the field",
}


def taking_apart(path: Path) -> set[str]:
    """The functions that a module calls, or hands on, to take bytes or texts apart."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            of = node.value.id if isinstance(node.value, ast.Name) else ""
            is_known = node.attr in TAKES_APART and of != "msgspec"
            is_loads = node.attr == "loads" and of in ("json", "orjson", "pickle")
            if is_known or is_loads or (of == "re" and node.attr.islower()):
                found.add(node.attr)
        elif isinstance(node, ast.Name) and node.id in TAKES_APART:
            found.add(node.id)
    return found


def listed() -> dict[str, str]:
    """Module -> the reason in SECURITY.md's table."""
    section = (ROOT / "SECURITY.md").read_text().partition("### Own parsers\n")[2]
    section = section.partition("\n### ")[0]
    rows = re.findall(r"^\| (`npu_gr/.+?) \| (.+?) \| (.+?) \|$", section, re.MULTILINE)
    return {
        name: why for names, _, why in rows for name in re.findall(r"`(npu_gr/[\w/]+\.py)`", names)
    }


def modules() -> dict[str, Path]:
    found = {}
    for place in PLACES:
        path = ROOT / place
        for one in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            if not one.stem.endswith("_pb2"):
                found[one.relative_to(ROOT).as_posix()] = one
    return found


def test_every_module_that_takes_bytes_of_others_apart_is_listed_with_its_reason() -> None:
    taking = {name for name, path in modules().items() if taking_apart(path)}
    assert set(listed()) | set(OF_OUR_OWN) == taking
    assert not set(listed()) & set(OF_OUR_OWN)
    assert all(len(why.split()) >= 3 for why in listed().values())


def test_what_is_written_by_hand_is_found(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    for text, found in (
        ("import struct\nHEAD = struct.Struct('<I')\n", {"Struct"}),
        ("size = int.from_bytes(data)\n", {"from_bytes"}),
        ("import re\nA = re.compile(b'x')\n", {"compile"}),
        ("import re\nA: re.Pattern[str]\n", set()),
        ("for one in map(pb.Value.FromString, given): pass\n", {"FromString"}),
        ("from urllib.parse import unquote\nuser = unquote(path)\n", {"unquote"}),
    ):
        path.write_text(text)
        assert taking_apart(path) == found
