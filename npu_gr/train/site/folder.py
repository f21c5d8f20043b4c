"""The folder of a site while it is made: everything is written aside, and put into its place at the end.

    site/ranker, generator, vectors, popular.txt, serve.yaml, README.md, report.json    in service
    site/.new/...       the same names while they are made; `<name>.json` there says that a model is finished
    site/.new/READY     the names of what is finished: it is being put into its place

Invariants, checked by tests/train/site/test_folder.py:
  S1  before READY nothing of what is in service is touched, whatever ends the process
  S2  after READY the next run first finishes what the interrupted one began, so no site is mixed for longer than that
  S3  a file or folder in service is replaced by a rename: who has it open, or mapped, keeps the old one
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

from npu_gr.catalogue.names import ItemNames
from npu_gr.core.errors import ConfigError, DataError
from npu_gr.core.names import value_name
from npu_gr.core.renamed import current
from npu_gr.history_store.interactions import Interactions
from npu_gr.train.options import curl, serve
from npu_gr.train.site.configuration import EVALUATED_CONFIG, SERVE
from npu_gr.train.site.report import PartReport, SiteReport

STAGED = ".new"
READY = "READY"
REPLACED = ".old"
LOCK = ".lock"
REPORT = "report.json"


class SiteFolder:
    """One site, and what of it is being made. Only one process at a time makes it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.staged = place / STAGED

    @classmethod
    @contextmanager
    def opened(cls, place: Path) -> Iterator[SiteFolder]:
        """Make the folder, keep other makers out while the block runs, and finish what an interrupted run began.

        Raises:
            DataError: it cannot be made or written into.
            ConfigError: another process makes this site.
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
                raise ConfigError(f"{place}: another process makes this site") from error
            folder._finish()
            yield folder
        finally:
            os.close(lock)

    def report(self) -> SiteReport | None:
        """How what is in service was made; None: nothing is, or nobody knows."""
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
        """A model that an interrupted run has finished; None: it has not."""
        try:
            return msgspec.json.decode((self.staged / f"{name}.json").read_bytes(), type=PartReport)
        except (OSError, msgspec.MsgspecError):
            return None

    def begin(self, name: str) -> Path:
        """Make an empty folder to make a model in.

        Raises:
            DataError: it cannot be made.
        """
        self.discard(name)
        try:
            (self.staged / name).mkdir()
        except OSError as error:
            raise DataError(f"{self.staged / name}: cannot be made: {error.strerror}") from error
        return self.staged / name

    def finish(self, name: str, report: PartReport) -> None:
        """Note that a model is whole."""
        self.write(f"{name}.json", msgspec.json.encode(report))

    def discard(self, name: str) -> None:
        """Drop what was made of a model; the note that it is finished first."""
        (self.staged / f"{name}.json").unlink(missing_ok=True)
        shutil.rmtree(self.staged / name, ignore_errors=True)

    def write(self, name: str, content: bytes) -> Path:
        """Write a file aside.

        Raises:
            DataError: it cannot be written.
        """
        path = self.staged / name
        aside = path.with_name(f"{name}.tmp")
        try:
            aside.write_bytes(content)
            os.replace(aside, path)
        except OSError as error:
            raise DataError(f"{path}: cannot be written: {error.strerror}") from error
        return path

    def put_in_place(self, names: Sequence[str]) -> None:
        """Put what was made into service, in this order, and forget the rest.

        Raises:
            DataError: it cannot be moved; the next run goes on.
        """
        self.write(READY, msgspec.json.encode(names))
        self._finish()

    def _finish(self) -> None:
        """Go on with what READY names: what is no longer there has its place already."""
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
                    os.rename(self.place / name, replaced)
                os.rename(self.staged / name, self.place / name)
            shutil.rmtree(self.staged)
            self.staged.mkdir()
            shutil.rmtree(replaced, ignore_errors=True)
        except OSError as error:
            raise DataError(f"{self.place}: cannot be written: {error}") from error


def digest(*texts: str) -> str:
    """32 hex digits over texts."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(texts))


