"""Plots as SVG text: lines, points and stacked areas over a linear or logarithmic axis. No script, nothing loaded.

The SVG is written by hand because a report must work without extras, and matplotlib is one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

Points = Sequence[tuple[float, float]]


class Band(NamedTuple):
    """A range of values over a stretch of the x axis."""

    start: float
    end: float
    low: float
    high: float


WIDTH = 640
HEIGHT = 300
LEFT = 64  # these four: margins around the plot, for ticks and labels
RIGHT = 16
TOP = 12
BOTTOM = 44
COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#4b5563")


class Axis(NamedTuple):
    """The horizontal or vertical axis of a plot."""

    label: str
    low: float
    high: float
    is_log: bool = False

    def share(self, value: float) -> float:
        """0 at the low end, 1 at the high end. A value outside counts as the nearer end."""
        value = min(max(value, self.low), self.high)
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round values to write beside the axis."""
        if self.is_log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if self.high / self.low <= 2000 else (1,)
            return [t for t in (s * 10.0**d for d in decades for s in steps) if self.low <= t <= self.high * 1.0001]
        rough = (self.high - self.low) / 5
        size = 10.0 ** math.floor(math.log10(rough))
        step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [index * step for index in range(first, math.floor(self.high / step + 1e-9) + 1)]


def axis(label: str, values: Iterable[float], *, is_log: bool = False, from_zero: bool = True) -> Axis:
    """An axis that shows all finite values.

    Args:
        label: its title.
        values: in data units; on a logarithmic axis those up to 0 are left out.
        is_log: logarithmic.
        from_zero: a linear axis that begins at 0, or below.
    """
    finite = [value for value in values if math.isfinite(value) and (value > 0 or not is_log)]
    high = max(finite, default=1.0)
    low = min(finite, default=1.0 if is_log else 0.0)
    if is_log:
        return Axis(label, low * 0.9, max(high * 1.1, low * 2), True)
    low = min(0.0, low) if from_zero else low
    return Axis(label, low, high * 1.05 if high > low else low + 1.0)


def lines(
    series: Mapping[str, Points],
    x: Axis,
    y: Axis,
    *,
    level: tuple[str, float] | None = None,
    diagonal: bool = False,
    dots: bool = False,
    joined: bool = True,
) -> str:
    """A plot of lines, or of points.

    Args:
        series: name -> points (x, y) in order; a point that is not finite is left out.
        x, y: the axes.
        level: text and y of a dashed horizontal line.
        diagonal: draw a dashed line y = x.
        dots: mark the points.
        joined: the points of a series are a line; else a cloud, in any order. A line that is 0 from end to end is no
            line: the legend says so, because several of them would hide each other.
    """
    parts = [_frame(x, y)]
    if level is not None and y.low <= level[1] <= y.high:
        at = _y(y, level[1])
        parts.append(_dashed(LEFT, at, WIDTH - RIGHT, at, level[0]))
    if diagonal:
        end = min(x.high, y.high)
        parts.append(_dashed(LEFT, _y(y, y.low), _x(x, end), _y(y, end), "all offered"))
    legend = {}
    for colour, (name, points) in zip(_colours(len(series)), series.items(), strict=True):
        if joined and len(points) > 1 and not any(b for _, b in points):
            legend[f"{name}: 0"] = points
            continue
        legend[name] = points
        finite = [(_x(x, a), _y(y, b)) for a, b in points if math.isfinite(a) and math.isfinite(b)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in finite)
        title = f"<title>{escape(name)}</title>"
        if joined:
            line = f'points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"'
            parts.append(f"<polyline {line}>{title}</polyline>")
        is_cloud = not joined and len(finite) > 1
        if dots or is_cloud or len(finite) == 1:
            dot = f'r="2.2" fill="{colour}" fill-opacity="0.45"' if is_cloud else f'r="3.2" fill="{colour}"'
            parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" {dot}>{title}</circle>' for a, b in finite]
    return _svg(parts, legend)


