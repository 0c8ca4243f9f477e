"""Entry of the `hardpoint` program: ends quietly if it is interrupted while it is imported.

It imports nothing until its handler of SIGINT is set, and neither does the package.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code.

    0 is success, 1 a failed request (or, by Python, a fault of the program), 2 a HardpointError,
    wrong usage or an output that cannot be written, 130 an interrupt and 141 a reader that went
    away. A standard stream that is closed stands for /dev/null.
    """
    import os  # noqa: PLC0415 - nothing is imported before
    import signal  # noqa: PLC0415

    def end(*_: object) -> None:
        os._exit(_INTERRUPTED)  # nothing was begun; an exception might be lost, or be printed

    usual = signal.getsignal(signal.SIGINT)
    is_ours = usual is signal.default_int_handler
    try:
        signal.signal(signal.SIGINT, end if is_ours else usual)
    except ValueError:  # of another thread than the main one
        is_ours = False
    try:
        from .program import run  # noqa: PLC0415
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, usual)
    return run(argv)
