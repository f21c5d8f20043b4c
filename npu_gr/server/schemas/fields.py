"""`Codec`, and the fields, parsers and renderers that the codecs of the kinds share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from npu_gr.core.arrays import F32, I16, I64, largest, smallest
from npu_gr.core.errors import TooLarge, Unprocessable
from npu_gr.core.feature_schema.columns import Columns, OneRow, as_columns, known
from npu_gr.core.feature_schema.encode import Values as ColumnValues
from npu_gr.core.feature_schema.encode import as_column, has_value
from npu_gr.core.feature_schema.schema import MOST_FEATURES, MOST_VALUES, Feature
from npu_gr.core.feature_schema.values import BLANKS
from npu_gr.core.history import Events, HistoryRef, HistoryReport, UserKey, oldest_first
from npu_gr.core.kinds import A, Q
from npu_gr.core.names import MAX_NAME_BYTES, ItemIds, Names
from npu_gr.core.text_format import quoted
from npu_gr.server.config import ServerConfig
from npu_gr.server.schemas import bulk
from npu_gr.server.schemas.media import JSON


class NamesUser(Protocol):
    """A body with a user.

    The access log needs the user even if the request is rejected after decoding.
    """

    @property
    def user(self) -> UserKey:
        """The user that the request is about."""
        ...


B = TypeVar("B", bound=NamesUser)
Format = Literal["columns", "objects"]


class UrlParts(NamedTuple):
    """The URL of a request without a body: path variables and query, decoded."""

    path: Mapping[str, str]
    query: Mapping[str, str]

    @property
    def user(self) -> UserKey:
        """The user in the path, of the tenant in the query."""
        return UserKey(self.query.get("tenant", ""), self.path["user_id"])


class ResponseFields(NamedTuple):
    """Which item fields the response includes, and the names to fill them."""

    names: Names
    fields: tuple[str, ...] = ()  # a subset of ITEM_FIELDS
    format: Format | None = "columns"
    explains: bool = False  # the objects come with the columns, which say how they were found

    @classmethod
    def of(cls, body: object, names: Names) -> ResponseFields:
        """Read what a body asks for; bodies of kinds without items ask for nothing."""
        return cls(
            names,
            tuple(getattr(body, "fields", ())),
            getattr(body, "format", "columns"),
            getattr(body, "explain", False),
        )

    def are_objects(self, media: str) -> bool:
        """Whether items are a list of objects; where the request is silent, in JSON they are."""
        return self.format == "objects" or (self.format is None and media == JSON)

    def titles(self, ids: I64 | None) -> list[str | None] | msgspec.UnsetType:
        """Return the titles of items if the request asks for them; None = an item has none."""
        return (
            self.names.titles(ids) if ids is not None and "title" in self.fields else msgspec.UNSET
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec(Generic[B, Q, A]):
    """One kind of request on the wire. B = body, Q = request, A = answer of the service.

    `parse` receives the body, the limits and the names of the served versions; it raises TooLarge
    or Unprocessable with the field and the limit. `read_headers` raises BadRequest. `render`
    receives the answer, the request's id, the media type and the item fields to include; msgpack
    has raw columns where JSON has lists.
    """

    # Struct of the body; None: no body, `parse` receives `UrlParts`
    body: type[B] | None
    # Struct that `render` returns; None: an answer without content
    answer: type[msgspec.Struct] | None
    # Struct of an answer with status 202: accepted, but not complete
    begun: type[msgspec.Struct] | None = None
    parse: Callable[[B, ServerConfig, Names], Q]
    render: Callable[[A, str, str, ResponseFields], msgspec.Struct | None]
    loose_bytes: int = bulk.LOOSE_BYTES  # largest part of a body outside of its columns, in bytes
    # adds the fields of HTTP headers to the request; None = there are none
    read_headers: Callable[[Q, Mapping[str, str]], Q] | None = None
    operation: str | None = None  # OpenAPI's operationId; None = the kind's name
    # OpenAPI's parameters, in addition to those of the path and the time limit
    parameters: tuple[dict[str, Any], ...] = ()
    done: str = "Success."  # OpenAPI's description of a successful answer


class ScoredItemOut(msgspec.Struct, frozen=True, kw_only=True):
    """An item of an answer, best first; null: it has no title, or was not ranked."""

    item: str | int
    title: str | None
    score: float | None
    # probability of the item at its place, given those before; absent: nothing was drawn
    propensity: float | msgspec.UnsetType = msgspec.UNSET


class ObjectsOut(msgspec.Struct, frozen=True, kw_only=True):
    """Items as a list of objects, best first: `"format": "objects"`, and a recommend in JSON."""

    items: list[ScoredItemOut]
    request_id: str
    limited_by: str  # what ended a list of fewer items than requested; "" = it is complete
    # with `"explain": true` the whole answer in columns
    explain: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


def as_objects(
    answer: Any, request_id: str, about: ResponseFields, explain: msgspec.Struct | None
) -> ObjectsOut:
    """Convert an answer with items to a list of objects; `explain` is the answer in columns."""
    ids = answer.item_ids
    drawn = getattr(answer, "propensities", None)
    propensities = [msgspec.UNSET] * len(ids) if drawn is None else drawn.tolist()
    rows = zip(
        about.names.items(ids),
        about.names.titles(ids),
        answer.scores.tolist(),
        propensities,
        strict=True,
    )
    items = [
        ScoredItemOut(
            item=item, title=title, score=None if score != score else score, propensity=propensity
        )
        for item, title, score, propensity in rows
    ]
    return ObjectsOut(
        items=items,
        request_id=request_id,
        limited_by=answer.limited_by.value,
        explain=msgspec.UNSET if explain is None else msgspec.to_builtins(explain),
    )


MOST_ITEMS = 1000  # items of one request to /v1/items


class ItemOut(msgspec.Struct, frozen=True, kw_only=True):
    """An item: its id (as in raw columns) and name (as in lists). null: unknown to all tables."""

    id: int
    name: str | int | None
    title: str | None


Int = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
# name of an item; a whole number counts as its text
Item = (
    Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_BYTES)]
    | Annotated[int, msgspec.Meta(ge=0)]
)
Action = (
    Annotated[str, msgspec.Meta(max_length=MAX_NAME_BYTES)]
    | Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
    | float
)


def _a_column(what: str, raw: str, dtype: str, limit: str) -> msgspec.Meta:
    """Describe a column for OpenAPI; `bulk.py` reads its limit and the size of raw elements."""
    name = np.dtype(dtype).name
    text = f"{what}, or {raw} as raw little-endian {name} (base64 in JSON). At most server.{limit}."
    return msgspec.Meta(
        description=text, extra={"limit": limit, "element_bytes": np.dtype(dtype).itemsize}
    )


Items = Annotated[
    list[Item] | bytes, _a_column("Names of items", "ids", "<i8", "max_history_events")
]
Actions = Annotated[
    list[Action] | bytes,
    _a_column(
        "Names of actions", "indices in the model's list of actions", "<i2", "max_history_events"
    ),
]
Times = Annotated[
    list[Int] | bytes, _a_column("Unix seconds", "the same", "<i8", "max_history_events")
]
Candidates = Annotated[
    list[Item] | bytes, _a_column("Names of items", "ids", "<i8", "max_candidates")
]
LAST_S = 10**11  # unix seconds (the year 5138); larger numbers are milliseconds or shorter units
MAX_NAME = 128  # characters of a user id, tenant or version
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
Tenant = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Value = bool | int | float | Annotated[str, msgspec.Meta(max_length=1024)]
Values = Annotated[list[Value], msgspec.Meta(min_length=1, max_length=1000)]  # alternatives
MOST_NAMES = 100  # attributes of one item or one filter
Attributes = Annotated[dict[Name, Values], msgspec.Meta(max_length=MOST_NAMES)]
ITEM_FIELDS = ("title",)  # item fields that an answer can include in addition to the names
ItemFields = Annotated[list[Name], msgspec.Meta(max_length=16)]
# title of each item; absent: the request did not ask for them
Titles = list[str | None] | msgspec.UnsetType


# 7 and "7" are the same user
UserId = Name | Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


def check_user(user: UserKey) -> None:
    """Raise Unprocessable if blanks are around a user id.

    `prepare` removes them, so it is not the user of the dataset. An erasure takes any id.
    """
    if user.user != user.user.strip(BLANKS):
        raise Unprocessable("user_id: has blanks around it; send it without them")


class History(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Behaviours, oldest first, as columns of the same length."""

    items: Items
    actions: Actions
    timestamps: Times
    features: ColumnMap | msgspec.UnsetType = msgspec.UNSET  # features of each event


class UserBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A body with a user."""

    user_id: UserId
    tenant: Tenant = ""

    @property
    def user(self) -> UserKey:
        """The user within the tenant."""
        return UserKey(self.tenant, str(self.user_id))


class HistoryBody(UserBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A body with the user's history, or a known prefix (`base`) and the events after it.

    With neither, the history store is read.
    """

    history: History | None = None
    base: Name | None = None  # fingerprint of the known prefix that `history` continues
    model_version: Name | None = None


class HistoryOut(msgspec.Struct, frozen=True, kw_only=True):
    """How the model read the history, and where it came from.

    `features_source` and `features_fault` are present if the user's features came from
    `feature_store`.
    """

    fingerprint: str
    num_tokens: int  # tokens that the model read
    cut_tokens: int  # tokens left out because the history is longer than the model reads
    unknown_items: int  # events whose items the catalogue lacks
    source: str  # request | store | last_known | nothing; the last two: the history store failed
    fault: str  # fault of the history store: store_unavailable | store_slow | ...; "" = none
    # events that came after newer ones and were sorted (`service.unsorted_history`)
    sorted_events: int
    # events that the model read for this answer: the newest ones, if the outcome is degraded;
    # absent in answers of older versions
    read_events: int | msgspec.UnsetType = msgspec.UNSET
    # source | remembered | last_known | nothing
    features_source: str | msgspec.UnsetType = msgspec.UNSET
    # fault of the feature source; "" = none
    features_fault: str | msgspec.UnsetType = msgspec.UNSET


