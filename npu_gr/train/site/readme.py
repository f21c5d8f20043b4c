"""`README.md` of a site: what was trained on what, how good it is, how to serve it, and calls that work."""

from __future__ import annotations

from pathlib import Path

from npu_gr.train.next_command import curl, serve
from npu_gr.train.site.configuration import EVALUATED, SERVE
from npu_gr.train.site.examples import COLD_USER, NEW_ITEM, Examples, known_user, recommend, with_new_item
from npu_gr.train.site.report import SiteReport


def readme(site: Path, report: SiteReport, found: Examples) -> str:
    """Write the page.

    Args:
        site: folder, as the command that serves it will name it.
        report: what the site was made from.
        found: real names for the calls.
    """
    rows = [
        f"| {name} | {row.name} | {row.value:.4f} | {row.baseline_value:.4f} {row.baseline} | {part.measured_on} |"
        for name, part in report.parts.items()
        for row in part.figures
    ]
    events = {"items": [found.items[-1]], "actions": [found.actions[-1]], "timestamps": [found.timestamp - 1]}
    warnings = [text for warning in report.warnings() for text in ("", warning)]
    words = report.words()
    cascade = "\n\n" + "\n\n".join(words) if words else ""
    as_of = "" if found.asked_at is None else " (`timestamp` asks as of the end of the log; without it: as of now)"
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
`{serve(site / EVALUATED)}` serves it.
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
