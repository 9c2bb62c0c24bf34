"""Draws a run's numbers over the tokens seen, as SVG that the page contains. Colours are the page's CSS variables."""

import math
from dataclasses import dataclass
from html import escape

import pandas

from dsft.units import in_digits

WIDTH = 520
HEIGHT = 250
LEFT = 58
RIGHT = 14
TOP = 12
BOTTOM = 26
NUM_COLOURS = 6
MOST_POINTS = 600  # of a line; nobody sees more
SMOOTHED = 11  # neighbouring points, of which the thick line of noisy numbers is the mean
Points = list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a chart."""

    name: str
    points: Points
    colour: int
    has_dots: bool = False
    """Few points, each with a dot that shows its numbers. Others are drawn thin and pale, below the mean of their
    neighbours.
    """


def draw(curves: list[Curve]) -> str:
    """Return the SVG of some curves, at least one of which has a point."""
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    margin = 0.05 * (max(ys) - min(ys)) or 0.05 * abs(max(ys)) or 1.0
    lowest = min(ys) - margin
    highest = max(ys) + margin
    first = min(xs)
    last = max(xs)

    def place_x(x: float) -> float:
        return LEFT + (x - first) / ((last - first) or 1.0) * (WIDTH - RIGHT - LEFT)

    def place_y(y: float) -> float:
        return HEIGHT - BOTTOM - (y - lowest) / (highest - lowest) * (HEIGHT - BOTTOM - TOP)

    def line(points: Points, style: str) -> str:
        places = " ".join(f"{place_x(x):.1f},{place_y(y):.1f}" for x, y in points)
        return f'<polyline points="{places}" style="fill:none;stroke-linejoin:round;{style}"/>'

    parts = []
    for value in round_numbers(min(ys), max(ys)):
        y = place_y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>')
    for value in round_numbers(first, last):
        parts.append(f'<text x="{place_x(value):.1f}" y="{HEIGHT - 6}" text-anchor="middle">{short(value)}</text>')
    for curve in curves:
        points = curve.points[:: math.ceil(len(curve.points) / MOST_POINTS)]
        colour = f"var(--series-{curve.colour % NUM_COLOURS})"
        if not curve.has_dots and len(points) > SMOOTHED:
            parts.append(line(points, f"stroke:{colour};stroke-width:1;opacity:.35"))
            smooth = pandas.Series([y for _, y in points]).rolling(SMOOTHED, center=True, min_periods=1).mean()
            points = [(x, y) for (x, _), y in zip(points, smooth, strict=True)]
        parts.append(line(points, f"stroke:{colour};stroke-width:2"))
        for x, y in points if curve.has_dots else ():
            text = escape(f"{curve.name}: {in_digits(y)} at {x:,.0f} tokens")
            place = f'cx="{place_x(x):.1f}" cy="{place_y(y):.1f}"'
            parts.append(f'<circle {place} r="4" style="fill:{colour}"><title>{text}</title></circle>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def short(value: float) -> str:
    """Write a number of an axis: 1.5M, 20k, 0.003, 2e-05."""
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:g}{letter}"
    return f"{value:.6g}"


def round_numbers(low: float, high: float) -> list[float]:
    """Return about five round numbers from low to high."""
    if low == high:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= (high - low) / 4)
    return [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
