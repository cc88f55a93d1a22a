"""Random row programs against the law of regular rows: `python -m benchmarks.row_law [--chains
2000] [--first 0]`.

What the trace takes for regular rows must be so: a block of rows gives the block of what all give.
"""

import argparse
import sys

from tests.trace.capture.programs import Programs
from tests.trace.capture.test_rows import EXPORTED, batch, violations


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--chains", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    wrong, regular = 0, 0
    for first in range(args.first, args.first + args.chains, EXPORTED):
        found, claimed = violations(Programs(first, EXPORTED), batch())
        for each in found:
            print(f"programs {first} to {first + EXPORTED - 1}: {each}")
        wrong, regular = wrong + len(found), regular + claimed
    print(f"{args.chains} chains, {regular} values with regular rows, {wrong} of them wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