def digest_of_files(folder: Path, pattern: str) -> str:
    """32 hex digits over the names and the contents of the matching files of a folder.

    Raises:
        DataError: one cannot be read.
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
    """Write the page.

    Args:
        site: folder, as the command that serves it will name it.
        report: what the site was made from.
        found: real names for the calls.
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
    cascade = "\n\n" + "\n\n".join(words) if words else ""
    as_of = (
        ""
        if found.asked_at is None
        else (" (`timestamp` asks as of the end of the log; without it: as of now)")
    )
    return f"""# A recommender of {report.num_events:,} events

Made {report.made_at} from {report.num_events:,} events of {report.num_users:,} users with {report.num_items:,} items
by

```
{report.made_by}
```

## Serve it

```
{serve(site / SERVE)}
```

In the folder in which it was made: the paths in `serve.yaml` are relative to it. What is changed in `serve.yaml` stays
when the site is made again.

## Ask it

A user whom it knows, with {found.num_events} events in the history store{as_of}:

```
{curl("/v1/recommend", known_user(found))}
```

A user of whom nothing is known gets what users begin with, and what is popular:

```
{curl("/v1/recommend", recommend(COLD_USER, found.asked_at))}
```

Tell it what that user did, and ask again:

```
{curl("/v1/events", {"user_id": COLD_USER, "events": events})}
{curl("/v1/recommend", recommend(COLD_USER, found.asked_at))}
```

A history in the request, which ends with an item that no model has seen (`{NEW_ITEM}`): the rest of the history counts,
and the answer says how many items were unknown.

```
{curl("/v1/recommend", with_new_item(found))}
```

## How good it is

| model | figure | value | strongest baseline | measured on |
|---|---|---|---|---|
{chr(10).join([*rows, *warnings])}{cascade}

Each model was first trained without the events that it was asked for, and these figures are of that one:
`{serve(site / EVALUATED_CONFIG)}` serves it.
Then it was trained again on all {report.num_events:,} events, the newest included, and that one is served.

## What is here

| file | what |
|---|---|
| `ranker/` | scores candidates by the user's history (HSTU) |
| `generator/` | finds candidates by semantic IDs |
| `vectors/` | finds candidates by vectors |
| `popular.txt` | the most popular items, best first |
| `history.db` | the history store: what the users did |
| `serve.yaml` | the configuration; each line says what it means |
| `evaluated.yaml` | the same over the evaluated models, which lie in `evaluated` of each folder |
| `report.json` | the figures above, and what every model was made from |

The history store and the vectors hold data of users: whoever may not read the log may not read this folder.
"""


LEAST_EVENTS = 5
# a log that ends earlier than this is asked as of its end: no model has seen such a gap
OLD_S = 30 * 86_400
NEW_ITEM = "an-item-of-tomorrow"
COLD_USER = "somebody-new"


class Examples(NamedTuple):
    """Real names of a dataset."""

    user: str
    num_events: int  # of that user
    items: list[str | int]  # the newest of that user, oldest first
    actions: list[str]
    timestamp: int  # right after every event
    asked_at: int | None  # the moment to ask for; None = now


def examples(log: Interactions, names: ItemNames, num_items: int = 3) -> Examples:
    """Choose a user with an ordinary number of events: the median of those with at least five, or of all."""
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
    )


def asked_at(log: Interactions) -> int | None:
    """Choose the moment to ask for: right after the log where that is long ago, or None, which is now."""
    after = int(log.timestamps[-1]) + 60
    return after if after < time.time() - OLD_S else None


def recommend(user: str, timestamp: int | None = None, **more: Any) -> dict[str, Any]:
    """The body of a recommend of five items with titles; no timestamp asks for now."""
    when = {} if timestamp is None else {"timestamp": timestamp}
    return {"user_id": user, "num_items": 5, "fields": ["title"], **when, **more}


def known_user(found: Examples) -> dict[str, Any]:
    """The body of a recommend for a user whose history is in the store."""
    return recommend(found.user, found.asked_at)


def with_new_item(found: Examples) -> dict[str, Any]:
    """The body of a recommend whose history ends with an item that no model has seen."""
    items = [*found.items, NEW_ITEM]
    times = [found.timestamp + place - len(items) for place in range(len(items))]
    columns = {"items": items, "actions": [*found.actions, found.actions[-1]], "timestamps": times}
    return recommend("somebody-else", found.asked_at, history=columns)


def _action(log: Interactions, value: float) -> str:
    return log.action_names[int(value)] if log.action_names else value_name(value)
