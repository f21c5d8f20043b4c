"""`python -m benchmarks tables`: item rows on disk against the same rows in memory.

Makes a sharded checkpoint of that many items in int8, unless the folder has it. Two engines rank
the same requests in turn, of items drawn by popularity: one with a hot set, the other with every
row in memory. Before each request the kernel forgets every page of the files, so the hot set is all
that helps, but for the history of a request with a signal. The hot set is first brought to its
steady state by draws alone.

Then a real instance serves the checkpoint: seconds until it is ready, and its own memory.

Before anything is timed the rows of both are compared, bit for bit, and at the end all scores.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from benchmarks.frame import COUNT, FILE, SEED, Line, compared, option, tell
from benchmarks.rank import layout
from benchmarks.servers import Process, instance, running
from npu_gr.backend.cpu.backend import CPUBackend
from npu_gr.core.arrays import F32, I64
from npu_gr.core.errors import Unavailable
from npu_gr.core.history import Events, HistoryReport
from npu_gr.core.memory import free_memory, misfit, size_text
from npu_gr.engine.kv_cache.arena import KVArena
from npu_gr.engine.queue import SchedulerConfig
from npu_gr.engine.rank_engine import RankEngine, RankPass
from npu_gr.engine.scheduler import Scheduler
from npu_gr.model.config import HSTUConfig
from npu_gr.model.history_tokenizer import Tokens
from npu_gr.model.hot_rows import HotRows
from npu_gr.model.hstu import HSTU
from npu_gr.model.item_shards import Records, RowShards, decode, encode, file_name
from npu_gr.model.weights import Checkpoint, load, save_shards

OPTIONS = (
    option("--rows", default=100_000_000, type=COUNT, help="Items."),
    option("--hot-bytes", default=512 << 20, type=COUNT, help="Memory of the hot set."),
    option("--requests", default=1500, type=COUNT, help="Timed requests of each case."),
    option("--folder", type=FILE, help="Folder of the checkpoint; by default a temporary one."),
    option("--no-server", is_flag=True, help="Leave out the instance."),
    SEED,
)
DIM = 64
ZIPF = 1.05  # exponent of the items' popularity
CANDIDATES = 128
CASES = {  # events of a history, whether a signal has asked for them
    "512 events": (512, False),
    "512 events, after a signal": (512, True),
    "16 events, as after a hit": (16, False),
}
SIGNAL_AHEAD_S = 0.02  # that a signal comes before its rank
SHOWN_AT = 1_700_000_000
BLOCK = 1 << 16
WARM_DRAWS, WARM_BATCH = 8, 200_000  # draws of the warm-up, in places of the hot set
SLOWER, START_S = 1.3, 10.0  # targets
FIRST_ID = 1000


def shape(rows: int) -> HSTUConfig:
    """Return the shape of the ranker."""
    return HSTUConfig(
        num_items=rows,
        actions=("click",),
        tasks=("click",),
        dim=DIM,
        num_layers=4,
        max_history_tokens=1024,
    )


def make(folder: Path, rows: int, seed: int) -> None:
    """Write a sharded checkpoint of random rows."""
    torch.manual_seed(seed)
    base = encode(torch.randn(BLOCK, DIM) * 0.02, "int8").numpy()

    def parts() -> Iterator[Records]:
        for number, first in enumerate(range(0, rows, BLOCK)):
            made = base[: rows - first].copy()
            made[:, :2] ^= np.array([number, number >> 8], np.int64).astype(np.uint8)
            yield made

    model = HSTU(shape(rows), has_item_rows=False).eval()
    ids = np.arange(FIRST_ID, FIRST_ID + rows)
    one = Checkpoint(model=model, item_ids=ids, name="made", version="0" * 16)
    save_shards(one, folder, parts(), "int8")


class Popularity:
    """Draws rows by Zipf's law; popular rows lie anywhere."""

    def __init__(self, rows: int, seed: int) -> None:
        self._rows = rows
        self._random = np.random.default_rng(seed)
        self._step = next(n for n in range(int(rows * 0.618) | 1, rows * 2) if np.gcd(n, rows) == 1)
        self._sums = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -ZIPF)

    def draw(self, count: int) -> I64:
        ranks = np.searchsorted(self._sums, self._random.random(count) * self._sums[-1])
        rows: I64 = (ranks * self._step) % self._rows
        return rows

    def of_best(self, count: int) -> float:
        """Return the share of the draws that the most popular rows get."""
        return float(self._sums[min(count, self._rows) - 1] / self._sums[-1])