# ---- parsing


def optional_items(
    values: list[str | int] | bytes | None, field: str, limit: int, names: ItemIds
) -> I64 | None:
    """Parse a column of items that may be absent. Raises as `parse_items` does."""
    return None if values is None else parse_items(values, field, limit, names)


def parse_items(values: list[str | int] | bytes, field: str, limit: int, names: ItemIds) -> I64:
    """Parse a column of items.

    Args:
        values: Items, as names or as ids in raw little-endian int64.
        field: Name of the field in error messages.
        limit: Largest number of elements.
        names: Names of the served versions, which compute the ids.

    Returns:
        Ids, int64 [n].

    Raises:
        TooLarge: There are more than `limit` elements.
        Unprocessable: A raw id is negative, the bytes are not whole ids, or a name is invalid.
    """
    ids: I64 = _column(values, field, "<i8", limit, names.item_ids)
    return ids


def check_item_fields(fields: list[str]) -> None:
    """Raise Unprocessable if a requested item field is not one of `ITEM_FIELDS`."""
    for field in fields:
        if field not in ITEM_FIELDS:
            raise Unprocessable(
                f"fields: unknown field {quoted(field)}; there are: {', '.join(ITEM_FIELDS)}"
            )


def shown_at(timestamp: int | None) -> int | None:
    """Return a timestamp after a check. Raises Unprocessable if it is not in unix seconds."""
    if timestamp is not None and timestamp > LAST_S:
        raise Unprocessable(f"timestamp: {timestamp} {_unit(timestamp)}")
    return timestamp


def parse_events(
    history: History,
    field: str,
    limit: int,
    names: Names,
    version: str | None = None,
    *,
    is_sorted_later: bool = False,
) -> Events:
    """Convert the columns of a history to arrays.

    Args:
        history: Decoded body.
        field: Name of the field in error messages.
        limit: Largest number of events.
        names: Actions of the served models, and the policy for events that are not in time order.
        version: Version of the ranker that defines the actions; None = the current one.
        is_sorted_later: Under the policy "sort", leave the events unsorted here, because the code
            that has the earlier events (of the base, or of the store) sorts all of them.

    Raises:
        TooLarge: As `parse_items` does.
        Unprocessable: As `parse_items` does; also if the model lacks an action, a timestamp is not
            in seconds, events are not in time order, or the columns differ in length.
        NotFound: The version is not served.
    """
    ids = parse_items(history.items, f"{field}.items", limit, names)
    known = names.actions(version)
    read = _indices if known is None else known.indices
    actions: I16 = _column(history.actions, f"{field}.actions", "<i2", limit, read)
    times: I64 = _column(
        history.timestamps, f"{field}.timestamps", "<i8", limit, partial(np.array, dtype=np.int64)
    )
    if not len(ids) == len(actions) == len(times):
        raise Unprocessable(
            f"{field}: items, actions and timestamps have {len(ids)}, {len(actions)} and "
            f"{len(times)} entries"
        )
    if len(times) and (last := largest(times)) > LAST_S:
        raise Unprocessable(
            f"{field}.timestamps: {last} at index {int(times.argmax())} {_unit(last)}"
        )
    given = history.features or {}
    of_event = names.features(version).event.features if given else {}
    events = Events(
        ids, actions, times, features=parse_columns(given, of_event, len(ids), f"{field}.features")
    )
    policy = names.unsorted_history
    return events if is_sorted_later and policy == "sort" else oldest_first(events, policy, field)


