"""The calls of docs/http.md, in order, against a real instance: answers have the form shown."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np

from npu_gr.model.weights import Checkpoint, save
from npu_gr.vector_search.vectors import save as save_vectors
from tests.models import tiny_model
from tests.server.test_recommend_over_http import section
from tests.serving import FIRST_ID, serving
from tests.sources import ROOT
from tests.vector_search.vectors import make_vectors

PAGE = (ROOT / "docs" / "http.md").read_text()
CALL = re.compile(r"```\n(curl .*?)```\n(?:```json\n(.*?)```)?", re.DOTALL)
H = re.findall(r'`("history": .*?)`\.', PAGE, re.DOTALL)[0].replace("\n", " ")
STATUS = {"POST /v1/signal": 202, "DELETE /v1/users/me": 202}  # else 200


def form(value: Any) -> Any:
    """What an answer consists of: names and types. Lists are of one type; null may be anything."""
    if isinstance(value, dict):
        return {name: form(one) for name, one in value.items()}
    if isinstance(value, list):
        return [form(value[0])] if value else []
    return "number" if type(value) in (int, float) else type(value).__name__


def differs(told: Any, found: Any, at: str = "") -> list[str]:
    """Where two forms are not one."""
    if "NoneType" in (told, found) or [] in (told, found):
        return []
    if isinstance(told, dict) and isinstance(found, dict):
        if at.endswith(("ops", "stages_s")):  # of the machine, of what was still to be done
            told, found = (
                {name: one for name, one in side.items() if name in told and name in found}
                for side in (told, found)
            )
        missing = [f"{at}.{name}: only on one side" for name in sorted(told.keys() ^ found.keys())]
        return missing + [
            line
            for name in told.keys() & found.keys()
            for line in differs(told[name], found[name], f"{at}.{name}")
        ]
    if isinstance(told, list) and isinstance(found, list):
        return differs(told[0], found[0], f"{at}[]")
    return [] if told == found else [f"{at}: {told}, and it is {found}"]


def words_of(call: str) -> tuple[str, str, dict[str, str], str | None]:
    """Method, URL, headers and body of a call of curl."""
    words = [word.replace("$H", H) for word in shlex.split(call.replace("\\\n", " "))]
    method, headers, body, url = "", {}, None, ""
    assert words[:2] == ["curl", "-s"]
    rest = iter(words[2:])
    for word in rest:
        if word == "-H":
            name, _, value = next(rest).partition(": ")
            headers[name] = value
        elif word == "-X":
            method = next(rest)
        elif word == "-d":
            body = next(rest)
        else:
            url = word
    return method or ("POST" if body else "GET"), url, headers, body


async def test_the_calls_are_answered_as_the_page_says(tmp_path: Path) -> None:
    model = tiny_model()
    ids = np.arange(model.config.num_items, dtype=np.int64) + FIRST_ID
    save(
        Checkpoint(model=model, item_ids=ids, name="tiny", action_names=("skip", "click", "like")),
        tmp_path / "checkpoint",
    )
    save_vectors(make_vectors(), tmp_path / "vectors")
    sections = {
        **section(tmp_path),
        "match": {"vectors": str(tmp_path / "vectors")},
        "record": {"folder": str(tmp_path / "record"), "enabled": True},
        "server": {"default_budget_s": 10.0, "max_budget_s": 30.0},
    }
    calls = CALL.findall(PAGE)
    assert len(calls) == PAGE.count("```\ncurl ") >= 12
    told = []
    async with serving(tmp_path, **sections) as (client, _):
        for call, example in calls:
            method, url, headers, body = words_of(call)
            path = url.replace("$URL", "").replace("$ADMIN", "")
            headers = {
                name: value for name, value in headers.items() if name != "x-request-timeout-ms"
            }  # a busy machine
            async with client.request(method, path, data=body, headers=headers) as response:
                text = await response.text()
            assert response.status == STATUS.get(f"{method} {path}", 200), (call, text)
            assert example, call
            told += [
                f"{method} {path}{line}"
                for line in differs(form(json.loads(example)), form(json.loads(text)))
            ]
    assert told == []
