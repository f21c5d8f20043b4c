"""What the summary and the checks at the end of `prepare` say of a loaded log."""

from __future__ import annotations

from typing import Any

from npu_gr.dataset.columns import LogColumns
from npu_gr.dataset.times import US_PER_S

EXAMPLE_USERS = 3  # whose first events the summary shows
EXAMPLE_EVENTS = 3
MIN_DAYS = 20  # distinct times that are no months and days by chance


def examples(con: Any, columns: LogColumns) -> list[dict[str, Any]]:
    """Return the first events of some users: user, and item, action and microseconds each."""
    action = "event" if columns.event is not None else "NULL"
    if columns.value is not None:
        action = "CAST(value AS VARCHAR)"
    users = con.execute(
        "SELECT user FROM log WHERE reason = 0 GROUP BY user ORDER BY "
        f"count(*) < {EXAMPLE_EVENTS}, min(n) LIMIT {EXAMPLE_USERS}"
    ).fetchall()
    return [
        {
            "user": user,
            "events": con.execute(
                f"SELECT item, {action}, time_us FROM log WHERE reason = 0 AND user = ? "
                f"ORDER BY time_us, n LIMIT {EXAMPLE_EVENTS}",
                [user],
            ).fetchall(),
        }
        for (user,) in users
    ]


def busiest_user(con: Any) -> tuple[str, int, int]:
    """Return the user with the most rows: name, rows of the user, rows of all users."""
    found: tuple[str, int, int] = con.execute(
        "SELECT user, count(*), sum(count(*)) OVER () FROM log WHERE reason = 0 GROUP BY user "
        "ORDER BY count(*) DESC, user LIMIT 1"
    ).fetchone()
    return found


def lost_events(con: Any, columns: LogColumns) -> list[tuple[str, int, int]]:
    """List event types of which most rows were rejected: name, rejected rows, all rows."""
    if columns.event is None:
        return []
    found: list[tuple[str, int, int]] = con.execute(
        "SELECT event, count(*) FILTER (reason > 0), count(*) FROM log "
        "WHERE reason >= 0 AND event IS NOT NULL GROUP BY event "
        "HAVING count(*) FILTER (reason > 0) * 2 > count(*) ORDER BY ALL"
    ).fetchall()
    return found


def month_days(con: Any) -> bool:
    """Whether the seconds of a log are all months and days, such as 829 and 1111 (MMDD)."""
    ((is_one, num_days),) = con.execute(
        "SELECT bool_and(s // 100 BETWEEN 1 AND 12 AND s % 100 BETWEEN 1 AND 31), count(DISTINCT s)"
        f" FROM (SELECT time_us // {US_PER_S} AS s FROM log WHERE reason = 0)"
    ).fetchall()
    return bool(is_one) and num_days >= MIN_DAYS
