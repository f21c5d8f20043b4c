"""Fixed inputs of the HSTU kernels; see `fixed.py`."""

from __future__ import annotations

from tests.ops.ascend_emulator import Machine
from tests.ops.hstu_oracle import Batch, Finish, Request, Rows, Scores, Tight


def batch(seed: int, *requests: Request, cores: int = 3, tile: int = 0, **more: object) -> Batch:
    """Of small heads, in as few slots as its requests need."""
    row_slots = -(-max(r.rows for r in requests) // 32) * 32 or 32
    key_slots = -(-max(r.keys for r in requests) // 256) * 256
    known = {
        "heads": 2, "qk_dim": 16, "v_dim": 32, "dtype": "bfloat16", "row_slots": row_slots,
        "key_slots": key_slots,
        "page_tokens": 16, "seed": seed, "on": Machine(cores, tile=tile),
    }  # fmt: skip
    return Batch(list(requests), **(known | more))  # type: ignore[arg-type]


PREFILL = Request(40, 40, 0, 0, True)
CHUNK = Request(33, 350, 317, 0, True)
RANK = Request(37, 300, 263, 37)
BOTH = Request(50, 290, 240, 21, True)
LAST = Request(21, 290, 240, 21, True)
KEEPS = Request(0, 70, 33, 0, True)
FAR = batch(  # 2^33 elements, of which few are in use
    21,
    *[Request(0, 9, 0, 0)] * 3,
    Request(5, 290, 250, 3),
    heads=8,
    row_slots=2**14,
    key_slots=2**14,
)
DTYPES = ("float32", "float16", "bfloat16")

ROWS: list[Rows | Tight] = [
    *(
        Rows(batch(i, PREFILL, RANK, BOTH, dtype=dtype), q_scale=-0.25)
        for i, dtype in enumerate(DTYPES)
    ),
    *(
        Rows(batch(i, LAST, CHUNK, dtype=dtype), silu_all=True, q_scale=-0.25)
        for i, dtype in enumerate(DTYPES)
    ),
    Rows(batch(4, KEEPS, RANK, cores=5, tile=5)),
    Rows(batch(5, CHUNK, KEEPS, cores=1, page_tokens=7), q_scale=0.3),
    Rows(batch(6, Request(3, 3, 0, 3), cores=48, heads=3, v_dim=16), q_scale=0.5),
    Rows(batch(7, BOTH, LAST, on=Machine(2, splits=5), key_slots=1536)),
    Rows(batch(9, BOTH, Request(1, 1, 0, 0), page_tokens=8, tile=3)),
    Rows(batch(8, PREFILL, on=Machine(1, tile=16, splits=8), page_tokens=3)),
    # pages behind 2^32 elements
    Rows(batch(10, BOTH, PREFILL, page_tokens=2048), first_page=2**16 + 3),
    Tight(Rows(batch(11, RANK, *[Request(2, 40, 38, 2)] * 30, page_tokens=1))),
]
SCORES: list[Scores | Tight] = [
    # one bucket far away, two, some, more than are selected; near the diagonal and not
    *(Scores(batch(i, CHUNK, BOTH, dtype=dtype), 16, (0, 1, 60)) for i, dtype in enumerate(DTYPES)),
    Scores(batch(3, CHUNK), 16, (0,)),
    Scores(batch(4, CHUNK, RANK), 1, (2**18,)),
    Scores(batch(5, RANK, LAST, tile=16), 64, (1, 3600, 86400), odd=True),
    Scores(batch(6, CHUNK, cores=1, dtype="float32"), 300, (0, 0, 0, 1), alpha=-0.3),
    Scores(batch(7, BOTH, CHUNK, cores=7), 16, (0, 1, 9, 10**7), skew=True),
    Scores(batch(8, RANK, PREFILL, cores=1, key_slots=768), 256, (10**7,)),
    Scores(batch(9, LAST, cores=48, heads=3), 16, (1, 2, 3)),
    Scores(batch(10, Request(70, 700, 630, 0), cores=2), 100, (10,), alpha=0.5),
    Scores(batch(11, Request(70, 700, 630, 70), cores=2), 100, (10, 1000)),
    Scores(batch(12, Request(40, 600, 560, 0), cores=1, heads=1), 16, (2**24,)),
    Scores(batch(14, CHUNK, cores=1), 2, (0,), alpha=0.5),
    Scores(batch(15, Request(20, 20, 0, 0), Request(9, 30, 21, 0), cores=1, heads=1), 4, (1,)),
    # as many buckets as are selected
    Scores(batch(16, Request(32, 322, 290, 0), cores=1), 16, (10,)),
    # a float's bucket is one up
    Scores(batch(17, Request(40, 300, 260, 0), cores=1), 2, (0,), jump_s=3 * 2**23 - 2),
    # own keys far behind their position
    Scores(batch(18, Request(20, 620, 0, 600), cores=1), 3, (5,)),
    Scores(batch(19, Request(32, 343, 311, 0), cores=1), 16, (3,)),
    # a window of positions is used to its end
    Scores(batch(28, Request(64, 375, 311, 0), cores=1), 16, (3,)),
    # the diagonal crosses two blocks of keys
    Scores(batch(20, Request(32, 272, 240, 0), cores=1), 4, (2,)),
    # one block of keys, of many buckets
    Scores(batch(22, Request(40, 250, 210, 40), cores=1), 16, (1, 3600)),
    Scores(
        batch(23, Request(100, 800, 700, 0), Request(90, 600, 400, 40), cores=11), 40, (0, 1, 5000)
    ),
    Scores(  # candidates alone, in wide tiles
        batch(
            24,
            Request(130, 900, 770, 130),
            Request(0, 9, 0, 0),
            Request(65, 400, 0, 399),
            cores=5,
            dtype="float32",
        ),
        *(30, (1, 3600)),
    ),
    # what one request, or its history, leaves is not the next one's: one head and one block of
    # keys, the same buckets
    Scores(
        batch(25, Request(20, 40, 20, 10), Request(24, 44, 20, 14), cores=1, heads=1),
        64,
        (0, 0, 0, 1),
    ),
    Scores(
        batch(26, Request(20, 40, 20, 20), Request(24, 44, 20, 24), cores=1, heads=1),
        64,
        (0, 0, 0, 1),
    ),
    Scores(
        batch(27, *[Request(50, 70, 20, 0)] * 2, cores=1, heads=1), 64, (*[0] * 7, 1), skew=True
    ),
    Scores(FAR, 16, (10,), is_far=True),
    Scores(
        batch(13, Request(33, 33, 0, 0), Request(0, 9, 0, 0), Request(5, 260, 0, 255), cores=2),
        2,
        (0, 2**25 + 1),
    ),
    Tight(Scores(batch(29, RANK, heads=16, dtype="float32"), 16, (1,))),
    Tight(Scores(batch(30, *[Request(3, 9, 0, 3)] * 20, heads=1, key_slots=2048), 16, (1,))),
]
FINISH: list[Finish | Tight] = [
    *(
        Finish(batch(i, PREFILL, BOTH, dtype=dtype), i == 1, i != 1)
        for i, dtype in enumerate(DTYPES)
    ),
    Finish(batch(3, LAST, RANK, dtype="float32"), True, False),
    Finish(batch(4, CHUNK, heads=5, v_dim=16, tile=7, cores=2), True, True, scale=0.01),
    Finish(batch(5, RANK, heads=3, v_dim=80, cores=1), False, False, eps=0.5),
    Finish(batch(7, LAST, CHUNK, tile=11), True, False),
    # rows behind 2^32 elements
    Finish(batch(8, *[Request(5, 9, 0, 0)] * 4, heads=8, row_slots=2**23), True, True, is_far=True),
    Tight(Finish(batch(9, RANK, heads=4, v_dim=80), False, True)),
    Finish(batch(6, KEEPS, Request(1, 1, 0, 0), cores=1, v_dim=128), False, True, scale=1e-4),
]
