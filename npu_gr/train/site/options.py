"""What `npu-gr train all --set KEY=VALUE` may say: the options of every model, and those of the cascade over them."""

from __future__ import annotations

from math import prod

import msgspec

from npu_gr.core.settings import Count
from npu_gr.train.generate.train import MOVIELENS, GenerateOptions
from npu_gr.train.rank.train import DEMO, TrainOptions

CODE_COUNTS = ((64, 64), (128, 128), (256, 256), (256, 256, 256), (1024, 1024, 1024))
ROOM = 2  # semantic IDs an item: with fewer, similar items lose their codes to each other


class SiteOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides a site but the dataset and the number of threads."""

    rank: TrainOptions = DEMO
    generate: GenerateOptions = MOVIELENS
    num_generated: Count = 100  # items that a recommend asks of the generator
    max_candidates: Count = 200  # of those, at most so many are ranked
    num_popular: Count = 200  # most popular items, for users of whom nothing is known


def options_for(num_items: int) -> SiteOptions:
    """Choose the options for a catalogue of this size; `--set` replaces them."""
    fits = [codes for codes in CODE_COUNTS if prod(codes) >= ROOM * num_items]
    codes = fits[0] if fits else CODE_COUNTS[-1]
    return SiteOptions(generate=msgspec.structs.replace(MOVIELENS, code_count=codes))
