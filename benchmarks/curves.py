"""Curves as an SVG picture: one line a series, named at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

COLOURS = (
    "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#e377c2", "#17becf", "#7f7f7f", "#bcbd22",
    "#111111", "#4b0082", "#006400", "#b8860b", "#a0522d",
)  # fmt: skip
WIDTH, HEIGHT = 860, 420
LEFT, RIGHT, TOP, BOTTOM = 56, 150, 44, 48
LABEL_GAP = 15
"""Least distance of two names at the right, in pixels."""


def draw(
    path: Path,
    curves: Mapping[str, Sequence[float]],
    *,
    title: str,
    x: str,
    y: str,
    y_range: tuple[float, float] | None = None,
) -> None:
    """Write a picture of curves that share their axes.

    Args:
        curves: by name, one value a step; step 1 first.
        y_range: lowest and highest value shown; None takes those of the curves.
    """
    values = [value for curve in curves.values() for value in curve]
    low, high = y_range or (min(values), max(values))
    last = max(len(curve) for curve in curves.values())

    def across(step: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - 1) / max(last - 1, 1)

    def down(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - low) / ((high - low) or 1.0))

    parts = [_frame(title, x, y)]
    for tick in range(6):
        value, step = low + (high - low) * tick / 5, 1 + round((last - 1) * tick / 5)
        parts += [_grid(down(value)), _text(LEFT - 8, down(value) + 4, f"{value:.3g}", "end")]
        parts.append(_text(across(step), HEIGHT - BOTTOM + 18, str(step), "middle"))
    names = _spaced({name: down(curve[-1]) for name, curve in curves.items()})
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(f"{across(i):.1f},{down(value):.1f}" for i, value in enumerate(curve, 1))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        parts.append(_text(WIDTH - RIGHT + 8, names[name] + 4, name, "start", colour))
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def smoothed(values: Sequence[float], keep: float = 0.95) -> list[float]:
    """The exponential moving average of a series, without the pull of its first value."""
    found, average = [], 0.0
    for number, value in enumerate(values, 1):
        average = keep * average + (1 - keep) * value
        found.append(average / (1 - keep**number))
    return found


def _spaced(heights: Mapping[str, float]) -> dict[str, float]:
    """Heights of names, pushed apart so that none covers another."""
    found: dict[str, float] = {}
    above = TOP - LABEL_GAP
    for name in sorted(heights, key=lambda name: heights[name]):
        above = max(heights[name], above + LABEL_GAP)
        found[name] = above
    return found


def _frame(title: str, x: str, y: str) -> str:
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
            'font-size="12">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            f'<text x="{LEFT}" y="24" font-size="15" fill="#222">{escape(title)}</text>',
            _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x, "middle"),
            f'<text x="14" y="{middle}" fill="#444" text-anchor="middle" transform="rotate(-90 14 {middle})">'
            f"{escape(y)}</text>",
        ]
    )


def _grid(height: float) -> str:
    return f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}" stroke="#ddd"/>'


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#444") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>'
