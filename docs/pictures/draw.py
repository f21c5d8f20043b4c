"""Draw the pictures of the documentation as SVG.

`python docs/pictures/draw.py` writes them into this folder.

The figures of `throughput` are those of `python -m benchmarks relay` in docs/measured/relay.md,
those of `million` of `python -m benchmarks long` in docs/measured/rank.md. A test draws all of them
anew and compares.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
MEASURED = HERE.parent / "measured/relay.md"
RANK = HERE.parent / "measured/rank.md"
SAME_SHAPE = 4096  # tokens up to which the table has one model; beyond, a smaller one
BLUE, ORANGE, GREEN, RED, GREY, INK = (
    "#2563eb",
    "#d97706",
    "#059669",
    "#dc2626",
    "#9ca3af",
    "#1f2937",
)
PALE = {BLUE: "#dbeafe", ORANGE: "#fef3c7", GREEN: "#d1fae5", RED: "#fee2e2", GREY: "#f3f4f6"}


class Picture:
    """SVG of boxes, lines and words, from the top left corner, in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'font-family="system-ui, sans-serif" font-size="13" fill="{INK}">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="{INK}"/></marker></defs>',
        ]

    def box(
        self, x: float, y: float, width: float, height: float, words: str = "", colour: str = GREY
    ) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
            f'fill="{PALE[colour]}" '
            f'stroke="{colour}"/>'
        )
        lines = words.split("\n") if words else []
        for index, line in enumerate(lines):
            self.words(
                x + width / 2,
                y + height / 2 + 4.5 + (index - (len(lines) - 1) / 2) * 16,
                line,
                "middle",
            )

    def words(
        self,
        x: float,
        y: float,
        text: str,
        anchor: str = "start",
        colour: str = INK,
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" '
            f'fill="{colour}"{weight}>{escape(text)}</text>'
        )

    def line(
        self,
        *points: tuple[float, float],
        colour: str = INK,
        arrow: bool = False,
        dashed: bool = False,
    ) -> None:
        path = "M" + " ".join(f"{x:g} {y:g}" for x, y in points)
        tip = ' marker-end="url(#tip)"' if arrow else ""
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{tip}{dashes}/>'
        )

    def dot(self, x: float, y: float, colour: str, hollow: bool = False) -> None:
        self.parts.append(
            f'<circle cx="{x:g}" cy="{y:g}" r="4" fill="{"#ffffff" if hollow else colour}" '
            f'stroke="{colour}"/>'
        )

    def text(self) -> str:
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def architecture() -> str:
    """Draw the seven boxes of a request's way, and what stands outside of it."""
    it = Picture(760, 320, "A router and an instance of six parts")
    it.box(20, 62, 110, 56, "router\nHAProxy", ORANGE)
    it.box(170, 20, 570, 210, "", GREY)
    it.words(190, 42, "an instance: one process, one device", bold=True)
    forth = ("HTTP, gRPC", "admission", "handler")
    back = ("model and ops", "scheduler", "prefix cache\nHBM, DRAM")
    for index, (above, below) in enumerate(zip(forth, back, strict=True)):
        x = 190 + index * 190
        it.box(x, 62, 150, 56, above, BLUE)
        it.box(x, 158, 150, 56, below, GREEN)
        if index:
            it.line((x - 40, 90), (x - 4, 90), arrow=True)
            it.line((x, 186), (x - 36, 186), arrow=True)
    it.line((130, 90), (186, 90), arrow=True)
    it.line((645, 118), (645, 154), arrow=True)
    for x, words in ((190, "training"), (380, "replay"), (570, "benchmarks")):
        it.box(x, 260, 150, 34, words, GREY)
    it.line((265, 260), (265, 218), arrow=True, dashed=True)
    it.words(273, 248, "checkpoints")
    it.line((455, 260), (455, 234), arrow=True, dashed=True)
    it.words(463, 248, "recorded requests")
    return it.text()


