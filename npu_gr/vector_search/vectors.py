"""Saves and loads the vectors of `match`: a folder with `vectors.safetensors` and `manifest.json`.

Both are written to temporary files and then renamed, so an interrupted save leaves no partial file.
The manifest has the version, which is the digest of `vectors.safetensors`; `load` rejects a file
with another digest.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import DataError
from npu_gr.core.file_permissions import make_private
from npu_gr.core.history import UserKey
from npu_gr.core.memory import free_memory, misfit
from npu_gr.vector_search.fold import Activation, Folding, JoinedFolding, Norm, SourceItems

FORMAT = 2
# Memory that loading takes at most, by the size of the file: its tensors, what is made of them for
# the search, and the names of users as objects.
LOADS = 2.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Vectors:
    """The vectors of one target domain. U = users, I = items, d = dimension."""

    user_keys: list[UserKey]  # [U], distinct; users of two tenants differ, even with equal names
    item_ids: I64  # [I] external ids, ascending and distinct
    users: F32  # [U, d]; the row of a user without any history has no meaning
    items: F32  # [I, d]
    in_target: npt.NDArray[np.bool_]  # [U] whether the user had target history in the training
    in_source: npt.NDArray[np.bool_]  # [U] whether the user had source history in the training
    popularity: I64  # [I] target edges of each item
    seen_starts: I64  # [U + 1] user u had seen_items[seen_starts[u] : seen_starts[u + 1]]
    # [target edges] item rows, by user; if the folding has a decay, oldest event first
    seen_items: npt.NDArray[np.int32]
    figures: dict[str, float]  # metrics of the training, by name
    # computes vectors of new histories; None = users keep their trained vectors
    folding: Folding | JoinedFolding | None = None
    source: SourceItems | None = None  # None = there is no source domain
    version: str = ""  # set by `save`


_SOURCE_TENSORS = ("seen_starts", "seen_items", "near_duplicate_starts", "near_duplicate_items")
_OLD_SOURCE_TENSORS = {"near_duplicate_starts": "twin_starts", "near_duplicate_items": "twin_items"}


class _FoldingKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    norm: Norm
    activation: Activation
    decay: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None


class _JoinedKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    encoder: _FoldingKind | None
    encoder_weight: float
    popularity: float


class _Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: int
    version: str  # xxh3-128 of vectors.safetensors
    num_bytes: int
    num_users: int
    num_items: int
    dim: int
    checksums: dict[str, str]  # xxh3-64 of each tensor's bytes
    figures: dict[str, float] = {}
    folding: _FoldingKind | None = None
    joined: _JoinedKind | None = None


def save(vectors: Vectors, folder: Path) -> str:
    """Write vectors to a folder, which is created if it does not exist.

    Returns:
        The version of the vectors.

    Raises:
        DataError: the folder cannot be written.
    """
    names, name_ends = _joined([key.user for key in vectors.user_keys])
    tensors: dict[str, npt.NDArray[np.generic]] = {
        "user_names": names,
        "user_name_ends": name_ends,
        "item_ids": vectors.item_ids,
        "users": vectors.users,
        "items": vectors.items,
        "in_target": vectors.in_target,
        "in_source": vectors.in_source,
        "popularity": vectors.popularity,
        "seen_starts": vectors.seen_starts,
        "seen_items": vectors.seen_items,
    }
    if (source := vectors.source) is not None:
        tensors |= {f"source.{name}": getattr(source, name) for name in _SOURCE_TENSORS}
        tensors |= {} if source.ids is None else {"source.ids": source.ids}
    tenants = {
        tenant: place
        for place, tenant in enumerate(dict.fromkeys(key.tenant for key in vectors.user_keys))
    }
    if any(tenants):
        tensors["tenant_names"], tensors["tenant_name_ends"] = _joined(list(tenants))
        tensors["user_tenants"] = np.array(
            [tenants[key.tenant] for key in vectors.user_keys], np.int32
        )
    kind = joined = None
    if isinstance(fold := vectors.folding, JoinedFolding):
        joined = _JoinedKind(
            encoder=_kind(fold.encoder),
            encoder_weight=fold.encoder_weight,
            popularity=fold.popularity,
        )
        tensors |= {"fold.degrees": fold.degrees} | _fold_tensors(fold.encoder)
        if fold.target_states is not None and fold.source_states is not None:
            tensors |= {
                "fold.target_states": fold.target_states,
                "fold.source_states": fold.source_states,
            }
    else:
        kind = _kind(fold)
        tensors |= _fold_tensors(fold)
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    path = folder / "vectors.safetensors"
    manifest = folder / "manifest.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        make_private(path.with_suffix(".tmp"))  # the file contains names of users
        save_file(tensors, path.with_suffix(".tmp"))
        about = _Manifest(
            format=FORMAT,
            version=_digest(path.with_suffix(".tmp")),
            num_bytes=path.with_suffix(".tmp").stat().st_size,
            num_users=len(vectors.user_keys),
            num_items=len(vectors.item_ids),
            dim=vectors.items.shape[1],
            checksums={
                name: xxhash.xxh3_64_hexdigest(tensor.tobytes()) for name, tensor in tensors.items()
            },
            figures=vectors.figures,
            folding=kind,
            joined=joined,
        )
        text = msgspec.json.format(msgspec.json.encode(about), indent=2) + b"\n"
        manifest.with_suffix(".json.tmp").write_bytes(text)
        os.replace(path.with_suffix(".tmp"), path)
        os.replace(manifest.with_suffix(".json.tmp"), manifest)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{folder}: cannot be written: {error}") from error
    return about.version


def check_fits(folder: Path) -> None:
    """Check that vectors can be loaded while others serve.

    Raises:
        DataError: free memory is too small; the message has the sizes.
    """
    path = folder / "vectors.safetensors"
    size = path.stat().st_size if path.exists() else 0
    if words := misfit(folder, LOADS * size, free_memory()):
        raise DataError(words)


def load(folder: Path) -> Vectors:
    """Read vectors and check them against their manifest.

    Raises:
        DataError: a file is missing, damaged, of another format, or does not fit its manifest.
    """
    path = folder / "vectors.safetensors"
    manifest = folder / "manifest.json"
    try:
        about = msgspec.json.decode(manifest.read_bytes(), type=_Manifest)
        if about.format != FORMAT:
            raise DataError(f"{manifest}: format {about.format}, this version reads {FORMAT}")
        if _digest(path) != about.version:
            raise DataError(f"{path}: its digest differs from that in manifest.json")
        tensors = load_file(path)
        vectors = Vectors(
            user_keys=_user_keys(tensors, path),
            item_ids=tensors["item_ids"],
            users=tensors["users"].astype(np.float32, copy=False),
            items=tensors["items"].astype(np.float32, copy=False),
            in_target=tensors["in_target"],
            in_source=tensors["in_source"],
            popularity=tensors["popularity"],
            seen_starts=tensors["seen_starts"],
            seen_items=tensors["seen_items"],
            figures=about.figures,
            folding=_joined_folding(about.joined, tensors)
            if about.joined
            else _folding(about.folding, tensors),
            source=_source(tensors),
            version=about.version,
        )
    except OSError as error:
        raise DataError(f"{folder}: {error.strerror}: {error.filename}") from error
    except (msgspec.MsgspecError, SafetensorError, UnicodeDecodeError) as error:
        raise DataError(f"{folder}: {error}") from error
    except KeyError as error:
        raise DataError(f"{path}: no tensor {error}") from error
    _check(vectors, path)
    return vectors


def _joined(texts: list[str]) -> tuple[npt.NDArray[np.uint8], I64]:
    """Convert texts to tensors: their concatenated bytes, and the end of each text."""
    encoded = [text.encode() for text in texts]
    return np.frombuffer(b"".join(encoded), np.uint8), np.cumsum(
        [len(text) for text in encoded], dtype=np.int64
    )


def _texts(joined: npt.NDArray[Any], ends: npt.NDArray[Any]) -> list[str]:
    """Convert the result of `_joined` back."""
    data = joined.tobytes()
    return [data[start:end].decode() for start, end in pairwise([0, *ends.tolist()])]


def _user_keys(tensors: dict[str, npt.NDArray[Any]], path: Path) -> list[UserKey]:
    """Read the user of each row. Without tensors of tenants, all users are of the tenant "".

    Raises:
        DataError: a user has no tenant, or two rows.
    """
    names = _texts(tensors["user_names"], tensors["user_name_ends"])
    keys = [UserKey("", name) for name in names]
    if "user_tenants" in tensors:
        tenants = _texts(tensors["tenant_names"], tensors["tenant_name_ends"])
        places = tensors["user_tenants"]
        if places.shape != (len(names),) or not all(
            0 <= place < len(tenants) for place in places.tolist()
        ):
            raise DataError(
                f"{path}: user_tenants must have one of {len(tenants)} tenants for each of "
                f"{len(names)} users"
            )
        keys = [
            UserKey(tenants[place], name)
            for place, name in zip(places.tolist(), names, strict=True)
        ]
    if len(set(keys)) < len(keys):
        raise DataError(f"{path}: a user occurs twice")
    return keys


def _folding(kind: _FoldingKind | None, tensors: dict[str, npt.NDArray[Any]]) -> Folding | None:
    if kind is None:
        return None
    return Folding(
        users=tensors.get("fold.users"),
        states=tensors["fold.states"],
        matrices=tensors.get("fold.matrices"),
        degrees=tensors["fold.degrees"],
        norm=kind.norm,
        activation=kind.activation,
        decay=kind.decay,
    )


def _joined_folding(kind: _JoinedKind, tensors: dict[str, npt.NDArray[Any]]) -> JoinedFolding:
    return JoinedFolding(
        target_states=tensors.get("fold.target_states"),
        source_states=tensors.get("fold.source_states"),
        encoder=_folding(kind.encoder, tensors),
        encoder_weight=kind.encoder_weight,
        popularity=kind.popularity,
        degrees=tensors["fold.degrees"],
    )


def _kind(fold: Folding | None) -> _FoldingKind | None:
    return (
        None
        if fold is None
        else _FoldingKind(norm=fold.norm, activation=fold.activation, decay=fold.decay)
    )


def _fold_tensors(fold: Folding | None) -> dict[str, npt.NDArray[np.generic]]:
    if fold is None:
        return {}
    tensors: dict[str, npt.NDArray[np.generic]] = {
        "fold.states": fold.states,
        "fold.degrees": fold.degrees,
    }
    tensors |= {} if fold.users is None else {"fold.users": fold.users}
    return tensors | ({} if fold.matrices is None else {"fold.matrices": fold.matrices})


def _source(tensors: dict[str, npt.NDArray[Any]]) -> SourceItems | None:
    if "source.seen_starts" not in tensors:
        return None
    names = {name: name for name in _SOURCE_TENSORS}
    if "source.twin_starts" in tensors:  # a folder of an earlier version
        names |= _OLD_SOURCE_TENSORS
    return SourceItems(
        ids=tensors.get("source.ids"),
        **{name: tensors[f"source.{written}"] for name, written in names.items()},
    )


def _check(vectors: Vectors, path: Path) -> None:
    num_users = len(vectors.user_keys)
    num_items = len(vectors.item_ids)
    dim = vectors.items.shape[-1]
    shapes: dict[str, tuple[npt.NDArray[Any] | None, tuple[int, ...]]] = {
        "users": (vectors.users, (num_users, dim)),
        "items": (vectors.items, (num_items, dim)),
        "in_target": (vectors.in_target, (num_users,)),
        "in_source": (vectors.in_source, (num_users,)),
        "popularity": (vectors.popularity, (num_items,)),
        "seen_starts": (vectors.seen_starts, (num_users + 1,)),
    }
    source = vectors.source
    num_source = 0 if source is None else len(source.near_duplicate_starts) - 1
    if source is not None:
        shapes["source.ids"] = (source.ids, (num_source,))
        shapes["source.seen_starts"] = (source.seen_starts, (num_users + 1,))
    fold = vectors.folding
    if isinstance(fold, JoinedFolding):
        width = dim - bool(fold.popularity) - (fold.encoder.states.shape[-1] if fold.encoder else 0)
        if not (fold.target_states is None) == (width == 0):
            raise DataError(f"{path}: {width} columns are left for fold.target_states")
        shapes |= {
            "fold.target_states": (fold.target_states, (num_items, width)),
            "fold.source_states": (fold.source_states, (num_source, width)),
            "fold.degrees": (fold.degrees, (num_items,)),
        }
        dim = fold.encoder.states.shape[-1] if fold.encoder else 0
        fold = fold.encoder
    if fold is not None:
        num_layers = len(fold.states)
        shapes |= {
            "fold.users": (fold.users, (num_users, dim)),
            "fold.states": (fold.states, (num_layers, num_items, dim)),
            "fold.matrices": (fold.matrices, (num_layers, 2 * dim, dim)),
            "fold.degrees": (fold.degrees, (num_items,)),
        }
    for name, (tensor, shape) in shapes.items():
        if tensor is not None and tensor.shape != shape:
            raise DataError(f"{path}: {name} is {tensor.shape}, not {shape}")
    if num_items == 0 or (np.diff(vectors.item_ids) <= 0).any():
        raise DataError(f"{path}: item_ids must ascend, and there must be at least one")
    for name, (tensor, _) in shapes.items():
        if tensor is not None and not np.isfinite(tensor).all():
            raise DataError(f"{path}: {name} has a value that is not finite")
    _check_rows(vectors, path)
    _check_scores_differ(vectors, path)


def _check_rows(vectors: Vectors, path: Path) -> None:
    """Check that lists of rows are complete and in range.

    Raises:
        DataError: names the tensor.
    """
    num_items = len(vectors.item_ids)
    lists = {"seen": (vectors.seen_starts, vectors.seen_items, num_items)}
    if (source := vectors.source) is not None:
        num_source = len(source.near_duplicate_starts) - 1
        lists["source.seen"] = (source.seen_starts, source.seen_items, num_source)
        lists["source.near_duplicate"] = (
            source.near_duplicate_starts,
            source.near_duplicate_items,
            num_items,
        )
        if source.ids is not None and (np.diff(source.ids) <= 0).any():
            raise DataError(f"{path}: source.ids must ascend")
    for name, (starts, rows, count) in lists.items():
        if starts[0] != 0 or starts[-1] != len(rows) or (np.diff(starts) < 0).any():
            raise DataError(f"{path}: {name}_starts do not divide {name}_items")
        if len(rows) and not 0 <= rows.min() <= rows.max() < count:
            raise DataError(f"{path}: {name}_items has a row outside 0 .. {count - 1}")


def _check_scores_differ(vectors: Vectors, path: Path) -> None:
    """Check that scores can differ: items differ, and some user with a vector is not all zeros.

    Raises:
        DataError: names the tensor.
    """
    items, has_vector = vectors.items, vectors.in_target | vectors.in_source
    if len(items) > 1 and (items == items[0]).all():
        raise DataError(
            f"{path}: all {len(items)} rows of items are the same, so every item has the same score"
        )
    if has_vector.any() and not vectors.users[has_vector].any():
        raise DataError(f"{path}: users has only zeros, so every item has the same score")


def _digest(path: Path) -> str:
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            state.update(block)
    return state.hexdigest()
