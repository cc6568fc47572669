"""What several measurements have in common: options, results, the memory of a process."""

import argparse
import json
import os
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A command line with the options that several measurements have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny models, few rounds")
    return parser


def conditions() -> str:
    """What the times of a run depend on besides what runs: processors and load."""
    return f"{os.cpu_count()} processors, load average {os.getloadavg()[0]:.1f} before the start"


def add_results(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `report_results` reads."""
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the times of all turns to this file"
    )
    parser.add_argument("--check", action="store_true", help="exit code 1 if a goal is missed")


def report_results(
    options: argparse.Namespace, rows: Sequence[Mapping[str, object]], missed: Sequence[str]
) -> int:
    """Writes the rows as JSON if asked for, prints what is missed; returns the exit code."""
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    for line in missed:
        print(f"missed: {line}")
    return 1 if options.check and missed else 0


def with_rounds(
    parser: argparse.ArgumentParser, turn: float, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Reads a command line that also has the rounds, and the seconds of a turn."""
    parser.add_argument("--rounds", type=int, default=15, help="number of turns of each side (15)")
    text = f"seconds of the first side's turn ({turn:g})"
    parser.add_argument("--turn", type=float, default=turn, help=text)
    found = parser.parse_args(arguments)
    if found.rounds < 1 or found.turn <= 0:
        parser.error("--rounds and --turn: positive numbers are needed")
    if found.quick:
        found.rounds, found.turn = min(found.rounds, 3), min(found.turn, 0.05)
    return found


def peak_memory() -> int:
    """Returns the peak resident set of this process, bytes.

    Linux's `ru_maxrss` begins with that of the process that started this one, so is not asked.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return 1024 * int(status.split("VmHWM:")[1].split()[0])