def cascade() -> str:
    """Draw one recommendation on a time line, without and with the relay."""
    it = Picture(760, 300, "A cascade with and without the relay")
    deadline = 560
    for top, title in ((30, "without the relay"), (160, "with the relay")):
        it.words(20, top, title, bold=True)
        it.box(150, top + 15, 190, 30, "retrieval", GREY)
        it.box(340, top + 15, 80, 30, "rules", GREY)
    it.box(420, 45, 190, 30, "encode 4,096 events", ORANGE)
    it.box(610, 45, 60, 30, "score", BLUE)
    it.words(676, 65, "late", colour=RED, bold=True)
    it.box(150, 210, 190, 30, "encode the same events", ORANGE)
    it.box(420, 175, 60, 30, "score", BLUE)
    it.line((150, 195), (150, 208), arrow=True)
    it.words(150, 262, "POST /v1/signal: the history is known when retrieval starts")
    it.line((340, 225), (450, 225), (450, 208), arrow=True)
    it.words(352, 244, "prefix KV in device memory")
    it.line((deadline, 20), (deadline, 43), colour=RED, dashed=True)
    it.line((deadline, 77), (deadline, 250), colour=RED, dashed=True)
    it.words(deadline + 6, 130, "deadline", colour=RED)
    it.line((150, 280), (720, 280), arrow=True)
    it.words(720, 274, "time", "end")
    return it.text()


def tiers() -> str:
    """Draw where the KV of a user's prefix lies, and how it moves."""
    it = Picture(760, 270, "The tiers of prefix KV")
    it.box(20, 95, 120, 50, "signal", GREY)
    it.box(210, 40, 240, 160, "", BLUE)
    it.words(330, 62, "device memory (HBM)", "middle", bold=True)
    for index, (words, colour) in enumerate(
        (("ann: waits for its rank", GREEN), ("bob: being written", ORANGE), ("free pages", GREY))
    ):
        it.box(225, 75 + index * 40, 210, 32, words, colour)
    it.box(560, 40, 180, 160, "", GREEN)
    it.words(650, 62, "host memory (DRAM)", "middle", bold=True)
    for index, words in enumerate(("cid: comes back", "dan: comes back")):
        it.box(575, 75 + index * 40, 150, 32, words, GREY)
    it.line((140, 120), (206, 120), arrow=True)
    it.words(146, 112, "prefill")
    it.line((450, 100), (556, 100), arrow=True)
    it.words(503, 92, "spill", "middle")
    it.line((560, 150), (454, 150), arrow=True)
    it.words(503, 168, "reload", "middle")
    it.line((330, 200), (330, 222), arrow=True)
    it.words(330, 238, "rank and recommend lease the pages: hbm_hit, joined, dram_hit", "middle")
    it.words(
        330, 256, "nothing there: miss_full, slower and the same scores, never an error", "middle"
    )
    return it.text()


def beams() -> str:
    """Draw a beam search over the trie of valid semantic IDs."""
    it = Picture(760, 280, "Beam search over valid semantic IDs")
    levels = {
        "": (380, 40),
        "3": (180, 110),
        "7": (380, 110),
        "9": (580, 110),
        "3 1": (110, 180),
        "3 5": (250, 180),
        "7 2": (380, 180),
        "9 0": (520, 180),
        "9 4": (640, 180),
        "3 5 8": (200, 245),
        "3 5 2": (300, 245),
        "7 2 6": (380, 245),
        "9 4 1": (640, 245),
    }
    kept = {"3", "7", "3 5", "7 2", "3 5 8", "7 2 6"}
    for name, (x, y) in levels.items():
        if name:
            parent = levels[" ".join(name.split()[:-1])]
            it.line((parent[0], parent[1] + 14), (x, y - 14), colour=BLUE if name in kept else GREY)
    for name, (x, y) in levels.items():
        it.box(
            x - 32, y - 14, 64, 28, name or "history", BLUE if name in kept or not name else GREY
        )
    it.words(20, 40, "beam width 2", bold=True)
    it.words(20, 60, "blue: kept")
    it.words(20, 250, "items:", bold=True)
    it.words(20, 268, "only leaves exist")
    it.words(740, 40, "what is no edge of the trie", "end")
    it.words(740, 58, "is not scored, so no answer", "end")
    it.words(740, 76, "can be invalid", "end")
    return it.text()


def domains() -> str:
    """Draw two domains that share users."""
    it = Picture(760, 230, "Matching across two domains")
    it.words(150, 30, "source domain", "middle", bold=True)
    it.words(610, 30, "target domain", "middle", bold=True)
    for index in range(3):
        y = 60 + index * 55
        it.box(90, y, 120, 34, f"source item {index + 1}", ORANGE)
        it.box(550, y, 120, 34, f"target item {index + 1}", GREEN)
    for index, words in enumerate(("knows both", "new in the target")):
        y = 75 + index * 80
        it.box(315, y, 130, 38, words, BLUE)
        it.line((315, y + 19), (214, 77 + index * 55), arrow=True)
        it.line((315, y + 19), (214, 132 + index * 55), arrow=True)
    it.line((445, 94), (546, 77), arrow=True)
    it.line((445, 94), (546, 132), arrow=True)
    it.line((445, 174), (546, 187), arrow=True, dashed=True)
    it.words(380, 222, "shared users carry what they like from one domain to the other", "middle")
    return it.text()


