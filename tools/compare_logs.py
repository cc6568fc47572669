"""Compares the losses of two logs of `onnxpar train`.

    python tools/compare_logs.py GOT.jsonl WANT.jsonl [--rtol 1e-5]

The exit code is 1 if they differ, and 2 if a log cannot be read. The tolerance is relative to the
wanted loss of the same step.

Compare runs of a few small steps from equal parameters. In a long run, or at a high learning rate,
runs drift apart: if the operand of a ReLU is almost 0, rounding decides whether it passes, and the
difference grows from step to step.
"""

import argparse
import json
import sys
from pathlib import Path


def read(path: Path) -> list[tuple[int, int, float]]:
    """Returns `(epoch, step, loss)` of each step; evaluations are left out.

    Raises:
        ValueError: The file cannot be read, or is not a log.
    """
    found: list[tuple[int, int, float]] = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            if "evaluation_loss" in entry:
                continue
            found.append((entry["epoch"], entry["step"], float(entry["loss"])))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path}:{len(found) + 1}: expected a line of `train --log`") from None
    return found


def main() -> int:
    """Prints the largest difference between the losses, and returns the exit code."""
    parser = argparse.ArgumentParser(description="Compare the losses of two training logs.")
    parser.add_argument("got", type=Path)
    parser.add_argument("want", type=Path)
    parser.add_argument("--rtol", type=float, default=1e-5, help="default 1e-5")
    options = parser.parse_args()
    try:
        got, want = read(options.got), read(options.want)
    except ValueError as error:
        parser.error(str(error))
    if [line[:2] for line in got] != [line[:2] for line in want] or not want:
        print(f"steps differ: got {len(got)}, expected {len(want)}")
        return 1
    pairs = list(zip(got, want, strict=True))
    far = [abs(a[2] - b[2]) / abs(b[2]) if b[2] else abs(a[2] - b[2]) for a, b in pairs]
    worst = max(range(len(far)), key=far.__getitem__)
    # `far[worst]` may miss a loss that is not a number, which is never within the tolerance.
    holds = all(difference <= options.rtol for difference in far)
    epoch, step, _ = pairs[worst][0]
    print(
        f"losses of {len(pairs)} steps: {'equal' if holds else 'DIFFERENT'}, largest relative "
        f"difference {far[worst]:.1e} (epoch {epoch} step {step})"
    )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
