"""Converts Python values to bodies of the wire, and answers to Python values.

items       numbers as raw int64 ids; texts as they are, since the service has the key of their ids
actions     a list of names: their indices depend on the model that answers
timestamps  raw int64 unix seconds
answers     names and scores, and `answer` with all fields of the service
"""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from npu_gr.client.channel import Reply
from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import BadAnswer, TooLarge, Unprocessable
from npu_gr.core.names import answered_ids, is_hashed, item_ids, value_name
from npu_gr.core.text_format import quoted
from npu_gr.server.schemas import fields
from npu_gr.server.schemas.events import MAX_KEY, PRINTABLE
from npu_gr.server.schemas.fields import RankFeatures, RequestFeatures, SignalFeatures
from npu_gr.server.schemas.generate import GenerateOut
from npu_gr.server.schemas.ingest import UserEvents
from npu_gr.server.schemas.match import MatchOut
from npu_gr.server.schemas.media import JSON, MSGPACK
from npu_gr.server.schemas.rank import RankOut
from npu_gr.server.schemas.recommend import RecommendOut

Name = str | int
Names = Sequence[Name] | npt.NDArray[Any]
Cell = bool | int | float | str | Sequence[str | int] | None  # None = missing
Column = Sequence[Cell] | npt.NDArray[Any]
Time = datetime | float  # datetime with a time zone, or unix seconds
Times = Sequence[Time] | npt.NDArray[Any]
L = TypeVar("L", str, bytes)
F = TypeVar("F", SignalFeatures, RequestFeatures, RankFeatures)
Out = TypeVar("Out", GenerateOut, MatchOut, RecommendOut)
S = TypeVar("S")
_MOST_S = 2**62
_TIME = "unix seconds, or a datetime with a time zone"


