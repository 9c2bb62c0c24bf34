"""Draws a run's metrics over the tokens seen, as SVG for the page. Colours are the page's CSS variables."""

import math
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy
import pandas
from numpy.typing import ArrayLike

from dsft.units import in_digits

WIDTH = 520
HEIGHT = 250
LEFT = 58
RIGHT = 14
TOP = 12
BOTTOM = 26
NUM_COLOURS = 6
MOST_POINTS = 600  # of a line; more cannot be seen
SMOOTHED = 11  # neighbouring points averaged for the thick line of a noisy metric
Points = list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a chart."""

    name: str
    points: Points
    colour: int
    has_dots: bool = False
    """For few points: each has a dot with its values. Other curves are thin and pale, below the mean of neighbours."""


def draw(curves: list[Curve]) -> str:
    """Return the SVG of some curves; at least one must have a point."""
    points = numpy.concatenate([curve.points for curve in curves])
    first, low = points.min(axis=0)
    last, high = points.max(axis=0)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0

    def across(x: ArrayLike) -> Any:
        return numpy.interp(x, [first, last], [LEFT, WIDTH - RIGHT])

    def up(y: ArrayLike) -> Any:
        return numpy.interp(y, [low - margin, high + margin], [HEIGHT - BOTTOM, TOP])

    parts = []
    for value in round_numbers(low, high):
        y = up(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>')
    for value in round_numbers(first, last):
        x = across(value)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{short(value)}</text>')
    for curve in curves:
        every = math.ceil(len(curve.points) / MOST_POINTS)
        xs, ys = numpy.transpose(curve.points[::every])
        colour = f"var(--series-{curve.colour})"
        lines = {f"stroke:{colour};stroke-width:2": ys}
        if not curve.has_dots and len(ys) > SMOOTHED:
            smooth = pandas.Series(ys).rolling(SMOOTHED, center=True, min_periods=1).mean()
            lines = {f"stroke:{colour};stroke-width:1;opacity:.35": ys, f"stroke:{colour};stroke-width:2": smooth}
        for style, values in lines.items():
            places = [f"{x:.1f},{y:.1f}" for x, y in zip(across(xs), up(values), strict=True)]
            parts.append(f'<polyline points="{" ".join(places)}" style="fill:none;stroke-linejoin:round;{style}"/>')
        for x, y in curve.points if curve.has_dots else ():
            text = escape(f"{curve.name}: {in_digits(y)} at {x:,.0f} tokens")
            place = f'cx="{across(x):.1f}" cy="{up(y):.1f}"'
            parts.append(f'<circle {place} r="4" style="fill:{colour}"><title>{text}</title></circle>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def short(value: float) -> str:
    """Format a number of an axis: 1.5M, 20k, 0.003, 2e-05."""
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:g}{letter}"
    return f"{value:.6g}"


def round_numbers(low: float, high: float) -> list[float]:
    """Return about five numbers from low to high, multiples of a step with one digit."""
    if low == high:
        return [low]
    step = float(f"{(high - low) / 4:.0e}")
    return [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
