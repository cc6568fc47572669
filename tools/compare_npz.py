"""Compares two `.npz` files array by array; the exit code is 1 if they differ.

    python tools/compare_npz.py GOT WANT [--rtol 1e-5]

The tolerance is relative to the largest magnitude of the wanted array. Integers must be equal.
"""

import argparse
import sys
from pathlib import Path

import numpy as np


def difference(got: np.ndarray, want: np.ndarray) -> float:
    """Returns the largest difference, relative to the largest wanted magnitude.

    It is infinite for different shapes or dtypes, different integers and non-finite elements.
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    if np.array_equal(got, want, equal_nan=got.dtype.kind in "fc"):
        return 0.0
    if got.dtype.kind not in "fc" or not (np.isfinite(got).all() and np.isfinite(want).all()):
        return float("inf")
    scale = np.abs(want).max()
    return float(np.abs(got - want).max() / scale) if scale else float("inf")


def main() -> int:
    """Prints a line for each array, and returns the exit code."""
    parser = argparse.ArgumentParser(description="Compare two .npz files.")
    parser.add_argument("got", type=Path)
    parser.add_argument("want", type=Path)
    parser.add_argument("--rtol", type=float, default=1e-5, help="default 1e-5")
    options = parser.parse_args()
    with np.load(options.got) as got, np.load(options.want) as want:
        if set(got) != set(want):
            print(f"arrays differ: got {sorted(got)}, expected {sorted(want)}")
            return 1
        equal = True
        for name in want:
            relative = difference(got[name], want[name])
            holds = relative <= options.rtol
            equal &= holds
            verdict = "equal" if holds else "DIFFERENT"
            shapes = f"{got[name].shape} {got[name].dtype}"
            if got[name].shape != want[name].shape or got[name].dtype != want[name].dtype:
                shapes += f", expected {want[name].shape} {want[name].dtype}"
            print(f"{name} {shapes}: {verdict}, largest relative difference {relative:.1e}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
