"""Draws a run's numbers over the tokens seen, as SVG that the page holds. Colours are the page's CSS variables."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from dsft.units import in_digits

WIDTH, HEIGHT = 520, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 26
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
    is_noisy: bool = False
    """Drawn thin and pale, below the mean of its neighbours."""
    has_dots: bool = False
    """Few points, each with a dot that tells its numbers."""


def draw(curves: list[Curve], *, is_log: bool = False) -> str:
    """Return the SVG of some curves, at least one of which has a point."""
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    is_log = is_log and min(ys) > 0
    place_x = _scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    place_y = _scale(*_padded(min(ys), max(ys), is_log), HEIGHT - BOTTOM, TOP, is_log=is_log)
    parts = []
    for value in _ticks(min(ys), max(ys), is_log):
        y = place_y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>')
    for value in _ticks(min(xs), max(xs), is_log=False):
        parts.append(f'<text x="{place_x(value):.1f}" y="{HEIGHT - 6}" text-anchor="middle">{short(value)}</text>')
    for curve in curves:
        points = _thinned(curve.points)
        colour = f"var(--series-{curve.colour % NUM_COLOURS})"
        if curve.is_noisy and len(points) > SMOOTHED:
            parts.append(_line(points, place_x, place_y, f"stroke:{colour};stroke-width:1;opacity:.35"))
            points = _smooth(points)
        parts.append(_line(points, place_x, place_y, f"stroke:{colour};stroke-width:2"))
        if curve.has_dots:
            for x, y in points:
                told = escape(f"{curve.name}: {in_digits(y)} at {x:,.0f} tokens")
                place = f'cx="{place_x(x):.1f}" cy="{place_y(y):.1f}"'
                parts.append(f'<circle {place} r="4" style="fill:{colour}"><title>{told}</title></circle>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def short(value: float) -> str:
    """Write a number of an axis: 1.5M, 20k, 0.003, 2e-05."""
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:g}{letter}"
    return f"{value:.6g}"


def _line(points: Points, place_x: Callable, place_y: Callable, style: str) -> str:
    places = " ".join(f"{place_x(x):.1f},{place_y(y):.1f}" for x, y in points)
    return f'<polyline points="{places}" style="fill:none;stroke-linejoin:round;{style}"/>'


def _scale(low: float, high: float, start: float, end: float, *, is_log: bool = False) -> Callable[[float], float]:
    if is_log:
        low, high = math.log(low), math.log(high)
    span = (high - low) or 1.0
    return lambda value: start + ((math.log(value) if is_log else value) - low) / span * (end - start)


def _padded(low: float, high: float, is_log: bool) -> tuple[float, float]:
    if is_log:
        margin = (high / low) ** 0.05 if high > low else 1.05
        return low / margin, high * margin
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def _ticks(low: float, high: float, is_log: bool) -> list[float]:
    """Return round numbers from low to high, about five."""
    if is_log and high > 3 * low:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        digits = (1, 2, 5) if high < 300 * low else (1,)
        return [digit * 10.0**power for power in powers for digit in digits if low <= digit * 10.0**power <= high]
    if low == high:
        return [low]
    exact = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(exact))
    step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= exact)
    return [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _thinned(points: Points) -> Points:
    every = math.ceil(len(points) / MOST_POINTS)
    return points[::every] + (points[-1:] if (len(points) - 1) % every else [])


def _smooth(points: Points) -> Points:
    beside = SMOOTHED // 2
    smoothed = []
    for place, (x, _) in enumerate(points):
        near = points[max(0, place - beside) : place + beside + 1]
        smoothed.append((x, sum(y for _, y in near) / len(near)))
    return smoothed
