"""Tables in HTML, as which notebooks show our objects (`_repr_html_`)."""

from collections.abc import Sequence
from html import escape

MOST_ROWS = 200
"""A notebook is slow with more; the last row says how many there are."""


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], total: int | None = None
) -> str:
    """Returns a table with a title; all texts are escaped.

    Args:
        title: Its title.
        columns: The headings.
        rows: The rows, or the first of them.
        total: The number of all rows, if not all are given.
    """
    total = len(rows) if total is None else total
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    lines = [
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows[:MOST_ROWS]
    ]
    if total > MOST_ROWS:
        more = f"and {total - MOST_ROWS:,} more"
        lines.append(f'<tr><td colspan="{len(columns)}">{more}</td></tr>')
    body = "".join(lines)
    return (
        f"<table><caption>{escape(title)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table>"
    )
