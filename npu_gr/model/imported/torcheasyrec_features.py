"""The features of a TorchEasyRec configuration: which tables they read, and what their values are called.

Source: its public code, `IdFeature`, `BaseFeature` and `EmbeddingGroup`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from npu_gr.core.feature_schema.schema import Feature
from npu_gr.model.imported.contextual import Contextual, numbered
from npu_gr.model.imported.source import ForeignCheckpoint
from npu_gr.model.imported.text_message import TextMessage

GROUPS = ("contextual", "uih", "candidate", "uih_action", "uih_watchtime", "uih_timestamp", "candidate_timestamp")
HASHED = ("zch", "dynamicemb", "vocab_dict", "vocab_file")  # rows by a map that the tables do not hold


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
                source.refuse(f"feature group {name}: is not known here")
            wanted = "DEEP" if name == "contextual" else "JAGGED_SEQUENCE"
            if group.one("group_type") != wanted:
                source.refuse(f"feature group {name}: only of group_type {wanted} converts")

    def _add(self, config: TextMessage, prefix: str) -> None:
        """Keep what a `feature_configs`, or one of a sequence, says."""
        for kind in config.fields:
            own = config.message(kind)
            self._configs[f"{prefix}{own.one('feature_name')}"] = TextMessage({**own.fields, "kind": [kind]})

    def items(self) -> Tensor:
        """Take the table of items, [n, d]."""
        found = []
        for group in ("uih", "candidate"):
            names = self._groups.get(group, [])
            if len(names) != 1:
                self._source.refuse(
                    f"feature group {group} has {', '.join(names) or 'none'}: one feature, the item, converts"
                )
            found.append(self._table_name(names[0]) if names else "")
        if found[0] != found[1]:
            self._source.refuse("feature groups uih and candidate: their items have different tables")
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
            missing = table[int(default)] if default.isdecimal() and int(default) < len(table) else None
            return numbered(self._source, name, table, missing)
        nothing = table.new_zeros(table.shape[1])
        first = 0 if (other := config.one("default_bucketize_value")) is not None else 2  # else: default, unknown
        if len(table) != first + len(listed):
            self._source.refuse(f"contextual feature {name}: {len(listed)} values, and a table of {len(table)} rows")
            return numbered(self._source, name, table)
        unknown = table[1 if other is None else int(other)]
        row_of = dict(zip(listed, table[first:], strict=True))
        missing = row_of.get(default, table[0] if other is None else unknown) if default else nothing
        feature = Feature(name=name, of="user", kind="category", values=tuple(listed))
        return Contextual(feature, torch.cat([table[first:], unknown[None], missing[None]]))

    def _is_by_row(self, name: str) -> bool:
        """Tell whether a feature is one name or number, with a row; what it is else is noted."""
        config = self._configs.get(name, TextMessage())
        kind, more = config.one("kind", "missing"), [key for key in HASHED if key in config.fields]
        if kind != "id_feature" or more or config.one("weighted", False) or config.one("value_dim", 1) not in (0, 1):
            self._source.refuse(f"feature {name}: {', '.join([kind, *more])}: one id with a row of a table converts")
            return False
        if "hash_bucket_size" in config.fields:
            self._source.notes.append(
                f"feature {name}: a value is the bucket of its hash, as the project's tools compute it"
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
            if full.startswith(f"embedding_group.{collection}.") and full.endswith(f".{name}.weight")
        ]
        table = self._source.take(found[0] if len(found) == 1 else f"embedding_group.{place}.weight", -1, -1)
        self._taken[place] = table
        return table
