"""Writes the JSON Schema of strategy files again, for editors.

python tools/strategy_schema.py            # onnxpar/strategy/strategy.schema.json
python tools/strategy_schema.py --check    # write nothing; exit code 1 if it differs
"""

import json
import sys
from pathlib import Path

from onnxpar.strategy.json_schema import strategy_schema

FILE = Path(__file__).parents[1] / "onnxpar" / "strategy" / "strategy.schema.json"


def main() -> int:
    """Writes the file, or compares it; returns the exit code."""
    text = json.dumps(strategy_schema(), indent=1, ensure_ascii=False) + "\n"
    if "--check" in sys.argv[1:]:
        return int(FILE.read_text(encoding="utf-8") != text)
    FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
