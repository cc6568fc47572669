"""The times of operators, from onnxruntime's profiles."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SUFFIX = "_kernel_time"


def enable(options: Any, folder: Path) -> None:
    """Has onnxruntime write the times of a session's operators to a file of a folder."""
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "session")


def operator_times(session: Any) -> Iterator[tuple[str, int, int, dict[str, Any]]]:
    """Returns each run of an operator: its name, start and end (`time.monotonic_ns`), and more.

    Ends the profile of the session. A session writes at most a million events.
    """
    # onnxruntime's times begin at a time of the wall clock.
    shift = time.monotonic_ns() - time.time_ns()
    begin = session.get_profiling_start_time_ns() + shift
    path = Path(session.end_profiling())
    events = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    for event in events:
        name = event.get("name", "")
        if event.get("cat") != "Node" or not name.endswith(_SUFFIX):
            continue
        start = begin + event["ts"] * 1000
        facts = event["args"]
        more = {"op": facts.get("op_name", ""), "provider": facts.get("provider", "")}
        yield name.removesuffix(_SUFFIX), start, start + event["dur"] * 1000, more
