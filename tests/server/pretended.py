"""A kind of request that does not exist, to show what a new one costs.

It costs one entry, one codec, and here one answer.

`register()` must run before any module that derives from the table of kinds is imported, so such
modules are imported within functions. As a program it serves the kind over HTTP with a fake service
and prints what it found, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any

import msgspec

from npu_gr.core.history import UserKey
from npu_gr.core.kinds import KINDS, Kind, Priority, Routing, register


class ShoutRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    user: UserKey
    word: str


class ShoutAnswer(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    echo: str
    stages_s: dict[str, float] = msgspec.field(default_factory=dict)

    @property
    def label_value(self) -> str:
        return "loud"

    def log_fields(self) -> dict[str, Any]:
        return {"loudness": len(self.echo), "whisper": None}


SHOUT: Kind[ShoutRequest, ShoutAnswer] = Kind(
    name="shout",
    plural="shouts",
    summary="Say a word louder.",
    path="/v1/shout",
    status=201,
    request=ShoutRequest,
    answer=ShoutAnswer,
    objective_s=0.5,
    priority=Priority.GENERATE,
    routing=Routing.FOLLOW,
    uses_device=False,
    stages=("shout",),
    label="volume",
    labels=("loud",),
)


def register_shout() -> None:
    """Put the kind into the table, and its codec into the table of codecs."""
    assert not [
        name for name in sys.modules if name.startswith(("npu_gr.server", "npu_gr.metrics"))
    ]
    register(SHOUT)

    import msgspec

    from npu_gr.server.config import ServerConfig
    from npu_gr.server.schemas import CODECS
    from npu_gr.server.schemas.fields import Codec

    def parse(body: Any, _config: ServerConfig, _names: object) -> ShoutRequest:
        return ShoutRequest(user=body.user, word=body.word)

    def render(answer: ShoutAnswer, request_id: str, _media: str, _shown: object) -> msgspec.Struct:
        shown: msgspec.Struct = out(
            request_id=request_id, echo=answer.echo, stages_s=answer.stages_s
        )
        return shown

    from npu_gr.server.schemas.fields import UserBody

    body = msgspec.defstruct(
        "ShoutBody",
        [("word", str)],
        bases=(UserBody,),
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=True,
    )
    out = msgspec.defstruct(
        "ShoutOut", [("request_id", str), ("echo", str), ("stages_s", dict[str, float])]
    )
    CODECS[SHOUT.name] = Codec(body=body, answer=out, parse=parse, render=render)


class _Lines(logging.Handler):
    """Keeps the lines of the access log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(record.getMessage()))


async def main() -> dict[str, Any]:
    """Serve one shout, reject another, and gather what HTTP says about them."""
    register_shout()
    from tests.server.fake import FakeService, serving_fake

    handler = _Lines()
    logging.getLogger("npu_gr.request").addHandler(handler)
    logging.getLogger("npu_gr.request").setLevel(logging.INFO)
    service = FakeService({SHOUT.name: ShoutAnswer(echo="HELLO", stages_s={"shout": 0.25})})
    async with serving_fake(service) as (client, metrics):
        body = {"user_id": "u", "word": "hello"}
        async with client.post(SHOUT.path, json=body, headers={"X-Request-Id": "mine"}) as response:
            served = {"status": response.status, "body": await response.json()}
        async with client.post(SHOUT.path, json={"user_id": "u", "wordz": "hello"}) as response:
            rejected = {
                "status": response.status,
                "detail": (await response.json(content_type=None))["detail"],
            }
        status = await (await client.get("/debug/status")).json()
        documented = (await (await client.get("/openapi.json")).json())["paths"][SHOUT.path]["post"]
    ((kind, request, _),) = service.served
    assert (kind, request) == (SHOUT.name, ShoutRequest(user=UserKey("", "u"), word="hello"))
    assert KINDS[SHOUT.name] is SHOUT

    def count(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"npu_gr_{name}", {"kind": SHOUT.name, **labels})

    return {
        "served": served,
        "rejected": rejected,
        "documented": documented,
        "line": handler.lines[0],
        "counts": {
            "admitted": count("admissions_total", verdict="admitted"),
            "invalid": count("admissions_total", verdict="invalid"),
            "request_duration": count("request_duration_seconds_count"),
            "http": count("stage_duration_seconds_count", stage="http"),
        },
        "status_rows": [row["kind"] for row in status["goodput"]],
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main())))  # noqa: T201
