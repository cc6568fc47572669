"""`models` is a folder of scripts, not an installed package: its folder goes on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "models"))
