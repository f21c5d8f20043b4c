"""An instance of a company with its own names: a ranker, vector retrieval, a cascade, titles."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from npu_gr.catalogue.names import ItemNames
from npu_gr.core.names import item_ids
from npu_gr.handlers.service import Service
from npu_gr.model.weights import Checkpoint, save
from npu_gr.vector_search.vectors import save as save_vectors
from tests.models import tiny_model
from tests.serving import serving
from tests.vector_search.vectors import make_vectors

ACTIONS = ("view", "cart", "purchase")
NAMES = [str(row) if row % 3 == 0 else f"SKU-{row:04d}-{'ABC'[row % 3]}" for row in range(300)]
TITLES = {name: f"Thing no. {row}" if row % 2 == 0 else "" for row, name in enumerate(NAMES)}
NUM_MATCHED = 60
KEY = b"a key of 16 byte"


@asynccontextmanager
async def shop(
    folder: Path, record: dict[str, Any] | None = None, **server: Any
) -> AsyncIterator[tuple[str, Service]]:
    checkpoint = Checkpoint(
        model=tiny_model(), item_ids=item_ids(NAMES, KEY), name="tiny", action_names=ACTIONS
    )
    save(checkpoint, folder / "checkpoint")
    ItemNames.make(NAMES, list(TITLES.values()), KEY).save(folder / "checkpoint")
    save_vectors(
        make_vectors(NUM_MATCHED, item_ids=np.sort(item_ids(NAMES[:NUM_MATCHED], KEY))),
        folder / "vectors",
    )
    (folder / "popular.txt").write_text("".join(f"{name}\n" for name in NAMES[100:140]))
    sections: dict[str, Any] = {
        "match": {"vectors": str(folder / "vectors")},
        "recommend": {"sources": {"match": 20}, "popular": str(folder / "popular.txt")},
    }
    if record is not None:
        sections["record"] = record
    async with serving(folder, **sections, server=server) as (http, service):
        yield str(http.make_url("/")), service
