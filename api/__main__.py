"""`python -m hardpoint`: the same as the `hardpoint` program."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
