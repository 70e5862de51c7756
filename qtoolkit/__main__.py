"""python -m qtoolkit: the command line."""

import sys

from qtoolkit_command import main

if __name__ == "__main__":
    sys.exit(main())