class WholeTable:
    """Every record in memory: the definition, and the baseline."""

    def __init__(self, folder: Path, shards: RowShards) -> None:
        self.num_rows = shards.num_rows
        self.records = np.empty((shards.num_rows, shards.record_bytes), np.uint8)
        flat, at = self.records.reshape(-1), 0
        for number in range(len(shards.about.files)):
            with (folder / file_name(number)).open("rb") as file:
                at += file.readinto(flat[at:].data)
        assert at == flat.size

    def rows(self, rows: Tensor) -> Tensor:
        return decode(torch.from_numpy(self.records[rows.numpy()]), "int8")


class WarmShards(RowShards):
    """Shards that read from memory while the hot set warms up."""

    memory: Records | None = None

    def read(self, rows: Sequence[int]) -> Records:
        if self.memory is None:
            return super().read(rows)
        found: Records = self.memory[np.asarray(rows)]
        return found


def forget_pages(folder: Path) -> None:
    """Let the kernel drop the cached pages of all rows."""
    for path in folder.glob("*.rows"):
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def engine_of(folder: Path, rows: object) -> RankEngine:
    """Make an engine of the checkpoint that reads its item rows from `rows`."""
    backend = CPUBackend()
    model = load(folder, is_served=True).model
    model.items.sharded = rows  # type: ignore[assignment]
    arena = KVArena(layout(model.config, backend), 1, backend.device, pack=backend.pack_kv)
    return RankEngine(model, backend, Scheduler(SchedulerConfig()), arena)


def request(popular: Popularity, num_tokens: int) -> RankPass:
    """Make a rank of popular items, without a cached prefix."""
    rows = popular.draw(num_tokens)
    times = SHOWN_AT - np.arange(num_tokens)[::-1] * 1000
    events = Events(rows, np.zeros(num_tokens, np.int16), times)
    tokens = Tokens(events, rows, HistoryReport(fingerprint="", num_tokens=num_tokens))
    return RankPass(tokens, 0, popular.draw(CANDIDATES), SHOWN_AT)


def lines(
    rows: int, hot_bytes: int, requests: int, folder: Path | None, no_server: bool, seed: int
) -> Iterator[Line]:
    """Yield all cases.

    Raises:
        AssertionError: Rows or scores differ; nothing is said.
    """
    with TemporaryDirectory(prefix="tables-") as made:
        yield from _lines(rows, hot_bytes, requests, folder or Path(made, "t"), no_server, seed)


