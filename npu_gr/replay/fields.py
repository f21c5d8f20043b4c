"""The fields of the requests and answers of each recorded kind, derived from `npu_gr/core/kinds.py`.

The recorder, the player and the request bodies read these tables, so none of them lists the kinds.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import NoneType
from typing import Any, get_args, get_type_hints

from npu_gr.core.kinds import Kind
from npu_gr.replay.log import OPTIONS, RECORDED, SHARED

UNRANKED = "unranked"  # the outcome of an answer whose own outcome is null: a recommend whose rank failed

_OUTCOME = "outcome"
_VERSION = "model_version"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFields:
    """Names of fields in a kind's answer; the same in `npu_gr/core/request.py` and on the wire."""

    outcome: str | None  # how the answer came to be; None = its answers do not differ
    has_null_outcome: bool  # `outcome` may be null, which a log calls `UNRANKED`
    version: str | None  # of what answered: a model, or vectors
    names: frozenset[str]  # all fields


def _request_fields(name: str, kind: Kind[Any, Any]) -> tuple[str, ...]:
    options = OPTIONS[name].__struct_fields__ if name in OPTIONS else ()
    own = set(kind.request.__struct_fields__) - set(options)
    if kind.takes_delta:
        own.add("base")
    return tuple(field for field in SHARED if field in own)


def _answer_fields(kind: Kind[Any, Any]) -> AnswerFields:
    hints = get_type_hints(kind.answer)
    names = kind.answer.__struct_fields__
    outcome = _OUTCOME if _OUTCOME in names else kind.label
    versions = [name for name in names if name.endswith("_version")]
    return AnswerFields(
        outcome=outcome,
        has_null_outcome=outcome is not None and NoneType in get_args(hints.get(outcome)),
        version=_VERSION if _VERSION in names else next(iter(versions), None),
        names=frozenset(names),
    )


# kind -> the fields of its records and of its request bodies, beside user, tenant and options
REQUEST_FIELDS = {name: _request_fields(name, kind) for name, kind in RECORDED.items()}
ANSWER_FIELDS = {name: _answer_fields(kind) for name, kind in RECORDED.items()}
