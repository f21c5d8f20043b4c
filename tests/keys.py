"""Key files for tests, and the headers of callers who have the keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from npu_gr.core.kinds import Scope
from npu_gr.server.auth.keys import ANY_TENANT, KeyEntry, KeyFile, hash_of, to_yaml


def secret(name: str) -> str:
    return f"ngr_a-secret-that-is-long-enough-of-{name}"


def bearer(name: str = "all") -> dict[str, str]:
    return {"Authorization": f"Bearer {secret(name)}"}


def entry(
    name: str = "all", *, tenant: str = ANY_TENANT, scopes: list[Scope] | None = None, **fields: Any
) -> KeyEntry:
    return KeyEntry(
        name=name,
        sha256=hash_of(secret(name).encode()),
        tenant=tenant,
        scopes=list(Scope) if scopes is None else scopes,
        **fields,
    )


def write_keys(path: Path, *entries: KeyEntry) -> str:
    """Write a file of these keys, or of one that may do everything.

    Returns its path as the configuration has it.
    """
    path.write_text(to_yaml(KeyFile(keys=list(entries or (entry(),)))))
    return str(path)