def stored_events(history: History, config: ServerConfig, names: Names) -> Events:
    """Parse events for the history store. Raises as `parse_events` does."""
    limit = config.max_history_events
    return parse_events(history, "events", limit, names, is_sorted_later=True)


def parse_history(
    body: HistoryBody,
    config: ServerConfig,
    names: Names,
    version: str | None = None,
    of_user: Row | None = None,
) -> HistoryRef:
    """Parse the history of a request, its base and the user's features.

    Raises as `parse_events` does.
    """
    user = (
        None
        if of_user is None
        else parse_row(of_user, names.features(version).user.features, "features.user")
    )
    if body.history is None:
        return HistoryRef(base=body.base, user_features=user)
    limit, has_base = config.max_history_events, body.base is not None
    events = parse_events(body.history, "history", limit, names, version, is_sorted_later=has_base)
    return HistoryRef(events=events, base=body.base, user_features=user)


def _column(
    values: list[Any] | bytes,
    field: str,
    dtype: str,
    limit: int,
    read: Callable[[list[Any]], npt.NDArray[Any]],
) -> npt.NDArray[Any]:
    """Make an array from a list by `read`, or from raw bytes without a copy."""
    dt = np.dtype(dtype)
    if isinstance(values, bytes):
        if len(values) % dt.itemsize:
            raise Unprocessable(
                f"{field}: {len(values)} bytes are not whole little-endian {dt.name} values"
            )
        count = len(values) // dt.itemsize
    else:
        count = len(values)
    if count > limit:
        raise TooLarge(f"{field}: {count} entries, the limit is {limit}")
    if not isinstance(values, bytes):
        try:
            return read(values)
        except ValueError as error:
            raise Unprocessable(f"{field}: {error}") from None
    array = np.frombuffer(values, dt)
    if count and (least := smallest(array)) < 0:
        raise Unprocessable(f"{field}: {least} at index {int(array.argmin())} is negative")
    return array


def _indices(actions: Sequence[str | float]) -> I16:
    """Read actions as indices, 0 to 2^15 - 1, where no model names actions."""
    for place, action in enumerate(actions):
        is_digits = (
            isinstance(action, str) and action.isascii() and action.isdecimal() and len(action) <= 5
        )
        number = float(action) if is_digits or not isinstance(action, str) else -1.0
        if not (0 <= number < 2**15 and number.is_integer()):
            raise ValueError(
                f"{quoted(action)} at index {place}: no model names actions here; "
                f"send 0 to {2**15 - 1}"
            )
    return np.array(actions, np.float64).astype(np.int16)


def _unit(timestamp: int) -> str:
    """Describe a timestamp that is too large for seconds: its likely unit and the remedy."""
    for divisor, unit in ((10**3, "milliseconds"), (10**6, "microseconds"), (10**9, "nanoseconds")):
        if timestamp <= LAST_S * divisor:
            return f"looks like {unit}: divide by {divisor} for unix seconds"
    return "is not a unix time in seconds"


# ---- rendering


def render_history(report: HistoryReport) -> HistoryOut:
    """Convert the report about a history for the wire."""
    of_user = report.user_features
    return HistoryOut(
        fingerprint=report.fingerprint,
        num_tokens=report.num_tokens,
        cut_tokens=report.cut_tokens,
        unknown_items=report.unknown_items,
        source=report.origin.source.value,
        fault=report.origin.fault or "",
        sorted_events=report.origin.sorted_events,
        read_events=report.read_events,
        features_source=msgspec.UNSET if of_user is None else of_user.source.value,
        features_fault=msgspec.UNSET if of_user is None else of_user.fault or "",
    )


