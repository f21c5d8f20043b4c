"""The part `far` of `benchmarks long`: a log whose answer lies thousands of events back.

A user marks items (action 1) in a short run of events, then only views items of the same catalogue
for `lag` events. A candidate is liked if it was marked. A ranker is trained on histories that the
window holds, where all arms are the same model. Those that can see a far answer go on from there,
on the same users of longer lags. Each scores users at a short lag and at the longest:

    full attention   a row reads every event before it
    window           the newest and the first events; layers x window are fewer than the lag
    truncated        the model reads as many of the newest events as a row of the window does
    summaries        the window, and behind every segment of events a few learnt tokens, which read
                     their segment and the learnt tokens before them, and which all later rows read

The first three are scored by the engine that serves. Learnt tokens are not served: this is a
reference in torch. As a row reads what is before it alone, the rows that they leave never change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, silu

from benchmarks.frame import Line, compared, tell
from benchmarks.long_user import Long
from npu_gr.backend.base import Backend
from npu_gr.core.arrays import F32, I64
from npu_gr.core.history import Events, HistoryReport
from npu_gr.engine.rank_engine import RankPass
from npu_gr.model.config import HSTUConfig
from npu_gr.model.history_tokenizer import Tokens
from npu_gr.model.hstu import HSTU
from npu_gr.model.hstu_layer import HSTULayer
from npu_gr.train.metrics import F64, auc, difference_of_auc, difference_of_users

ITEMS, MARKED, SPREAD, BEFORE = 32, 8, 24, 40  # items; marks in SPREAD events, BEFORE ahead
RECENT, FIRST = 128, 32  # tokens of the window; the marks are behind the first ones
SEGMENT, LEARNT = 64, 4  # events of a segment, tokens behind it
TESTED = 20  # users of each lag
RATE = 3e-3
BEST = 8
WITHIN = 0.003
SHAPE = HSTUConfig(
    num_items=ITEMS,
    actions=("view", "mark"),
    tasks=("like",),
    dim=32,
    num_layers=2,
    num_heads=1,
    head_dim=32,
    relative_bias="none",
    scaling_seqlen=64,
    max_history_tokens=16_384,
)
WINDOW = {"attention_window_tokens": RECENT, "attention_first_tokens": FIRST}
ARMS = ("full attention", "window", "truncated", "summaries")
SEEING = ("full attention", "summaries")


class User(NamedTuple):
    """One user's events, and which items were marked."""

    items: I64
    actions: I64
    marked: I64  # [MARKED] items


def draw(random: np.random.Generator, lag: int, before: int = BEFORE) -> User:
    """Draw a user whose newest mark lies `lag` events back."""
    num_events = before + SPREAD + lag
    items = random.integers(0, ITEMS, num_events)
    actions = np.zeros(num_events, np.int64)
    at = before + random.permutation(SPREAD)[:MARKED]
    marked = random.permutation(ITEMS)[:MARKED]
    items[at], actions[at] = marked, 1
    return User(items, actions, marked)


def sees(arm: str, num_events: int) -> tuple[Tensor, Tensor]:
    """Return which rows see which keys, and each row's event.

    Returns:
        bool [rows + 1, rows], the last row a candidate's; int64 [rows] index of the event, or -1 of
        the learnt tokens.
    """
    every = torch.arange(num_events)
    at = torch.cat([every, torch.tensor([num_events])])  # a candidate comes after the last event
    ago = at[:, None] - every
    events = ago >= 0
    if arm in ("window", "summaries"):
        events &= (ago < RECENT) | (every < FIRST)
    if arm != "summaries":
        return events, every
    num_segments = num_events // SEGMENT
    of = torch.arange(num_segments).repeat_interleave(LEARNT)
    is_own = every // SEGMENT == of[:, None]
    behind = (of + 1) * SEGMENT <= at[:, None]  # [events + 1, learnt]
    learnt = torch.tril(torch.ones(len(of), len(of), dtype=torch.bool))
    rows = torch.cat([events[:-1], is_own, events[-1:]])
    return (
        torch.cat([rows, torch.cat([behind[:-1], learnt, behind[-1:]])], dim=1),
        torch.cat([every, torch.full((len(of),), -1)]),
    )


