"""python -m qtoolkit: the command line."""

import sys

from qtoolkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
