"""`benchmarks quality --only zozotown`: a ranker of features alone, on the sample of ZOZOTOWN's log in package obp.

60,000 impressions: three campaigns, each under two policies, with features of users and items and their affinity. Users
have no names there, so there are no histories: an impression is a user of its own. The ranker stands beside a logistic
regression and boosted trees of the same columns. AUC of the click over the newest fifth; the settings of all three are
chosen by the AUC over the newest fifth of the rest, and the model is trained again on all of the rest.

Source: Open Bandit Dataset, arXiv:2008.07146. Nothing of the package is imported.
"""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks.frame import Line
from npu_gr.core.errors import DataError
from npu_gr.core.feature_schema.computed import time_column
from npu_gr.dataset import PrepareOptions, prepare
from npu_gr.dataset.cells import pa
from npu_gr.features.interactions import Interactions, ItemValues
from npu_gr.train.data import Bools, InteractionLog, build_log
from npu_gr.train.metrics import F64, auc
from npu_gr.train.paired import difference_of_auc
from npu_gr.train.rank.evaluate import judged_logits
from npu_gr.train.rank.fit import fit
from npu_gr.train.rank.inputs import LogInputs
from npu_gr.train.rank.options import TrainOptions
from npu_gr.train.rank.schema import choose_features
from npu_gr.train.rank.tasks import Task, positives
from npu_gr.train.steps import TrainingProgress

CAMPAIGNS = ("all", "men", "women")
POLICIES = ("random", "bts")
USER = tuple(f"user_feature_{index}" for index in range(4))
ITEM = tuple(f"item_feature_{index}" for index in range(4))
TASKS = (Task(name="click", actions=("click",)),)
RANKER = TrainOptions(split="time", refit=False, num_layers=1, item_length=0.0, ordinal_weight=0.0, computed=("hour",))
# what is tried of each model
EPOCHS = (2, 4, 8)
RATES = (1e-3, 3e-3)
PENALTIES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # inverse strength of the regression's
LEAVES = (4, 8, 16)
TREES = (20, 50, 100)


class Impressions(NamedTuple):
    """The log. u = users, each with one impression."""

    events: Interactions
    items: list[ItemValues]
    names: npt.NDArray[Any]  # [u, columns] texts for the baselines: of the user, the item, the place and the hour
    affinity: F64  # [u]


def read_impressions(folder: Path | None = None) -> Impressions:
    """Read all impressions.

    Args:
        folder: has POLICY/CAMPAIGN/CAMPAIGN.csv; None = that of the package obp.

    Raises:
        DataError: the package is not installed; the message has the command.
    """
    root = folder or _installed()
    items: dict[str, dict[str, str]] = {}
    rows: list[dict[str, str]] = []
    for policy, campaign in product(POLICIES, CAMPAIGNS):
        for row in _read(root / policy / campaign / "item_context.csv"):
            items[f"{campaign}/{row['item_id']}"] = {name: row[name] for name in ITEM}
        for row in _read(root / policy / campaign / f"{campaign}.csv"):
            told = {name: row[name] for name in (*USER, "position", "timestamp")}
            told["affinity"] = row[f"user-item_affinity_{row['item_id']}"]
            told["event"] = "click" if row["click"] == "1" else "impression"
            told["item_id"] = f"{campaign}/{row['item_id']}"
            told["user_id"] = f"{len(rows)}"
            rows.append(told)
    events, item_values = _prepared(rows, items)
    mine = [rows[int(name)] for name in events.user_names]
    hours = np.empty(len(mine), np.int64)
    hours[events.users] = time_column("hour", events.timestamps)
    names = [[row[name] for name in (*USER, "item_id", "position")] + [*items[row["item_id"]].values()] for row in mine]
    with_hours = np.concatenate([np.array(names), hours.astype(str)[:, None]], axis=1)
    return Impressions(events, item_values, with_hours, np.array([float(row["affinity"]) for row in mine]))


def _prepared(
    rows: Sequence[dict[str, str]], items: dict[str, dict[str, str]]
) -> tuple[Interactions, list[ItemValues]]:
    """Make a dataset, as `npu-gr prepare` does."""
    options = PrepareOptions(
        event="event",
        request_features=("position:category",),
        cross_features=("affinity:number",),
        user_features=USER,
        features=ITEM,
    )
    log = ("user_id", "item_id", "timestamp", "event", "position", "affinity")
    sides = [{"item_id": item, **told, ITEM[0]: float(told[ITEM[0]])} for item, told in items.items()]
    with tempfile.TemporaryDirectory() as folder:
        made = prepare(
            pa.table({name: [row[name] for row in rows] for name in log}),
            Path(folder) / "data",
            options,
            items=pa.Table.from_pylist(sides),
            users=pa.table({name: [row[name] for row in rows] for name in ("user_id", *USER)}),
        )
        return made.dataset.interactions(), made.dataset.item_features()


