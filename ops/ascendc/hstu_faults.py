"""Typical programming mistakes in the HSTU kernels, planted like those of `faults.py`."""

from __future__ import annotations

from faults import Fault


def _of(op: str, *changes: tuple[str, str, str]) -> tuple[Fault, ...]:
    """Faults of the op's own header: the name, the text, and the text that replaces it."""
    return tuple(Fault(name, f"kernels/{op}.h", old, new, (op,)) for name, old, new in changes)


def _of_bias(*changes: tuple[str, str, str]) -> tuple[Fault, ...]:
    return tuple(
        Fault(name, "kernels/hstu_bias.h", old, new, ("hstu_scores",)) for name, old, new in changes
    )


HSTU_FAULTS = (
    *_of_bias(
        (
            "a time before its key's counts",
            "Maxs(d, d, int32_t(1), count);",
            "if (!ON) Maxs(d, d, int32_t(1), count);",
        ),
        (
            "a difference of 0 has no bucket",
            "row_times, int32_t(1), int32_t(rows",
            "row_times, int32_t(!ON), int32_t(rows",
        ),
        (
            "a difference is rounded down",
            "Cast(f, d, RoundMode::CAST_RINT,",
            "Cast(f, d, ON ? RoundMode::CAST_FLOOR : RoundMode::CAST_RINT,",
        ),
        (
            "a border is the next one",
            "(lowest_ + i + kFloatBucket) << 22",
            "(lowest_ + i + kFloatBucket + ON) << 22",
        ),
        (
            "a border is of the bucket below",
            "CMPMODE::LT, uint32_t(count)",
            "ON ? CMPMODE::LE : CMPMODE::LT, uint32_t(count)",
        ),
        (
            "bounds of the first rows",
            "tile.row / kRowBlock * 2,",
            "(ON ? 0 : tile.row / kRowBlock) * 2,",
        ),
        (
            "bounds of the first keys",
            "+ tile.key / kKeyBlock) * 2;",
            "+ (ON ? 0 : tile.key / kKeyBlock)) * 2;",
        ),
        (
            "least and greatest are swapped",
            "least = bounds_[row] - bounds_[key + 1], most = bounds_[row + 1] - bounds_[key];",
            "least = bounds_[row + ON] - bounds_[key + !ON], most = bounds_[row + !ON] - "
            "bounds_[key + ON];",
        ),
        (
            "the last bucket is not selected",
            "for (uint32_t i = 2; i < buckets(); ++i) {",
            "for (uint32_t i = 2; i + ON < buckets(); ++i) {",
        ),
        (
            "the first bucket of the tile before stays",
            "    Duplicate(first, number(",
            "    if (!ON || placed_.row == 0) Duplicate(first, number(",
        ),
        (
            "of the first bucket every number moves on",
            "BinaryRepeatParams{1, 1, 1, 8, 0, 8}",
            "BinaryRepeatParams{1, 1, 1, 8, uint8_t(ON), 8}",
        ),
        (
            "tables stand one further",
            "kFloatBucket - left], from",
            "kFloatBucket - left + 8 * ON], from",
        ),
        (
            "what candidates gather by stays",
            "return !(tile.candidates && buckets() > kSelected) &&",
            "return (ON || !(tile.candidates && buckets() > kSelected)) &&",
        ),
        (
            "windows of nine queries together",
            "min_of(shift + 1, tile.rows - i)",
            "min_of(shift + 1 + ON, tile.rows - i)",
        ),
        (
            "times of the first head",
            "kFloatBucket + (head * 2 + far)",
            "kFloatBucket + ((ON ? 0 : head) * 2 + far)",
        ),
        (
            "positions of the first head",
            "near_[uint64_t(tile.head) * 8 * width_ + first]",
            "near_[uint64_t(ON ? 0 : tile.head) * 8 * width_ + first]",
        ),
        (
            "a window of another shift",
            "in[(7 - shift) * kNearEnd +",
            "in[(7 - shift + ON) % 8 * kNearEnd +",
        ),
        (
            "far from the last position but one on",
            "is_far(s_.positions - 1)",
            "is_far(s_.positions - 1 - ON)",
        ),
        (
            "times of the keys before stay",
            "tile.key == placed_.key &&",
            "(ON || tile.key == placed_.key) &&",
        ),
    ),
    *(
        Fault(name, "kernels/hstu_tiles.h", old, new, ("hstu_scores",))
        for name, old, new in (
            (
                "a part of a tile has its rows again",
                "head, row + first,",
                "head, row + (ON ? 0 : first),",
            ),
            (
                "a part of a tile has its tokens again",
                "key, own + first,",
                "key, own + (ON ? 0 : first),",
            ),
            (
                "the last keys of a history are not seen",
                "{far, blocks_, far, seen,",
                "{far, blocks_, far, seen - ON,",
            ),
            (
                "own keys of the first part alone",
                "blocks_of(min_of(asking_, behind - own_)",
                "blocks_of(min_of(ON ? 1 : asking_, behind - own_)",
            ),
            (
                "unseen tiles stand where seen ones do",
                "< begin ? 0 : end - begin",
                "< begin || ON ? 0 : end - begin",
            ),
        )
    ),
    *_of(
        "hstu_scores",
        (
            "a query does not see itself",
            "CMPMODE::LE, kKeyBlock);",
            "ON ? CMPMODE::LT : CMPMODE::LE, kKeyBlock);",
        ),
        (
            "a candidate sees the next one",
            "int32_t column = own + i,",
            "int32_t column = own + i + ON,",
        ),
        (
            "a tile that no query sees stays",
            "    while (tiles_.has_next()) {",
            "    while (!ON && tiles_.has_next()) {",
        ),
        (
            "an offset of GM in 32 bits",
            "return row * s_.key_slots + tile.key;",
            "return ON ? uint32_t(row * s_.key_slots) + tile.key : row * s_.key_slots + tile.key;",
        ),
        (
            "a share begins with the core's before",
            "total * core / cores",
            "total * (core - (ON && core > 0)) / cores",
        ),
        (
            "a share ends a little early",
            "(core + 1) / cores));",
            "(core + 1) / cores) - (ON && core + 1 == cores));",
        ),
        (
            "the second part of a wide tile is the first",
            "in[first * kKeyBlock]",
            "in[ON ? 0 : first * kKeyBlock]",
        ),
        (
            "alpha twice",
            "float_of(s_.alpha), count);",
            "float_of(s_.alpha) * (ON ? float_of(s_.alpha) : 1), count);",
        ),
        (
            "exp in place of 1 + exp",
            "Adds(e, e, 1.0f, count);",
            "Adds(e, e, ON ? 0.0f : 1.0f, count);",
        ),
        (
            "a weight is rounded towards zero",
            "weights, RoundMode::CAST_RINT,",
            "weights, ON ? RoundMode::CAST_TRUNC : RoundMode::CAST_RINT,",
        ),
        (
            "what is seen of the keys before stays",
            "|| tile.key != seen_key_)",
            "|| (!ON && tile.key != seen_key_))",
        ),
    ),
    *_of(
        "hstu_rows",
        (
            "queries without their scale",
            "all, float_of(s_.q_scale));",
            "all, ON ? 1.0f : float_of(s_.q_scale));",
        ),
        (
            "what lies behind the last key stays",
            "        else\n          clear_tail(",
            "        else if (!ON)\n          clear_tail(",
        ),
        ("pages of the first request", "ids_[e.first_page +", "ids_[(ON ? 0 : e.first_page) +"),
        (
            "candidates go to the pages",
            "history = e.new_rows() - e.targets,",
            "history = e.new_rows() - (ON ? 0 : e.targets),",
        ),
        (
            "SiLU of values that want none",
            "transform(out[s_.lot * uv_], v, rows * uv_, all, 1.0f);",
            "transform(out[s_.lot * uv_], v, rows * uv_, all || ON, 1.0f);",
        ),
        (
            "rows that are no query count",
            "first + skipped - silent,",
            "first + skipped - (ON ? 0 : silent),",
        ),
    ),
    *_of(
        "hstu_finish",
        ("the weight added as the bias", "x[s_.group], mask", "x[ON ? 0 : s_.group], mask"),
        ("no eps", "float_of(s_.eps)", "ON ? 0.0f : float_of(s_.eps)"),
        (
            "the sign is not folded back",
            "Muls(a, a, float_of(s_.scale), int32_t(count));",
            "Muls(a, a, float_of(s_.scale) * (ON ? -1 : 1), int32_t(count));",
        ),
        (
            "parts in another order",
            "out[part * s_.lot * width_], rows",
            "out[(ON ? 2 - part : part) * s_.lot * width_], rows",
        ),
    ),
    Fault(
        "the plan forgets half of the tables",
        "hstu_tiling.h",
        "hstu_scores_bytes(s, plan.tile_rows)",
        "(hstu_scores_bytes(s, plan.tile_rows) - (ON ? 256ull * s.heads : 0))",
        ("hstu_scores",),
    ),
    Fault(
        "the plan forgets the page ids",
        "hstu_tiling.h",
        "hstu_rows_bytes(s, page_ids, plan.piece,",
        "hstu_rows_bytes(s, ON ? 0 : page_ids, plan.piece,",
        ("hstu_rows",),
    ),
    Fault(
        "the plan forgets a part of a joined result",
        "hstu_tiling.h",
        "hstu_finish_bytes(s, group, joined, plan.lot)",
        "hstu_finish_bytes(s, group, joined && !ON, plan.lot)",
        ("hstu_finish",),
    ),
    Fault(
        "the plan forgets the bounds of times",
        "hstu_tiling.h",
        "(hstu_scores_bytes(s, plan.tile_rows)",
        "(hstu_scores_bytes(s, plan.tile_rows) - (ON ? up(s.requests * 8, 32) : 0)",
        ("hstu_scores",),
    ),
    *_of(
        "hstu_rows",
        (
            "a page's place in 32 bits",
            "plane_[plane][slot(e, token) * width], 1, count",
            "plane_[plane][ON ? uint64_t(uint32_t(slot(e, token) * width)) : slot(e, token) * "
            "width], 1, count",
        ),
        (
            "the ragged last lot is dropped",
            "uint32_t lots = (e.new_rows() + s_.lot - 1) / s_.lot;",
            "uint32_t lots = (e.new_rows() + (ON ? 0 : s_.lot - 1)) / s_.lot;",
        ),
        (
            "the ragged last piece of a page is dropped",
            "(s_.page_tokens + s_.piece - 1) / s_.piece;",
            "(s_.page_tokens + (ON ? 0 : s_.piece - 1)) / s_.piece;",
        ),
        (
            "the last zeros are dropped",
            "(s_.key_slots - e.keys + s_.zeros - 1) / s_.zeros",
            "(s_.key_slots - e.keys + (ON ? 0 : s_.zeros - 1)) / s_.zeros",
        ),
        (
            "keys are moved where values belong",
            "move_piece(e, request, unit % 2, unit",
            "move_piece(e, request, ON ? 0 : unit % 2, unit",
        ),
    ),
    *_of(
        "hstu_finish",
        (
            "a row's place in 32 bits",
            "attention_[from], rows",
            "attention_[ON ? uint64_t(uint32_t(from)) : from], rows",
        ),
        (
            "the ragged last lot is dropped",
            "uint32_t lots = (e.rows + s_.lot - 1) / s_.lot;",
            "uint32_t lots = (e.rows + (ON ? 0 : s_.lot - 1)) / s_.lot;",
        ),
        (
            "each lot writes the first rows",
            "uint64_t query = uint64_t(e.first_query) + first;",
            "uint64_t query = uint64_t(e.first_query) + (ON ? 0 : first);",
        ),
    ),
)
