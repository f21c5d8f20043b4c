"""The options of an SCCDR training, and the stages that they make: all that decides its result but data and threads."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from npu_gr.core.settings import Count, Positive
from npu_gr.train.options import Seed, Weight

Domain = Literal["source", "target"]


class MatchOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a training; every ingredient of SCCDR can be switched off."""

    seed: Annotated[Seed, Meta(description="of everything that is drawn")] = 0

    schedule: Annotated[
        Literal["target-only", "mixed", "separated"],
        Meta(description="separated: source, then target, then the inter-domain stage; mixed: all at once"),
    ] = "separated"
    users: Annotated[
        Literal["own", "shared"], Meta(description="a user embedding for each domain, or one for both")
    ] = "own"
    initialise: Annotated[bool, Meta(description="separated: target users start at their source vectors")] = True
    aligned: Annotated[bool, Meta(description="use the aligned-user loss")] = True
    neighbour: Annotated[bool, Meta(description="use the neighbour-similarity loss")] = True
    stop_gradient: Annotated[bool, Meta(description="inter-domain losses do not move the source")] = True
    curriculum: Annotated[bool, Meta(description="negatives from easy to hard, by Katz centrality")] = True

    prior: Annotated[bool, Meta(description="add each item's popularity to its logits, in closed form")] = True
    encoder: Annotated[Literal["sage", "lightgcn"], Meta(description="of the graph")] = "sage"
    norm: Annotated[
        Literal["symmetric", "mean"],
        Meta(description="weights of the neighbours; mean, as in GraphSAGE's paper, forgets how popular an item is"),
    ] = "symmetric"
    activation: Annotated[
        Literal["none", "tanh", "leaky_relu"], Meta(description="after each matrix of the encoder")
    ] = "none"
    dim: Annotated[Count, Meta(description="width of a vector")] = 64
    num_layers: Annotated[Count, Meta(description="hops in the graph")] = 2

    export: Annotated[
        Literal["joined", "encoder"],
        Meta(description="joined: serve the joint SVD and popularity too, by weights of the validation"),
    ] = "joined"

    source_steps: Annotated[Count, Meta(description="most steps of the source's stage")] = 120
    target_steps: Annotated[Count, Meta(description="most steps of the target's stage")] = 120
    inter_steps: Annotated[Count, Meta(description="most steps of the inter-domain stage")] = 120
    evaluate_every: Annotated[Count, Meta(description="steps between two validations")] = 10
    patience: Annotated[int, Meta(ge=0, description="validations without a best one that end a stage; 0: none do")] = 4
    batch_edges: Annotated[Count, Meta(description="edges of each domain in a step")] = 8192
    num_negatives: Annotated[Count, Meta(description="sampled items beside each edge's own")] = 4
    negative_power: Annotated[Weight, Meta(description="items are sampled by their degree to this power")] = 0.0
    batch_anchors: Annotated[Count, Meta(description="anchors of each inter-domain loss in a step")] = 512
    num_inter_negatives: Annotated[Count, Meta(description="negatives of each anchor")] = 128
    lambda_intra: Annotated[Weight, Meta(description="of the intra-domain losses, in the inter-domain stage")] = 0.1
    lambda_inter: Annotated[Weight, Meta(description="of the inter-domain losses")] = 1.0
    tau: Annotated[Positive, Meta(description="temperature of the inter-domain losses")] = 0.2
    learning_rate: Annotated[Positive, Meta(description="of the embedding tables")] = 2e-2
    pacing_looks: Annotated[
        Count, Meta(description="curriculum: validations of the stage after which every negative may be drawn")
    ] = 4


class TrainingStage(NamedTuple):
    """One stage of a training, with its own optimizer."""

    name: Literal["source", "target", "both", "inter"]
    steps: int
    moves: tuple[Domain, ...]  # the domains whose weights it trains
    inter: bool  # whether it uses the inter-domain losses
    is_validated: bool = True


def stages(options: MatchOptions) -> list[TrainingStage]:
    """List the stages of a training, in order."""
    inter = options.aligned or options.neighbour
    if options.schedule == "target-only":
        return [TrainingStage("target", options.target_steps, ("target",), False)]
    if options.schedule == "mixed":
        return [TrainingStage("both", options.target_steps + options.inter_steps, ("source", "target"), inter)]
    first = [
        TrainingStage("source", options.source_steps, ("source",), False, is_validated=False),
        TrainingStage("target", options.target_steps, ("target",), False),
    ]
    moves: tuple[Domain, ...] = ("target",) if options.stop_gradient else ("source", "target")
    return [*first, TrainingStage("inter", options.inter_steps, moves, True)] if inter else first


# Options that the stages before the inter-domain one do not read.
_INTER_OPTIONS: tuple[str, ...] = (
    *("aligned", "neighbour", "stop_gradient", "curriculum", "inter_steps", "batch_anchors"),
    *("num_inter_negatives", "lambda_intra", "lambda_inter", "tau", "pacing_looks"),
)


def shared_key(options: MatchOptions, stage: TrainingStage) -> str | None:
    """Name the state at the end of a stage: trainings on the same data with equal keys have equal states.

    Returns:
        The key; None if no other training may have the same state.
    """
    if options.schedule != "separated" or stage.name == "inter":
        return None
    table = msgspec.to_builtins(options)
    for name in (*_INTER_OPTIONS, *(("initialise", "target_steps", "patience") if stage.name == "source" else ())):
        del table[name]
    return f"{stage.name} {msgspec.json.encode(table).decode()}"