class Reader(nn.Module):
    """A ranker with a mask of its own, for training; also the reference of learnt tokens."""

    def __init__(self, arm: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        window = WINDOW if arm == "window" else {}
        self.arm = arm
        self.model = HSTU(msgspec.structs.replace(SHAPE, **window))
        with torch.no_grad():  # wide enough to tell items apart within some hundred steps
            for table in (self.model.item.weight, self.model.action.weight):
                table.normal_(std=0.3)
        self.learnt = nn.Parameter(torch.randn(LEARNT, SHAPE.dim) * 0.3)

    def forward(self, items: Tensor, actions: Tensor, candidates: Tensor) -> Tensor:
        """Score candidates [B, c] after events [B, N]: [B, c]."""
        model = self.model
        if self.arm == "truncated":
            items, actions = (each[:, -(RECENT + FIRST) :] for each in (items, actions))
        mask, of = sees(self.arm, items.shape[1])
        x = model.items.embed(items) + model.action(actions)
        num_learnt = int((of < 0).sum())
        if num_learnt:
            learnt = self.learnt.repeat(num_learnt // LEARNT, 1)
            x = torch.cat([x, learnt.expand(len(x), -1, -1)], dim=1)
        kind = torch.tensor(len(SHAPE.actions))
        own = model.items.embed(candidates) + model.action(kind)
        scale = model.attention_scale(items.shape[1])
        for layer in model.layers:
            assert isinstance(layer, HSTULayer)
            cu, cv, cq, ck = layer.project(own)
            itself = silu((cq * ck).sum(-1) * SHAPE.attention_alpha)[..., None] * cv
            if layer is model.layers[-1]:
                k, v = layer.project_kv(x)
            else:
                u, v, q, k = layer.project(x)
                x = layer.finish(x, u, _attend(q, k, v, mask[:-1]) * scale)
            own = layer.finish(own, cu, (_attend(cq, k, v, mask[-1:]) + itself) * scale)
        return model.task_logits(own)[..., 0]


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    weights = silu(q[:, :, 0] @ k[:, :, 0].transpose(1, 2) * SHAPE.attention_alpha) * mask
    return (weights @ v[:, :, 0])[:, :, None]


class Phase(NamedTuple):
    """Steps of a training at one lag."""

    steps: int
    users: int  # of a step
    lag: int
    before: int = BEFORE


# little but marks at first: few steps do not find a mark among views
SHARED = (Phase(320, 32, 8, before=0), Phase(20, 32, RECENT // 2))


def phases(lag: int) -> tuple[Phase, ...]:
    """Make the phases of an arm that can see a far answer."""
    return Phase(60, 16, RECENT + 22), Phase(20, 4, lag // 8), Phase(10, 1, lag)


def train(arm: str, plan: tuple[Phase, ...], seed: int, start: Reader | None = None) -> Reader:
    """Train an arm on fresh users, from the weights of `start`."""
    reader = Reader(arm, seed)
    if start is not None:
        reader.load_state_dict(start.state_dict())
    random = np.random.default_rng(seed)
    optimiser = torch.optim.AdamW(reader.parameters(), lr=RATE)
    every = torch.arange(ITEMS)
    loss = torch.zeros(())
    for phase in plan:
        for _ in range(phase.steps):
            users = [draw(random, phase.lag, phase.before) for _ in range(phase.users)]
            labels = np.stack([np.isin(np.arange(ITEMS), user.marked) for user in users])
            logits = reader(
                torch.from_numpy(np.stack([user.items for user in users])),
                torch.from_numpy(np.stack([user.actions for user in users])),
                every.expand(len(users), -1),
            )
            loss = binary_cross_entropy_with_logits(logits, torch.from_numpy(labels).float())
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(reader.parameters(), 1.0)
            optimiser.step()
        tell("long", f"{arm}: trained at a lag of {phase.lag}, loss {loss.item():.3f}")
    return reader.eval()


def lines(backend: Backend, lag: int, seed: int) -> Iterator[Line]:
    """Train the arms, and yield the AUC and the best items of each against full attention's."""
    start = train(ARMS[0], SHARED, seed)
    readers = {arm: train(arm, phases(lag) if arm in SEEING else (), seed, start) for arm in ARMS}
    for at in (RECENT // 2, lag):
        random = np.random.default_rng((seed, at))
        users = [draw(random, at) for _ in range(TESTED)]
        labels = np.stack([np.isin(np.arange(ITEMS), user.marked) for user in users])
        scores = {arm: _scores(backend, readers[arm], users) for arm in ARMS}
        for mine, other in (
            ("window", "full attention"),
            ("window", "truncated"),
            ("summaries", "full attention"),
            ("summaries", "truncated"),
        ):
            yield from _differences(
                f"{mine}, answer {at} events back", other, (scores[mine], scores[other]), labels
            )


@torch.no_grad()
def _scores(backend: Backend, reader: Reader, users: list[User]) -> F64:
    """Score every item for each user, [users, items]; by the engine where it serves the arm."""
    every = np.arange(ITEMS)
    found = []
    engine = None
    if reader.arm != "summaries":
        reader.model.items.freeze()
        engine, _ = Long(reader.model, backend, 0, torch.float32).engine(1)
    for place, user in enumerate(users):
        rows = torch.from_numpy(user.items)[None], torch.from_numpy(user.actions)[None]
        if engine is None:
            found.append(reader(*rows, torch.from_numpy(every)[None])[0].numpy())
            continue
        scored: F32 = engine.forward([_served(reader.arm, user, every)])[0][:, 0]
        if not place:
            reference = reader(*rows, torch.from_numpy(every)[None])[0].numpy()
            assert np.allclose(scored, reference, atol=1e-3), f"{reader.arm}: another score"
        found.append(scored)
    return np.stack(found).astype(np.float64)


def _served(arm: str, user: User, candidates: I64) -> RankPass:
    newest = slice(-(RECENT + FIRST) if arm == "truncated" else None, None)
    items = user.items[newest]
    events = Events(items, user.actions[newest].astype(np.int16), np.arange(len(items)))
    report = HistoryReport(fingerprint="", num_tokens=len(items))
    return RankPass(Tokens(events, items, report), 0, candidates, len(items))


def _differences(
    case: str,
    other: str,
    pair: tuple[F64, F64],
    labels: np.ndarray[tuple[int, int], np.dtype[np.bool_]],
) -> Iterator[Line]:
    flat, users = labels.ravel(), np.repeat(np.arange(len(labels)), ITEMS)
    areas = [auc(each.ravel(), flat) for each in pair]
    gap = difference_of_auc(pair[0].ravel(), pair[1].ravel(), flat, users)
    assert gap is not None
    ok = gap.mean >= -WITHIN if other == "full attention" else None
    yield compared(
        "long", f"AUC: {case}", areas[0], "AUC", other, areas[1], areas[0] / areas[1],
        low=gap.low, high=gap.high, ok=ok,
    )  # fmt: skip
    mine, before = (
        np.take_along_axis(labels, np.argsort(-each, axis=1)[:, :BEST], axis=1).mean(1)
        for each in pair
    )
    of_best = difference_of_users(mine, before)
    yield compared(
        "long", f"best {BEST} that were marked: {case}", float(mine.mean()), "share", other,
        float(before.mean()), float(mine.mean() / max(before.mean(), 1e-9)),
        low=of_best.low, high=of_best.high,
    )  # fmt: skip
