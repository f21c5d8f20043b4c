"""A made-up kind of request, served by a real instance: a new kind costs what is below `register`.

    the entry   `SHOUT`, in `tests/server/pretended.py`: put into `KINDS` by `register_shout`
    the codec   in the same place
    the job     `ShoutJob` here, with its maker in `MAKERS`

`python -m tests.pretended` serves it over HTTP and prints what every list of kinds says of it, as
JSON.
"""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

from tests.server.pretended import SHOUT, ShoutAnswer, ShoutRequest, _Lines, register_shout


class ShoutJob:
    """Answers at once."""

    async def run(self, request: ShoutRequest, _call: object) -> ShoutAnswer:
        return ShoutAnswer(echo=request.word.upper(), stages_s={"shout": 0.001})

    async def stop(self) -> None:
        """Do nothing."""


async def main(folder: Path) -> dict[str, Any]:
    """Serve one shout, and gather what the rest of the system says about it."""
    register_shout()  # before any module that derives from the table is imported
    from npu_gr.core.kinds import Routing
    from npu_gr.metrics.dashboards import dashboards
    from npu_gr.metrics.rules import rules
    from npu_gr.replay.files import QueryLog
    from npu_gr.replay.requests import encode
    from npu_gr.route.haproxy import routed
    from npu_gr.service.config import SLOConfig
    from npu_gr.service.job_table import MAKERS
    from tests.serving import serving

    async def make_job(_shared: object, _jobs: object) -> ShoutJob:
        return ShoutJob()

    MAKERS[SHOUT.name] = make_job
    handler = _Lines()
    logging.getLogger("npu_gr.request").addHandler(handler)
    logging.getLogger("npu_gr.request").setLevel(logging.INFO)
    record = {"folder": str(folder / "traffic"), "enabled": True, "suffix": ".jsonl"}
    async with serving(folder, watched=False, record=record, slo={"shout_s": 0.5}) as (client, _):
        async with client.post(SHOUT.path, json={"user_id": "u", "word": "hello"}) as response:
            status, body = response.status, await response.json()
        line = handler.lines[-1]
        text = await (await client.get("/metrics")).text()
        documented = (await (await client.get("/openapi.json")).json())["paths"][SHOUT.path]["post"]
        page = await (await client.get("/debug/status")).json()
    samples = dict(row.rsplit(" ", 1) for row in text.splitlines() if row and row[0] != "#")
    (logged,) = (
        one for file in (folder / "traffic").glob("traffic-*.jsonl") for one in QueryLog(file)
    )
    objectives = SLOConfig().objectives()
    flat = [rule for group in rules(objectives)["groups"] for rule in group["rules"]]
    alerts = (rule["alert"] for rule in flat if rule.get("alert", "").startswith("NpuGrShout"))
    return {
        "status": status,
        "echo": body["echo"],
        "admitted": float(samples['npu_gr_admissions_total{kind="shout",verdict="admitted"}']),
        "in_time": float(samples['npu_gr_shout_duration_seconds_bucket{le="0.5",volume="loud"}']),
        "stage": float(samples['npu_gr_stage_duration_seconds_count{kind="shout",stage="shout"}']),
        "line": {name: line[name] for name in ("loudness", "route")},
        "documented": documented["summary"],
        "row": next(row["threshold_s"] for row in page["goodput"] if row["kind"] == SHOUT.name),
        "recorded": {"kind": logged.kind, "word": json.loads(encode(logged))["word"]},
        "router": next(how.name for how in Routing if SHOUT in routed(how)),
        "alerts": sorted(name for name in alerts if name.endswith("FastBurn")),
        "has_panel": 'kind=\\"shout\\"' in json.dumps(dashboards(objectives)),
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(main(Path(folder)))))  # noqa: T201