Rates = dict[int, tuple[float, float, float]]


def relay_rates(text: str, objective: str) -> Rates:
    """Read the rows of 100 candidates from the table of `benchmarks relay`.

    Returns ranks/s by history tokens: of full inference, of the relay, and of the relay with DRAM
    and 75 % returning users. A rate is negative where even that rate, the lowest of the bench,
    missed the objective.

    Args:
        text: The page, as Markdown.
        objective: A cell of the table's second column, such as `1.5x`.
    """
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 8 and re.fullmatch(r"[\d,]+, 100", cells[0]) and cells[1] == objective:
            tokens = int(cells[0].partition(", ")[0].replace(",", ""))
            full, hbm, returning = (
                cells[at].partition(" (")[0].replace("< ", "-") for at in (2, 3, 5)
            )
            found[tokens] = (float(full), float(hbm), float(returning))
    return {tokens: row for tokens, row in found.items() if tokens <= SAME_SHAPE}


def throughput() -> str:
    """Draw ranks/s against the length of the history, for a tight and a loose objective."""
    text = MEASURED.read_text()
    it = Picture(760, 350, "Throughput against history length")
    low, high, least, most = 260, 75, 0.3, 100.0
    it.words(20, 26, "ranks/s of which 99 of 100 meet the objective", bold=True)

    def height(rate: float) -> float:
        return low - math.log10(rate / least) / math.log10(most / least) * (low - high)

    series = (
        ("full inference", ORANGE),
        ("relay", BLUE),
        ("relay and DRAM, 75 % of the users return", GREEN),
    )
    for left, objective in ((70, "1.5x"), (440, "3x")):
        right, rates = left + 270, relay_rates(text, objective)
        xs = {
            tokens: left + 20 + index * (right - left - 40) / (len(rates) - 1)
            for index, tokens in enumerate(rates)
        }
        it.words(left, high - 16, f"objective: {objective} of an idle full inference")
        it.line((left, high), (left, low), (right, low))
        for tokens, x in xs.items():
            it.words(x, low + 20, f"{tokens:,}", "middle")
        it.words((left + right) / 2, low + 40, "tokens of history", "middle")
        for value in (1, 10, 100):
            it.words(left - 8, height(value) + 4, f"{value}", "end")
            it.line((left - 4, height(value)), (left, height(value)))
        for index, (_, colour) in enumerate(series):
            points = [
                (xs[tokens], height(abs(row[index])), row[index] < 0)
                for tokens, row in rates.items()
            ]
            it.line(
                *((x, y) for x, y, _ in points),
                colour=colour,
                dashed=any(none for *_, none in points),
            )
            for x, y, none in points:
                it.dot(x, y, colour, hollow=none)
                if none:
                    it.line((x, y + 5), (x, y + 20), arrow=True)
    for x, (name, colour) in zip((30, 180, 290), series, strict=True):
        it.dot(x, 330, colour)
        it.words(x + 10, 334, name)
    it.dot(600, 330, ORANGE, hollow=True)
    it.words(610, 334, "not even this rate")
    return it.text()


def rank_times(text: str, num_cells: int) -> dict[int, list[str]]:
    """Read the rows of a table by number of events, from the section of histories of any length."""
    section = text.partition("## A history of any length")[2].partition("\n## ")[0]
    found = {}
    for line in section.splitlines():
        first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if len(cells) == num_cells - 1 and re.fullmatch(r"[\d,]+", first):
            found[int(first.replace(",", ""))] = cells
    return found


