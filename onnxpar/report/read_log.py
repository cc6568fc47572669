"""Reads the log of a training, for the page that shows it."""

import json
from math import isfinite
from pathlib import Path
from typing import Any

from onnxpar.core.errors import OnnxparError
from onnxpar_format.regular_file import open_regular

MOST_ROWS = 2000
"""A longer log is thinned out to about as many rows."""
EVALUATION = "evaluation_"
"""What names of an evaluation's numbers begin with."""
_MOST = 1 << 63


class LogError(OnnxparError):
    """A log cannot be used."""


def read_log(path: Path) -> dict[str, Any]:
    """Returns what a page shows of a log.

    - `columns`: the names of its numbers;
    - `rows`: the numbers of logged steps, None where one is absent. Of a long log, these are every
      `stride`-th step and the last;
    - `steps`: for each row, the number of its step in the run, `run_step`. If the log has no such
      numbers, every step counts as logged;
    - `logged`: how many steps are in the log;
    - `evaluations`: for each number of an evaluation, such as `evaluation_loss`, pairs of a step of
      the run and the number.

    Args:
        path: A file that `train --log` has written: a JSON object in each line. Lines without a
            loss or an evaluation, and fields that are no numbers, are left out.

    Raises:
        LogError: It cannot be read, a line is no JSON object, or no line has a loss.
    """
    try:
        with open_regular(path) as stream:
            lines = stream.read().decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LogError(f"{path}: {error}") from None
    found: list[dict[str, float]] = []
    evaluations: dict[str, dict[float, float]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise LogError(f"{path}, line {number}: not JSON: {error}") from None
        if not isinstance(entry, dict):
            raise LogError(f"{path}, line {number}: expected a JSON object, got {line[:40]!r}")
        numbers = {k: v for k, v in entry.items() if _is_number(v)}
        if "loss" in numbers:
            found.append(numbers)
        elif "run_step" in numbers:
            for name in numbers:
                if name.startswith(EVALUATION):
                    evaluations.setdefault(name, {})[numbers["run_step"]] = numbers[name]
    if not found:
        raise LogError(f"{path}: expected lines with a loss, got none")
    columns = list(dict.fromkeys(name for entry in found for name in entry))
    known = all("run_step" in entry for entry in found)
    steps = [entry["run_step"] for entry in found] if known else list(range(1, len(found) + 1))
    stride = -(-len(found) // MOST_ROWS)
    shown = [*range(0, len(found) - 1, stride), len(found) - 1]
    return {
        "columns": columns,
        "rows": [[found[place].get(name) for name in columns] for place in shown],
        "steps": [steps[place] for place in shown],
        "stride": stride,
        "logged": len(found),
        "evaluations": {name: sorted(steps.items()) for name, steps in evaluations.items()},
    }


def _is_number(value: object) -> bool:
    # NaN and infinity are no JSON, in which a page gets its data.
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < _MOST
    return isinstance(value, float) and isfinite(value)
