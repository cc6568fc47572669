"""What the scripts that another script starts say to somebody who runs them by hand."""

import sys
from pathlib import Path

MISTAKE = 2
"""Exit code of a script that was not started by its driver."""


def expect_driver(driver: str, count: int = 1) -> None:
    """Ends the process if its arguments are not those that the driver gives, such as `--help`.

    Args:
        driver: The script that starts this one, such as `tools/bench/step.py`.
        count: The number of arguments that the driver gives at least.
    """
    given = sys.argv[1:]
    if len(given) < count or given[0].startswith("-"):
        name = Path(sys.argv[0]).name
        print(f"{name} is started by {driver}; run `{driver} --help` instead", file=sys.stderr)
        raise SystemExit(MISTAKE)
