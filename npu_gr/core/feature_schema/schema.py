"""`Feature`: an input of a ranker other than items, actions and times.

A checkpoint lists them in `features`.

    of       input                                                                 known
    user     one token at the start of the prefix (their sum), or a token each     before the signal
    event    the token of its event                                                before the signal
    request  every candidate's row, and NEXT                                       with the rank
    item     the item embedding                                                    in training
    cross    the row of its candidate                                              with the rank

Trainer and service encode values with the same code, `encode.py`. Missing is a separate value in
every kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal, get_args

import msgspec

from npu_gr.core.feature_schema.computed import OF_TIME, read_rule
from npu_gr.core.feature_schema.factors import MF_SCORE

Of = Literal["user", "event", "request", "item", "cross"]
OFS: tuple[Of, ...] = get_args(Of)

Kind = Literal["category", "hashed", "number"]

MOST_FEATURES = 256  # of one `of`
MOST_VALUES = 1024  # of one multi-valued feature
MOST_WHOLE = 2**24  # whole numbers that float32 represents exactly


class Feature(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One feature, and the encoding of its values.

    category  names, each with a row; names not in `values` have the row "unknown"
    hashed    names without a vocabulary: the row is xxh3-64 of the name modulo `num_buckets`
    number    with `borders`: a row per interval; with `num_buckets`: a row per whole number from 0,
              other values are missing; else: (x - mean) / scale, clipped at +-clip

    A name of several values (`max_values` over 1) is the mean of their rows.

    Raises:
        ValueError: the fields contradict each other; the message names the feature and the field.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    of: Of
    kind: Kind
    values: tuple[str, ...] = ()  # vocabulary of a category
    # of a hashed feature, or of a number (at most 2^24)
    num_buckets: Annotated[int, msgspec.Meta(ge=0, le=2**30)] = 0
    # per user, event, request, item or candidate
    max_values: Annotated[int, msgspec.Meta(ge=1, le=MOST_VALUES)] = 1
    # of a number, ascending; x is in interval i if i borders are <= x
    borders: tuple[float, ...] = ()
    mean: float = 0.0
    scale: float = 1.0
    clip: float = 10.0
    # rule of a feature that the service computes, see `computed.py`; "" = the client sends it
    computed: str = ""
    # of a computed cross feature: the actions that count; empty = all
    actions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind != "category" and self.values:
            raise ValueError(f"features.{self.name}: values are only for a category")
        if self.kind == "category" and (
            not self.values or len(set(self.values)) != len(self.values)
        ):
            raise ValueError(
                f"features.{self.name}: values: a category needs distinct values, at least one"
            )
        if (self.kind == "hashed") != bool(self.num_buckets) and self.kind != "number":
            raise ValueError(
                f"features.{self.name}: num_buckets: needed for a hashed feature, not allowed for "
                "a category"
            )
        if self.kind != "number" and (
            self.borders or (self.mean, self.scale, self.clip) != (0.0, 1.0, 10.0)
        ):
            raise ValueError(
                f"features.{self.name}: borders, mean, scale and clip are only for a number"
            )
        if self.kind == "number":
            self._check_number()
        self._check_computed()

    def _check_computed(self) -> None:
        if self.actions and not (self.computed and self.of == "cross"):
            raise ValueError(f"features.{self.name}: actions are only for a computed cross feature")
        if not self.computed:
            return
        if self.of == "request" and self.computed in OF_TIME:
            if self.kind != "category":
                raise ValueError(
                    f"features.{self.name}: computed: {self.computed} needs kind category"
                )
        elif self.of == "cross":
            if self.kind != "number":
                raise ValueError(
                    f"features.{self.name}: computed: {self.computed} needs kind number"
                )
            if self.computed == MF_SCORE and self.actions:
                raise ValueError(
                    f"features.{self.name}: actions: not allowed for {MF_SCORE}, which uses the "
                    "values of all actions"
                )
            try:
                read_rule(self.computed)
            except ValueError as error:
                raise ValueError(f"features.{self.name}: {error}") from error
        else:
            raise ValueError(
                f"features.{self.name}: computed: {self.computed!r} is not available for {self.of}"
            )

    def _check_number(self) -> None:
        if self.max_values != 1:
            raise ValueError(f"features.{self.name}: max_values: must be 1 for a number")
        if not all(map(math.isfinite, (*self.borders, self.mean, self.scale, self.clip))):
            raise ValueError(f"features.{self.name}: borders, mean, scale and clip must be finite")
        if self.num_buckets and (self.borders or self.num_buckets > MOST_WHOLE):
            raise ValueError(
                f"features.{self.name}: num_buckets: a number has at most "
                f"{MOST_WHOLE}, and no borders"
            )
        if any(low >= high for low, high in pairwise(self.borders)):
            raise ValueError(f"features.{self.name}: borders must ascend")
        if self.scale <= 0 or self.clip <= 0:
            raise ValueError(f"features.{self.name}: scale and clip must be over 0")

    @property
    def is_dense(self) -> bool:
        """Whether it is a numeric input instead of a row of the table."""
        return self.kind == "number" and not self.borders and not self.num_buckets

    @property
    def num_rows(self) -> int:
        """Rows of the table: values, "unknown" of a category, "missing"; 0 if it is dense."""
        if self.kind == "category":
            return len(self.values) + 2
        if self.num_buckets:
            return self.num_buckets + 1
        return len(self.borders) + 2 if self.borders else 0


def check_features(features: Sequence[Feature]) -> None:
    """Check a list of features together.

    Raises:
        ValueError: a name occurs twice in one `of`, or one `of` has too many features.
    """
    for of in OFS:
        names = [feature.name for feature in features if feature.of == of]
        if len(names) > MOST_FEATURES:
            raise ValueError(f"features: {len(names)} of {of}, the limit is {MOST_FEATURES}")
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"features: {twice} of {of} occurs twice")
