"""Features of every kind and place, and random values of them, that several test folders use."""

from __future__ import annotations

from typing import Any

import numpy as np

from npu_gr.core.feature_schema.columns import OneRow
from npu_gr.core.feature_schema.schema import OFS, Feature, Of

NAMES = ("fr", "de", "nl")


def every_feature(of: tuple[Of, ...] = OFS) -> tuple[Feature, ...]:
    return tuple(
        feature
        for one in of
        for feature in (
            Feature(name="country", of=one, kind="category", values=NAMES[:2]),
            Feature(name="tags", of=one, kind="hashed", num_buckets=11, max_values=3),
            Feature(name="age", of=one, kind="number", borders=(1.0, 2.0)),
            Feature(name="spent", of=one, kind="number", mean=1.0, scale=2.0),
        )
    )


def random_features(random: np.random.Generator) -> tuple[Feature, ...]:
    """Some features of every kind, in any order."""
    made: list[Feature] = []
    for of in OFS:
        for place in range(int(random.integers(0, 4))):
            about: dict[str, Any] = {"name": f"f{place}", "of": of}
            match int(random.integers(0, 4)):
                case 0:
                    size = int(random.integers(1, 4))
                    made.append(
                        Feature(**about, kind="category", values=NAMES[:size], max_values=size)
                    )
                case 1:
                    num_buckets, most = (int(one) for one in random.integers(1, 6, 2))
                    made.append(
                        Feature(**about, kind="hashed", num_buckets=num_buckets, max_values=most)
                    )
                case 2:
                    borders = tuple(np.unique(random.normal(size=3)).tolist())
                    made.append(Feature(**about, kind="number", borders=borders))
                case _:
                    made.append(
                        Feature(**about, kind="number", mean=float(random.normal()), scale=2.0)
                    )
    return tuple(made[place] for place in random.permutation(len(made)))


def values(
    features: tuple[Feature, ...], of: Of, num_rows: int, random: np.random.Generator
) -> dict[str, list[Any]]:
    """Columns as lists, a fifth of them missing, some left out."""
    columns: dict[str, list[Any]] = {}
    for feature in features:
        if feature.of != of or random.random() < 0.1:
            continue
        cells: list[Any]
        if feature.kind == "number":
            cells = random.normal(size=num_rows).astype(np.float32).tolist()
        elif feature.max_values == 1:
            cells = [NAMES[place] for place in random.integers(0, 3, num_rows)]
        else:
            sizes = random.integers(0, feature.max_values + 1, num_rows)
            cells = [[NAMES[place] for place in random.integers(0, 3, size)] for size in sizes]
        columns[feature.name] = [None if random.random() < 0.2 else cell for cell in cells]
    return columns


def row(features: tuple[Feature, ...], of: Of, random: np.random.Generator) -> OneRow:
    """One row, as a request brings it."""
    found = {name: column[0] for name, column in values(features, of, 1, random).items()}
    return {
        name: tuple(one) if isinstance(one, list) else one
        for name, one in found.items()
        if one not in (None, [])
    }