def cloud(
    series: Mapping[str, Points],
    x: Axis,
    y: Axis,
    *,
    bands: tuple[str, Sequence[Band]],
    level: tuple[str, float],
) -> str:
    """A plot of many points, and above them a range of values for each stretch of the x axis.

    Args:
        series: name -> points (x, y) in any order.
        x, y: the axes.
        bands: what the ranges are, and the ranges.
        level: text and y of a dashed horizontal line.
    """
    parts = [_frame(x, y)]
    at = _y(y, level[1])
    parts.append(_dashed(LEFT, at, WIDTH - RIGHT, at, level[0]))
    for colour, (name, points) in zip(_colours(len(series)), series.items(), strict=True):
        dots = "".join(f'<circle cx="{_x(x, a):.1f}" cy="{_y(y, b):.1f}" r="1.8"/>' for a, b in points)
        parts.append(f'<g fill="{colour}" fill-opacity="0.45"><title>{escape(name)}</title>{dots}</g>')
    for band in bands[1]:
        left, right = _x(x, band.start), _x(x, band.end)
        top, bottom = _y(y, band.high), _y(y, band.low)
        shape = f'x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}"'
        edges = f"M{left:.1f},{top:.1f} H{right:.1f} M{left:.1f},{bottom:.1f} H{right:.1f}"
        words = f"<title>{escape(bands[0])}: {number(band.low)} to {number(band.high)}</title>"
        parts.append(f'<g class="band">{words}<rect {shape}/><path d="{edges}"/></g>')
    legend = f'<span class="key"><i class="band"></i>{escape(bands[0])}</span>' if bands[1] else ""
    return _svg(parts, series, legend)


def areas(series: Mapping[str, Points], x: Axis, y_label: str) -> str:
    """A plot of areas that are stacked on each other.

    Args:
        series: name -> points (x, y) in order; all series have the same x.
        x: the axis.
        y_label: title of the other axis, which begins at 0.
    """
    names = list(series)
    base = [0.0] * (len(series[names[0]]) if names else 0)
    tops: list[list[float]] = []
    for name in names:
        base = [below + value for below, (_, value) in zip(base, series[name], strict=True)]
        tops.append(base)
    y = axis(y_label, tops[-1] if tops else ())
    parts = [_frame(x, y)]
    for colour, name, top in reversed(list(zip(_colours(len(names)), names, tops, strict=True))):
        at = [_x(x, a) for a, _ in series[name]]
        zero = _y(y, 0.0)
        path = " ".join(f"{a:.1f},{_y(y, b):.1f}" for a, b in zip(at, top, strict=True))
        title = f"<title>{escape(name)}</title>"
        shape = f"{at[0]:.1f},{zero:.1f} {path} {at[-1]:.1f},{zero:.1f}"
        parts.append(f'<polygon points="{shape}" fill="{colour}" fill-opacity="0.85">{title}</polygon>')
    return _svg(parts, series)


def number(value: float) -> str:
    """A number as people write it: 0.2, 15, 20k, 1.5M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.3g}{letter}"
    return f"{value:.4g}"


def _svg(parts: Iterable[str], series: Mapping[str, Points], legend: str = "") -> str:
    legend += "".join(
        f'<span class="key"><i style="background:{colour}"></i>{escape(name)}</span>'
        for colour, name in zip(_colours(len(series)), series, strict=True)
    )
    body = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{body}</svg><div class="legend">{legend}</div>'


def _frame(x: Axis, y: Axis) -> str:
    right = WIDTH - RIGHT
    bottom = HEIGHT - BOTTOM
    parts = [f'<path class="axis" d="M{LEFT},{TOP} V{bottom} H{right}"/>']
    for tick in x.ticks():
        at = _x(x, tick)
        parts.append(f'<path class="grid" d="M{at:.1f},{TOP} V{bottom}"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{number(tick)}</text>')
    for tick in y.ticks():
        at = _y(y, tick)
        parts.append(f'<path class="grid" d="M{LEFT},{at:.1f} H{right}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{at + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    middle = (LEFT + right) / 2
    parts.append(f'<text class="label" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x.label)}</text>')
    turn = f'transform="rotate(-90)" x="{-(TOP + bottom) / 2}" y="14"'
    parts.append(f'<text class="label" {turn} text-anchor="middle">{escape(y.label)}</text>')
    return "".join(parts)


def _dashed(x1: float, y1: float, x2: float, y2: float, name: str) -> str:
    line = f'<path class="level" d="M{x1:.1f},{y1:.1f} L{x2:.1f},{y2:.1f}"/>'
    left = 4 if y1 == y2 else 36  # of a line that rises: above it
    y = y2 - 5 if y2 >= TOP + 15 else y2 + 13 if y1 == y2 else TOP + 10  # within the plot, and off the line
    at = f'x="{x2 - left:.1f}" y="{y:.1f}"'
    return f'{line}<text class="level" {at} text-anchor="end">{escape(name)}</text>'


def _x(x: Axis, value: float) -> float:
    return LEFT + x.share(value) * (WIDTH - LEFT - RIGHT)


def _y(y: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - y.share(value) * (HEIGHT - TOP - BOTTOM)


def _colours(num: int) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(num)]