def million() -> str:
    """Draw one core's ranks a second against the length of the history, to a million events."""
    text = RANK.read_text()
    it = Picture(760, 300, "Ranks a second up to a million events")
    low, high, left, right = 220, 60, 70, 710
    it.words(20, 26, "ranks/s of one core, 100 candidates, 8 layers of width 256", bold=True)
    windows, ratios = rank_times(text, 6), rank_times(text, 5)
    cached = {tokens: float(row[0]) for tokens, row in windows.items()}
    cold = {tokens: float(row[1]) for tokens, row in windows.items()}
    # a window's cached rank takes the same time at any length
    full = {n: cached[min(cached)] * float(row[2].rstrip("x")) for n, row in ratios.items()}
    shortest, longest = min(windows), max(windows)

    def place(tokens: int, ms: float) -> tuple[float, float]:
        across = math.log(tokens / shortest) / math.log(longest / shortest)
        up = math.log10(1000 / ms) / 3
        return left + 20 + across * (right - left - 40), low - up * (low - high)

    it.line((left, high), (left, low), (right, low))
    for value in (1, 10, 100, 1000):
        y = low - math.log10(value) / 3 * (low - high)
        it.words(left - 8, y + 4, f"{value:,}", "end")
        it.line((left - 4, y), (left, y))
    for tokens in sorted({*windows, *full}):
        it.words(place(tokens, 1)[0], low + 20, f"{tokens:,}", "middle")
    it.words((left + right) / 2, low + 40, "events of history", "middle")
    series = (
        ("a window of attention, cached prefix", BLUE, cached),
        ("the same, cold", GREY, cold),
        ("full attention, cached prefix", ORANGE, full),
    )
    for x, (name, colour, times) in zip((30, 300, 440), series, strict=True):
        points = [place(tokens, ms) for tokens, ms in times.items()]
        it.line(*points, colour=colour)
        for point in points:
            it.dot(*point, colour)
        it.dot(x, 282, colour)
        it.words(x + 10, 286, name)
    return it.text()


def deltas() -> str:
    """Draw a delta that changes one item, and the prefixes of two users."""
    title = "A delta changes one item; only the prefix that has read it is encoded again"
    it = Picture(760, 250, title)
    for index, (words, colour) in enumerate(
        (("checkpoint\n0", GREY), ("delta 1\nitem 7", ORANGE), ("delta 2\nhead, new 9", BLUE))
    ):
        it.box(20 + index * 130, 20, 100, 50, words, colour)
        if index:
            it.line((20 + index * 130, 45), (-6 + index * 130, 45), arrow=True, dashed=True)
    it.line((380, 45), (476, 45), arrow=True)
    it.words(428, 27, "synced,", "middle")
    it.words(428, 41, "in order", "middle")
    words = "written between two passes,\nthe catalogue in the same step"
    it.box(480, 20, 260, 50, words, GREEN)
    it.words(20, 106, "prefixes in HBM", bold=True)
    for row, (user, items, kept) in enumerate(
        (("ann", "3 5 8 2", True), ("bob", "3 7 8 1", False))
    ):
        top = 120 + row * 60
        it.words(20, top + 27, user)
        for place, item in enumerate(items.split()):
            it.box(70 + place * 50, top, 44, 42, item, ORANGE if item == "7" else GREEN)
        it.line((276, top + 21), (326, top + 21), arrow=True)
        if kept:
            it.words(334, top + 26, "the same key and the same bits: exact")
        else:
            it.words(334, top + 18, "another key: encoded again when the device has time;")
            it.words(334, top + 36, "until then stale, for relay.max_stale_s, or a miss")
    return it.text()


def handover() -> str:
    """Draw an instance that leaves, and the prefix of one of its users."""
    title = "An instance leaves; the next owner of its users finds their prefixes in the pool"
    it = Picture(760, 236, title)
    it.box(20, 20, 180, 88, "", RED)
    it.words(110, 42, "instance a, stopped", "middle", bold=True)
    it.box(35, 54, 150, 40, "ann, HBM and DRAM", GREY)
    it.box(300, 20, 160, 88, "", GREEN)
    it.words(380, 42, "Mooncake Store", "middle", bold=True)
    it.box(315, 54, 130, 40, "ann, one value", GREY)
    it.box(560, 20, 180, 88, "", BLUE)
    it.words(650, 42, "instance b", "middle", bold=True)
    it.box(575, 54, 150, 40, "ann, DRAM, then HBM", GREY)
    it.line((200, 74), (296, 74), arrow=True)
    it.words(248, 66, "put", "middle")
    it.line((460, 74), (556, 74), arrow=True)
    it.words(508, 66, "get", "middle")
    it.box(300, 150, 160, 40, "router, by user", GREY)
    it.line((300, 170), (110, 170), (110, 112), arrow=True, dashed=True)
    it.words(205, 162, "until it leaves", "middle")
    it.line((460, 170), (650, 170), (650, 112), arrow=True)
    it.words(555, 162, "signal, then rank", "middle")
    it.words(
        380, 222, "no prefix there, or computing it is faster: computed, with the same scores",
        "middle",
    )  # fmt: skip
    return it.text()


PICTURES: dict[str, Callable[[], str]] = {
    "architecture": architecture,
    "cascade": cascade,
    "tiers": tiers,
    "beams": beams,
    "deltas": deltas,
    "handover": handover,
    "domains": domains,
    "throughput": throughput,
    "million": million,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / f"{name}.svg").write_text(draw())
