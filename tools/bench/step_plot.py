"""Draws the ratios of tools/bench/step.py as bars, in an SVG file."""

from collections.abc import Sequence
from html import escape

from step_sides import Row

BAR, GAP, LEFT, WIDTH, TOP = 14, 3, 230, 420, 20
COLOURS = {"torch": "#b0b0b0", "onnxpar": "#3b6fb6"}


def plot(rows: Sequence[Row]) -> str:
    """Bars of all rows, one after another; a line marks 1, PyTorch's single process."""
    longest = max(1.0, *(row.ratio for row in rows))
    scale = WIDTH / longest
    parts = []
    y, case = TOP, ""
    for row in rows:
        if case != (case := f"{row.model} {row.optimizer}"):
            y += BAR
            parts.append(f'<text x="4" y="{y}" font-weight="bold">{escape(case)}</text>')
            y += GAP
        width = row.ratio * scale
        colour = COLOURS[row.side.system]
        parts.append(
            f'<text x="12" y="{y + BAR - 3}">{escape(row.side.label)}</text>'
            f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>'
            f'<text x="{LEFT + width + 4:.1f}" y="{y + BAR - 3}">{row.ratio:.2f}</text>'
        )
        y += BAR + GAP
    one = LEFT + scale
    parts.append(f'<line x1="{one}" y1="{TOP}" x2="{one}" y2="{y}" stroke="#c03030"/>')
    parts.append(f'<text x="{one - 3}" y="{TOP - 6}">1</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 60}" height="{y + 10}" '
        'font-family="sans-serif" font-size="11">\n'
        '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )
