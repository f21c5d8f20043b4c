"""The time of a selection kernel on an Ascend 910B, from the counters of the CPU emulator."""

from __future__ import annotations

# Public figures. Cycles: the cost tests of pto-isa (start 14, 2 for a repeat of Sort32, 18 after a
# barrier); 2 for a merged pair: pto-isa's top-k sample on an A3 takes 3.24 us for a row of 1024 on
# a core, 94 % of it vector work, which fits three merges of 1024 pairs and 32 groups at 1.8 GHz.
# Bandwidth: 1.6 TB/s of HBM for 48 vector cores.
CLOCK_GHZ = 1.8
START_CYCLES = 14
REPEAT_CYCLES = 1
BARRIER_CYCLES = 18
SORT32_GROUP_CYCLES = 2
MERGED_PAIR_CYCLES = 2
CORE_BYTES_PER_CYCLE = 1600 / 48 / CLOCK_GHZ
# Our assumptions, where nothing is published: a flag or a scalar access costs as much as a barrier,
# a gathered element one cycle.
FLAG_CYCLES = 18
SCALAR_CYCLES = 18
GATHER_CYCLES = 1


def modelled_us(counts: dict[str, float]) -> float:
    """Compute the model: the maximum of the vector and scalar units' cycles and the movers'."""
    at = {name: counts.get(name, 0.0) for name in _NAMES}
    vector = at["vector_instructions"] * START_CYCLES + at["vector_repeats"] * REPEAT_CYCLES
    vector += at["sort32_groups"] * SORT32_GROUP_CYCLES + at["merged_pairs"] * MERGED_PAIR_CYCLES
    vector += at["gathered"] * GATHER_CYCLES + at["barriers"] * BARRIER_CYCLES
    vector += at["flags"] * FLAG_CYCLES + at["scalar_accesses"] * SCALAR_CYCLES
    return (
        max(
            vector, at["mte2_bytes"] / CORE_BYTES_PER_CYCLE, at["mte3_bytes"] / CORE_BYTES_PER_CYCLE
        )
        / CLOCK_GHZ
        / 1e3
    )


_NAMES = (
    "vector_instructions",
    "vector_repeats",
    "gathered",
    "sort32_groups",
    "merged_pairs",
    "barriers",
    "flags",
    "scalar_accesses",
    "mte2_bytes",
    "mte3_bytes",
)
