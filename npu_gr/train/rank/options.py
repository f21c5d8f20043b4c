"""The options of `npu-gr train rank`, and its presets."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from npu_gr.core.feature_schema.schema import Feature
from npu_gr.core.settings import Count, Positive
from npu_gr.train.data import Split
from npu_gr.train.options import Decay, DropoutRatio, Seed, Share, Weight
from npu_gr.train.rank.tasks import Task


class TrainOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides the result but the log and the number of threads."""

    name: Annotated[str, Meta(description="of the model, as answers and metrics show it")] = "hstu"
    seed: Annotated[Seed, Meta(description="of everything that is drawn: weights, batches, negatives")] = 0
    split: Annotated[
        Split,
        Meta(description="what the evaluation keeps: the newest fifth of each user or of the log, or each last event"),
    ] = "user-time"
    evaluate_on: Annotated[
        Literal["test", "validation"],
        Meta(description="validation: split the training part again, and train and evaluate on that"),
    ] = "test"
    test_users: Annotated[Count, Meta(description="most users of HR and NDCG, drawn at random")] = 1000
    validation_users: Annotated[
        Count,
        Meta(description="most users whose last trained event stops the training and fits the order, drawn at random"),
    ] = 2000
    refit: Annotated[
        bool, Meta(description="after the evaluation, train the served model anew on all events, the newest included")
    ] = True
    tasks: Annotated[
        tuple[Task, ...] | None,
        Meta(description="one logit each, e.g. [{name: click}, {name: buy, actions: [purchase]}]; null: by the log"),
    ] = None

    features: Annotated[
        tuple[Feature, ...] | None,
        Meta(description="columns of the dataset to read, each with its kind; null: all, as their values look"),
    ] = None
    computed: Annotated[
        tuple[str, ...],
        Meta(description="what is computed besides, e.g. [events, rate_by:genre, recency, mf_score, hour]"),
    ] = ()

    budget_s: Annotated[
        float, Meta(ge=0.0, description="seconds of a search for better settings on the validation; 0 = these settings")
    ] = 0.0

    dim: Annotated[Count, Meta(description="width of a token")] = 64
    num_layers: Annotated[Count, Meta(description="attention layers")] = 2
    num_heads: Annotated[Count, Meta(description="attention heads")] = 2
    qk_dim: Annotated[Count, Meta(description="width of a query and a key, per head")] = 32
    v_dim: Annotated[Count, Meta(description="width of a value, per head")] = 32
    head_dim: Annotated[Count, Meta(description="hidden width before the task logits")] = 64
    activation: Annotated[Literal["uvqk", "u"], Meta(description="SiLU on all four projections, or on U alone")] = (
        "uvqk"
    )
    residual: Annotated[Literal["add", "concat"], Meta(description="how the attention's output joins a token")] = "add"
    norm: Annotated[
        Literal["layer", "group"], Meta(description="of the attention's output: over all heads, or each by itself")
    ] = "layer"
    relative_bias: Annotated[
        Literal["position_time", "none"],
        Meta(description="what attention adds for the distance and the time between two tokens; none: nothing"),
    ] = "position_time"
    scaling_seqlen: Annotated[Count, Meta(description="the constant attention scale is 1 / this")] = 64
    max_history_tokens: Annotated[Count, Meta(description="longest history that is served")] = 1024

    epochs: Annotated[Count, Meta(description="most passes over the log; the learning rate falls over all of them")] = (
        16
    )
    patience: Annotated[
        int, Meta(ge=0, description="epochs without a better likelihood on validation that end it; 0 = never")
    ] = 3
    window_tokens: Annotated[Count, Meta(description="longest run of events trained on at once")] = 120
    batch_tokens: Annotated[Count, Meta(description="events of one step, padding included")] = 1024
    learning_rate: Annotated[Positive, Meta(description="highest rate, at the end of the warm-up")] = 3e-3
    warm_up_ratio: Annotated[Share, Meta(description="share of the steps with a rising learning rate")] = 0.05
    item_weight_decay: Annotated[Weight, Meta(description="of item embeddings, which overfit first")] = 0.5
    dropout: Annotated[DropoutRatio, Meta(description="share of embeddings and updates that are dropped")] = 0.3
    row_dropout: Annotated[
        DropoutRatio,
        Meta(description="share of the items that a step knows by features and codes alone, as it will know new ones"),
    ] = 0.1
    vector_dropout: Annotated[DropoutRatio, Meta(description="share of the user's vector that is dropped")] = 0.15
    average_decay: Annotated[Decay, Meta(description="of the moving average of the weights, which is served")] = 0.995
    item_length: Annotated[
        Weight, Meta(description="of the item embeddings at the start, which say what stands near what; 0 = random")
    ] = 0.3

    max_softmax_items: Annotated[
        Count, Meta(description="largest catalogue of which every item is in the softmax of the next one")
    ] = 4000
    num_negatives: Annotated[
        Count, Meta(description="items drawn for each step in the place of a larger catalogue")
    ] = 1024
    task_weight: Annotated[Weight, Meta(description="of the binary tasks in the loss; the next item has 1")] = 1.0
    ordinal_weight: Annotated[Weight, Meta(description="of the auxiliary head beside the binary tasks")] = 0.5
    click_weight: Annotated[Weight, Meta(description="of the next item's logit in the loss")] = 0.3
    click_ratio: Annotated[Share, Meta(description="share of the events that get items drawn for that logit")] = 0.05
    num_retrieved: Annotated[
        Count, Meta(description="retrieved items of the lists that the order is fitted on, and that it is evaluated on")
    ] = 200
    num_neighbours: Annotated[
        int,
        Meta(ge=0, description="items of these lists that the users of the history's items have, beside the others"),
    ] = 100

    def __post_init__(self) -> None:
        if self.tasks is None:
            return
        if not self.tasks or len({task.name for task in self.tasks}) != len(self.tasks):
            raise ValueError("tasks: needs at least one, each name once")
        if sum(task.is_next_item for task in self.tasks) > 1:
            raise ValueError("tasks: at most one may have neither at_least nor actions")


DEMO = TrainOptions()
QUICK = TrainOptions(epochs=5)
"""Two CPU minutes for 100,000 events, the refit included."""
PRESETS = {"demo": DEMO, "quick": QUICK}
