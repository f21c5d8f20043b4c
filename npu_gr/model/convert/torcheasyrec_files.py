"""Reading the folder of a TorchEasyRec run: its weights, and the tables of its `pipeline.config`.

    FOLDER/pipeline.config                     protocol buffers as text
    FOLDER/model.ckpt-<step>/model/            torch's distributed checkpoint
    FOLDER/model.ckpt-<step>/{optimizer,..}    not read

Messages in text form are read without their definitions. Only the definitions say whether a field
is repeated, so every field is a list here.

Source: its public code, `latest_checkpoint`, `save_model`, `IdFeature`, `BaseFeature` and
`EmbeddingGroup`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from npu_gr.core.errors import CheckpointError
from npu_gr.core.feature_schema.schema import Feature
from npu_gr.model.convert.source import Contextual, ForeignCheckpoint, numbered

_TOKEN = re.compile(
    r"""(?P<skip>\s+|\#[^\n]*) | (?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    | (?P<word>[^\s\#{}<>\[\]:,;"']+) | (?P<mark>[{}<>\[\]:,;])""",
    re.VERBOSE,
)
_MOST_DEEP = 64
_WORDS: Mapping[str, Any] = {"true": True, "false": False}
_CLOSING = {"{": "}", "<": ">"}


class TextMessage:
    """A protocol buffer message in text form: its fields by name, in the order of the text."""

    def __init__(self, fields: Mapping[str, list[Any]] | None = None) -> None:
        self.fields: dict[str, list[Any]] = dict(fields or {})

    def many(self, name: str) -> list[Any]:
        """Return all values of a field."""
        return list(self.fields.get(name, ()))

    def one(self, name: str, default: Any = None) -> Any:
        """Return the value of a field that is not repeated: the last one, as protobuf does."""
        found = self.fields.get(name)
        return found[-1] if found else default

    def messages(self, name: str) -> list[TextMessage]:
        """Return the messages in a field."""
        return [value for value in self.many(name) if isinstance(value, TextMessage)]

    def message(self, name: str) -> TextMessage:
        """Return the message in a field that is not repeated; absent = a message without fields."""
        return [TextMessage(), *self.messages(name)][-1]

    def put(self, path: str, value: Any) -> None:
        """Replace the field at `message.message.field` by a value, or by the values of a list."""
        first, _, rest = path.partition(".")
        if rest:
            inner = self.message(first)
            self.fields[first] = [inner]
            inner.put(rest, value)
        else:
            self.fields[first] = list(value) if isinstance(value, list | tuple) else [value]


def parse_text(text: str) -> TextMessage:
    """Parse a message.

    Raises:
        ValueError: The syntax is wrong; the text names the line.
    """
    return _fields(_Tokens(text), "", 0)


