#!/usr/bin/env python3
"""Makes `docs/operators.md` from the table of operators and from ONNX's node tests.

    tools/operator_table.py                   # write the page, with the stored test results
    tools/operator_table.py --run             # first run the tests, with samples of plans
    tools/operator_table.py --run --all       # with all plans
    tools/operator_table.py --again           # run the tests that did not pass last time
    tools/operator_table.py --only softmax    # run some tests, and only print their results

The exit code is 1 if a test gives a wrong result or crashes.
"""

import argparse
import sys
from collections import Counter

import onnxruntime
from operators import backend, page
from operators.backend import CRASHED, WRONG
from operators.bench import examine_all


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", action="store_true", help="run the node tests first")
    parser.add_argument("--again", action="store_true", help="run the tests that did not pass")
    parser.add_argument("--all", action="store_true", help="shard each test in all ways")
    parser.add_argument(
        "--samples", type=int, default=3, help="plans of each test and number of ranks"
    )
    parser.add_argument("--only", metavar="TEXT", help="run tests whose name contains this")
    parser.add_argument(
        "--workers", type=int, default=2, help="processes that run at the same time"
    )
    given = parser.parse_args()
    bad = False
    if given.run or given.only or given.again:
        names = sorted(n for n in backend.cases() if (given.only or "") in n)
        if given.again:
            names = [name for name, _, _ in page.load().bad]
        outcomes = examine_all(names, None if given.all else given.samples, given.workers)
        for outcome in outcomes:
            if outcome.detail:
                print(f"{outcome.name}: {outcome.status}: {outcome.detail}")
        print(dict(Counter(o.status for o in outcomes)))
        bad = any(o.status in (WRONG, CRASHED) for o in outcomes)
        if given.only:
            for outcome in outcomes:
                print(f"{outcome.name}: {outcome.splits} of {outcome.plans} plans shard a node")
            return int(bad)
        page.save(
            page.again(page.load(), outcomes)
            if given.again
            else page.summary(outcomes, len(names), onnxruntime.__version__)
        )
    page.PAGE.write_text(page.render(page.load()), "utf-8")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
