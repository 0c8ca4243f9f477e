"""Entry of the `hardpoint` program, and of `python -m hardpoint`.

It imports nothing until its handler of SIGINT is set, and neither does the package: an interrupt of
the imports ends the program without a traceback.
"""

from __future__ import annotations

_INTERRUPTED = 130


def main() -> int:
    """Import and run the program; return its exit code, see `hardpoint.cli.main`."""
    import os  # noqa: PLC0415 - nothing is imported before the handler
    import signal  # noqa: PLC0415

    def end(*_: object) -> None:
        os._exit(_INTERRUPTED)  # nothing was begun; an exception might be lost, or be printed

    usual = signal.getsignal(signal.SIGINT)
    is_usual = usual is signal.default_int_handler
    if is_usual:
        signal.signal(signal.SIGINT, end)
    try:
        from .cli import main as run  # noqa: PLC0415
    except KeyboardInterrupt:
        return _INTERRUPTED
    finally:
        if is_usual:
            signal.signal(signal.SIGINT, usual)
    return run()


if __name__ == "__main__":
    raise SystemExit(main())
