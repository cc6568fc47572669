"""Writes networks of the zoo in the dialects of other runtimes, and runs them.

    python tools/zoo_dialects.py                     # all networks
    python tools/zoo_dialects.py bert gpt2 --limit 60

For each network, strategy and dialect prints a row: the graphs agree with the undivided model
(`yes`), they do not (`no`, with the reason), or the dialect cannot say a node (`refused`, with the
node's operator and the reason). The exit code is 1 if some graphs do not agree.
"""

import argparse
import logging
import re
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zoo

from onnxpar.api.pytorch.export_module import export, save
from onnxpar.api.runtime import verify
from onnxpar.api.shard_model import shard_model
from onnxpar.core.errors import DialectError, OnnxparError
from onnxpar.ops.collective.dialects import Dialect
from onnxpar_runtime.errors import OnnxparRuntimeError

STRATEGIES = ("tp=2", "dp=2,tp=2")


def main() -> int:
    """Prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("names", nargs="*", help="networks; all if none is given")
    parser.add_argument("--limit", type=int, default=120, help="seconds for a network")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print("| network | strategy | tensorrt | onnxruntime |\n| --- | --- | --- | --- |")
    good = True
    for name in options.names or zoo.ZOO:
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder, "model.onnx")
            save(export(zoo.example(name)), model)
            for strategy in STRATEGIES:
                cells = [cell(model, strategy, d, options.limit) for d in Dialect]
                good &= not any(c.startswith("no") for c in cells)
                print(f"| {name} | `{strategy}` | {' | '.join(cells)} |", flush=True)
    return 0 if good else 1


def cell(model: Path, strategy: str, dialect: Dialect, limit: int) -> str:
    """Returns what becomes of a network in a dialect."""
    out = model.parent / f"{strategy}.{dialect}"
    try:
        with at_most(limit):
            shard_model(model, strategy, out, dialect=dialect)
            cases = verify(out, model)
    except DialectError as error:
        found = re.match(rf"node '.*' \((\w+)\): .* dialect {dialect}: (.*)", str(error))
        return "refused: " + (": ".join(found.groups()) if found else str(error))
    except TimeoutError:
        return f"not done in {limit} s"
    except (OnnxparError, OnnxparRuntimeError) as error:
        return f"no: {str(error).splitlines()[0]}"
    return "yes" if all(case.ok for case in cases) else "no: results differ"


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in what takes longer."""

    def stop(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


if __name__ == "__main__":
    sys.exit(main())
