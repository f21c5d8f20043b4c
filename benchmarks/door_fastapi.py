"""FastAPI and uvicorn with the same ranker, in their usual form: a typed body, a plain handler in the thread pool.

python -m benchmarks.door_fastapi CHECKPOINT PORT
"""

import sys
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from benchmarks.door_cold import ColdRanker
from npu_gr.core.process import set_up_process


class RankedHistory(BaseModel):
    """The columns of a history."""

    items: list[int]
    actions: list[int]
    timestamps: list[int]


class RankedBody(BaseModel):
    """What a rank brings."""

    user_id: str
    tenant: str = ""
    history: RankedHistory
    candidates: list[int]
    timestamp: int


def main(checkpoint: Path, port: int) -> None:
    """Serve until the process is ended."""
    set_up_process()
    ranker = ColdRanker(checkpoint)
    app = FastAPI()

    def rank(body: RankedBody) -> dict[str, dict[str, list[float]]]:
        return {"scores": ranker.scores(body.model_dump())}

    app.post("/v1/rank")(rank)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
