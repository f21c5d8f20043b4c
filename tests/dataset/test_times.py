"""Times of every unit are recognised and said.

A row of another unit, or of no time at all, is rejected by reason.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.core.errors import DataError
from npu_gr.dataset.engine import in_memory
from npu_gr.dataset.rejects import RejectReason
from npu_gr.dataset.times import FIRST_US, LAST_US, TimeKind, recognise

NOW = 1_700_000_000
FACTORS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def read(
    array: Any, unit: str = "", pattern: str = ""
) -> tuple[list[float], list[RejectReason | None]]:
    """Seconds and reasons."""
    found = rows(recognise(array, "log: t", unit, pattern), array)
    reasons = [None, *RejectReason]
    return [us / 1e6 if not code else 0 for us, code in found], [reasons[code] for _, code in found]


def rows(kind: TimeKind, array: Any) -> list[tuple[int, int]]:
    """Microseconds and codes, as DuckDB reads them."""
    with in_memory() as con:
        con.register("log", pa.table({"t": array}))
        sql = kind.sql("t", str(con.sql("DESCRIBE log").fetchall()[0][1]))
        parts = ", ".join(f"{one} AS {name}" for name, one in sql.parts.items())
        steps = f"SELECT *, {sql.us} AS time_us FROM (SELECT *, {parts} FROM log)"
        found: list[tuple[int, int]] = con.sql(
            f"SELECT time_us, {sql.reason} FROM ({steps})"
        ).fetchall()
        return found


@pytest.mark.parametrize("unit", FACTORS)
@pytest.mark.parametrize(
    "kind", [pa.int64(), pa.string(), pa.float64(), pa.decimal128(30, 0)], ids=str
)
def test_units_are_recognised(unit: str, kind: pa.DataType) -> None:
    array = pa.array([(NOW + at) * FACTORS[unit] for at in range(3)], pa.int64()).cast(
        kind, safe=False
    )
    assert read(array)[0] == [NOW, NOW + 1, NOW + 2]
    assert recognise(array, "t").words.endswith("since 1970, by the size of the numbers")
    assert recognise(array, "t").unit == unit


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2023-11-14", 1_699_920_000),
        ("2023-11-14 22:13:20", NOW),
        ("2023-11-14T22:13:20Z", NOW),
        ("2023-11-14T22:13:20.5z", NOW + 0.5),
        ("2023-11-14T22:13:20.123456789Z", NOW + 0.123456),
        ("2023-11-14 22:13:20,250", NOW + 0.25),
        ("2023-11-14 22:13", NOW - 20),
        ("2023-11-14T23:13:20+01:00", NOW),
        ("2023-11-14T23:13:20+0100", NOW),
        ("2023-11-14 17:13:20 -05:00", NOW),
        ("2023-11-14 22:13:20 UTC", NOW),
        (" 2023-11-14 22:13:20 GMT ", NOW),
    ],
)
def test_iso_8601(text: str, seconds: float) -> None:
    assert read(pa.array([text, "2023-02-30"])) == (
        [seconds, 0],
        [None, RejectReason.UNREADABLE_TIME],
    )


def test_zones_are_said() -> None:
    assert "UTC assumed" in recognise(pa.array(["2023-11-14 22:13:20"]), "t").words
    assert "UTC assumed" not in recognise(pa.array(["2023-11-14 22:13:20Z"]), "t").words


@settings(deadline=None)
@given(st.integers(FIRST_US, LAST_US - 1), st.integers(-14 * 60, 14 * 60))
def test_what_python_writes_is_read(us: int, minutes: int) -> None:
    at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=us)
    zoned = at.astimezone(timezone(timedelta(minutes=minutes)))
    kind = recognise(pa.array([zoned.isoformat()]), "t")
    assert rows(kind, pa.array([zoned.isoformat(sep=" ")])) == [(us, 0)]


@pytest.mark.parametrize(
    "array",
    [
        pa.array([datetime(2023, 11, 14, 22, 13, 20)]),
        pa.array(
            [datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)], pa.timestamp("ms", "Europe/Berlin")
        ),
        pa.array([datetime(2023, 11, 14, 22, 13, 20)]).dictionary_encode(),
    ],
    ids=str,
)
def test_timestamps_with_a_type(array: Any) -> None:
    assert read(array)[0] == [NOW]


def test_dates_with_a_type() -> None:
    assert read(pa.array([date(2023, 11, 14), None])) == (
        [1_699_920_000, 0],
        [None, RejectReason.NO_TIME],
    )


def test_a_row_of_another_unit_is_rejected() -> None:
    array = pa.array([NOW, NOW + 1, NOW * 1000, NOW * 10**9, 0, -5, None, 5_000_000_000])
    assert read(array)[1] == [
        None,
        None,
        RejectReason.OTHER_UNIT,
        RejectReason.OTHER_UNIT,
        RejectReason.EARLY,
        RejectReason.EARLY,
        RejectReason.NO_TIME,
        RejectReason.LATE,
    ]
    # declared, so not guessed
    assert read(array, "ms")[1][:3] == [RejectReason.EARLY, RejectReason.EARLY, None]


def test_garbage_among_times_is_rejected() -> None:
    texts = [
        "2023-11-14",
        "9999-12-31",
        "1969-12-31",
        "",
        "soon",
        "1700000000",
        "20-11-2023",
        None,
        "2023-11-14Z9",
    ]
    unreadable = RejectReason.UNREADABLE_TIME
    assert read(pa.array(texts))[1] == [
        None,
        RejectReason.LATE,
        RejectReason.EARLY,
        unreadable,
        unreadable,
        unreadable,
        unreadable,
        RejectReason.NO_TIME,
        unreadable,
    ]
    numbers = [
        "1700000000",
        "1.7e9",
        "+1700000000.5",
        "nan",
        "inf",
        "9" * 30,
        "-" + "9" * 19,
        "0x10",
        "1_000",
    ]
    seconds, reasons = read(pa.array(numbers))
    assert seconds[:3] == [NOW, NOW, NOW + 0.5]
    assert reasons[3:] == [
        unreadable,
        unreadable,
        RejectReason.OTHER_UNIT,
        RejectReason.OTHER_UNIT,
        *[unreadable] * 2,
    ]


def test_places_in_an_order_are_times() -> None:
    assert read(pa.array([0, 1, 2])) == ([0, 1, 2], [None] * 3)
    assert "positions in an order" in recognise(pa.array(["1", "2"]), "t").words


@pytest.mark.parametrize(
    ("texts", "seconds"),
    [
        (["2024/03/01 09:00:00", "2024/3/1 09:01:00"], [0, 60]),
        (["2024/03/01 09:00"], [0]),
        (["2024.03.01 09:00:00.500"], [0.5]),
        (["01.03.2024 09:00"], [0]),
        (["2024年3月1日 09:00"], [0]),
        (["3/1/2024 9:00 AM", "3/13/2024 9:00 PM"], [0, 12.5 * 86_400]),
        (["1/3/2024 09:00", "13/3/2024 09:00"], [0, 12 * 86_400]),
        (["01 Mar 2024 09:00:00"], [0]),
        (["Fri, 01 Mar 2024 09:00:00 GMT"], [0]),
        (["Fri, 01 Mar 2024 10:00:00 +0100"], [0]),
        (["2024030109"], [0]),
        (["202403010930", "202403010900"], [1800, 0]),
        (["20240301090001"], [1]),
        (["45352.375", "45352.5"], [0, 3 * 3600]),
    ],
)
def test_calendars_are_recognised(texts: list[str], seconds: list[float]) -> None:
    nine = int(datetime(2024, 3, 1, 9, tzinfo=UTC).timestamp())
    assert read(pa.array(texts))[0] == [nine + one for one in seconds]


def test_numbers_that_are_calendars_are_recognised() -> None:
    assert read(pa.array([20231114, 20231115])) == ([1_699_920_000, 1_700_006_400], [None] * 2)
    assert "%Y%m%d%H" in recognise(pa.array([2024030109, 2024030110]), "t").words
    # digits that are a calendar in one row alone
    assert recognise(pa.array([2024030109, 2024990109]), "t").unit == "s"
    assert read(pa.array([45352.375]))[0] == [1_709_283_600]


def test_a_day_that_can_be_a_month_is_an_error() -> None:
    for texts in (["03/04/2024", "05/06/2024"], ["13/04/2024", "04/13/2024"]):
        with pytest.raises(DataError, match=r"month or with the day; give --time-format '%m/%d/%Y"):
            recognise(pa.array(texts), "log: t")


def test_rounded_times_are_an_error() -> None:
    array = pa.array(["1.709309E+09", "1.709309E+09"])
    with pytest.raises(DataError, match=r"log: t: '1.709309E.09' was rounded.*--time-unit s"):
        recognise(array, "log: t")
    assert read(array, unit="s")[0] == [1_709_309_000] * 2


def test_an_unknown_format_is_an_error() -> None:
    array = pa.array(["14;11;2023 22:13", "2023"])
    with pytest.raises(
        DataError, match=r"log: t: '14;11;2023 22:13' is not a known time.*--time-format"
    ):
        recognise(array.slice(0, 1), "log: t")
    assert read(array, pattern="%d;%m;%Y %H:%M") == (
        [NOW - 20, 0],
        [None, RejectReason.UNREADABLE_TIME],
    )
    with pytest.raises(
        DataError, match="the first rows have no time; name another column with --time"
    ):
        recognise(pa.nulls(3, pa.string()), "log: t")