def _lines(
    rows: int, hot_bytes: int, requests: int, folder: Path, no_server: bool, seed: int
) -> Iterator[Line]:
    torch.set_num_threads(1)
    if not (folder / "config.json").exists():
        tell("tables", f"writing {rows:,} rows of {DIM} int8")
        make(folder, rows, seed)
    if words := misfit("the table", (DIM + 4) * rows + hot_bytes, free_memory()):
        raise Unavailable(f"bench tables: {words}")
    forget_pages(folder)
    began_at = time.perf_counter()
    checkpoint = load(folder, is_served=True)
    assert checkpoint.rows is not None
    about = checkpoint.rows.about
    hot = HotRows(shards := WarmShards(folder, about, rows, DIM), 0, hot_bytes, torch.device("cpu"))
    start_s = time.perf_counter() - began_at
    began_at = time.perf_counter()
    whole = WholeTable(folder, shards)
    read_s = time.perf_counter() - began_at
    yield compared("tables", "open", start_s, "s", "read every row", read_s, read_s / start_s)
    popular = Popularity(rows, seed)
    sample = torch.from_numpy(popular.draw(5000))
    for _ in range(2):
        assert torch.equal(hot.rows(sample), whole.rows(sample))
    tell("tables", "warming up the hot set")
    shards.memory = whole.records
    num_places = hot_bytes // (shards.record_bytes + 9)
    for _ in range(max(1, WARM_DRAWS * num_places // WARM_BATCH)):
        hot.rows(torch.from_numpy(popular.draw(WARM_BATCH)))
    shards.memory = None
    engines = [engine_of(folder, hot), engine_of(folder, whole)]
    yield compared(
        "tables", "memory", (hot.num_bytes) / 2**20, "MiB", "every row in memory",
        whole.records.nbytes / 2**20, whole.records.nbytes / hot.num_bytes,
        whole.records.nbytes / (512 << 20), hot.num_bytes <= hot_bytes + (1 << 16),
    )  # fmt: skip
    for case, (num_tokens, is_signalled) in CASES.items():
        works = [request(popular, num_tokens) for _ in range(requests)]
        best = popular.of_best(num_places)
        yield from _ranks(case, works, engines, hot, folder, best, is_signalled)
    del whole, engines
    if not no_server:
        yield from _served(folder, hot_bytes, read_s, popular)


def _ranks(
    case: str,
    works: list[RankPass],
    engines: list[RankEngine],
    hot: HotRows,
    folder: Path,
    best: float,
    is_signalled: bool,
) -> Iterator[Line]:
    taken: list[list[float]] = [[], []]
    scores: list[list[F32]] = [[], []]
    for engine in engines:
        engine.forward(works[:1])
    before = hot.reads
    for number, work in enumerate(works):
        for place in (0, 1) if number % 2 else (1, 0):
            forget_pages(folder)
            if is_signalled:
                hot.prefetch(work.tokens.rows)
                time.sleep(SIGNAL_AHEAD_S)
            began_at = time.perf_counter()
            found = engines[place].forward([work])
            taken[place].append(time.perf_counter() - began_at)
            scores[place] += found
    for got, want in zip(*scores, strict=True):
        assert np.array_equal(got, want), case
    reads = hot.reads
    hits, misses = reads.hits - before.hits, reads.misses - before.misses
    for name, at in (("median", 50), ("P99", 99)):
        a, b = (float(np.percentile(one, at)) * 1e3 for one in taken)
        low, high = _interval(taken, at)
        target = 1 / SLOWER if at == 99 else None
        yield compared(
            "tables", f"{case}: {name}", a, "ms", "every row in memory", b, b / a, target,
            low=low, high=high,
        )  # fmt: skip
    # of distinct rows of a pass, while the best possible set is by draws
    share = hits / (hits + misses)
    yield compared(
        "tables", f"{case}: distinct rows from disk a rank", misses / len(works), "rows",
        "all", (hits + misses) / len(works), 1 / (1 - share) if share < 1 else float("inf"),
    )  # fmt: skip
    tell("tables", f"{case}: {share:.1%} of distinct rows hot; best set: {best:.1%} of draws")


def _interval(taken: list[list[float]], at: int) -> tuple[float, float]:
    """Return a 95 % interval of the difference of a percentile, ms, of requests drawn again."""
    pairs = np.array(taken).T * 1e3
    random = np.random.default_rng(0)
    found = [
        np.subtract(*np.percentile(pairs[random.integers(0, len(pairs), len(pairs))], at, axis=0))
        for _ in range(300)
    ]
    low, high = np.percentile(found, [2.5, 97.5])
    return float(low), float(high)


def _served(folder: Path, hot_bytes: int, read_s: float, popular: Popularity) -> Iterator[Line]:
    """Start an instance, rank with it for a while, and look at its memory."""
    with TemporaryDirectory(prefix="tables-") as place:
        process = instance("sharded", folder, Path(place), (f"models.hot_item_bytes={hot_bytes}",))
        forget_pages(folder)
        began_at = time.perf_counter()
        with running("sharded", process):
            start_s = time.perf_counter() - began_at
            yield compared(
                "tables", "an instance is ready", start_s, "s", "read every row", read_s,
                read_s / start_s, None, start_s <= START_S,
            )  # fmt: skip
            before = _memory(process)
            for number in range(300):
                _rank(process.port, popular, number)
            after = _memory(process)
            tell("tables", f"memory when ready {before}, after 300 ranks {after}")


def _rank(port: int, popular: Popularity, number: int) -> None:
    work = request(popular, 128)
    body = {
        "user_id": f"u{number}",
        "history": {
            "items": (work.tokens.rows + FIRST_ID).tolist(),
            "actions": ["click"] * 128,
            "timestamps": work.tokens.events.timestamps.tolist(),
        },
        "candidates": (work.candidates + FIRST_ID).tolist(),
    }
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/rank", json.dumps(body), {"Content-Type": "application/json"})
    with connection.getresponse() as answer:
        scores = json.load(answer)["scores"]["click"]
    connection.close()
    assert len(scores) == CANDIDATES


def _memory(process: Process) -> str:
    text = Path(f"/proc/{process.pid}/status").read_text()
    kib = dict(re.findall(r"^(RssAnon|RssFile|VmHWM):\s+(\d+) kB", text, re.MULTILINE))
    return ", ".join(f"{name} {size_text(1024 * int(value))}" for name, value in kib.items())