def _installed() -> Path:
    try:
        files = importlib.metadata.files("obp") or []
    except importlib.metadata.PackageNotFoundError as error:
        raise DataError("ZOZOTOWN's log: run pip install --no-deps obp==0.4.1 first") from error
    for file in files:
        if file.parts[-3:] == ("bts", "all", "all.csv"):
            return Path(str(file.locate())).parents[2]
    raise DataError("ZOZOTOWN's log: this version of obp does not carry it; use obp==0.4.1")


def _read(path: Path) -> Iterator[dict[str, str]]:
    with path.open(newline="") as file:
        yield from csv.DictReader(file)


Model = Callable[[InteractionLog, Impressions, Any], F64]
"""(log, impressions, settings) -> scores of the log's events after the trained ones."""


def zozotown_lines(seed: int, impressions: Impressions | None = None) -> Iterator[Line]:
    """Compare the ranker with the two baselines, a line each.

    Args:
        seed: of the ranker's training.
        impressions: None = those of the package.

    Raises:
        DataError: a package is missing; the message has the command.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise DataError("the baselines of ZOZOTOWN's log need pip install 'npu_gr[baselines]'")
    found = impressions or read_impressions()
    log = build_log(found.events, found.items, "time")
    clicks = positives(log, TASKS[0])
    judged = ~log.trained
    num_clicks, num_judged = int(clicks[judged].sum()), int(judged.sum())
    ours = _chosen(log, found, clicks, partial(_ranker, seed=seed), list(product(EPOCHS, RATES)))
    for name, model, grid in (
        ("logistic regression", _regression, list(PENALTIES)),
        ("boosted trees", _trees, list(product(TREES, LEAVES))),
    ):
        theirs = _chosen(log, found, clicks, model, grid)
        gap = difference_of_auc(ours, theirs, clicks[judged], log.users[judged])
        assert gap is not None  # there are clicks, and others
        value, other = auc(ours, clicks[judged]), auc(theirs, clicks[judged])
        yield Line(
            bench="quality",
            case=f"features ZOZOTOWN, {num_clicks} clicks of {num_judged:,} impressions, AUC click",
            ours=value,
            unit="AUC",
            baseline=name,
            baseline_value=other,
            ratio=value / other,
            target=1.0,
            ok=gap.high >= 0,
            low=gap.low,
            high=gap.high,
        )


def _chosen(log: InteractionLog, found: Impressions, clicks: Bools, model: Model, grid: Sequence[Any]) -> F64:
    """Choose settings on the newest fifth of the trained part, train on all of it, and score the rest."""
    inner = log.only_trained("time")
    label = clicks[log.trained][~inner.trained]
    best = max(grid, key=lambda settings: auc(model(inner, found, settings), label))
    return model(log, found, best)


def _ranker(log: InteractionLog, found: Impressions, settings: tuple[int, float], seed: int) -> F64:
    epochs, rate = settings
    options = msgspec.structs.replace(RANKER, epochs=epochs, learning_rate=rate, seed=seed)
    features = choose_features(log, found.items, TASKS, options)
    model = fit(log, found.items, TASKS, options, [], "ranker", _ignore, features=features).model
    return judged_logits(LogInputs(log, model), model, 0)


def _ignore(progress: TrainingProgress) -> None:
    """Take a progress and do nothing."""


def _regression(log: InteractionLog, found: Impressions, penalty: float) -> F64:
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import OneHotEncoder

    encoder = OneHotEncoder(handle_unknown="ignore")
    return _fitted(log, found, encoder, LogisticRegression(C=penalty, max_iter=1000))


def _trees(log: InteractionLog, found: Impressions, settings: tuple[int, int]) -> F64:
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.preprocessing import OrdinalEncoder

    num_trees, num_leaves = settings
    num_names = found.names.shape[1]
    model = HistGradientBoostingClassifier(
        max_iter=num_trees,
        max_leaf_nodes=num_leaves,
        categorical_features=[*range(num_names)],
        early_stopping=False,
        random_state=0,
    )
    encoder = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=np.nan, encoded_missing_value=np.nan)
    return _fitted(log, found, encoder, model)


def _fitted(log: InteractionLog, found: Impressions, encoder: Any, model: Any) -> F64:
    """Fit a classifier of scikit-learn to the trained events, the names encoded, the affinity as it is."""
    from sklearn.compose import make_column_transformer
    from sklearn.pipeline import make_pipeline

    num_names = found.names.shape[1]
    columns = np.concatenate([found.names.astype(object), found.affinity[:, None]], axis=1)[log.users]
    both = make_column_transformer((encoder, [*range(num_names)]), remainder="passthrough")
    clicks = positives(log, TASKS[0])
    pipeline = make_pipeline(both, model).fit(columns[log.trained], clicks[log.trained])
    scores: F64 = pipeline.predict_proba(columns[~log.trained])[:, 1]
    return scores
