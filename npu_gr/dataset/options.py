"""What a caller of `prepare` may tell instead of leaving it to a guess."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions:
    """What is told rather than guessed. Names of columns: "" = guess, "none" = the log has none."""

    user: str = ""
    item: str = ""
    time: str = ""
    event: str = ""
    value: str = ""
    title: str = ""  # in the items' file
    items_key: str = ""  # the column of the item in the items' file
    features: tuple[str, ...] | None = None  # columns of the items' file; None = all that can be
    users_key: str = ""  # the column of the user in the users' file
    # features, each `NAME` or `NAME:KIND` of a column; KIND is category, hashed or number, else as
    # its cells look
    user_features: tuple[str, ...] | None = None  # of the users' file; None = all that can be
    event_features: tuple[str, ...] = ()  # of the log: what happened
    request_features: tuple[str, ...] = ()  # of the log: the request that showed the item
    cross_features: tuple[str, ...] = ()  # of the log: the user and the shown item together
    columns: tuple[str, ...] = ()  # names of the columns of a CSV or TSV without a header
    format: str = ""  # one of `sources.FORMATS`; "" = as the suffix says
    has_time: bool = True  # False: rows are in time order, and no column says when
    time_unit: str = ""  # s, ms, us, ns or iso
    time_format: str = ""  # as strptime has it
    num_buckets: int = 10  # of a continuous value
    keep_duplicates: bool = False
    max_rejected_ratio: float = 0.5
    memory_mb: int = 0  # that DuckDB may use; 0 = by the size of the log, 100 to 512
