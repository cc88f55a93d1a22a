"""The command `python -m synchromesh`, the same as `synchromesh`."""

import sys

from synchromesh.cli import main

if __name__ == "__main__":
    sys.exit(main())
