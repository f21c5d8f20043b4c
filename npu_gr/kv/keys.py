"""What a cached prefix is known by, and an index of keys by user."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

from npu_gr.core.request import UserKey


class PrefixKey(NamedTuple):
    """One changed field is another prefix (the version fence, I6 of `relaygr.md`)."""

    user: UserKey
    model_version: str
    layout_id: str
    fingerprint: str


class _Keyed(Protocol):
    @property
    def key(self) -> PrefixKey: ...


E = TypeVar("E", bound=_Keyed)


class ByUser(Generic[E]):
    """Entries of each user, oldest first. A user has few, so a list is the index."""

    def __init__(self) -> None:
        self._entries: dict[UserKey, list[E]] = {}

    def add(self, entry: E) -> None:
        """Take the entry in."""
        self._entries.setdefault(entry.key.user, []).append(entry)

    def remove(self, entry: E) -> None:
        """Take it out; it is there."""
        entries = self._entries[entry.key.user]
        entries.remove(entry)
        if not entries:
            del self._entries[entry.key.user]

    def of(self, user: UserKey) -> list[E]:
        """A copy of the user's entries."""
        return list(self._entries.get(user, ()))

    def matching(self, user: UserKey, model_version: str, layout_id: str) -> Iterator[E]:
        """The user's entries of one model and layout, newest first."""
        for entry in reversed(self._entries.get(user, ())):
            if entry.key.model_version == model_version and entry.key.layout_id == layout_id:
                yield entry
