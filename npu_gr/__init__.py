"""npu_gr: generative recommendation under a P99 deadline.

The names in `__all__` are the public API; everything else may change between versions. Each name is
imported when it is first used, so `import npu_gr` itself loads neither torch nor numpy nor aiohttp.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# the only place: pyproject.toml reads it from here, without importing the package
__version__ = "0.1.0"

# the same names once more, for type checkers: tests/test_public_api.py compares the two lists
if TYPE_CHECKING:
    from npu_gr.core import errors
    from npu_gr.core.history import Events, HistoryRef, HistoryReport, Mode, UserKey, Write, Written
    from npu_gr.core.kinds import (
        ERASE,
        EVENTS,
        GENERATE,
        INGEST,
        KINDS,
        MATCH,
        RANK,
        RECOMMEND,
        SIGNAL,
        Kind,
    )
    from npu_gr.core.request import (
        Basis,
        EraseAnswer,
        EraseRequest,
        EventsAnswer,
        EventsRequest,
        GenerateAnswer,
        GenerateRequest,
        IngestAnswer,
        IngestRequest,
        MatchAnswer,
        MatchRequest,
        Outcome,
        RankAnswer,
        RankRequest,
        Reason,
        RecommendAnswer,
        RecommendRequest,
        SignalAnswer,
        SignalRequest,
        StageReport,
        StageResult,
        Verdict,
    )
    from npu_gr.core.served import CatalogueChange, CatalogueInfo, ModelInfo, NewItem, VectorsInfo
    from npu_gr.handlers.service import Service
    from npu_gr.service.app import instance
    from npu_gr.service.config import Config, load
    from npu_gr.tools.site import Site, train

__all__ = [
    "ERASE",
    "EVENTS",
    "GENERATE",
    "INGEST",
    "KINDS",
    "MATCH",
    "RANK",
    "RECOMMEND",
    "SIGNAL",
    "Basis",
    "CatalogueChange",
    "CatalogueInfo",
    "Config",
    "EraseAnswer",
    "EraseRequest",
    "Events",
    "EventsAnswer",
    "EventsRequest",
    "GenerateAnswer",
    "GenerateRequest",
    "HistoryRef",
    "HistoryReport",
    "IngestAnswer",
    "IngestRequest",
    "Kind",
    "MatchAnswer",
    "MatchRequest",
    "Mode",
    "ModelInfo",
    "NewItem",
    "Outcome",
    "RankAnswer",
    "RankRequest",
    "Reason",
    "RecommendAnswer",
    "RecommendRequest",
    "Service",
    "SignalAnswer",
    "SignalRequest",
    "Site",
    "StageReport",
    "StageResult",
    "UserKey",
    "VectorsInfo",
    "Verdict",
    "Write",
    "Written",
    "errors",
    "instance",
    "load",
    "train",
]

_HOMES = {
    "npu_gr.core.history": (
        "Events",
        "HistoryRef",
        "HistoryReport",
        "Mode",
        "UserKey",
        "Write",
        "Written",
    ),
    "npu_gr.core.served": (
        "CatalogueChange",
        "CatalogueInfo",
        "ModelInfo",
        "NewItem",
        "VectorsInfo",
    ),
    "npu_gr.core.kinds": (
        *("ERASE", "EVENTS", "GENERATE", "INGEST", "MATCH", "RANK", "RECOMMEND", "SIGNAL"),
        *("KINDS", "Kind"),
    ),
    "npu_gr.service.app": ("instance",),
    "npu_gr.service.config": ("Config", "load"),
    "npu_gr.handlers.service": ("Service",),
    "npu_gr.tools.site": ("Site",),
}
_MODULES = {"errors": "npu_gr.core.errors", "train": "npu_gr.train"}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # a type checker must not believe that every name is here

    def __getattr__(name: str) -> Any:
        """Import a public name from the module that defines it, and keep it here."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name in _MODULES:  # the second one can be called
            value: Any = import_module(_MODULES[name])
        else:
            value = getattr(import_module(_HOME.get(name, "npu_gr.core.request")), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
