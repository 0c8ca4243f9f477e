"""`python -m hardpoint`: the same as the `hardpoint` program."""

import sys

from hardpoint.registry.discovery import advise

if __name__ == "__main__":
    try:
        from .cli import main
    except ModuleNotFoundError as cause:
        if cause.name != "hardpoint.cli":
            raise
        sys.exit(f"hardpoint: error: {advise('command line')}")
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(main())
