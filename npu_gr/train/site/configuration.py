"""Write `serve.yaml` of a site: an instance with all models, each line with a comment."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Annotated, Literal

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
PartName = Literal["generator", "ranker", "vectors"]
Optional = Literal["generator", "vectors"]  # models that a site can do without
EVALUATED_CONFIG = "evaluated.yaml"
_MEANING = {
    "checkpoint": "folder of the decoder, a Hugging Face checkpoint",
    "catalogue": "items and their semantic IDs",
    "change_log": "log of changes by POST /v1/catalog/items; one instance a log",
    "codes": "tokens of each level of a semantic ID",
    "normalise": "a token's probability is among the valid ones, as in the training",
    "max_beams": "largest beam width of a request",
    "beam_width": "default beam width of a request",
    "max_prompt_tokens": "longer histories are cut to their newest items",
    "cut_step_items": "long histories are cut in steps of so many items",
}
_EVALUATED = (
    "# The evaluated models, not the served ones: they were trained without the newest events, so "
    "the figures of",
    "# README.md are theirs, and the held-out events can be replayed and evaluated.",
)
_COLUMN = 34  # column at which comments begin


def configuration(
    site: Path,
    made_by: str,
    options: SiteOptions,
    cascade: SiteCascade,
    *,
    node_count: tuple[int, ...] = (),
    is_evaluated: bool = False,
    attribute: str = "brand",
) -> str:
    """Write the configuration of a site.

    Args:
        site: Folder of the site, as the command that serves it will name it.
        made_by: Command line that made the site.
        options: Options of the site.
        cascade: Sources and order of `recommend`.
        node_count: Nodes of each level that are the generator's tokens; empty = the codes are.
        is_evaluated: Whether to serve the evaluated models, which were trained without the newest
            events.
        attribute: A feature of the items, for the example of a rule.
    """
    own = Path("evaluated") if is_evaluated else Path()
    repeats = f"{cascade.repeat_ratio:.0%} of the held-out events are repeats"

    def seen(kind: str) -> str:
        excludes = cascade.excludes.get(kind, cascade.exclude_seen)
        return _line("  exclude_seen", excludes, f"leave out what a user had; {repeats}")

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
            "cpu | cuda | npu | reference; npu-gr does not start if it cannot load",
        ),
        _line(
            "threads",
            1,
            "torch threads of a device thread; more take CPU time from the event loop",
        ),
        "",
        "slo:",
        *(_line(f"  {name}", value, _objective(name)) for name, value in slo.items()),
        "",
        "server:",
        _line("  host", "127.0.0.1", "public address; any but loopback needs api_keys_file"),
        _line("  port", 8080, "0 = any free port"),
        _line("  admin_port", 8081, "admin address: status page, /metrics, reload"),
        "",
        "trigger:",
        _line(
            "  policy",
            "always",
            "always: prefill whatever fits | at_risk: only if the rank would be late",
        ),
        _line("  min_prefix_tokens", 16, "shorter histories are not prefilled"),
        "",
        "kv_cache:",
        _line(
            "  hbm_bytes",
            268_435_456,
            "device memory for the KV of histories; host memory on a CPU",
        ),
        _line("  dram_bytes", 268_435_456, "host memory for KV evicted from device memory"),
        "",
        "history_store:",
        _line("  kind", "embedded", "the history store: embedded | redis | none"),
        _line(
            "  path",
            str(site / "history.db"),
            "file of the store; `npu-gr load` fills it, POST /v1/events appends to it",
        ),
        "",
    ]
    if "generator" not in options.without:
        generate = section(
            node_count or options.generate.code_count,
            "valid" if node_count else "vocabulary",
            options.generate,
            site / "generator" / own,
        )
        if not is_evaluated:  # outside of the folder that the next training replaces
            generate["change_log"] = str(site / "catalogue.changes")
        lines += [
            "generate:                         # POST /v1/generate: retrieval by semantic IDs",
            *(_line(f"  {name}", value, _MEANING[name]) for name, value in generate.items()),
            seen("generate"),
            "",
        ]
    if "vectors" not in options.without:
        lines += [
            "match:                            # POST /v1/match: retrieval by vectors",
            _line("  vectors", str(site / "vectors" / own), "folder of the vectors"),
            seen("match"),
            "",
        ]
    lines += [
        "recommend:                        # POST /v1/recommend: the cascade in one call",
        _line(
            "  sources",
            cascade.sources,
            "items to retrieve by source; sources and order were chosen on held-out events",
        ),
        _line("  max_candidates", options.max_candidates, "most items to rank"),
        _line(
            "  order",
            cascade.order,
            "blended: by the ranker's fitted score blend; or rank, fused, retrieval",
        ),
        seen("recommend"),
    ]
    if not is_evaluated:  # popularity was counted over all events, also the held-out ones
        popular = str(site / "popular.txt")
        lines.append(
            _line("  popular", popular, "fills up short retrievals, e.g. of unknown users")
        )
        rule = f"{{diversity: [{{by: {json.dumps(attribute, ensure_ascii=False)}, most: 2}}]}}"
        lines.append(f"  # rules: {rule}  # and boost, pin, deny, cap")
    return "\n".join(lines) + "\n"


def _objective(name: str) -> str:
    kind, _, unit = name.rpartition("_")
    if unit == "s":
        return f"seconds within which a request of kind {kind} should be answered"
    what = {
        "latency": "answered requests that must be within the SLO",
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
"""Trains about as long as the ranker, in parallel; the default of `train generate` is longer."""
# the ranker's split: generator and vectors are evaluated on each user's last event too
SPLIT: Split = "leave-one-out"
CODE_COUNTS = ((64, 64), (128, 128), (256, 256), (256, 256, 256), (1024, 1024, 1024))
ROOM = 2  # semantic IDs per item; with fewer, more items collide and get less similar codes


class SiteOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides a site, except the dataset and the number of threads."""

    without: Annotated[
        tuple[Optional, ...],
        Meta(description="models that are not trained and not served, e.g. [generator]"),
    ] = ()
    rank: ranking.TrainOptions = msgspec.structs.replace(
        ranking.DEMO, split=SPLIT, choose_mf_score=True
    )
    generate: generating.GenerateOptions = GENERATOR
    retrieve: RetrieveOptions = RetrieveOptions(test_users=1000)
    num_retrieved: Annotated[
        Count, Meta(description="items that recommend retrieves by the ranker's shared encoder")
    ] = 200
    num_transitions: Annotated[
        Count, Meta(description="items that recommend retrieves by transitions, if chosen")
    ] = 100
    num_neighbours: Annotated[
        Count, Meta(description="items that recommend retrieves by neighbours, if chosen")
    ] = 100
    num_own: Annotated[
        Count, Meta(description="items that the user had that recommend retrieves, if it may")
    ] = 100
    num_generated: Annotated[
        Count, Meta(description="items that recommend retrieves by the generator, if chosen")
    ] = 100
    num_matched: Annotated[
        Count, Meta(description="items that recommend retrieves by the vectors, if chosen")
    ] = 100
    max_candidates: Annotated[Count, Meta(description="most items that recommend ranks")] = 200
    selection_users: Annotated[
        Count,
        Meta(
            description="most users on whom the sources and the order of recommend are chosen "
            "and evaluated"
        ),
    ] = 600
    num_popular: Annotated[
        Count, Meta(description="popular items to keep, for users without known events")
    ] = 200

    def __post_init__(self) -> None:
        for name in ("rank", "generate", "retrieve"):
            if not getattr(self, name).refit:
                raise ValueError(
                    f"{name}.refit: must be true, because a site serves models of all events"
                )
        if self.rank.split != SPLIT:
            raise ValueError(
                f"rank.split: must be {SPLIT}, because a site evaluates every model on each user's "
                "last event"
            )
        if self.rank.evaluate_on != "test":
            raise ValueError(
                "rank.evaluate_on: must be test, because a site reports figures of the test; use "
                "npu-gr train rank to try settings on the validation"
            )


