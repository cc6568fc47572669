"""Writes the report page: one HTML file with its data, styles and scripts, and nothing else.

The parts are the files of the folder `page`. No script runs that is not one of them: names from a
model are data, which the scripts only ever show as text, and the data cannot end its element.
"""

import html
import json
from pathlib import Path
from typing import Any

PARTS = Path(__file__).parent / "page"
"""The folder of the parts."""
SCRIPTS = (
    "sizes.js",
    "elements.js",
    "tables.js",
    "layouts.js",
    "mesh.js",
    "model.js",
    "collectives.js",
    "charts.js",
    "memory.js",
    "time.js",
    "pipeline.js",
    "timeline.js",
    "measured.js",
    "runs.js",
    "compare.js",
    "main.js",
)
"""The scripts, in the order in which they run."""
_UNSAFE = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}
"""What could end an element or begin a comment, in JSON."""


def page_html(data: dict[str, Any], title: str) -> str:
    """Returns the page.

    Args:
        data: What `onnxpar.report.page_data.page_data` returns.
        title: The title of the page, as text.
    """
    content = json.dumps(data, ensure_ascii=False, separators=(",", ":")).translate(_UNSAFE)
    scripts = "\n".join(f"<script>\n{_part(name)}</script>" for name in SCRIPTS)
    filled = {
        "title": html.escape(title),
        "styles": _part("page.css"),
        "data": content,
        "scripts": scripts,
    }
    before, *rest = _part("page.html").split("{{")
    found = [before]
    for piece in rest:
        name, after = piece.split("}}", 1)
        found += [filled[name], after]
    return "".join(found)


def _part(name: str) -> str:
    return (PARTS / name).read_text(encoding="utf-8")
