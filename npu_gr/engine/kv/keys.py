"""The key of a cached prefix, and an index of entries by user."""

from __future__ import annotations

from typing import Generic, NamedTuple, Protocol, TypeVar

from npu_gr.core.history import UserKey


class PrefixKey(NamedTuple):
    """Identifies a prefix. Prefixes whose keys differ in one field never stand for each other (the version fence)."""

    user: UserKey
    model_version: str
    layout_id: str  # `KVLayout.layout_id`
    fingerprint: str  # of the tokens


class _Keyed(Protocol):
    @property
    def key(self) -> PrefixKey: ...


E = TypeVar("E", bound=_Keyed)


class ByUser(Generic[E]):
    """The entries of each user, oldest first. A user has few entries, so a list is enough."""

    def __init__(self) -> None:
        self._entries: dict[UserKey, list[E]] = {}

    def add(self, entry: E) -> None:
        """Add an entry."""
        self._entries.setdefault(entry.key.user, []).append(entry)

    def remove(self, entry: E) -> None:
        """Remove an entry that was added."""
        entries = self._entries[entry.key.user]
        entries.remove(entry)
        if not entries:
            del self._entries[entry.key.user]

    def of(self, user: UserKey) -> list[E]:
        """Return the user's entries, in a list of their own."""
        return list(self._entries.get(user, ()))

    def matching(self, user: UserKey, model_version: str, layout_id: str) -> list[E]:
        """List the user's entries of one model version and page layout, newest first."""
        return [
            entry
            for entry in reversed(self._entries.get(user, ()))
            if entry.key.model_version == model_version and entry.key.layout_id == layout_id
        ]
