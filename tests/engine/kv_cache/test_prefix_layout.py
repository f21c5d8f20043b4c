"""Where the rows of a prefix lie, against a list of what each page was last written with."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from npu_gr.engine.kv_cache.pages import (
    KVLayout,
    PageRing,
    PageRun,
    PrefixLayout,
    WholeHistory,
)

RINGS = st.builds(
    PageRing,
    page_tokens=st.sampled_from([1, 2, 4, 8]),
    window_tokens=st.integers(1, 40),
    first_tokens=st.integers(0, 20),
    num_layers=st.integers(1, 4),
)


class Written:
    """Every token that is written to a place, in the order of the passes."""

    def __init__(self, layout: PrefixLayout, page_tokens: int) -> None:
        self._layout = layout
        self._page_tokens = page_tokens
        self.pages: dict[int, dict[int, int]] = {}  # place -> slot -> position

    def encode(self, start: int, stop: int) -> None:
        """Check that a pass reads what was written, then write its tokens."""
        while start < stop:
            end = self._layout.step_end(start, stop)
            assert start < end <= stop
            positions = self.positions(start, end)
            held = {position for position in positions if position < start}
            assert held >= {p for part in self._layout.rows(start) for p in part}
            for place, position in zip(self._slots(start, end), positions, strict=True):
                if position < start:
                    page, slot = place
                    assert self.pages[page][slot] == position, "a row was overwritten"
                elif position < end:
                    self.pages.setdefault(place[0], {})[place[1]] = position
            start = end

    def _places(self, start: int, stop: int) -> tuple[tuple[int, ...], int, int]:
        places = self._layout.places(start, stop)
        if places is None:
            return tuple(range(self._layout.num_pages(stop))), 0, 0
        return places

    def _slots(self, start: int, stop: int) -> list[tuple[int, int]]:
        pages, _, _ = self._places(start, stop)
        return [(page, slot) for page in pages for slot in range(self._page_tokens)]

    def positions(self, start: int, stop: int) -> list[int]:
        """The position of each token of the pass's pages."""
        pages, gap_at, gap = self._places(start, stop)
        local = range(len(pages) * self._page_tokens)
        return [i + gap if i >= gap_at else i for i in local]


@settings(max_examples=300, deadline=None)
@given(RINGS, st.lists(st.integers(0, 60), min_size=1, max_size=8))
def test_a_row_is_never_overwritten_while_a_later_row_reads_it(
    ring: PageRing, deltas: list[int]
) -> None:
    written = Written(ring, ring.page_tokens)
    n = 0
    for delta in deltas:
        written.encode(n, n + delta)
        n += delta
        assert len(written.pages) == ring.num_pages(n)
        rows = {p for part in ring.rows(n) for p in part}
        # the definition of the form, for the row at position n
        assert rows == {p for p in range(n) if p < ring.first_tokens or p > n - ring.window_tokens}
        assert rows <= {p for page in written.pages.values() for p in page.values()}


@given(st.integers(1, 8), st.integers(0, 50), st.integers(0, 50))
def test_full_attention_keeps_every_row_in_order(page: int, start: int, delta: int) -> None:
    form = WholeHistory(page)
    written = Written(form, page)
    written.encode(0, start)
    written.encode(start, start + delta)
    assert form.rows(start + delta) == (range(start + delta),)
    assert len(written.pages) == form.num_pages(start + delta)


def test_a_ring_has_the_same_bytes_at_any_length_and_another_identifier() -> None:
    def layout(window: int, first: int) -> KVLayout:
        return KVLayout(
            num_layers=8,
            num_heads=4,
            qk_dim=64,
            v_dim=64,
            dtype="bfloat16",
            window_tokens=window,
            first_tokens=first,
        )

    ring, whole = layout(192, 32), layout(0, 0)
    assert ring.bytes(1024) == ring.bytes(1_000_000) == 5 * ring.page_bytes
    assert whole.bytes(16_384) >= 50 * ring.bytes(16_384)
    assert len({one.layout_id for one in (ring, whole, layout(192, 0), layout(128, 32))}) == 4
    assert whole.layout_id.endswith("/64/bfloat16/natural")


def test_the_pages_of_a_pass_are_in_token_order() -> None:
    layout = KVLayout(
        num_layers=1, num_heads=1, qk_dim=1, v_dim=1, page_tokens=2, window_tokens=4, first_tokens=1
    )
    runs = (PageRun(7, 2), PageRun(3, 2))  # places 0 to 3 are the pages 7, 8, 3, 4
    held = layout.held(runs, 11, 12)
    assert held == ((PageRun(7, 2), PageRun(3, 1)), 5, 2, 6)
    assert layout.held(runs, 13, 14).runs == (PageRun(7, 1), PageRun(3, 2))
    assert layout.held(runs, 3, 4) == ((PageRun(7, 2),), 3, 0, 0)
