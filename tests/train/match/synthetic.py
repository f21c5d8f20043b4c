"""Two domains with a planted taste: a user likes one group of items in both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from npu_gr.train.match.domains import Domains, MatchData, read_domains, split
from npu_gr.train.match.train import MatchOptions

NUM_USERS, NUM_ITEMS, NUM_GROUPS = 160, 240, 8
QUICK = MatchOptions(
    dim=16,
    source_steps=30,
    target_steps=30,
    inter_steps=20,
    batch_edges=512,
    batch_anchors=64,
    num_inter_negatives=16,
)


def write(folder: Path, seed: int = 0) -> tuple[Path, Path]:
    random = np.random.default_rng(seed)
    taste = random.integers(0, NUM_GROUPS, NUM_USERS)

    def draw(user: int, num: int) -> list[int]:
        group = NUM_ITEMS // NUM_GROUPS
        liked = taste[user] * group + random.permutation(group)[:num]
        return sorted({int(item) for item in (*liked, random.integers(NUM_ITEMS))})

    paths = folder / "source.tsv", folder / "target.tsv"
    for path, num, offset in zip(paths, (14, 3), (0, 5000), strict=True):
        rows = [
            f"u{user}\t{item + offset}\t1\n"
            for user in range(NUM_USERS)
            for item in draw(user, num)
        ]
        path.write_text("".join(rows))
    return paths


def domains(folder: Path, seed: int = 0) -> Domains:
    return read_domains(*write(folder, seed))


def data(folder: Path, seed: int = 0) -> MatchData:
    return split(domains(folder, seed), 1.0, 60, seed)


def quick(**changes: Any) -> MatchOptions:
    return msgspec.structs.replace(QUICK, **changes)
