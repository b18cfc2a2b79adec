"""A chart of the layouts as SVG: how many times faster than one trace a request each trains."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from benchmarks.training.speed import Measurement

WIDTH, BAR, GAP, LEFT, RIGHT, TOP = 760, 34, 22, 230, 150, 46
COLOURS = ("#9aa5b1", "#4c8bf5", "#1a5fb4")


def chart(title: str, measured: Sequence[Measurement]) -> str:
    base = measured[0].seconds
    ratios = [base / one.seconds for one in measured]
    scale = (WIDTH - LEFT - RIGHT) / max([*ratios, *(one.goal or 0.0 for one in measured)])
    height = TOP + len(measured) * (BAR + GAP) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="13" role="img">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="14" y="26" font-size="15" font-weight="600" fill="#222">{escape(title)}</text>',
    ]
    for number, (one, ratio) in enumerate(zip(measured, ratios, strict=True)):
        y = TOP + number * (BAR + GAP)
        middle = y + BAR / 2 + 5
        said = f"{ratio:.1f}× · {one.seconds:.1f} s a step"
        parts += [
            f'<text x="{LEFT - 12}" y="{middle}" text-anchor="end" fill="#222">{escape(one.name)}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{ratio * scale:.1f}" height="{BAR}" rx="3" '
            f'fill="{COLOURS[number % len(COLOURS)]}"/>',
            f'<text x="{LEFT + ratio * scale + 8:.1f}" y="{middle}" fill="#222">{said}</text>',
        ]
        if one.goal is not None:
            x = LEFT + one.goal * scale
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 5}" y2="{y + BAR + 5}" stroke="#c01c28" '
                f'stroke-dasharray="4 3"><title>goal {one.goal:g}×</title></line>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"
