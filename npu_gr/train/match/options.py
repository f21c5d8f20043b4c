"""What decides a training's result, apart from the data and the number of threads."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0.0)]
Weight = Annotated[float, Meta(ge=0.0)]
Domain = Literal["source", "target"]


class MatchOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every ingredient of SCCDR is a switch."""

    seed: Annotated[int, Meta(ge=0)] = 0

    schedule: Annotated[
        Literal["target-only", "mixed", "separated"],
        Meta(description="separated: source, then target, then the inter-domain stage; mixed: all from the first step"),
    ] = "separated"
    users: Annotated[Literal["own", "shared"], Meta(description="a user embedding a domain, or one for both")] = "own"
    initialise: Annotated[bool, Meta(description="separated: target users start at their source vectors")] = True
    aligned: Annotated[bool, Meta(description="the aligned-user loss")] = True
    neighbour: Annotated[bool, Meta(description="the neighbour-similarity loss")] = True
    stop_gradient: Annotated[bool, Meta(description="inter-domain losses do not move the source")] = True
    curriculum: Annotated[bool, Meta(description="negatives from easy to hard, by Katz centrality")] = True

    encoder: Literal["sage", "lightgcn"] = "sage"
    norm: Annotated[
        Literal["symmetric", "mean"],
        Meta(description="of the neighbours; a mean, as GraphSAGE's paper has it, forgets how popular an item is"),
    ] = "symmetric"
    activation: Literal["none", "tanh", "leaky_relu"] = "none"
    projector: Literal["none", "linear", "mlp"] = "linear"
    dim: Count = 64
    num_layers: Count = 2

    source_steps: Count = 120
    target_steps: Count = 120
    inter_steps: Count = 120
    evaluate_every: Annotated[Count, Meta(description="steps between two looks at the validation part")] = 10
    patience: Annotated[int, Meta(ge=0, description="looks without a better one that end a stage; 0: never")] = 4
    batch_edges: Annotated[Count, Meta(description="of each domain, a step")] = 8192
    num_negatives: Annotated[Count, Meta(description="items beside each edge")] = 4
    negative_power: Annotated[Weight, Meta(description="they are drawn by item degree to this power")] = 0.0
    batch_anchors: Annotated[Count, Meta(description="of each inter-domain loss, a step")] = 512
    num_inter_negatives: Count = 128
    lambda_intra: Annotated[Weight, Meta(description="of the intra-domain losses in the inter-domain stage")] = 0.1
    lambda_inter: Weight = 1.0
    tau: Positive = 0.2
    learning_rate: Annotated[Positive, Meta(description="of the embedding tables")] = 2e-2
    matrix_learning_rate: Annotated[Positive, Meta(description="of everything else")] = 1e-3
    inter_learning_rate_ratio: Annotated[Positive, Meta(description="of both, in the inter-domain stage")] = 0.2
    start_share: Annotated[float, Meta(gt=0.0, le=1.0, description="of the negatives, the easiest, at first")] = 0.3
    pacing_power: Positive = 1.0


class Stage(NamedTuple):
    """One part of a training, with its own optimizer."""

    name: Literal["source", "target", "both", "inter"]
    steps: int
    moves: tuple[Domain, ...]  # whose weights it trains
    inter: bool  # with the inter-domain losses
    judged: bool = True  # on the validation part


def stages(options: MatchOptions) -> list[Stage]:
    """Of a training, in order."""
    inter = options.aligned or options.neighbour
    if options.schedule == "target-only":
        return [Stage("target", options.target_steps, ("target",), False)]
    if options.schedule == "mixed":
        return [Stage("both", options.target_steps + options.inter_steps, ("source", "target"), inter)]
    first = [
        Stage("source", options.source_steps, ("source",), False, judged=False),
        Stage("target", options.target_steps, ("target",), False),
    ]
    moves: tuple[Domain, ...] = ("target",) if options.stop_gradient else ("source", "target")
    return [*first, Stage("inter", options.inter_steps, moves, True)] if inter else first


_OF_INTER: tuple[str, ...] = (
    *("aligned", "neighbour", "stop_gradient", "curriculum", "projector", "inter_steps", "batch_anchors"),
    *("num_inter_negatives", "lambda_intra", "lambda_inter", "tau", "inter_learning_rate_ratio"),
    *("start_share", "pacing_power"),
)


def shared_key(options: MatchOptions, stage: Stage) -> str | None:
    """Equal for trainings of the same data whose results are equal up to this stage; None: not to be shared."""
    if options.schedule != "separated" or stage.name == "inter":
        return None
    table = msgspec.to_builtins(options)
    for name in (*_OF_INTER, *(("initialise", "target_steps", "patience") if stage.name == "source" else ())):
        del table[name]
    return f"{stage.name} {msgspec.json.encode(table).decode()}"
