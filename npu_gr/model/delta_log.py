"""The deltas of a ranker in a folder, in order, and which of them an instance serves.

    000000000041.delta.safetensors    a file is complete and synced before it has its name
    000000000042.delta.safetensors
    served.json                       after a rollback: {"sequence":41,"last":42}

The newest delta is served, or the one that `served.json` names while no newer one than its `last`
exists. A delta names the weights on which it rests (`base`), so the way from the checkpoint to the
served delta is found backwards:

    checkpoint v0 <- 41 (v0 to v1) <- 42 (v1 to v2)        served: 42, v2
    rolled back to 41; then 43 (v1 to v3)                  served: 43, v3; 42 is on no way

A checkpoint whose weights are already those of delta 41 needs no older file: they may be removed.
Several instances may read one folder; each number is given once (`publish`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from npu_gr.core.durable_files import replace_file
from npu_gr.core.errors import AppliedAlready, DeltaError
from npu_gr.core.served import ItemChange
from npu_gr.model.delta import (
    SUFFIX,
    Delta,
    Manifest,
    file_name,
    make_delta,
    publish,
    read_manifest,
    write_delta,
)
from npu_gr.model.weights import read_weights

SERVED = "served.json"
CHECKPOINT = 0  # as a sequence number: the weights of the checkpoint itself


class Link(NamedTuple):
    """One delta on the way from the checkpoint to the served weights."""

    path: Path
    manifest: Manifest

    @property
    def sequence(self) -> int:
        """Number of the delta."""
        return self.manifest.sequence


class ServedNumber(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `served.json`."""

    sequence: int  # `CHECKPOINT` = no delta
    last: int  # newest delta when it was written


class DeltaLog:
    """A folder of deltas. Its methods block; call them in a thread, one at a time."""

    def __init__(self, folder: Path) -> None:
        """Read nothing yet; the folder need not exist."""
        self.folder = folder
        self._manifests: dict[str, Manifest] = {}  # by file name; a file never changes

    def pull(self) -> None:
        """Bring the folder up to date; others write into it themselves."""

    def files(self) -> list[Link]:
        """List the deltas, oldest first.

        Raises:
            DeltaError: one cannot be read, or its name is not its number.
        """
        try:
            names = sorted(path.name for path in self.folder.glob(f"*{SUFFIX}"))
        except OSError as error:
            raise DeltaError(f"{self.folder}: {error.strerror}") from error
        found = {}
        for name in names:
            if name.startswith("."):
                continue
            manifest = self._manifests.get(name) or read_manifest(self.folder / name)
            if file_name(manifest.sequence) != name:
                raise DeltaError(
                    f"{self.folder / name}: has delta {manifest.sequence}; its name must be "
                    f"{file_name(manifest.sequence)}"
                )
            found[name] = manifest
        self._manifests = found
        return [Link(self.folder / name, manifest) for name, manifest in found.items()]

    def way(self, base: str, target: int | None = None) -> list[Link]:
        """Find the deltas that lead from a checkpoint to the served weights, oldest first.

        Args:
            base: Digest of the checkpoint's weights.
            target: Number to go to in the place of the served one; `CHECKPOINT` for none.

        Raises:
            DeltaError: no delta has that number, or none leads there from this checkpoint.
        """
        files = self.files()
        if not files:
            if target:
                raise DeltaError(f"delta {target} is not kept; there is none")
            return []
        head = self._head(files[-1].sequence) if target is None else target
        if head == CHECKPOINT:
            return []
        by_number = {link.sequence: link for link in files}
        if head not in by_number:
            raise DeltaError(
                f"delta {head} is not kept; there are {files[0].sequence} to {files[-1].sequence}"
            )
        link = by_number[head]
        if base == link.manifest.result != link.manifest.base:
            return []  # the checkpoint was saved with this delta
        way = [link]
        while way[-1].manifest.base != base:
            before = [
                one
                for one in files
                if one.sequence < way[-1].sequence and one.manifest.result == way[-1].manifest.base
            ]
            if not before:
                raise DeltaError(
                    f"delta {way[-1].sequence} of {self.folder} needs the weights "
                    f"{way[-1].manifest.base}, and neither the checkpoint ({base}) nor an older "
                    "delta has them"
                )
            way.append(before[-1])
        return way[::-1]

    def check_next(self, delta: Manifest, served: str) -> None:
        """Check that a delta follows the newest one, and rests on the served weights.

        Args:
            delta: The delta.
            served: Digest of the served weights.

        Raises:
            AppliedAlready: the log has this very delta.
            DeltaError: it is a duplicate, some are missing before it, or its base is another one.
        """
        files = self.files()
        number = delta.sequence
        if files and number <= files[-1].sequence:
            newest = f"the newest is {files[-1].sequence}"
            if any(one.manifest == delta for one in files):
                what = f"delta {number}: duplicate: it is applied already; {newest}"
                raise AppliedAlready(what, number)
            raise DeltaError(
                f"delta {number}: duplicate: another delta has this number or a later; {newest}"
            )
        if files and number > files[-1].sequence + 1:
            raise DeltaError(
                f"delta {number}: gap: the newest is {files[-1].sequence}, so "
                f"{files[-1].sequence + 1} must come first"
            )
        if delta.base != served:
            raise DeltaError(
                f"delta {number}: wrong base: it changes the weights {delta.base}, and {served} "
                "are served"
            )

    def add(self, made: Path, delta: Manifest) -> Link:
        """Give a complete, checked file in the folder its name, durably.

        Raises:
            DeltaError: another writer was first, or the disk failed; nothing was added.
        """
        path = self.folder / file_name(delta.sequence)
        try:
            publish(made, path)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise DeltaError(f"{path}: cannot be written: {error.strerror}") from error
        return Link(path, delta)

    def roll_back(self, target: int) -> None:
        """Name the served delta, durably; `CHECKPOINT` for none.

        Raises:
            DeltaError: the disk failed; the same delta is served as before.
        """
        files = self.files()
        served = ServedNumber(target, files[-1].sequence if files else CHECKPOINT)
        try:
            replace_file(self.folder / SERVED, msgspec.json.encode(served))
        except OSError as error:
            raise DeltaError(f"{self.folder / SERVED}: {error.strerror}") from error

    def _head(self, last: int) -> int:
        path = self.folder / SERVED
        try:
            served = msgspec.json.decode(path.read_bytes(), type=ServedNumber)
        except FileNotFoundError:
            return last
        except (OSError, msgspec.MsgspecError) as error:
            raise DeltaError(f"{path}: {error}") from error
        return served.sequence if served.last == last else last


def write_next(
    folder: Path, old: Path, new: Path, item_key: bytes = b"", items: Sequence[ItemChange] = ()
) -> tuple[Path, Delta]:
    """Write what changed from one checkpoint to another as the next delta of a folder.

    Args:
        folder: Folder of deltas, whose first one has the number 1.
        old, new: Folders of checkpoints of one shape.
        item_key: Key of their items' names.
        items: Changes of the catalogue, in order.

    Returns:
        The file, and the delta.

    Raises:
        CheckpointError: a checkpoint cannot be read.
        DeltaError: they differ in more than weights, or the folder cannot be read or written.
    """
    files = DeltaLog(folder).files()
    number = files[-1].sequence + 1 if files else 1
    made = make_delta(read_weights(old), read_weights(new), number, item_key, items)
    path = folder / file_name(number)
    write_delta(made, path)
    return path, made
