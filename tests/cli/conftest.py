"""Lets the tests of the command line use the artifacts written by hand for the runtime's tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