@dataclass(frozen=True, slots=True, eq=False)
class Behaviours:
    """Behaviours of a user, oldest first, as columns of equal length, with your own names."""

    items: Names  # names such as "SKU-0042-C" or 42; an int64 array may hold ids
    # names such as "purchase"; numbers where ratings are the actions
    actions: Sequence[str | float] | npt.NDArray[Any]
    timestamps: Times  # datetimes with a time zone, or unix seconds; datetime64 is UTC
    features: Mapping[str, Column] = field(default_factory=dict)  # feature -> value of each event

    def on_the_wire(self, field: str) -> fields.History:
        """Convert the columns for a body; `field` is their name in error messages.

        Raises:
            Unprocessable: A value is invalid; the message names the field and the index.
        """
        return fields.History(
            items=item_column(self.items, f"{field}.items"),
            actions=_action_names(self.actions, f"{field}.actions"),
            timestamps=_raw(seconds(self.timestamps, f"{field}.timestamps")),
            features=feature_columns(self.features, f"{field}.features") or msgspec.UNSET,
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Features:
    """Features of a user, a request and its candidates; absent ones are missing values.

    `models()` lists the features that the ranker knows.
    """

    # part of the prefix; None = those of the base, if there is one
    user: Mapping[str, Cell] | None = None
    request: Mapping[str, Cell] = field(default_factory=dict)  # such as hour, page, device
    cross: Mapping[str, Column] = field(default_factory=dict)  # feature -> value of each candidate


def feature_columns(columns: Mapping[str, Column], field: str) -> dict[str, Any]:
    """Convert feature columns for a body: float arrays to raw float32 (NaN = missing).

    All others become lists.

    Raises:
        Unprocessable: A column is invalid; the message names the feature.
    """
    made: dict[str, Any] = {}
    for name, values in columns.items():
        if isinstance(values, str):
            raise Unprocessable(f"{field}.{name}: is one text; give a list with one value per row")
        if not isinstance(values, np.ndarray):
            made[name] = [cell_of(value) for value in values]
        elif _flat(values, f"{field}.{name}").dtype.kind == "f":
            made[name] = values.astype("<f4", copy=False).tobytes()
        else:
            made[name] = values.tolist()
    return made


def feature_row(row: Mapping[str, Cell]) -> dict[str, Any]:
    """Convert the features of one user or request for a body."""
    return {name: cell_of(value) for name, value in row.items()}


def cell_of(value: Any) -> Any:
    """Convert a NumPy scalar or a collection to plain Python values."""
    if isinstance(value, np.generic):
        return value.item()
    return list(value) if isinstance(value, tuple | set | frozenset) else value


def item_column(names: Names, field: str) -> bytes | list[Name]:
    """Return ids as raw bytes, or a list of names if one is a text.

    Raises Unprocessable with the field and the index.
    """
    ids = ids_of(names, field)
    if (isinstance(names, np.ndarray) and names.dtype.kind in "iu") or not is_hashed(ids).any():
        return _raw(ids)
    return listed(names, field)


def ids_of(names: Names, field: str) -> I64:
    """Return the ids of names, [n] -> int64 [n]; that of a text only tells it from others.

    Raises Unprocessable with the field and the index.
    """
    if isinstance(names, np.ndarray) and names.dtype.kind in "iu":
        _flat(names, field)
        if names.size and not 0 <= int(names.min()) <= int(names.max()) < 2**63:
            raise Unprocessable(
                f"{field}: ids are 0 to 2^63 - 1, got {names.min()} to {names.max()}"
            )
        return names.astype(np.int64, copy=False)
    try:
        return item_ids(listed(names, field))
    except ValueError as error:
        raise Unprocessable(f"{field}: {error}") from None


def listed(names: Names, field: str) -> list[Name]:
    """Return names as a list of texts and integers.

    Raises Unprocessable with the field and the index.
    """
    if isinstance(names, str):
        raise Unprocessable(f"{field}: is one text; give a list of names")
    items: list[Any] = (
        _flat(names, field).tolist() if isinstance(names, np.ndarray) else list(names)
    )
    for place, name in enumerate(items):
        if type(name) is str or type(name) is int:
            continue
        if isinstance(name, np.integer | np.str_):
            items[place] = name.item()
        else:
            raise Unprocessable(
                f"{field}: index {place}: {quoted(name)} is not a name (a text or an integer)"
            )
    return items


def _action_names(actions: Sequence[str | float] | npt.NDArray[Any], field: str) -> list[Any]:
    if isinstance(actions, str):
        raise Unprocessable(f"{field}: is one text; give a list of names")
    names: list[Any] = list(_flat(actions, field) if isinstance(actions, np.ndarray) else actions)
    for place, name in enumerate(names):
        if type(name) is str or type(name) is int:
            continue
        if isinstance(name, np.integer | np.str_):
            names[place] = name.item()
        elif isinstance(name, float | np.floating):
            names[place] = value_name(float(str(name)))  # a float32 4.1 must become "4.1"
        else:
            raise Unprocessable(
                f"{field}: index {place}: {quoted(name)} is not an action (a text or a number)"
            )
    return names


def second(moment: Time, field: str) -> int:
    """Return one time as unix seconds. Raises Unprocessable with the field."""
    return int(seconds([moment], field)[0])


def seconds(times: Times, field: str) -> I64:
    """Return times as unix seconds, rounded down: [n] -> int64 [n].

    Raises Unprocessable with the field.
    """
    try:
        found = times if isinstance(times, np.ndarray) else np.array(list(times))
    except ValueError as error:
        raise Unprocessable(f"{field}: contains a list; give a list of times") from error
    if not _flat(found, field).size:
        return np.empty(0, np.int64)
    match found.dtype.kind:
        case "i":
            return found.astype(np.int64, copy=False)
        case "u" | "f":
            if not (np.abs(found) < _MOST_S).all():  # also rejects NaN
                raise Unprocessable(f"{field}: unix seconds must be finite and below 2^62")
            return np.floor(found).astype(np.int64)
        case "M":
            if np.isnat(found).any():
                raise Unprocessable(
                    f"{field}: index {int(np.isnat(found).argmax())}: is NaT, not a time"
                )
            return found.astype("datetime64[s]").astype(np.int64)
        case "O":
            return np.array(
                [_unix(moment, place, field) for place, moment in enumerate(found)], np.int64
            )
        case _:
            raise Unprocessable(f"{field}: {quoted(found[0].item())} is not a time: give {_TIME}")


def _unix(moment: object, place: int, field: str) -> int:
    if isinstance(moment, datetime):
        if moment.utcoffset() is None:
            raise Unprocessable(
                f"{field}: index {place}: {moment.isoformat()} has no time zone; add tzinfo=UTC"
            )
        return int(moment.timestamp() // 1)
    if isinstance(moment, int | float) and not isinstance(moment, bool):
        if not abs(moment) < _MOST_S:
            raise Unprocessable(
                f"{field}: index {place}: unix seconds must be finite and below 2^62"
            )
        return math.floor(moment)
    raise Unprocessable(f"{field}: index {place}: {quoted(moment)} is not a time: give {_TIME}")


def _flat(values: npt.NDArray[Any], field: str) -> npt.NDArray[Any]:
    if values.ndim != 1:
        raise Unprocessable(f"{field}: is an array of {values.ndim} dimensions; give one dimension")
    return values


def _raw(values: I64) -> bytes:
    return values.astype("<i8", copy=False).tobytes()


# ---- bodies


def parts(pieces: Sequence[L], most: int, most_long: int) -> Iterator[list[L]]:
    """Split pieces into batches of at most `most` pieces and `most_long` characters or bytes.

    A longer piece is a batch of its own.
    """
    part: list[L] = []
    length = 0
    for one in pieces:
        if len(part) == most or (part and length + len(one) >= most_long):
            yield part
            part, length = [], 0
        part.append(one)
        length += len(one) + 1
    if part:
        yield part


def checked_key(idempotency_key: str | None) -> str:
    """Return the idempotency key after a check; None = a new one."""
    if idempotency_key is None:
        return uuid.uuid4().hex
    if not re.fullmatch(PRINTABLE, idempotency_key):
        raise Unprocessable(
            f"idempotency_key: {quoted(idempotency_key)} is not 1 to {MAX_KEY} printable ASCII "
            "characters"
        )
    return idempotency_key


def feature_body(features: Features | None, cls: type[F]) -> F | msgspec.UnsetType:
    """Convert features for a body of class `cls`.

    Raises Unprocessable where the call does not take a group of features.
    """
    if features is None:
        return msgspec.UNSET
    body: dict[str, Any] = {"user": None if features.user is None else feature_row(features.user)}
    if features.request:
        body["request"] = feature_row(features.request)
    if features.cross:
        body["cross"] = feature_columns(features.cross, "features.cross")
    for name in body:
        if name not in cls.__struct_fields__:
            raise Unprocessable(
                f"features.{name}: this call takes only {', '.join(cls.__struct_fields__)}"
            )
    return cls(**body)


def history_body(history: Behaviours | None) -> Any:
    """Convert a history for a body; None = the service reads the history store."""
    return None if history is None else history.on_the_wire("history")


def optional_items(names: Names | None, field: str) -> bytes | list[Name] | None:
    """Convert a column of items that may be absent."""
    return None if names is None else item_column(names, field)


def given(body: msgspec.Struct) -> dict[str, Any]:
    """Return the fields without default values, so that older services accept the body."""
    found = {
        name: value
        for name, value in msgspec.structs.asdict(body).items()
        if value not in (None, msgspec.UNSET, {}, [])
    }
    if found.get("tenant") == "":
        del found["tenant"]
    return found


def packed_users(
    events: Mapping[Name, Behaviours], idempotency_key: str | None, most_bytes: int
) -> list[bytes]:
    """Encode each user's part of an ingest as msgpack.

    Raises:
        TooLarge: A part is over `most_bytes`.
        Unprocessable: A user appears twice, as 7 and "7".
    """
    users: dict[str, bytes] = {}
    for place, (user, columns) in enumerate(events.items()):
        if (name := str(user)) in users:
            raise Unprocessable(
                f"events: index {place}: user {quoted(name)} appears twice, as number and text"
            )
        one = UserEvents(
            user_id=name, events=columns.on_the_wire("events"), idempotency_key=idempotency_key
        )
        packed = msgspec.msgpack.encode(given(one))
        if len(packed) > most_bytes:
            raise TooLarge(
                f"events: index {place}: the events of this user have {len(packed)} bytes, the "
                f"limit is {most_bytes}; send them in parts, or by `events`"
            )
        users[name] = packed
    return list(users.values())


# ---- answers


class Item(NamedTuple):
    """An item of an answer."""

    name: Name
    score: float  # NaN = unknown to the model, or not ranked
    title: str | None = None  # None = it has none, or titles were not requested


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ranked:
    """Scores of candidates, and the whole answer."""

    names: list[Name]  # [c] the candidates, as they were passed
    scores: dict[str, F32]  # task -> [c] logits; NaN = the catalogue lacks the item
    top: list[Item]  # the best `top_k` by the first task; equal scores: the earlier candidate
    answer: RankOut

    @property
    def outcome(self) -> str:
        """Outcome of the prefix cache: hbm_hit, joined, dram_hit, miss_full or degraded."""
        return self.answer.outcome


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoundItems(Generic[Out]):
    """A sequence of `Item`, best first, and the whole answer."""

    names: list[Name]  # [n]
    scores: F32  # [n]
    titles: list[str | None]  # [n]
    answer: Out

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Item]:
        return map(Item, self.names, self.scores.tolist(), self.titles)

    def __getitem__(self, place: int) -> Item:
        return Item(self.names[place], float(self.scores[place]), self.titles[place])


def read(reply: Reply, cls: type[S]) -> S:
    """Decode an answer.

    Raises:
        BadAnswer: The answer is neither JSON nor msgpack, or not a `cls`.
    """
    try:
        if reply.media == MSGPACK:
            return msgspec.msgpack.decode(reply.body, type=cls)
        if reply.media == JSON:
            return msgspec.json.decode(reply.body, type=cls)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadAnswer(f"the answer is not a {cls.__name__}: {error}") from error
    raise BadAnswer(f"the answer is {reply.media}, neither {JSON} nor {MSGPACK}")


def ranked(reply: Reply, names: list[Name], ids: I64) -> Ranked:
    """Decode the answer of a rank of these candidates.

    Raises:
        BadAnswer: The answer is malformed, or does not match the candidates.
    """
    answer = read(reply, RankOut)
    scores = {task: _floats(column) for task, column in answer.scores.items()}
    if not scores:
        raise BadAnswer("the answer has no scores")
    if any(len(column) != len(names) for column in scores.values()):
        raise BadAnswer(f"the answer does not have one score per candidate, {len(names)}")
    places: dict[int, int] = {}  # id -> index; msgpack has ids in `top`, JSON has names
    for place, one in enumerate(ids.tolist()):
        places.setdefault(one, place)
    best = answer.top or []
    titles = _titles(answer.titles, len(best))
    first = next(iter(scores.values()))
    try:
        found = [places[one] for one in answered_ids(best).tolist()]
    except (KeyError, ValueError) as error:
        raise BadAnswer(f"the answer's top has {error}, which is not a candidate") from None
    top = [
        Item(names[place], float(first[place]), title)
        for place, title in zip(found, titles, strict=True)
    ]
    return Ranked(names=names, scores=scores, top=top, answer=answer)


def found(reply: Reply, cls: type[Out]) -> FoundItems[Out]:
    """Decode the JSON answer of a kind that chooses items.

    Raises:
        BadAnswer: The answer is malformed.
    """
    answer = read(reply, cls)
    if isinstance(answer.items, bytes):
        raise BadAnswer("the answer has raw items instead of names")
    scores = _floats(answer.scores)
    if len(scores) != len(answer.items):
        raise BadAnswer(f"the answer has {len(answer.items)} items and {len(scores)} scores")
    titles = _titles(answer.titles, len(scores))
    return FoundItems(names=list(answer.items), scores=scores, titles=titles, answer=answer)


def _titles(titles: fields.Titles, num_items: int) -> list[str | None]:
    if isinstance(titles, msgspec.UnsetType):
        return [None] * num_items
    if len(titles) != num_items:
        raise BadAnswer(f"the answer has {num_items} items and {len(titles)} titles")
    return titles


def _floats(column: list[float | None] | list[float] | bytes) -> F32:
    if isinstance(column, bytes):
        if len(column) % 4:
            raise BadAnswer(f"a column of {len(column)} bytes is not whole float32 values")
        return np.frombuffer(column, "<f4")
    return np.array([np.nan if one is None else one for one in column], np.float32)
