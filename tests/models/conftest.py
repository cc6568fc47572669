"""`models` is a folder of scripts, not an installed package: its folder goes on the path.

So does this one, for the helpers that its tests share.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / "models"), str(HERE)]
