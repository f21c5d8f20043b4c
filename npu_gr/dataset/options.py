"""Options of `prepare`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions:
    """Options of `prepare`. Names of columns: "" to guess, "none" if the log has none."""

    user: str = ""
    item: str = ""
    time: str = ""
    event: str = ""
    value: str = ""
    title: str = ""  # in the items' file
    items_key: str = ""  # the column of the item in the items' file
    features: tuple[str, ...] | None = None  # columns of the items' file; None = all suitable ones
    users_key: str = ""  # the column of the user in the users' file
    # features, each `NAME` or `NAME:KIND` of a column; KIND is category, hashed or number; it is
    # guessed from the cells by default
    user_features: tuple[str, ...] | None = None  # of the users' file; None = all suitable ones
    event_features: tuple[str, ...] = ()  # of the log: what happened
    request_features: tuple[str, ...] = ()  # of the log: the request that showed the item
    cross_features: tuple[str, ...] = ()  # of the log: the user and the shown item together
    # conditions of `row_filter`; rows that do not meet them are left out. "none" = every row counts
    positive: tuple[str, ...] = ()  # what makes a row a behaviour; others are impressions
    position: str = ""  # of the log: the place of the item among those shown
    drop: tuple[str, ...] = ()  # a row that meets one is left out
    where: tuple[str, ...] = ()  # a row must meet all
    # folder of a dataset whose actions and items keep their ids; "" = the replaced one
    like: str = ""
    strict: bool = False  # fail where the checks at the end find something
    columns: tuple[str, ...] = ()  # names of the columns of a CSV or TSV without a header
    encoding: str = ""  # of text files; "" = UTF-8, or Windows-1252 by its letters
    format: str = ""  # one of `sources.FORMATS`; "" = as the suffix says
    has_time: bool = True  # False: no column is the time, and rows are in time order
    time_unit: str = ""  # s, ms, us, ns or iso
    time_format: str = ""  # as strptime has it
    num_buckets: int = 10  # of a continuous value
    keep_duplicates: bool = False
    max_rejected_ratio: float = 0.5
    memory_mb: int = 0  # memory limit of DuckDB; 0 = by the size of the log, 100 to 512