def render_items(ids: I64, names: Names, is_raw: bool) -> list[str | int] | bytes:
    """Render items as raw ids if `is_raw`, else as a list of names."""
    return ids.astype("<i8", copy=False).tobytes() if is_raw else names.items(ids)


def render_column(values: npt.NDArray[Any], dtype: str, is_raw: bool) -> Any:
    """Render an array as one flat column: raw bytes of `dtype` if `is_raw`, else a list."""
    return values.astype(dtype, copy=False).tobytes() if is_raw else values.ravel().tolist()


def render_scores(values: F32, is_raw: bool) -> list[float | None] | bytes:
    """Render scores as raw float32 if `is_raw`, else as a list, where NaN becomes null."""
    scores: list[float | None] | bytes = render_column(values, "<f4", is_raw)
    return scores


Text = Annotated[str, msgspec.Meta(max_length=1024)]
FeatureName = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Several = Annotated[list[bool | int | float | Text], msgspec.Meta(max_length=MOST_VALUES)]
Cell = bool | int | float | Text | Several | None  # null = missing
Row = Annotated[dict[FeatureName, Cell], msgspec.Meta(max_length=MOST_FEATURES)]
ColumnMap = Annotated[
    dict[FeatureName, list[Cell] | bytes],
    msgspec.Meta(
        description="Features: each a list with one value per row, or raw little-endian float32 "
        "(numbers) or uint64 hashes (names), in base64 in JSON. At most server.max_feature_values "
        "values in total.",
        max_length=MOST_FEATURES,
        extra={"limit": "max_feature_values", "element_bytes": 4, "most_entries": MOST_FEATURES},
    ),
]


class SignalFeatures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Features known at the signal: those of the user, which are a part of the prefix."""

    user: Row | None = None  # absent: those stored with `base`


class RequestFeatures(SignalFeatures, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Features of the user and of this request, such as hour, page or device."""

    request: Row = msgspec.field(default_factory=dict)


class RankFeatures(RequestFeatures, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Features of the user, of this request, and of each user-candidate pair."""

    cross: ColumnMap = msgspec.field(default_factory=dict)


def parse_row(row: Mapping[str, Cell], features: Mapping[str, Feature], field: str) -> OneRow:
    """Parse the features of one user or request.

    Raises Unprocessable with the feature and the limit.
    """
    try:
        return {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in row.items()
            if has_value(as_column(known(features, name), [value], 1))
        }
    except ValueError as error:
        raise Unprocessable(f"{field}.{error}") from None


def parse_columns(
    columns: Mapping[str, list[Cell] | bytes],
    features: Mapping[str, Feature],
    num_rows: int,
    field: str,
) -> Columns:
    """Parse the features of `num_rows` candidates or events.

    Raises Unprocessable with the feature, the row and the limit.
    """
    if not columns:
        return Columns()
    try:
        if (numbers := _raw_numbers(columns, features, num_rows)) is not None:
            return Columns(numbers)
        return as_columns(
            features,
            {name: _values(known(features, name), values) for name, values in columns.items()},
            num_rows,
        )
    except ValueError as error:
        raise Unprocessable(f"{field}.{error}") from None


def _raw_numbers(
    columns: Mapping[str, list[Cell] | bytes], features: Mapping[str, Feature], num_rows: int
) -> Mapping[str, F32] | None:
    """Parse columns at once if all are raw numbers without missing values, else return None."""
    for name, values in columns.items():
        feature = features.get(name)
        if feature is None or feature.kind != "number" or feature.computed:
            return None
        if type(values) is not bytes or len(values) != 4 * num_rows:
            return None
    read: F32 = np.frombuffer(b"".join(columns.values()), "<f4").reshape(-1, num_rows)  # type: ignore[arg-type]
    return dict(zip(columns, read, strict=True)) if np.isfinite(read).all() else None


def _values(feature: Feature, values: list[Any] | bytes) -> ColumnValues:
    if not isinstance(values, bytes):
        return values
    dtype, width = (
        (np.dtype("<f4"), 1) if feature.kind == "number" else (np.dtype("<u8"), feature.max_values)
    )
    if len(values) % (dtype.itemsize * width):
        raise ValueError(
            f"{feature.name}: {len(values)} bytes are not whole rows of {width} {dtype.name}"
        )
    read = np.frombuffer(values, dtype)
    return read if feature.kind == "number" else read.reshape(-1, width)
