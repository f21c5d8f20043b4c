"""`serve.yaml` of a site: one instance that ranks, generates, matches and recommends, each line with its meaning."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Annotated

import msgspec
import yaml
from msgspec import Meta

from npu_gr.core import shipped
from npu_gr.core.settings import Count
from npu_gr.service.config import SLOConfig
from npu_gr.train.data import Split
from npu_gr.train.generate import train as generating
from npu_gr.train.generate.publish import section
from npu_gr.train.options import serve
from npu_gr.train.rank import options as ranking
from npu_gr.train.retrieve import RetrieveOptions
from npu_gr.train.site.report import SiteCascade

SERVE = "serve.yaml"
EVALUATED_CONFIG = "evaluated.yaml"
_MEANING = {
    "checkpoint": "folder of the decoder, a Hugging Face checkpoint",
    "catalogue": "items and their semantic IDs",
    "codes": "codes of each level of a semantic ID",
    "max_beams": "widest beam that a request may ask for",
    "beam_width": "beam of a request that names none",
    "max_prompt_tokens": "a longer history is cut to its newest items",
    "cut_step_items": "the start of a cut history moves in steps of this many items",
}
_EVALUATED = (
    "# The models that were evaluated, not those that serve: they have not seen the newest events, "
    "so the figures of",
    "# README.md are theirs, and what is held out can be replayed and evaluated.",
)
_COLUMN = 34  # at which comments begin


def configuration(
    site: Path,
    made_by: str,
    options: SiteOptions,
    cascade: SiteCascade,
    *,
    is_evaluated: bool = False,
) -> str:
    """Write the configuration of a site.

    Args:
        site: folder, as the command that serves it will name it.
        made_by: the command that made it.
        options: of the cascade and of the generator.
        cascade: what a recommend asks, and how it orders.
        is_evaluated: serve the models that were evaluated, which have not seen the newest events.
    """
    own = Path("evaluated") if is_evaluated else Path()
    generate = section(options.generate.code_count, options.generate, site / "generator" / own)
    objectives = SLOConfig()
    slo = {name: getattr(objectives, name) for name in objectives.__struct_fields__}
    lines = [
        shipped.schema_line().rstrip(),
        *(f"# {line}" for line in f"Made by: {made_by}".splitlines()),
        *(_EVALUATED if is_evaluated else ()),
        f"# Serve it: {serve(site / (EVALUATED_CONFIG if is_evaluated else SERVE))}",
        "# Paths are relative to the folder in which npu-gr starts; npu-gr config --reference "
        "lists every key.",
        "",
        _line("checkpoint", str(site / "ranker" / own), "folder of the ranker"),
        _line(
            "backend",
            "cpu",
            "cpu | cuda | npu | reference; if it cannot load, npu-gr does not start",
        ),
        _line(
            "threads",
            1,
            "intra-op threads of a device thread; more of them take CPU time from the event loop",
        ),
        "",
        "slo:",
        *(_line(f"  {name}", value, _objective(name)) for name, value in slo.items()),
        "",
        "server:",
        _line("  host", "127.0.0.1", "serves callers; anything but loopback needs api_keys_file"),
        _line("  port", 8080, "0 = any free one"),
        _line("  admin_port", 8081, "of the admin address: status page, /metrics, reload"),
        "",
        "trigger:",
        _line(
            "  policy",
            "always",
            "always: whatever fits | at_risk: pre-infer only what would make the rank late",
        ),
        _line("  min_prefix_tokens", 16, "shorter histories are not worth a pre-infer"),
        "",
        "kv_cache:",
        _line(
            "  hbm_bytes",
            268_435_456,
            "device memory for histories' KV; on a CPU it is ordinary memory",
        ),
        _line("  dram_bytes", 268_435_456, "host memory behind it, for users who come back"),
        "",
        "history_store:",
        _line("  kind", "embedded", "the history store: embedded | redis | none"),
        _line(
            "  path",
            str(site / "history.db"),
            "its file; `npu-gr load` fills it, POST /v1/events appends to it",
        ),
        "",
        "generate:                         # POST /v1/generate: retrieval by semantic IDs",
        *(_line(f"  {name}", value, _MEANING[name]) for name, value in generate.items()),
        "",
        "match:                            # POST /v1/match: retrieval by vectors",
        _line("  vectors", str(site / "vectors" / own), "folder of the vectors"),
        "",
        "recommend:                        # POST /v1/recommend: the cascade in one call",
        _line(
            "  sources",
            cascade.sources,
            "items asked of each source: chosen by users' next items, as is the order",
        ),
        _line("  max_candidates", options.max_candidates, "ranked at most"),
        _line(
            "  order",
            cascade.order,
            "blended: by the sum that was fitted with the ranker; or rank, fused, retrieval",
        ),
    ]
    if not is_evaluated:  # what is popular is counted over all events
        popular = str(site / "popular.txt")
        lines.append(
            _line(
                "  popular", popular, "fills up a short retrieval: users of whom nothing is known"
            )
        )
    return "\n".join(lines) + "\n"


def _objective(name: str) -> str:
    kind, _, unit = name.rpartition("_")
    if unit == "s":
        return f"seconds within which a request of kind {kind} should be answered"
    what = {
        "latency": "answered requests that must be in time",
        "availability": "requests that must be answered",
    }
    return f"share of the {what[kind]}"


def _line(key: str, value: object, meaning: str) -> str:
    text = yaml.safe_dump([value], default_flow_style=True, width=10**9).strip()[1:-1]
    return (
        f"{f'{key}: {text}':<{_COLUMN}}# {meaning}"
        if len(key) + len(text) < _COLUMN - 3
        else f"{key}: {text}  # {meaning}"
    )


GENERATOR = msgspec.structs.replace(
    generating.MOVIELENS, epochs=20, validation_users=500, test_users=1000
)
"""Trained in about the time of the ranker, beside which it is trained; `train generate` takes more."""
# of the ranker: generator and vectors are evaluated on each last event, too
SPLIT: Split = "leave-one-out"
CODE_COUNTS = ((64, 64), (128, 128), (256, 256), (256, 256, 256), (1024, 1024, 1024))
ROOM = 2  # semantic IDs an item: with fewer, similar items lose their codes to each other


class SiteOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides a site but the dataset and the number of threads."""

    rank: ranking.TrainOptions = msgspec.structs.replace(ranking.DEMO, split=SPLIT)
    generate: generating.GenerateOptions = GENERATOR
    retrieve: RetrieveOptions = RetrieveOptions(test_users=1000)
    num_retrieved: Annotated[
        Count, Meta(description="items that a recommend asks of the ranker's own retrieval")
    ] = 200
    num_transitions: Annotated[
        Count, Meta(description="of what followed the last items, if that is asked")
    ] = 100
    num_neighbours: Annotated[
        Count, Meta(description="of what the same users have, if that is asked")
    ] = 100
    num_generated: Annotated[Count, Meta(description="of the generator, if it is asked")] = 100
    num_matched: Annotated[
        Count, Meta(description="of the retrieval vectors, if they are asked")
    ] = 100
    max_candidates: Annotated[Count, Meta(description="most items that a recommend ranks")] = 200
    selection_users: Annotated[
        Count,
        Meta(
            description="most users who choose which of these a recommend asks, and in "
            "which order it answers"
        ),
    ] = 600
    num_popular: Annotated[
        Count, Meta(description="most popular items, for users of whom nothing is known")
    ] = 200

    def __post_init__(self) -> None:
        for name in ("rank", "generate", "retrieve"):
            if not getattr(self, name).refit:
                raise ValueError(
                    f"{name}.refit: a site serves models of all events, and keeps the "
                    "evaluated ones"
                )
        if self.rank.split != SPLIT:
            raise ValueError(
                f"rank.split: a site asks every model for each user's last event, so it is {SPLIT}"
            )
        if self.rank.evaluate_on != "test":
            raise ValueError(
                "rank.evaluate_on: a site shows figures of the test; npu-gr train "
                "rank tries settings"
            )


FULL = SiteOptions()
QUICK = SiteOptions(
    rank=msgspec.structs.replace(ranking.QUICK, split=SPLIT), generate=generating.QUICK
)
"""For a first look: half of the time."""
PRESETS = {"full": FULL, "quick": QUICK}


def options_for(num_items: int, preset: SiteOptions = FULL) -> SiteOptions:
    """Fit a preset to a catalogue of this size; `--set` replaces what it chooses."""
    fits = [codes for codes in CODE_COUNTS if prod(codes) >= ROOM * num_items]
    codes = fits[0] if fits else CODE_COUNTS[-1]
    return msgspec.structs.replace(
        preset, generate=msgspec.structs.replace(preset.generate, code_count=codes)
    )
