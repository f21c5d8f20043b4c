"""Encode feature values as rows of an embedding table and numbers, for trainer and service.

    names    -> xxh3-64 of `name_of`      [n, max_values], 0 = no value    -> rows of the table
    numbers  -> float32                   [n], NaN = missing               -> a row, or an input

`as_column` makes the middle form when a request is parsed, since that needs no vocabulary; rows are
made where the model runs.

The table of one `of` has the rows of its features one after another, and a last row of zeros
(`padding`) for unused places of multi-valued features. A dense number is two inputs: the scaled
value, and 1 if it is missing.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from npu_gr.core.feature_schema.schema import Feature
from npu_gr.core.feature_schema.values import BOOLEANS, name_of, number_of, plain_name

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
U64 = npt.NDArray[np.uint64]

Values = Sequence[Any] | npt.NDArray[Any]
"""One feature of n rows, each as `values.py` reads it."""

Column = F32 | U64
"""One feature of n rows, as `as_column` returns it."""


class Encoded(NamedTuple):
    """The features of one `of` for n rows."""

    codes: I32  # [n, width] rows of the table
    numbers: F32  # [n, num_numbers] inputs


def encode(features: Sequence[Feature], columns: Mapping[str, Values], num_rows: int) -> Encoded:
    """Encode the features of one `of`. Raises as `FeatureEncoder.encode` does."""
    return FeatureEncoder(features).encode(columns, num_rows)


class FeatureEncoder:
    """Encodes the features of one `of`."""

    def __init__(self, features: Sequence[Feature]) -> None:
        """Assign rows of the table.

        Args:
            features: All features of one `of`, in the order of the checkpoint.
        """
        self.features = {feature.name: feature for feature in features}
        self._dense = [feature for feature in features if feature.is_dense]
        self._coded: list[_Coded] = []
        first_row = column = 0
        for feature in features:
            if feature.num_rows:
                self._coded.append(_Coded(feature, first_row, column))
                first_row += feature.num_rows
                column += feature.max_values
        self.padding = first_row  # the last row of the table
        self.width = column
        self.num_numbers = 2 * len(self._dense)
        self.shared = (
            # (start, stop) of the codes of a multi-valued feature, which are averaged
            tuple(
                (one.column, one.column + one.feature.max_values)
                for one in self._coded
                if one.feature.max_values > 1
            )
        )
        coded = {
            one.feature.name: slice(one.column, one.column + one.feature.max_values)
            for one in self._coded
        }
        numbers = {
            one.name: [place, place + len(self._dense)] for place, one in enumerate(self._dense)
        }
        # columns of codes or of numbers, by feature
        self.columns = [coded.get(name) or numbers[name] for name in self.features]
        self._mean = np.array([[feature.mean] for feature in self._dense], np.float32)
        self._scale = np.array([[feature.scale] for feature in self._dense], np.float32)
        self._clip = np.array([[feature.clip] for feature in self._dense], np.float32)

    def encode(self, columns: Mapping[str, Values], num_rows: int) -> Encoded:
        """Encode values.

        Args:
            columns: Name -> values of n rows; an absent feature is missing in every row.
            num_rows: Number n of rows.

        Raises:
            ValueError: a feature is unknown, a column has another length, or a value is invalid;
                the message names the feature, the row and the limit.
        """
        read = {
            name: as_column(self._known(name), values, num_rows) for name, values in columns.items()
        }
        return self.encode_columns(read, num_rows)

    def encode_columns(self, read: Mapping[str, Column], num_rows: int) -> Encoded:
        """Encode columns that `as_column` returned."""
        codes = np.full((num_rows, self.width), self.padding, np.int32)
        for one in self._coded:
            one.fill(
                codes[:, one.column : one.column + one.feature.max_values],
                read.get(one.feature.name),
            )
        return Encoded(codes, self._numbers(read, num_rows))

    def _known(self, name: str) -> Feature:
        feature = self.features.get(name)
        if feature is None:
            raise ValueError(
                f"{name[:_SHOWN]}: unknown feature; the model has "
                f"{', '.join(self.features) or 'none'}"
            )
        return feature

    def _numbers(self, read: Mapping[str, Column], num_rows: int) -> F32:
        """Scale the dense numbers: [n, 2 k], values first, then 1 for each missing one."""
        if not self._dense:
            return np.empty((num_rows, 0), np.float32)
        given = np.empty((len(self._dense), num_rows), np.float32)
        for row, feature in zip(given, self._dense, strict=True):
            row[:] = read.get(feature.name, np.nan)
        with np.errstate(over="ignore"):  # clipped next
            given -= self._mean
            given /= self._scale
        np.minimum(given, self._clip, out=given)
        np.maximum(given, -self._clip, out=given)  # both keep NaN
        inputs = np.zeros((num_rows, self.num_numbers), np.float32)
        missing = np.isnan(given)
        if missing.any():
            given[missing] = 0.0
            inputs[:, len(given) :] = missing.T
        inputs[:, : len(given)] = given.T
        return inputs


class _Coded:
    """A feature with rows in the table."""

    def __init__(self, feature: Feature, first_row: int, column: int) -> None:
        self.feature = feature
        self.column = column  # first column of codes
        self._first = first_row
        self._missing = first_row + feature.num_rows - 1
        self._borders = np.array(feature.borders, np.float32)
        rows: dict[str, int] = {}
        # of values that are spellings of one name, the first counts
        for spelled in (map(plain_name, feature.values), feature.values):
            for row, text in enumerate(spelled):
                rows.setdefault(text, row)
        # raw columns and stored events of older versions have hashes of other spellings
        for text, name in BOOLEANS.items():
            if name in rows:
                rows.setdefault(text, rows[name])
        hashes = hash_names([[text] for text in rows], 1)
        self._sorted, first = np.unique(hashes, return_index=True)
        self._row_of = np.array([*rows.values()], np.int64)[first]

    def fill(self, codes: I32, column: Column | None) -> None:
        """Write codes into [n, max_values] that is filled with padding."""
        if column is None:
            codes[:, 0] = self._missing
        elif self.feature.kind == "number" and self.feature.num_buckets:
            is_row = (
                (column >= 0) & (column < self.feature.num_buckets) & (column == np.floor(column))
            )
            codes[:, 0] = np.where(
                is_row, self._first + np.where(is_row, column, 0).astype(np.int32), self._missing
            )
        elif self.feature.kind == "number":
            codes[:, 0] = self._first + np.searchsorted(self._borders, column, side="right")
            codes[np.isnan(column), 0] = self._missing
        else:
            hashes: U64 = column.astype(np.uint64, copy=False)
            is_value = hashes != 0
            np.copyto(codes, self._rows(hashes), where=is_value, casting="unsafe")
            codes[~is_value[:, 0], 0] = self._missing

    def _rows(self, hashes: U64) -> npt.NDArray[np.int64]:
        if self.feature.kind == "hashed":
            return self._first + (hashes % np.uint64(self.feature.num_buckets)).astype(np.int64)
        places = np.searchsorted(self._sorted, hashes).clip(max=len(self._sorted) - 1)
        return self._first + np.where(
            self._sorted[places] == hashes, self._row_of[places], len(self.feature.values)
        )


def as_column(feature: Feature, values: Values, num_rows: int) -> Column:
    """Validate the values of one feature, and convert them to numbers or hashes.

    Args:
        feature: Schema of the feature.
        values: Numbers of a number feature; else names, or lists of names. An array of hashes with
            descending rows is returned as it is.
        num_rows: Required number of rows.

    Returns:
        Float32 [n], NaN = missing; or hashes uint64 [n, max_values], descending, 0 = no value.

    Raises:
        ValueError: as `FeatureEncoder.encode`.
    """
    if len(values) != num_rows:
        raise ValueError(f"{feature.name}: {len(values)} entries, expected {num_rows}")
    return _numbers(feature, values) if feature.kind == "number" else _names(feature, values)


def has_value(column: Column) -> bool:
    """Whether a value of a column of `as_column` is not missing."""
    return bool((column == column).any() if column.ndim == 1 else column.any())


def _numbers(feature: Feature, values: Values) -> F32:
    if isinstance(values, np.ndarray):
        if values.ndim != 1 or values.dtype.kind not in "fiub":
            raise ValueError(
                f"{feature.name}: an array of {values.dtype} with {values.ndim} axes, "
                "expected numbers with one axis"
            )
        with np.errstate(over="ignore"):  # too large numbers are found below
            numbers: F32 = values.astype(np.float32, copy=False)
    else:
        numbers = _numbers_of(feature, values)
    if np.isinf(numbers).any():
        raise ValueError(
            f"{feature.name}: row {int(np.isinf(numbers).argmax())} is out of the range of float32"
        )
    return numbers


def _numbers_of(feature: Feature, values: Sequence[Any]) -> F32:
    try:
        wide = np.frombuffer(array("d", values))  # fails if a value is None or a text
    except (TypeError, OverflowError):
        numbers = []
        for row, value in enumerate(values):
            try:
                numbers.append(number_of(value))
            except TypeError as error:
                raise ValueError(
                    f"{feature.name}: row {row} is a {error}, expected a number"
                ) from None
        wide = np.array(numbers)
    with np.errstate(over="ignore"):  # too large numbers are found later
        return wide.astype(np.float32)


def _names(feature: Feature, values: Values) -> U64:
    most = feature.max_values
    if isinstance(values, np.ndarray):
        if values.dtype == np.uint64 and values.shape == (len(values), most):
            return (
                values if (values[:, 1:] <= values[:, :-1]).all() else np.sort(values, 1)[:, ::-1]
            )
        values = values.tolist()
    rows: list[list[str]] = []
    for row, value in enumerate(values):
        several = value if isinstance(value, list | tuple | set) else (value,)
        try:
            found = [name_of(one, feature.values) for one in several]
        except TypeError as error:
            raise ValueError(f"{feature.name}: row {row} is a {error}, expected a name") from None
        rows.append([name for name in dict.fromkeys(found) if name is not None])
        if len(rows[-1]) > most:
            raise ValueError(
                f"{feature.name}: row {row} has {len(rows[-1])} values, the limit is {most}"
            )
    return hash_names(rows, most)


def hash_names(rows: Sequence[Sequence[str]], width: int) -> U64:
    """Hash names to uint64 [n, width], 0 = no value; the order within a row is ignored."""
    flat = [
        xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass")) or 1
        for row in rows
        for name in row
    ]
    hashes = np.zeros((len(rows), width), np.uint64)
    if len(flat) == len(rows) * width:
        hashes.ravel()[:] = flat
    else:
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        hashes[np.arange(width) < lengths[:, None]] = flat
    return np.sort(hashes, 1)[:, ::-1] if width > 1 else hashes


_SHOWN = 64  # characters of a name in an error
