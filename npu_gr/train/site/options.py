"""What `npu-gr train all --set KEY=VALUE` may say: the options of every model, and those of the cascade over them."""

from __future__ import annotations

from math import prod
from typing import Annotated

import msgspec
from msgspec import Meta

from npu_gr.core.settings import Count
from npu_gr.train.data import Split
from npu_gr.train.generate import train as generating
from npu_gr.train.rank import options as ranking
from npu_gr.train.retrieve.train import RetrieveOptions

GENERATOR = msgspec.structs.replace(generating.MOVIELENS, epochs=20, validation_users=500, test_users=1000)
"""Trained in about the time of the ranker, beside which it is trained; `train generate` takes more."""
SPLIT: Split = "leave-one-out"  # of the ranker: generator and vectors are evaluated on each last event, too
CODE_COUNTS = ((64, 64), (128, 128), (256, 256), (256, 256, 256), (1024, 1024, 1024))
ROOM = 2  # semantic IDs an item: with fewer, similar items lose their codes to each other


class SiteOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides a site but the dataset and the number of threads."""

    rank: ranking.TrainOptions = msgspec.structs.replace(ranking.DEMO, split=SPLIT)
    generate: generating.GenerateOptions = GENERATOR
    retrieve: RetrieveOptions = RetrieveOptions(test_users=1000)
    num_found: Annotated[Count, Meta(description="items that a recommend asks of the ranker's own retrieval")] = 200
    num_following: Annotated[Count, Meta(description="of what followed the last items, if that is asked")] = 100
    num_neighbours: Annotated[Count, Meta(description="of what the same users have, if that is asked")] = 100
    num_generated: Annotated[Count, Meta(description="of the generator, if it is asked")] = 100
    num_matched: Annotated[Count, Meta(description="of the retrieval vectors, if they are asked")] = 100
    max_candidates: Annotated[Count, Meta(description="most items that a recommend ranks")] = 200
    choosing_users: Annotated[
        Count, Meta(description="most users who choose which of these a recommend asks, and in which order it answers")
    ] = 600
    num_popular: Annotated[Count, Meta(description="most popular items, for users of whom nothing is known")] = 200

    def __post_init__(self) -> None:
        for section in ("rank", "generate", "retrieve"):
            if not getattr(self, section).refit:
                raise ValueError(f"{section}.refit: a site serves models of all events, and keeps the evaluated ones")
        if self.rank.split != SPLIT:
            raise ValueError(f"rank.split: a site asks every model for each user's last event, so it is {SPLIT}")
        if self.rank.evaluate_on != "test":
            raise ValueError("rank.evaluate_on: a site shows figures of the test; npu-gr train rank tries settings")


FULL = SiteOptions()
QUICK = SiteOptions(rank=msgspec.structs.replace(ranking.QUICK, split=SPLIT), generate=generating.QUICK)
"""For a first look: half of the time."""
PRESETS = {"full": FULL, "quick": QUICK}


def options_for(num_items: int, preset: SiteOptions = FULL) -> SiteOptions:
    """Fit a preset to a catalogue of this size; `--set` replaces what it chooses."""
    fits = [codes for codes in CODE_COUNTS if prod(codes) >= ROOM * num_items]
    codes = fits[0] if fits else CODE_COUNTS[-1]
    return msgspec.structs.replace(preset, generate=msgspec.structs.replace(preset.generate, code_count=codes))
