"""The folder of a site while it is made: everything is staged, and moved into place at the end.

    site/ranker, generator, vectors, popular.txt, serve.yaml, README.md, report.json    in service
    site/.new/...       the same names, staged; `<name>.json` marks a model as finished, and
                        `<name>.states` lets its interrupted training go on, see `../resume.py`
    site/.new/READY     names of the staged files that are being moved into place

Invariants, checked by tests/train/site/test_folder.py:
  S1  before READY exists, nothing in service changes, even if the process is killed
  S2  after READY exists, the next run first completes the move of the interrupted one, so a site
      with files of two runs does not last longer than that
  S3  files and folders in service are replaced by a rename, so a process that has one open or
      mapped keeps the old one
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from npu_gr.catalogue import change_log
from npu_gr.catalogue.names import ItemNames
from npu_gr.core.errors import ConfigError, DataError
from npu_gr.core.names import value_name
from npu_gr.core.renamed import current
from npu_gr.dataset.times import ORDER_S
from npu_gr.history_store.interactions import Interactions, ItemValues
from npu_gr.train.options import curl, serve
from npu_gr.train.site.configuration import EVALUATED_CONFIG, SERVE
from npu_gr.train.site.report import PartReport, SiteReport

STAGED = ".new"
READY = "READY"
REPLACED = ".old"
LOCK = ".lock"
REPORT = "report.json"


class SiteFolder:
    """The folder of one site, with its staged files. Only one process at a time can open it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.staged = place / STAGED

    @classmethod
    @contextmanager
    def opened(cls, place: Path) -> Iterator[SiteFolder]:
        """Make and lock the folder, and complete the move of an interrupted run.

        Raises:
            DataError: the folder cannot be made or written.
            ConfigError: another process has the lock.
        """
        folder = cls(place)
        try:
            folder.staged.mkdir(parents=True, exist_ok=True)
            lock = os.open(place / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise DataError(f"{place}: cannot be written: {error.strerror}") from error
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigError(
                    f"{place}: another process makes this site; wait until it ends"
                ) from error
            folder._finish()
            yield folder
        finally:
            os.close(lock)

    def report(self) -> SiteReport | None:
        """Read the report of the site in service; None = there is none, or it is unreadable."""
        try:
            report: Any = msgspec.json.decode((self.place / REPORT).read_bytes())
            if cascade := report.get("cascade"):  # of an earlier version, perhaps
                cascade["order"] = current(cascade["order"])
                cascade["sources"] = {
                    current(name): num for name, num in cascade["sources"].items()
                }
            return msgspec.convert(report, SiteReport)
        except (OSError, msgspec.MsgspecError, AttributeError, LookupError, TypeError):
            return None

    def finished(self, name: str) -> PartReport | None:
        """Read the report of a model that an interrupted run has finished; None = it has not."""
        try:
            return msgspec.json.decode((self.staged / f"{name}.json").read_bytes(), type=PartReport)
        except (OSError, msgspec.MsgspecError):
            return None

    def begin(self, name: str) -> Path:
        """Make an empty staged folder for a model.

        Raises:
            DataError: the folder cannot be made.
        """
        self.discard(name)
        try:
            (self.staged / name).mkdir()
        except OSError as error:
            raise DataError(f"{self.staged / name}: cannot be made: {error.strerror}") from error
        return self.staged / name

    def finish(self, name: str, report: PartReport) -> None:
        """Mark a staged model as finished."""
        self.write(f"{name}.json", msgspec.json.encode(report))

    def discard(self, name: str) -> None:
        """Delete a staged model, its mark first, so that a partial folder never looks finished."""
        (self.staged / f"{name}.json").unlink(missing_ok=True)
        shutil.rmtree(self.staged / name, ignore_errors=True)

    def write(self, name: str, content: bytes) -> Path:
        """Write a staged file.

        Raises:
            DataError: the file cannot be written.
        """
        path = self.staged / name
        temporary = path.with_name(f"{name}.tmp")
        try:
            temporary.write_bytes(content)
            os.replace(temporary, path)
        except OSError as error:
            raise DataError(f"{path}: cannot be written: {error.strerror}") from error
        return path

    def put_in_place(self, names: Sequence[str]) -> None:
        """Move staged files into service, in this order, and delete the other staged ones.

        Raises:
            DataError: a file cannot be moved; the next run continues the move.
        """
        self.write(READY, msgspec.json.encode(names))
        self._finish()

    def _finish(self) -> None:
        """Move the files that READY names; those that are no longer staged were moved before."""
        replaced = self.place / REPLACED
        try:
            names = msgspec.json.decode((self.staged / READY).read_bytes(), type=list[str])
        except FileNotFoundError:
            return
        try:
            for name in names:
                if not (self.staged / name).exists():
                    continue
                if (self.place / name).is_dir():
                    shutil.rmtree(replaced, ignore_errors=True)
                    for log in (self.place / name).glob(f"*{change_log.SUFFIX}"):
                        os.rename(log, self.staged / name / log.name)  # goes with the instance
                    os.rename(self.place / name, replaced)
                os.rename(self.staged / name, self.place / name)
            shutil.rmtree(self.staged)
            self.staged.mkdir()
            shutil.rmtree(replaced, ignore_errors=True)
        except OSError as error:
            raise DataError(f"{self.place}: cannot be written: {error}") from error


def digest(*texts: str) -> str:
    """Return a digest of texts, 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(texts))


def digest_of_files(folder: Path, pattern: str) -> str:
    """Return a digest of the names and contents of a folder's matching files, 32 hex digits.

    Raises:
        DataError: a file cannot be read.
    """
    state = xxhash.xxh3_128()
    try:
        for path in sorted(folder.glob(pattern)):
            state.update(path.name.encode())
            with path.open("rb") as file:
                while block := file.read(1 << 22):
                    state.update(block)
    except OSError as error:
        raise DataError(f"{folder}: {error}") from error
    return state.hexdigest()


def readme(site: Path, report: SiteReport, found: Examples) -> str:
    """Write the README of a site.

    Args:
        site: Folder of the site, as the command that serves it will name it.
        report: Report of the site.
        found: User, items and actions of the example calls.
    """
    rows = [
        f"| {name} | {row.name} | {row.value:.4f} | {row.baseline_value:.4f} {row.baseline} | "
        f"{part.measured_on} |"
        for name, part in report.parts.items()
        for row in part.figures
    ]
    events = {
        "items": [found.items[-1]],
        "actions": [found.actions[-1]],
        "timestamps": [found.timestamp - 1],
    }
    warnings = [text for warning in report.warnings() for text in ("", warning)]
    words = report.words()
    verdict = [f"**{report.verdict.text}**"] if report.verdict else []
    cascade = "".join(f"\n\n{text}" for text in (*words, *verdict))
    models = "".join(
        f"| `{name}/` | {_MODELS[name]} |\n" for name in _MODELS if name in report.parts
    )
    as_of = (
        ""
        if found.asked_at is None
        else " (`timestamp` is the end of the log; without it, the request is as of now)"
    )
    return f"""# A recommender of {report.num_events:,} events

Made {report.made_at} from {report.num_events:,} events of {report.num_users:,} users with
{report.num_items:,} items by

```
{report.made_by}
```

## Serve it

```
{serve(site / SERVE)}
```

Run this in the folder in which the site was made: the paths in `serve.yaml` are relative to it.
Your changes to `serve.yaml` are kept when the site is made again.

## Call it

Recommend for a known user, with {found.num_events} events in the history store{as_of}:

```
{curl("/v1/recommend", known_user(found))}
```

Recommend for an unknown user, who gets items that users begin with, and popular items:

```
{curl("/v1/recommend", recommend(COLD_USER, found.asked_at))}
```

Add an event of that user, and recommend again:

```
{curl("/v1/events", {"user_id": COLD_USER, "events": events})}
{curl("/v1/recommend", recommend(COLD_USER, found.asked_at))}
```

Send the history in the request. This one ends with an item that is not in the catalogue
(`{NEW_ITEM}`): the rest of the history is used, and the answer says how many items were unknown.

```
{curl("/v1/recommend", with_new_item(found))}
```
{_new_item(found) if "generator" in report.parts else ""}
## How good it is

| model | figure | value | strongest baseline | measured on |
|---|---|---|---|---|
{chr(10).join([*rows, *warnings])}{cascade}

These are the figures of models that were trained without the test events. To serve those models:
`{serve(site / EVALUATED_CONFIG)}`.
The served models were then trained on all {report.num_events:,} events, with the same settings.

## Files

| file | content |
|---|---|
{models}| `popular.txt` | the most popular items, best first |
| `history.db` | the history store: events of the users |
| `serve.yaml` | the configuration, with a comment on each line |
| `evaluated.yaml` | the configuration of the evaluated models, in `evaluated` of each folder |
| `report.json` | the figures above, and the data and options of every model |

The history store and the vectors contain users' data: protect this folder like the log.
"""


_MODELS = {
    "ranker": "scores candidates by the user's history (HSTU)",
    "generator": "finds candidates by semantic IDs",
    "vectors": "finds candidates by vectors",
}


def _new_item(found: Examples) -> str:
    """Show how an item enters the served catalogue; "" = items have no features to place it by."""
    if not found.features:
        return ""
    added = {"item_id": NEW_ITEM, "title": "An item of tomorrow", "features": found.features}
    changes = ({"add": [added]}, {"withdraw": [NEW_ITEM]})
    add, withdraw = (curl("/v1/catalog/items", one, ADMIN_PORT) for one in changes)
    return f"""
Add that item to the catalogue by its features, at the admin address, and take it out again:

```
{add}
{withdraw}
```
"""


ADMIN_PORT = 8081
LEAST_EVENTS = 5
# requests on a log that ended longer ago use its end as their time: the models were not trained on
# such a gap
OLD_S = 30 * 86_400
NEW_ITEM = "an-item-of-tomorrow"
COLD_USER = "somebody-new"


class Examples(NamedTuple):
    """Names of a dataset for example calls."""

    user: str
    num_events: int  # number of the user's events
    items: list[str | int]  # the user's newest items, oldest first
    actions: list[str]
    timestamp: int  # unix seconds, right after the last event
    asked_at: int | None  # unix seconds, `timestamp` of requests; None = now
    features: dict[str, Any]  # of the newest of the items


def examples(
    log: Interactions, names: ItemNames, features: Sequence[ItemValues] = (), num_items: int = 3
) -> Examples:
    """Choose a user with a median number of events, among users with at least five, or all."""
    counts = np.bincount(log.users, minlength=len(log.user_names))
    enough = np.flatnonzero(counts >= LEAST_EVENTS)
    some = enough if len(enough) else np.flatnonzero(counts)
    user = int(some[np.argsort(counts[some], kind="stable")[len(some) // 2]])
    own = log[np.flatnonzero(log.users == user)[-num_items:]]
    return Examples(
        user=log.user_names[user],
        num_events=int(counts[user]),
        items=names.names(own.items),
        actions=[_action(log, value) for value in own.values.tolist()],
        timestamp=int(log.timestamps[-1]) + 60,
        asked_at=asked_at(log),
        features=_of_item(int(own.items[-1]), features),
    )


def _of_item(item: int, features: Sequence[ItemValues]) -> dict[str, Any]:
    """Return the features of an item as a request gives them: a number, a text or a list."""
    found: dict[str, Any] = {}
    for one in features:
        values = [one.values[place] for place in one.of_item.get(item, [])]
        if item in one.numbers:
            found[one.name] = one.numbers[item]
        elif values:
            found[one.name] = values if len(values) > 1 else values[0]
    return found


def asked_at(log: Interactions) -> int | None:
    """Choose the time of requests: right after the log if it ended long ago, or None = now.

    A model of a log without times reads none.
    """
    after = int(log.timestamps[-1]) + 60
    return after if ORDER_S <= after < time.time() - OLD_S else None


def recommend(user: str, timestamp: int | None = None, **more: Any) -> dict[str, Any]:
    """Make the body of a recommend for five items."""
    when = {} if timestamp is None else {"timestamp": timestamp}
    return {"user_id": user, "num_items": 5, **when, **more}


def known_user(found: Examples) -> dict[str, Any]:
    """Make the body of a recommend for a user whose history is in the store."""
    return recommend(found.user, found.asked_at)


def with_new_item(found: Examples) -> dict[str, Any]:
    """Make the body of a recommend whose history ends with an item outside the catalogue."""
    items = [*found.items, NEW_ITEM]
    times = [found.timestamp + place - len(items) for place in range(len(items))]
    columns = {"items": items, "actions": [*found.actions, found.actions[-1]], "timestamps": times}
    return recommend("somebody-else", found.asked_at, history=columns, explain=True)


def _action(log: Interactions, value: float) -> str:
    return log.action_names[int(value)] if log.action_names else value_name(value)
