"""Where Python programs that tests start find what the tests share."""

import os
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


def with_tests(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment in which Python finds `tests`, and the modules of `models`."""
    places = [environment.get("PYTHONPATH", ""), str(ROOT), str(ROOT / "models")]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, places))}
