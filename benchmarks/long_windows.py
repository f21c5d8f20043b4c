"""The parts `windows` and `far` of `benchmarks long`: what an attention window costs in quality.

`windows` trains a ranker for each window on a log, on whole histories, and compares it with full
attention on the events after the trained ones: of all users, and of those with the longest
histories.

`far` draws users whose answers lie `DISTANCE` events back: each likes or dislikes each of some
topics once, sees other items, and is then asked about every topic. No answer says anything about
another one, so what a model knows it has read there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.frame import Line, compared, tell
from benchmarks.long_user import Long
from npu_gr.backend.base import Backend
from npu_gr.core.arrays import I64
from npu_gr.core.history import Events, HistoryReport
from npu_gr.engine.rank_engine import RankPass
from npu_gr.history_store.interactions import Interactions
from npu_gr.model.config import HSTUConfig
from npu_gr.model.history_tokenizer import Tokens
from npu_gr.model.hstu import HSTU
from npu_gr.train.metrics import F64, auc, difference_of_auc, difference_of_users
from npu_gr.train.rank.evaluate import Evaluation, K
from npu_gr.train.rank.forward import EncodedHistories, HistoryBatch
from npu_gr.train.rank.options import TrainOptions
from npu_gr.train.rank.train import train_rank

Bools = npt.NDArray[np.bool_]

WINDOWS = (64, 128, 256)
FIRST = 16  # attention_first_tokens
LONG_USERS = 256  # trained events of a user with a long history
LOSES = 0.003  # most that a window may lose
TRAINED = TrainOptions(refit=False, window_tokens=1024, batch_tokens=4096, patience=2)


def real(interactions: Interactions, options: TrainOptions) -> Iterator[Line]:
    """Yield the AUC and HR@10 of each window minus those of full attention."""
    arms: dict[int, Evaluation] = {}
    for window in (0, *WINDOWS):
        tell("long", f"trains a ranker with a window of {window or 'all'} tokens")
        first = FIRST if window else 0
        own = msgspec.structs.replace(
            options, attention_window_tokens=window, attention_first_tokens=first
        )
        _, arms[window] = train_rank(interactions, [], own)
    full = arms.pop(0)
    events = np.bincount(interactions.users)
    for window, found in arms.items():
        for name, least in (("all users", 0), (f"{LONG_USERS} events or more", LONG_USERS)):
            at = f"window {window} + {FIRST}, {name}"
            yield from _compared(at, found, full, events >= least)


def _compared(at: str, found: Evaluation, full: Evaluation, chosen: Bools) -> Iterator[Line]:
    assert found.ranker.liking is not None
    assert full.ranker.liking is not None
    own = chosen[found.users]
    mine, theirs = found.ranker.liking[own], full.ranker.liking[own]
    labels, users = found.likes[own], found.users[own]
    yield _area(f"AUC, {at}, {len(labels)} events", mine, theirs, labels, users)
    of_user = chosen[found.next_users]
    hits: list[F64] = [
        (one.parts[0].ranks.overall[of_user] < K).astype(np.float64) for one in (found, full)
    ]
    gap = difference_of_users(hits[0], hits[1])
    yield compared(
        "long", f"HR@{K} of the retrieval, {at}, {len(hits[0])} users", float(hits[0].mean()), "HR",
        "full attention", float(hits[1].mean()), float(hits[0].mean() / hits[1].mean()),
        ok=gap.mean >= -LOSES, low=gap.low, high=gap.high,
    )  # fmt: skip


def _area(case: str, mine: F64, theirs: F64, labels: Bools, users: I64) -> Line:
    gap = difference_of_auc(mine, theirs, labels, users)
    assert gap is not None
    value, before = auc(mine, labels), auc(theirs, labels)
    return compared(
        "long", case, value, "AUC", "full attention", before, value / before,
        ok=gap.mean >= -LOSES, low=gap.low, high=gap.high,
    )  # fmt: skip


# ---- an answer far back

DISTANCE = 5000  # events between a topic's answer and the question
TOPICS = 16
OTHERS = 200  # items that say nothing
# (steps, distance, users of a step) of the training, from near to far
COURSE = ((400, 0, 16), (300, 30, 16), (400, 300, 8))
TESTED = 100  # users


class Asked(NamedTuple):
    """Histories of some users, and the topics about which each is asked at their ends."""

    histories: HistoryBatch  # [B, N]
    topics: torch.Tensor  # int64 [B, TOPICS]
    liked: torch.Tensor  # float32 [B, TOPICS]


def draw(num_users: int, distance: int, random: np.random.Generator) -> Asked:
    """Draw users; the answers stand behind `FIRST` other items."""
    length = FIRST + TOPICS + distance
    items = random.integers(TOPICS, TOPICS + OTHERS, (num_users, length))
    actions = random.integers(0, 2, (num_users, length))
    order = np.argsort(random.random((num_users, TOPICS)), axis=1)
    items[:, FIRST : FIRST + TOPICS] = order
    asked = np.sort(order, axis=1)
    place = np.argsort(order, axis=1)
    liked = np.take_along_axis(actions[:, FIRST : FIRST + TOPICS], place, axis=1)
    times = np.arange(length)[None].repeat(num_users, 0) * 60
    histories = HistoryBatch(
        items=torch.from_numpy(items),
        actions=torch.from_numpy(actions),
        times=torch.from_numpy(times),
    )
    return Asked(histories, torch.from_numpy(asked), torch.from_numpy(liked.astype(np.float32)))


def far_model(window: int, seed: int) -> HSTU:
    """Make a small ranker without a bias by distance, so that it reads at any distance."""
    torch.manual_seed(seed)
    return HSTU(
        HSTUConfig(
            num_items=TOPICS + OTHERS, actions=("no", "yes"), tasks=("like",), dim=32,
            num_layers=1, num_heads=1, qk_dim=32, v_dim=32, head_dim=32, relative_bias="none",
            scaling_seqlen=1, max_history_tokens=8192,
            attention_window_tokens=window, attention_first_tokens=FIRST if window else 0,
        )
    )  # fmt: skip


def logits(model: HSTU, asked: Asked) -> torch.Tensor:
    """Score every topic just before the last event, with gradients: [B, TOPICS]."""
    encoded = EncodedHistories(model, asked.histories)
    last = torch.full((len(asked.topics), 1), asked.histories.items.shape[1] - 1)
    return model.task_logits(encoded.rows(asked.topics[:, None], last))[:, 0, :, 0]


def served(model: HSTU, asked: Asked, backend: Backend) -> F64:
    """Score every topic just before the last event, as an instance does: [B * TOPICS]."""
    model.eval().items.freeze()
    engine, _ = Long(model, backend, 0).engine(1)
    found = []
    for user, topics in enumerate(asked.topics.numpy()):
        items, actions, times = (
            getattr(asked.histories, name)[user].numpy() for name in ("items", "actions", "times")
        )
        events = Events(items[:-1], actions[:-1].astype(np.int16), times[:-1])
        tokens = Tokens(events, events.items, HistoryReport(fingerprint="", num_tokens=len(events)))
        found.append(engine.forward([RankPass(tokens, 0, topics, int(times[-1]))])[0][:, 0])
    return np.concatenate(found).astype(np.float64)


def trained(window: int, seed: int) -> HSTU:
    """Train on answers that are ever further back."""
    model = far_model(window, seed)
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    random = np.random.default_rng(seed)
    for steps, distance, num_users in COURSE:
        for _ in range(steps):
            one = draw(num_users, distance, random)
            loss = binary_cross_entropy_with_logits(logits(model, one), one.liked)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return model


def far(backend: Backend, seed: int) -> Iterator[Line]:
    """Yield the AUC of each window minus that of full attention, near and far."""
    models = {}
    for window in (0, *WINDOWS):
        tell("long", f"trains a window of {window or 'all'} tokens on answers far back")
        models[window] = trained(window, seed)
    for distance in (min(WINDOWS) // 2, DISTANCE):
        asked = draw(TESTED, distance, np.random.default_rng(seed + 1))
        scores = {window: served(model, asked, backend) for window, model in models.items()}
        users = np.arange(TESTED).repeat(TOPICS)
        full = scores.pop(0)
        for window, own in scores.items():
            case = f"AUC of answers {distance} events back, window {window} + {FIRST}"
            yield _area(
                f"{case}, {TESTED} users", own, full, asked.liked.flatten().numpy() > 0, users
            )