class _Tokens:
    """The tokens of a text, with one token of look-ahead."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._rest = self._all()
        self.place = 0
        self.kind, self.word = next(self._rest)

    def _all(self) -> Iterator[tuple[str, str]]:
        place = 0
        while place < len(self._text):
            match = _TOKEN.match(self._text, place)
            if match is None:
                self.place = place
                raise self.error(f"unexpected {self._text[place]!r}")
            if match.lastgroup != "skip":
                self.place = place
                yield str(match.lastgroup), match.group()
            place = match.end()
        self.place = place
        while True:
            yield "end", ""

    def take(self) -> str:
        """Return the current token and advance."""
        word = self.word
        self.kind, self.word = next(self._rest)
        return word

    def skip(self, marks: str) -> bool:
        """Advance if the current token is one of these marks; return whether it was."""
        is_one = self.kind == "mark" and self.word in marks
        if is_one:
            self.take()
        return is_one

    def error(self, what: str) -> ValueError:
        return ValueError(f"line {self._text.count(chr(10), 0, self.place) + 1}: {what}")


def _fields(tokens: _Tokens, closing: str, depth: int) -> TextMessage:
    """Read fields up to `closing`; "" = the end of the text."""
    if depth > _MOST_DEEP:
        raise tokens.error(f"messages in more than {_MOST_DEEP} messages")
    found = TextMessage()
    while tokens.kind != "end" if not closing else not tokens.skip(closing):
        if tokens.kind != "word":
            raise tokens.error(f"a name was expected, there is {tokens.word or 'the end'!r}")
        name = tokens.take()
        has_colon = tokens.skip(":")
        if not has_colon and (tokens.kind != "mark" or tokens.word not in _CLOSING):
            raise tokens.error(f"{name}: neither ':' nor a message follows")
        found.fields.setdefault(name, []).extend(_values(tokens, depth))
        tokens.skip(",;")
    return found


def _values(tokens: _Tokens, depth: int) -> list[Any]:
    """Read a value, or the values of a list."""
    if not tokens.skip("["):
        return [_value(tokens, depth)]
    found: list[Any] = []
    while not tokens.skip("]"):
        found.append(_value(tokens, depth))
        tokens.skip(",")
    return found


def _value(tokens: _Tokens, depth: int) -> Any:
    if tokens.kind == "mark" and tokens.word in _CLOSING:
        return _fields(tokens, _CLOSING[tokens.take()], depth + 1)
    if tokens.kind == "text":
        text = ""
        while tokens.kind == "text":  # adjacent strings are one value
            text += ast.literal_eval(tokens.take())
        return text
    if tokens.kind != "word":
        raise tokens.error(f"a value was expected, there is {tokens.word or 'the end'!r}")
    word = tokens.take()
    if word in _WORDS:
        return _WORDS[word]
    for number in (int, float):
        try:
            return number(word)
        except ValueError:
            continue
    return word  # a value of an enumeration


PIPELINE = "pipeline"  # the setting that holds the whole configuration
CONFIG = "pipeline.config"


def weights_folder(folder: Path) -> Path:
    """Return the folder that holds the weights of the newest step."""
    steps = {
        path: path.name.removeprefix("model.ckpt-")
        for path in folder.glob("model.ckpt-*")
        if path.is_dir()
    }
    numbered = [(int(step), path) for path, step in steps.items() if step.isdecimal()]
    newest = max(numbered)[1] if numbered else folder
    return newest / "model" if (newest / "model").is_dir() else newest


def step_of(folder: Path) -> int:
    """Return the step of the weights that are read; 0 = their folder has none in its name."""
    found = weights_folder(folder)
    for path in (found, found.parent):
        step = path.name.removeprefix("model.ckpt-")
        if step != path.name and step.isdecimal():
            return int(step)
    return 0


def read_pipeline(folder: Path) -> dict[str, Any]:
    """Read `pipeline.config` of a run's folder, or of the parent of a step's folder.

    Raises:
        CheckpointError: It is missing or cannot be parsed.
    """
    found = next(
        (path for path in (folder / CONFIG, folder.parent / CONFIG) if path.is_file()), None
    )
    if found is None:
        raise CheckpointError(f"{folder}: no {CONFIG}")
    try:
        return {PIPELINE: parse_text(found.read_text())}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{found}: {error}") from error


def pipeline_of(settings: dict[str, Any]) -> TextMessage:
    """Return the configuration, overridden by the other settings.

    Their keys are paths, e.g. `model_config.dlrm_hstu.max_seq_len`.
    """
    pipeline = deepcopy(settings.get(PIPELINE, TextMessage()))
    assert isinstance(pipeline, TextMessage)
    for path, value in settings.items():
        if path != PIPELINE:
            pipeline.put(path, value)
    return pipeline


GROUPS = (
    "contextual",
    "uih",
    "candidate",
    "uih_action",
    "uih_watchtime",
    "uih_timestamp",
    "candidate_timestamp",
)
# fields of features whose row numbers come from a map outside of the tables
HASHED = ("zch", "dynamicemb", "vocab_dict", "vocab_file")


class FeatureConfigs:
    """The features that a checkpoint's configuration names, by group."""

    def __init__(self, source: ForeignCheckpoint, pipeline: TextMessage) -> None:
        self._source = source
        self._configs: dict[str, TextMessage] = {}
        for config in pipeline.messages("feature_configs"):
            for sequence in config.messages("sequence_feature"):
                for inner in sequence.messages("features"):
                    self._add(inner, f"{sequence.one('sequence_name')}__")
            self._add(config, "")
        self._groups: dict[str, list[str]] = {}
        self._taken: dict[str, Tensor] = {}  # features may share a table
        for group in pipeline.message("model_config").messages("feature_groups"):
            name = group.one("group_name")
            self._groups[name] = group.many("feature_names")
            if name not in GROUPS:
                source.reject(f"feature group {name}: unknown group")
            wanted = "DEEP" if name == "contextual" else "JAGGED_SEQUENCE"
            if group.one("group_type") != wanted:
                source.reject(f"feature group {name}: only of group_type {wanted} converts")

    def _add(self, config: TextMessage, prefix: str) -> None:
        """Store a `feature_configs` entry, or one feature of a sequence."""
        for kind in config.fields:
            own = config.message(kind)
            self._configs[f"{prefix}{own.one('feature_name')}"] = TextMessage(
                {**own.fields, "kind": [kind]}
            )

    def items(self) -> Tensor:
        """Take the table of items, [n, d]."""
        found = []
        for group in ("uih", "candidate"):
            names = self._groups.get(group, [])
            if len(names) != 1:
                self._source.reject(
                    f"feature group {group} has {', '.join(names) or 'none'}: one feature, the "
                    "item, converts"
                )
            found.append(self._table_name(names[0]) if names else "")
        if found[0] != found[1]:
            self._source.reject(
                "feature groups uih and candidate: their items have different tables"
            )
        for name in self._groups.get("uih", [])[:1]:
            self._is_by_row(name)
        return self._take(f"seq_emb_impls.*.{found[0]}")

    def contextual(self) -> list[Contextual]:
        """Take the tables of the contextual features, in the order of their tokens."""
        found = []
        for name in self._groups.get("contextual", []):
            is_by_row = self._is_by_row(name)
            table = self._take(f"emb_impls.*.{self._table_name(name)}")
            if is_by_row:
                found.append(self._contextual(name, table))
        return found

    def _contextual(self, name: str, table: Tensor) -> Contextual:
        config = self._configs[name]
        default = str(config.one("default_value", ""))
        if not (listed := [str(value) for value in config.many("vocab_list")]):
            missing = (
                table[int(default)] if default.isdecimal() and int(default) < len(table) else None
            )
            return numbered(self._source, name, table, missing)
        nothing = table.new_zeros(table.shape[1])
        # without a default bucket, rows 0 and 1 are the default and the unknown value
        first = 0 if (other := config.one("default_bucketize_value")) is not None else 2
        if len(table) != first + len(listed):
            self._source.reject(
                f"contextual feature {name}: {len(listed)} values, and a table of {len(table)} rows"
            )
            return numbered(self._source, name, table)
        unknown = table[1 if other is None else int(other)]
        row_of = dict(zip(listed, table[first:], strict=True))
        missing = (
            row_of.get(default, table[0] if other is None else unknown) if default else nothing
        )
        feature = Feature(name=name, of="user", kind="category", values=tuple(listed))
        return Contextual(feature, torch.cat([table[first:], unknown[None], missing[None]]))

    def _is_by_row(self, name: str) -> bool:
        """Return whether a feature is one id with a row; any other form is rejected."""
        config = self._configs.get(name, TextMessage())
        kind, more = config.one("kind", "missing"), [key for key in HASHED if key in config.fields]
        if (
            kind != "id_feature"
            or more
            or config.one("weighted", False)
            or config.one("value_dim", 1) not in (0, 1)
        ):
            self._source.reject(
                f"feature {name}: {', '.join([kind, *more])}: one id with a row of a table converts"
            )
            return False
        if "hash_bucket_size" in config.fields:
            self._source.notes.append(
                f"feature {name}: a value is the bucket of its hash, as the project's tools "
                "compute it"
            )
        return True

    def _table_name(self, name: str) -> str:
        config = self._configs.get(name, TextMessage())
        return str(config.one("embedding_name") or f"{name}_emb")

    def _take(self, place: str) -> Tensor:
        """Take the table at `collection.*.name`."""
        if place in self._taken:
            return self._taken[place]
        collection, name = place.split(".*.")
        found = [
            full
            for full in self._source.tensors
            if full.startswith(f"embedding_group.{collection}.")
            and full.endswith(f".{name}.weight")
        ]
        table = self._source.take(
            found[0] if len(found) == 1 else f"embedding_group.{place}.weight", -1, -1
        )
        self._taken[place] = table
        return table