FULL = SiteOptions()
QUICK = SiteOptions(
    rank=msgspec.structs.replace(ranking.QUICK, split=SPLIT), generate=generating.QUICK
)
"""For a first look: half of the time."""
PRESETS = {"full": FULL, "quick": QUICK}


# Events that a training passes at the most: Beauty's best epochs are 9 to 16 of 198,502 events (1.8
# to 3.2 M), that of Sports is 8 of 296,337 (2.4 M). More passes of a longer log would take hours.
MOST_PASSED = 5_000_000
LEAST_EPOCHS = 2
# Users who test each model: a tenth of all, at most 3,000. By the interval of Beauty (NDCG@10
# +-.0019 of 22,363 users), a verdict of 3,000 users has +-.005, one of 300 +-.016.
TESTED_RATIO = 0.1
MOST_TESTED = 3000


def options_for(
    num_items: int, preset: SiteOptions = FULL, num_events: int = 0, num_users: int = 0
) -> SiteOptions:
    """Choose codes, epochs and tested users of a preset by the log's size; `--set` overrides them.

    Args:
        num_items: Items of the catalogue.
        preset: Options, whose epochs and tested users are those of small logs.
        num_events: Events of the log.
        num_users: Users of the log.
    """
    fits = [codes for codes in CODE_COUNTS if prod(codes) >= ROOM * num_items]
    rank, generate = preset.rank, preset.generate
    most_epochs = max(LEAST_EPOCHS, MOST_PASSED // max(1, num_events))
    epochs = min(generate.epochs, most_epochs)
    tested = max(rank.test_users, min(MOST_TESTED, int(num_users * TESTED_RATIO)))
    return msgspec.structs.replace(
        preset,
        rank=msgspec.structs.replace(rank, epochs=min(rank.epochs, most_epochs), test_users=tested),
        generate=msgspec.structs.replace(
            generate,
            code_count=fits[0] if fits else CODE_COUNTS[-1],
            epochs=epochs,
            validate_every=min(generate.validate_every, epochs),
            test_users=tested,
        ),
        retrieve=msgspec.structs.replace(preset.retrieve, test_users=tested),
    )
