"""`npu-gr judge --choose`: which sources and which order a running service's cascade should have.

Every user is asked for in every way that the configuration allows, over HTTP; `npu_gr/train/cascade.py` chooses. What
was chosen is two lines of the section `recommend`, which `write` puts into a configuration file.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from npu_gr.core.errors import ConfigError, Unavailable
from npu_gr.core.kinds import RECOMMEND
from npu_gr.core.names import answered_ids
from npu_gr.core.request import SourceName
from npu_gr.service.config import load
from npu_gr.tools.evaluate_service import AT_ONCE, EvaluationClient
from npu_gr.train.cascade import TOP, CascadeChoice, CascadeWay, cascade_ways, choose_way
from npu_gr.train.next_event import MISSED, NextEventCase, hides_seen


async def choose_over_http(
    base_url: str,
    admin_url: str,
    cases: Sequence[NextEventCase],
    done: Callable[[int, int], None] = lambda *_: None,
    api_key: str | None = None,
) -> CascadeChoice:
    """Ask a service for every case in every way, and choose one.

    Args:
        base_url, admin_url, api_key: as of `evaluate`.
        cases: at least two; half of the users choose, the others judge.
        done: called with (cases so far, in all).

    Raises:
        Unavailable: the service refused a request, or there is one case only.
    """
    if len(cases) < 2:
        raise Unavailable(f"{len(cases)} users with a known and a later event: to choose and to judge takes two")
    async with EvaluationClient(base_url, api_key) as client, EvaluationClient(admin_url, api_key) as admin:
        section = await admin.cascade()
        sources: list[SourceName] = list(section["sources"])
        seen: dict[str, object] = {"exclude_seen": hides_seen(cases)}
        first, _ = await _asked(client, cases[0], seen)
        configured = CascadeWay(tuple(sources), first["order"])
        # only a ranker with a fitted order answers in it unasked
        has_order = section["order"] == "fitted" or (section["order"] is None and configured.order == "fitted")
        ways = cascade_ways(sources, has_order=has_order)
        places = {way: np.full(len(cases), MISSED) for way in ways}
        waiting = asyncio.Semaphore(AT_ONCE)
        num_done = 0

        async def one(row: int, case: NextEventCase) -> None:
            nonlocal num_done
            async with waiting:
                for way in ways:
                    _, items = await _asked(client, case, seen | {"sources": list(way.sources), "order": way.order})
                    if case.target in items:
                        places[way][row] = items.index(case.target)
                num_done += 1
                done(num_done, len(cases))

        async with asyncio.TaskGroup() as group:
            for row, case in enumerate(cases):
                group.create_task(one(row, case))
    return choose_way(places, configured)


async def _asked(
    client: EvaluationClient, case: NextEventCase, how: dict[str, object]
) -> tuple[dict[str, Any], list[int]]:
    when = {"timestamp": case.happened_at, "num_items": TOP}
    answer, _ = await client.post(RECOMMEND.path, case.body("judge-choose") | when | how)
    return answer, answered_ids(answer["items"]).tolist()


def write(choice: CascadeChoice, path: Path) -> str:
    """Put what was chosen into a configuration file: the lines `sources` and `order` of its section `recommend`.

    Sources keep their numbers of items. Comments and every other line stay.

    Returns:
        What was written, in words.

    Raises:
        ConfigError: the file has no such section, a source that was chosen is not in it, or it cannot be read.
    """
    given = load(path).recommend
    if given is None or (missing := [name for name in choice.way.sources if name not in given.sources]):
        lacking = "no section recommend" if given is None else f"no recommend.sources.{missing[0]}"
        raise ConfigError(f"{path}: has {lacking}, which the judged service has")
    sources = ", ".join(f"{name}: {given.sources[name]}" for name in choice.way.sources)
    found = {"sources": f"{{{sources}}}", "order": choice.way.order}
    text = path.read_text()
    start = re.search(r"^recommend:[ \t]*(#.*)?\n", text, re.MULTILINE)
    if start is None:
        raise ConfigError(f"{path}: recommend is not written as a block; write {found} yourself")
    end = re.search(r"^\S", text[start.end() :], re.MULTILINE)
    stop = len(text) if end is None else start.end() + end.start()
    block = text[start.end() : stop]
    for key, value in found.items():
        block = _replaced(block, key, value)
    staged = path.with_name(f"{path.name}.tmp")
    staged.write_text(text[: start.end()] + block + text[stop:])
    try:
        now = load(staged).recommend
        if now is None or (tuple(now.sources), now.order) != choice.way:
            raise ConfigError(f"{path}: recommend is written in a form that is not understood; write {found} yourself")
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)
    return f"recommend: sources {found['sources']}, order {found['order']}, in {path}"


def _replaced(block: str, key: str, value: str) -> str:
    """Replace a key's line, and what a block below it holds; its comment stays."""
    line = f"  {key}: {value}"
    old = re.search(rf"^  {key}:[^#\n]*(#[^\n]*)?(?:\n    [^\n]*)*", block, re.MULTILINE)
    if old is None:
        return f"{line}\n{block}"
    return block[: old.start()] + f"{line}  {old[1] or ''}".rstrip() + block[old.end() :]
