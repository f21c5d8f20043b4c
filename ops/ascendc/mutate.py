"""Mutation test of the kernels: make one small change at a time, run the cases of tests/ops.

    python ops/ascendc/mutate.py                 every mutant
    python ops/ascendc/mutate.py --every 9       every ninth
    python ops/ascendc/mutate.py --rule "no flag" --rule "no free"
    python ops/ascendc/mutate.py --file kernels/hstu_tiles.h --share 40 --seed 1
    python ops/ascendc/mutate.py --list

All mutants of a rule are in one build, and a number selects the one that is on. So there is one
build for each rule, and one for the typical mistakes of faults.py and hstu_faults.py. A mutant
falls if the emulator reports an error, a result differs, or the program crashes or hangs. The exit
status is 1 if a mutant survives, except for those in EQUIVALENT: they have no effect that a test
could detect, each with the reason.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from faults import KERNEL_FAULTS, Fault, plant
from hstu_faults import HSTU_FAULTS

from tests.ops.ascend_emulator import FLAGS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FAULTS = (*KERNEL_FAULTS, *HSTU_FAULTS)
KERNELS = {  # file -> ops that run through it
    "kernels/best_pairs.h": ("masked_topk", "csr_gather_topk"),
    "kernels/masked_topk.h": ("masked_topk",),
    "kernels/merge_pairs.h": ("masked_topk", "csr_gather_topk"),
    "kernels/children.h": ("csr_gather_topk",),
    "kernels/csr_gather_topk.h": ("csr_gather_topk",),
    "kernels/row_index.h": ("beam_fork", "hstu_finish"),
    "kernels/beam_fork.h": ("beam_fork",),
    "kernels/hstu_batch.h": ("hstu_rows", "hstu_finish", "hstu_scores"),
    "kernels/hstu_rows.h": ("hstu_rows",),
    "kernels/hstu_tiles.h": ("hstu_scores",),
    "kernels/hstu_bias.h": ("hstu_scores",),
    "kernels/hstu_scores.h": ("hstu_scores",),
    "kernels/hstu_finish.h": ("hstu_finish",),
}

# ON(n) is true for the mutant that is on. `a < Op<kind>{n} > b` is a comparison that it switches.
SWITCH = r"""
#pragma once
inline int npu_gr_mutant = -1;
extern "C" inline __attribute__((used, visibility("default"))) void npu_gr_mutate(int n) {
  npu_gr_mutant = n;
}
#define ON(n) (npu_gr_mutant == (n))
namespace mutants {
template <int kind> struct Op { int n; };
template <int kind, typename A> struct Half { A a; int n; };
template <int kind, typename A> Half<kind, A> operator<(A a, Op<kind> op) { return {a, op.n}; }
template <int kind, typename A> Half<kind, A> operator+(A a, Op<kind> op) { return {a, op.n}; }
template <typename A, typename B>
bool operator>(Half<0, A> h, B b) {
  return ON(h.n) ? h.a <= b : h.a < b;
}
template <typename A, typename B>
bool operator>(Half<1, A> h, B b) {
  return ON(h.n) ? h.a >= b : h.a > b;
}
template <typename A, typename B>
auto operator+(Half<2, A> h, B b) {
  return ON(h.n) ? h.a - b : h.a + b;
}
template <typename A, typename B>
auto operator+(Half<3, A> h, B b) {
  return ON(h.n) ? h.a + b : h.a - b;
}
template <typename A, typename B>
bool operator>(Half<4, A> h, B b) {
  return (h.a == b) != ON(h.n);
}
template <typename A, typename B>
bool operator>(Half<5, A> h, B b) {
  return (h.a != b) != ON(h.n);
}
}  // namespace mutants
"""


class Rule(NamedTuple):
    """A pattern of source code, and the text that replaces it: the original or the mutant."""

    name: str
    pattern: str
    switched: Callable[[re.Match[str], int], str]


def _operator(kind: int) -> Callable[[re.Match[str], int], str]:
    """Switch a binary operator; `kind` is the template parameter of `Op` in SWITCH."""
    before, behind = ("+", "+") if kind in (2, 3) else ("<", ">")  # sums bind as sums do
    return lambda _m, n: f" {before} mutants::Op<{kind}>{{{n}}} {behind} "


def _other(text: str) -> Callable[[re.Match[str], int], str]:
    """Switch to another text; `{}` in it stands for the original."""
    return lambda m, n: f"(ON({n}) ? {text.format(m[0])} : {m[0]})"


def _skipped(m: re.Match[str], n: int) -> str:
    return f"if (!ON({n})) {m[0]}"


COMPARES = {
    "AscendC::CMPMODE::GT": "GE",
    r"\bCMPMODE::LT": "LE",
    r"\bCMPMODE::LE": "LT",
    r"\bCMPMODE::EQ": "NE",
}
TO_FLOAT = r"(?<=Cast\(f, d, )RoundMode::CAST_RINT"  # the only cast of integers
TO_NARROW = r"(?<!f, d, )(?:AscendC::)?\bRoundMode::CAST_RINT"
RULES = (
    Rule("no barrier", r"\bvector_done\(\);", _skipped),
    Rule("no flag", r"\bsync<[\w:]+>\(\*pipe_?\);", _skipped),
    Rule("no free", r"[\w.]+\.FreeTensor\(\w+\)", _other("(void)0")),
    Rule("below: or equal", r" < ", _operator(0)),
    Rule("above: or equal", r" > ", _operator(1)),
    Rule("plus: minus", r" \+ ", _operator(2)),
    Rule("minus: plus", r" - ", _operator(3)),
    Rule(
        "no rounding up",
        r"\bround_up\(([^,()]+(?:\([^()]*\))?[^,()]*), [\w ]+\)",
        lambda m, n: f"(ON({n}) ? uint32_t({m[1]}) : {m[0]})",
    ),
    Rule(
        "no limit",
        r"\bmin_of\(([^,()]+), ([^()]+)\)",
        lambda m, n: f"(ON({n}) ? ({m[2]}) : {m[0]})",
    ),
    *(
        Rule("other compare", found, _other(f"AscendC::CMPMODE::{other}"))
        for found, other in COMPARES.items()
    ),
    Rule("equal: not", r" == ", _operator(4)),
    Rule("not equal: equal", r" != ", _operator(5)),
    Rule("other rounding", TO_FLOAT, _other("AscendC::RoundMode::CAST_FLOOR")),
    Rule("other rounding", TO_NARROW, _other("AscendC::RoundMode::CAST_TRUNC")),
    Rule("other float", r"(?<![\w.])1\.0f|float_of\(s_\.\w+\)", _other("0.5f")),
    Rule("another number", r"int32_t\([01]\)", _other("-7")),
    Rule("first head", r"\b(tile\.)?head(?= \*)", _other("0")),
    Rule("first request", r"\b(tile\.)?request(?= \*)|(?<=\()(tile\.)?request(?=\))", _other("0")),
    Rule("other size", r"\bk(RowBlock|KeyBlock|NearEnd|FloatBucket|Selected)\b", _other("{} + 1")),
    Rule("another infinity", r"\bkNegInf\b", _other("0.0f")),
    Rule("-1: 0", r"int32_t\(-1\)", _other("int32_t(0)")),
    Rule("next row", r"uint64_t\((row|request|group|list|first)\)", _other("{} + 1")),
    Rule("opposite", r"\bif \((?=[^;{]*[;{]?$)", lambda m, n: f"if (ON({n}) != bool("),
)


class Mutant(NamedTuple):
    """One place of one rule."""

    rule: int
    number: int
    file: str
    line: int  # from 1
    code: str

    @property
    def key(self) -> tuple[str, str, str]:
        """For EQUIVALENT: survives edits elsewhere in the file."""
        return self.file, RULES[self.rule].name, self.code

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {RULES[self.rule].name}: {self.code}"


# Mutants without an effect that a test could detect, and why. A key may stand for several places of
# one line.
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "kernels/best_pairs.h",
        "below: or equal",
        "for (uint32_t run = 32; run < count; run *= 4) {",
    ): "one list is copied once more",
    (
        "kernels/best_pairs.h",
        "below: or equal",
        "for (uint32_t i = 0; i * run < count; ++i) lengths[i] = uint16_t(min_of(run, count - i * "
        "run));",
    ): "a list more, of length 0, in a place that is not read",
    (
        "kernels/best_pairs.h",
        "above: or equal",
        "AscendC::MrgSortSrcList<float>(from, from[run * 2], lists > 2 ? from[run * 4] : from,",
    ): "the address of a list that is not merged",
    (
        "kernels/best_pairs.h",
        "above: or equal",
        "lists > 3 ? from[run * 6] : from),",
    ): "the address of a list that is not merged",
    (
        "kernels/best_pairs.h",
        "minus: plus",
        "uint32_t lists = (count + run - 1) / run;",
    ): "a list more, of length 0",
    (
        "kernels/masked_topk.h",
        "below: or equal",
        "uint32_t begin = part * s_.part, end = s_.n - begin < s_.part ? s_.n : begin + s_.part;",
    ): "both sides are the same number",
    (
        "kernels/masked_topk.h",
        "above: or equal",
        "pairs_.SetGlobalBuffer((__gm__ float *)workspace, s_.splits > 1 ? padded * 2 * s_.splits "
        "* s_.rows : 0);",
    ): "the size of a buffer that is not used",
    (
        "kernels/masked_topk.h",
        "no rounding up",
        "pipe_->InitBuffer(masks_, 2, round_up(s_.tile / 8, 256));",
    ): "room that the plan leaves to spare",
    (
        "kernels/children.h",
        "below: or equal",
        "for (uint32_t i = 0; i < kColumns; ++i) gm_[i].SetGlobalBuffer((__gm__ int32_t "
        "*)columns[i], rows);",
    ): "an address more, in the place of a table that is loaded later",
    (
        "kernels/csr_gather_topk.h",
        "no free",
        "outs_.FreeTensor(total);",
    ): "the kernel ends here",
    (
        "kernels/csr_gather_topk.h",
        "no free",
        "outs_.FreeTensor(score);",
    ): "the kernel ends here",
    (
        "kernels/csr_gather_topk.h",
        "below: or equal",
        "for (uint32_t at = 0; at < degree; at += s_.tile) {",
    ): "in Peak the greatest is found twice; the same mutant of Total falls",
    (
        "kernels/csr_gather_topk.h",
        "below: or equal",
        "if (from < to && norm > kNegInf && acc > kNegInf)",
    ): "a row is moved for nothing",
    (
        "kernels/csr_gather_topk.h",
        "above: or equal",
        "if (from < to && norm > kNegInf && acc > kNegInf)",
    ): "of acc: a score of -inf is not chosen; that of norm falls",
    (
        "kernels/csr_gather_topk.h",
        "above: or equal",
        "if (degree > 0) {",
    ): "a row is moved for nothing",
    (
        "kernels/csr_gather_topk.h",
        "above: or equal",
        "if (here > peak) peak = here;",
    ): "both are the same number",
    (
        "kernels/csr_gather_topk.h",
        "minus: plus",
        "uint32_t held = (s_.rows + cores - 1) / cores;",
    ): "a buffer with room to spare",
    (
        "kernels/csr_gather_topk.h",
        "minus: plus",
        "uint32_t words = round_up(s_.k, 32) * 2, held = (s_.rows + s_.groups - 1) / s_.groups;",
    ): "a buffer with room to spare",
    (
        "kernels/csr_gather_topk.h",
        "another infinity",
        "float peak = kNegInf, sum = 0.0f;",
    ): "of a row without children, whose sum of 0 has the logarithm -inf",
    (
        "kernels/beam_fork.h",
        "above: or equal",
        "last_ = parent + 1 > last_ ? parent + 1 : last_;",
    ): "both are the same number",
    (
        "kernels/hstu_rows.h",
        "above: or equal",
        "if (s_.page_ids > 0) ids_.init(pipe, page_ids, s_.page_ids);",
    ): "a list of no pages is loaded",
    (
        "kernels/hstu_rows.h",
        "above: or equal",
        "uint32_t widest = qk_ > uv_ ? qk_ : uv_, whole = 2 * (qk_ + uv_);",
    ): "both are the same number",
    (
        "kernels/hstu_rows.h",
        "plus: minus",
        "for (uint32_t unit = (AscendC::GetBlockIdx() + cores - done % cores) % cores; unit < "
        "units; unit += cores) {",
    ): "another core takes it",
    (
        "kernels/hstu_rows.h",
        "minus: plus",
        "for (uint32_t unit = (AscendC::GetBlockIdx() + cores - done % cores) % cores; unit < "
        "units; unit += cores) {",
    ): "another core takes it",
    (
        "kernels/hstu_rows.h",
        "minus: plus",
        "uint32_t pieces = asks ? (e.cached + s_.page_tokens - 1) / s_.page_tokens * of_page * 2 "
        ": 0;",
    ): "a page more, of which nothing is cached",
    (
        "kernels/hstu_rows.h",
        "below: or equal",
        "uint32_t silent = e.silent_rows(), skipped = first < silent ? min_of(silent - first, "
        "rows) : 0;",
    ): "both are the same number",
    (
        "kernels/hstu_finish.h",
        "plus: minus",
        "for (uint32_t lot = (AscendC::GetBlockIdx() + cores - done % cores) % cores; lot < lots; "
        "lot += cores)",
    ): "another core takes it",
    (
        "kernels/hstu_finish.h",
        "minus: plus",
        "for (uint32_t lot = (AscendC::GetBlockIdx() + cores - done % cores) % cores; lot < lots; "
        "lot += cores)",
    ): "another core takes it",
    (
        "kernels/hstu_scores.h",
        "above: or equal",
        "uint32_t bits = held > 0 ? (1u << held) - 1 : 0;",
    ): "both are the same number",
    (
        "kernels/hstu_tiles.h",
        "above: or equal",
        "history_ = entry_.rows > entry_.targets ? entry_.rows - entry_.targets : 0;",
    ): "both are the same number",
    (
        "kernels/hstu_tiles.h",
        "minus: plus",
        "__aicore__ inline bool is_far(uint32_t distance) const { "
        "return position(0) >= key + kKeyBlock - 1 + distance; }",
    ): "a far tile takes the way of a near one, to the same numbers",
    (
        "kernels/hstu_bias.h",
        "above: or equal",
        "uint32_t above = most > 0 ? uint32_t(most) + 1 : 1;",
    ): "both are the same number",
    (
        "kernels/hstu_bias.h",
        "above: or equal",
        "lowest_ = bucket_below(least > 0 ? uint32_t(least) + 1 : 1);",
    ): "both are the same number",
    (
        "kernels/hstu_bias.h",
        "above: or equal",
        "return 2 * octave + (octave > 0 ? n >> (octave - 1) & 1 : 0);",
    ): "1 has no bit below its highest",
    (
        "kernels/hstu_bias.h",
        "below: or equal",
        "for (uint32_t i = 1; i < buckets(); ++i)",
    ): "a border that no bucket needs",
    (
        "kernels/hstu_bias.h",
        "plus: minus",
        "lowest_ = bucket_below(least > 0 ? uint32_t(least) + 1 : 1);",
    ): "a bucket more, which nothing is in",
    (
        "kernels/hstu_bias.h",
        "minus: plus",
        "pipe->InitBuffer(masks_, (kSelected - 1) * s_.tile_rows * kKeyBlock / 8);",
    ): "a buffer with room to spare",
    (
        "kernels/hstu_bias.h",
        "minus: plus",
        "__aicore__ inline bool is_far(const HstuTile &tile) const { return "
        "tile.is_far(s_.positions - 1); }",
    ): "a far tile takes the way of a near one, to the same numbers",
    (
        "kernels/hstu_bias.h",
        "minus: plus",
        "int32_t least = bounds_[row] - bounds_[key + 1], most = bounds_[row + 1] - bounds_[key];",
    ): "of most: buckets more, which nothing is in; that of least falls",
    (
        "kernels/hstu_bias.h",
        "minus: plus",
        "__aicore__ inline uint32_t buckets() const { return highest_ - lowest_ + 1; }",
    ): "more are gathered, to the same numbers",
    (
        "kernels/hstu_bias.h",
        "below: or equal",
        "if (lowest_ < highest_ && !is_placed(tile)) place(tile, times);",
    ): "times are looked at for nothing",
    (
        "kernels/hstu_tiles.h",
        "other size",
        "__aicore__ inline bool is_full() const { return key + kKeyBlock <= position(0); }",
    ): "a full tile is selected from, to the same numbers",
    (
        "kernels/hstu_tiles.h",
        "other size",
        "__aicore__ inline bool is_far(uint32_t distance) const { return position(0) >= key + "
        "kKeyBlock "
        "- 1 + distance; }",
    ): "a far tile takes the way of a near one, to the same numbers",
    (
        "kernels/hstu_bias.h",
        "other size",
        "pipe->InitBuffer(times_in_, 2, kKeyBlock * 4);",
    ): "a buffer with room to spare",
    (
        "kernels/hstu_bias.h",
        "other size",
        "pipe->InitBuffer(near_in_, 1, 8 * kNearEnd * 4);",
    ): "a buffer with room to spare",
    (
        "kernels/hstu_bias.h",
        "other size",
        "pipe->InitBuffer(rows_, kRowBlock * 32);",
    ): "a buffer with room to spare",
    (
        "kernels/hstu_bias.h",
        "other size",
        "pipe->InitBuffer(masks_, (kSelected - 1) * s_.tile_rows * kKeyBlock / 8);",
    ): "a buffer with room to spare",
    (
        "kernels/hstu_bias.h",
        "other size",
        "pipe->InitBuffer(row_bias_, kKeyBlock * 4);",
    ): "a buffer with room to spare",
    (
        "kernels/hstu_bias.h",
        "other size",
        "Sub(d[at], row_times, in[at], 64, uint8_t(rows), BinaryRepeatParams{1, 0, 1, kKeyBlock / "
        "8, 1, 0});",
    ): "both are the same number",
    (
        "kernels/hstu_bias.h",
        "other size",
        "return min_of(kNearEnd - 1 + s_.positions + key - position, width_ - kKeyBlock);",
    ): "of the end of a row, which repeats one number; the other one falls",
    (
        "kernels/hstu_bias.h",
        "other size",
        "copy_in(in, near_[(uint64_t(tile.head) * 8 + 7) * width_ + window(tile.position(0), "
        "tile.key)], kKeyBlock, 0.0f);",
    ): "a number more, which nothing reads",
    (
        "kernels/hstu_scores.h",
        "other size",
        "uint32_t cells = s_.tile_rows * kKeyBlock;",
    ): "buffers with room to spare",
    (
        "kernels/hstu_scores.h",
        "other size",
        "pipe->InitBuffer(columns_, kKeyBlock * 4);",
    ): "a buffer with room to spare",
    (
        "kernels/hstu_scores.h",
        "other size",
        "pipe->InitBuffer(history_, kKeyBlock / 8);",
    ): "both are the same number",
    (
        "kernels/hstu_scores.h",
        "other size",
        "words.SetValue((uint32_t(i) * kKeyBlock + uint32_t(word)) / 32, bits | 1u << (column - "
        "word));",
    ): "both are the same number",
    (
        "kernels/children.h",
        "another number",
        "for (uint32_t i = 0; i < kColumns; ++i) copy_in(table_[i * pitch_], "
        "gm_[i][uint64_t(first)], "
        "count, int32_t(0));",
    ): "padding, which nothing reads",
    (
        "kernels/children.h",
        "another number",
        "copy_in(code, code_[edge], count, int32_t(0));",
    ): "padding, which nothing reads",
    (
        "kernels/row_index.h",
        "another number",
        "copy_in(table_, from, count, int32_t(0));",
    ): "padding, which nothing reads",
    (
        "kernels/hstu_bias.h",
        "another number",
        "copy_in(in, from, count, int32_t(0));",
    ): "padding, which nothing reads",
    (
        "kernels/hstu_bias.h",
        "equal: not",
        "lowest_ == placed_lowest_ && highest_ == placed_highest_;",
    ): "of one place they are the same; if not, it is made once more",
    (
        "kernels/hstu_tiles.h",
        "above: or equal",
        "has_history_ = has_history_ || history_ > 0;",
    ): "candidates in narrow tiles, to the same numbers; tests/benchmarks counts their loads",
    (
        "kernels/hstu_tiles.h",
        "above: or equal",
        "uint32_t first = key > own_ ? key - own_ : 0;",
    ): "both are the same number",
}


def mutable(code: str) -> bool:
    """Whether a switch may be written here: not into a declaration or a constant."""
    declares = "#", "template", "class", "struct", "using", "constexpr", "if constexpr"
    return "static" not in code and not code.lstrip().startswith(declares)


def closed(code: str, start: int) -> str:
    """Insert the parenthesis that `if (ON(1) != bool(a ...` lacks after the condition."""
    at = code.index("bool(", start) + len("bool")
    depth = 0
    for end in range(at, len(code)):
        depth += {"(": 1, ")": -1}.get(code[end], 0)
        if depth == 0:
            return f"{code[:end]}){code[end:]}"
    raise ValueError(code)


def planted(rule: int, tree: Path | None = None) -> list[Mutant]:
    """Return every mutant of a rule; with a `tree`, write them into that copy of the sources."""
    mutants: list[Mutant] = []
    for file in KERNELS:
        lines = (HERE / file).read_text().splitlines()
        for at, line in enumerate(lines):
            code = line.split("//", 1)[0].rstrip()
            if not mutable(code):
                continue
            places = list(re.finditer(RULES[rule].pattern, code))
            changed = code
            for number, place in reversed(list(enumerate(places, len(mutants)))):
                changed = (
                    changed[: place.start()]
                    + RULES[rule].switched(place, number)
                    + changed[place.end() :]
                )
                if RULES[rule].name == "opposite":
                    changed = closed(changed, place.start())
            mutants += [
                Mutant(rule, len(mutants) + i, file, at + 1, code.strip())
                for i in range(len(places))
            ]
            lines[at] = changed if places else line
        if tree is not None:
            (tree / file).write_text("\n".join(lines) + "\n")
    return mutants


def build(rule: int | None, folder: Path) -> Path:
    """Build a library with all mutants of a rule, None = all faults; none of them is on."""
    tree = folder / f"rule{rule}"
    shutil.copytree(HERE, tree, ignore=shutil.ignore_patterns("*.py", "build"))
    if rule is None:
        plant(FAULTS, tree)
    else:
        planted(rule, tree)
    switch = tree / "switch.h"
    switch.write_text(SWITCH)
    library = tree / "emulator.so"
    flags = (*FLAGS, "-O0", "-w", "-include", str(switch))
    subprocess.run(
        ["g++", *flags, str(tree / "emulator" / "library.cpp"), "-o", str(library)], check=True
    )
    return library


def verdicts(library: Path, mutants: Sequence[Mutant | Fault | None], jobs: int) -> list[str]:
    """Run each mutant: `fell: ...` or `survived`. None = no mutant is on, and every op runs."""
    asked: list[tuple[int, Sequence[str]]] = []
    for mutant in mutants:
        if isinstance(mutant, Mutant):
            asked.append((mutant.number, KERNELS[mutant.file]))
        elif mutant is not None:
            asked.append((FAULTS.index(mutant), mutant.ops))
        else:
            asked.append((-1, sorted({op for ops in KERNELS.values() for op in ops})))
    found = [""] * len(asked)
    with ThreadPoolExecutor(jobs) as pool:
        for first, lines in enumerate(
            pool.map(partial(_lines, library), [asked[i::jobs] for i in range(jobs)])
        ):
            found[first::jobs] = lines
    return found


def _lines(library: Path, asked: Sequence[tuple[int, Sequence[str]]]) -> list[str]:
    run = [sys.executable, "-m", "tests.ops.mutants", str(library)]
    done = subprocess.run(
        run, cwd=ROOT, input=json.dumps(asked), stdout=subprocess.PIPE, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def is_equivalent(mutant: Mutant | Fault) -> bool:
    """Whether the mutant is known to have no effect that a test could detect."""
    return bool(mutant.equivalent) if isinstance(mutant, Fault) else mutant.key in EQUIVALENT


class Chosen(NamedTuple):
    """Which mutants run: all by default."""

    rules: tuple[str, ...] = ()  # names; empty = every rule, and FAULTS
    files: tuple[str, ...] = ()  # keys of KERNELS; empty = all
    every: int = 1
    share: int = 0  # most mutants of a rule, drawn by the seed; 0 = all
    seed: int = 0

    def of(self, rule: int) -> list[Mutant]:
        """Return the chosen mutants of a rule, in their order."""
        found = [m for m in planted(rule) if not self.files or m.file in self.files][:: self.every]
        if not self.share or len(found) <= self.share:
            return found
        return sorted(random.Random(f"{self.seed} {rule}").sample(found, self.share))  # noqa: S311  (a sample)

    def builds(self) -> list[int | None]:
        """Return the rules that have a mutant to run; None = FAULTS."""
        named = [
            rule for rule, known in enumerate(RULES) if not self.rules or known.name in self.rules
        ]
        return [
            *([] if self.rules or self.files else [None]),
            *(rule for rule in named if self.of(rule)),
        ]


def check(chosen: Chosen, jobs: int) -> int:
    """Run and report; return how many survive without being known as equivalent."""
    counts = {"fell": 0, "equivalent": 0, "survived": 0}
    each: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
        todo = chosen.builds()
        for rule, library in zip(
            todo, pool.map(lambda r: build(r, Path(folder)), todo), strict=True
        ):
            mutants: list[Mutant | Fault] = [*FAULTS] if rule is None else [*chosen.of(rule)]
            found = verdicts(library, [None, *mutants], jobs)
            if found[0] != "survived":
                raise SystemExit(f"{rule}: without a mutant: {found[0]}")
            for mutant, verdict in zip(mutants, found[1:], strict=True):
                kind = verdict.split(":")[0]
                kind = "equivalent" if kind == "survived" and is_equivalent(mutant) else kind
                counts[kind] += 1
                each[mutant.file] = each.get(mutant.file, 0) + 1
                sys.stdout.write(f"{kind:10} {mutant}  [{verdict}]\n")
                sys.stdout.flush()
    sys.stdout.write(", ".join(f"{number} {file}" for file, number in each.items()) + "\n")
    sys.stdout.write(", ".join(f"{number} {kind}" for kind, number in counts.items()) + "\n")
    return counts["survived"]


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = sorted({rule.name for rule in RULES})
    parser.add_argument(
        "--rule", action="append", default=[], choices=names, metavar="NAME", help=", ".join(names)
    )
    parser.add_argument(
        "--file",
        action="append",
        default=[],
        choices=[*KERNELS],
        metavar="FILE",
        help="mutants of this file only",
    )
    parser.add_argument(
        "--every", type=int, default=1, metavar="N", help="only every Nth mutant of each rule"
    )
    parser.add_argument(
        "--share",
        type=int,
        default=0,
        metavar="N",
        help="at most N of each rule, drawn by the seed",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="list the mutants, run none")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    chosen = Chosen(
        tuple(options.rule), tuple(options.file), options.every, options.share, options.seed
    )
    if options.list:
        for rule in chosen.builds():
            sys.stdout.writelines(
                f"{mutant}\n" for mutant in (FAULTS if rule is None else chosen.of(rule))
            )
        return 0
    return int(check(chosen, options.jobs) > 0)


if __name__ == "__main__":
    sys.exit(main())
