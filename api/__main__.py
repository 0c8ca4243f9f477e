"""`python -m hardpoint`: the same as the `hardpoint` program."""

import sys

if __name__ == "__main__":
    try:
        from .cli import main

        code = main()
    except ModuleNotFoundError as cause:
        if cause.name not in ("hardpoint.cli", "hardpoint.program"):
            raise
        from hardpoint.registry.discovery import advise

        sys.exit(f"hardpoint: error: {advise('command line')}")
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(code)
