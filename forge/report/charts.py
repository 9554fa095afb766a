"""Numbers -> SVG: lines over steps, bars of shares, histograms. Pure; colours are classes of forge/report/style.py.

Every drawing has a viewBox and no size, so that it is as wide as its column, and `title` elements that a browser shows
under the pointer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from forge.report.words import escaped, number

WIDTH, HEIGHT = 420, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 8, 8, 34
MAX_POINTS = 240
"""More points of a line are put together: their means."""
NUM_COLOURS = 8


@dataclass(frozen=True)
class Line:
    """One run in a chart; x grows."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: int = 0
    faint: bool = False
    """What each step measured, behind the strong line of its mean."""
    lows: Sequence[float] = field(default_factory=tuple)
    """Where a band around the line begins, along it; () draws none."""
    highs: Sequence[float] = field(default_factory=tuple)


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers that enclose `low` to `high`, about `count` steps apart."""
    if high <= low:
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, high + margin
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [n * step for n in range(first, last + 1)]


def tick_texts(at: Sequence[float]) -> list[str]:
    """Ticks with as many digits behind the point as tell them apart."""
    step = at[1] - at[0]
    if max(abs(at[0]), abs(at[-1])) >= 1e6 or step < 1e-5:
        return ["0" if abs(tick) < step / 2 else f"{tick:.2g}" for tick in at]
    places = next(n for n in range(7) if abs(step * 10**n - round(step * 10**n)) < 1e-6)
    return [f"{tick + 0.0:,.{places}f}" for tick in at]


def thinned(line: Line) -> Line:
    """The line with at most `MAX_POINTS` points, each the mean of as many neighbours."""
    per = math.ceil(len(line.xs) / MAX_POINTS)
    if per <= 1:
        return line

    def means(found: Sequence[float]) -> list[float]:
        parts = (found[n : n + per] for n in range(0, len(found), per))
        return [sum(part) / len(part) for part in parts]

    return Line(line.name, means(line.xs), means(line.ys), line.colour, line.faint, means(line.lows), means(line.highs))


def line_chart(
    lines: Sequence[Line],
    *,
    label: str,
    x_label: str = "step",
    unit: str = "",
    show_x: Callable[[float], str] = number,
    low: float | None = None,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """An SVG of lines with axes; "" of nothing. label: what it shows, for those who hear the page.

    low: the y axis begins there at the latest. marks: upright lines at an x, and what they say.
    """
    lines = [thinned(line) for line in lines if line.xs]
    if not lines:
        return ""
    bottom = min(y for line in lines for y in (*line.ys, *line.lows))
    bottom = bottom if low is None else min(low, bottom)
    top = max(y for line in lines for y in (*line.ys, *line.highs))
    y_ticks = ticks(bottom, bottom + 1.0 if low is not None and top <= bottom else top)
    x_low, x_high = min(line.xs[0] for line in lines), max(line.xs[-1] for line in lines)
    if x_high == x_low:
        x_low, x_high = x_low - 1, x_high + 1

    def x(value: float) -> float:
        return _LEFT + (value - x_low) / (x_high - x_low) * (WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return HEIGHT - _BOTTOM - (value - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (HEIGHT - _BOTTOM - _TOP)

    parts = [
        _y_axis(y_ticks, y, tick_texts(y_ticks)),
        _x_axis([t for t in ticks(x_low, x_high, 5) if x_low <= t <= x_high], x, show_x),
    ]
    parts += [_mark(at, x, text) for at, text in marks if x_low <= at <= x_high]
    parts += [_band(line, x, y) for line in lines if line.lows]
    parts += [_path(line, x, y) for line in sorted(lines, key=lambda line: not line.faint)]
    strong = [line for line in lines if not line.faint]
    parts += _hover(strong, x, f"{x_label} ", show_x, unit)
    parts.append(_text(WIDTH - _RIGHT, HEIGHT - 3, x_label, "end"))
    return _svg(WIDTH, HEIGHT, label, parts)


def _y_axis(at: Sequence[float], y: Callable[[float], float], texts: Sequence[str]) -> str:
    parts = []
    for tick, text in zip(at, texts, strict=True):
        place = y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{place:.1f}" y2="{place:.1f}"/>')
        parts.append(_text(_LEFT - 5, place + 3.5, text, "end"))
    return "".join(parts)


def _x_axis(at: Sequence[float], x: Callable[[float], float], show: Callable[[float], str]) -> str:
    parts, base = [], HEIGHT - _BOTTOM
    for tick in at:
        place = x(tick)
        anchor = "end" if place > WIDTH - 25 else "middle"
        parts.append(f'<line class="axis" x1="{place:.1f}" x2="{place:.1f}" y1="{base}" y2="{base + 4}"/>')
        parts.append(_text(place, base + 15, show(tick), anchor))
    return "".join(parts)


def _path(line: Line, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    points = [(x(a), y(b)) for a, b in zip(line.xs, line.ys, strict=True)]
    kind = "faint" if line.faint else f"line dash{line.colour % NUM_COLOURS}"
    if len(points) == 1:
        return (
            f'<circle class="dot c{line.colour % NUM_COLOURS}" cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="3"/>'
        )
    track = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    return f'<polyline class="{kind} c{line.colour % NUM_COLOURS}" points="{track}"/>'


def _band(line: Line, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    if len(line.xs) == 1:
        place = f'x1="{x(line.xs[0]):.1f}" x2="{x(line.xs[0]):.1f}"'
        ends = f'y1="{y(line.lows[0]):.1f}" y2="{y(line.highs[0]):.1f}"'
        return f'<line class="line c{line.colour % NUM_COLOURS}" {place} {ends}/>'
    above = [f"{x(a):.1f},{y(b):.1f}" for a, b in zip(line.xs, line.highs, strict=True)]
    below = [f"{x(a):.1f},{y(b):.1f}" for a, b in zip(line.xs, line.lows, strict=True)]
    below.reverse()
    return f'<polygon class="band f{line.colour % NUM_COLOURS}" points="{" ".join(above + below)}"/>'


def _mark(at: float, x: Callable[[float], float], text: str) -> str:
    place = f'x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"'
    return f'<line class="mark" {place}><title>{escaped(text)}</title></line>'


def _hover(
    lines: Sequence[Line], x: Callable[[float], float], before: str, show_x: Callable[[float], str], unit: str
) -> list[str]:
    """Strips over the whole height, one for each x: what the lines have there."""
    found: dict[float, list[str]] = {}
    for line in lines:
        for a, b in zip(line.xs, line.ys, strict=True):
            name = f"{line.name}: " if len(lines) > 1 else ""
            found.setdefault(a, []).append(f"{name}{number(b, 4)}{unit and ' ' + unit}")
    places = sorted(found)
    edges = [(a + b) / 2 for a, b in pairwise(places)]
    strips = []
    for n, place in enumerate(places):
        left = x(edges[n - 1]) if n else _LEFT
        right = x(edges[n]) if n < len(edges) else WIDTH - _RIGHT
        text = escaped(f"{before}{show_x(place)}\n" + "\n".join(found[place]))
        strips.append(
            f'<rect class="hit" x="{left:.1f}" y="{_TOP}" width="{max(0.1, right - left):.1f}" '
            f'height="{HEIGHT - _TOP - _BOTTOM}"><title>{text}</title></rect>'
        )
    return strips


def column_chart(shares: Sequence[tuple[str, Sequence[float]]], *, label: str, x_label: str) -> str:
    """Shares of 1 by name, a column for each run beside each other."""
    if not shares:
        return ""
    y_ticks = ticks(0.0, max(max(own) for _, own in shares) or 1.0)
    room = (WIDTH - _LEFT - _RIGHT) / len(shares)

    def y(value: float) -> float:
        return HEIGHT - _BOTTOM - value / y_ticks[-1] * (HEIGHT - _BOTTOM - _TOP)

    parts = [_y_axis(y_ticks, y, [f"{tick * 100:.3g} %" for tick in y_ticks])]
    every = math.ceil(len(shares) / 12)
    for n, (name, own) in enumerate(shares):
        left, wide = _LEFT + n * room, min(60.0, room * 0.8)
        each = wide / len(own)
        for colour, share in enumerate(own):
            place, top = left + (room - wide) / 2 + colour * each, y(share)
            text = escaped(f"{x_label} {name}: {share * 100:.3g} %")
            parts.append(
                f'<rect class="f{colour % NUM_COLOURS}" x="{place:.1f}" y="{top:.1f}" width="{max(1.0, each - 1):.1f}" '
                f'height="{HEIGHT - _BOTTOM - top:.1f}"><title>{text}</title></rect>'
            )
        if n % every == 0:
            parts.append(_text(left + room / 2, HEIGHT - _BOTTOM + 15, name, "middle"))
    parts.append(_text(WIDTH - _RIGHT, HEIGHT - 3, x_label, "end"))
    return _svg(WIDTH, HEIGHT, label, parts)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escaped(text)}</text>'


def _svg(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{escaped(label)}">{"".join(parts)}</svg>'
